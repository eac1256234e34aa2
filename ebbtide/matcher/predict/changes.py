"""Changes of machines' cores, as the matcher reads them: growth or shrink in whole cores, beginnings and ends."""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

from ebbtide.deflation.errors import InvalidField
from ebbtide.deflation.resources import TOLERANCE

#: Seconds: the stretch of history that counts (Agarwal et al. 2023, §3.1.1: the past D = 1 days).
WINDOW_S: Final = 86_400.0


class Direction(StrEnum):
    """Which way a machine's cores went."""

    GROWTH = "growth"
    SHRINK = "shrink"


@dataclass(frozen=True, slots=True)
class Change:
    """One change of one machine's cores."""

    machine: str
    #: Seconds since the epoch.
    at: float
    cores_before: float
    cores_after: float
    #: Whether the machine's owner ended it: the cores were not taken away, so its last interval stays incomplete.
    by_owner: bool = False

    @property
    def starts(self) -> bool:
        """Whether this is the machine's first change: it came from nothing."""
        return self.cores_before <= TOLERANCE < self.cores_after

    @property
    def ends(self) -> bool:
        """Whether the machine is gone with this change."""
        return self.cores_after <= TOLERANCE < self.cores_before

    @property
    def direction(self) -> Direction | None:
        """Growth or shrink in whole cores; None if the matcher sees no difference.

        The beginning and the end of a machine are changes even when it has less than one core (Agarwal et al. 2023,
        §2.1 counts an eviction as a change to size 0).
        """
        before, after = whole_cores(self.cores_before), whole_cores(self.cores_after)
        if after > before or self.starts:
            return Direction.GROWTH
        return Direction.SHRINK if after < before or self.ends else None


@dataclass(frozen=True, slots=True)
class LastChange:
    """Where a machine stands after its last change."""

    at: float
    direction: Direction
    cores: int
    gone: bool


def check_duration(duration_s: float) -> None:
    """Raises InvalidField where a duration is negative or not finite."""
    if not math.isfinite(duration_s) or duration_s < 0:
        raise InvalidField("duration_s", f"must be finite and not negative, but is {duration_s!r}")


def whole_cores(cores: float) -> int:
    """What a task sees of a size: whole cores."""
    return math.floor(cores + TOLERANCE)
