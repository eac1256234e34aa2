"""Pace of the rebalancer; without its policy, so that a command line is there at once."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

#: Seconds between two looks, and moves under way at a time, of one host never more than one: a manager's defaults.
EVERY_S: Final = 300.0
MOST_MOVES: Final = 2


@dataclass(frozen=True, slots=True)
class RebalancePace:
    """When a move is worth its bytes."""

    #: A host whose VMs have been deflated for so long counts, in seconds.
    hold_s: float = 1800.0
    #: A VM that was moved stays for so long, in seconds.
    rest_s: float = 21_600.0
    #: The longest that a deflation is expected to go on, in seconds.
    longest_s: float = 21_600.0
    #: Core-hours (and GiB-hours by their worth) that are to be given back per GiB copied.
    least_worth: float = 0.5
