"""Figures that the manager's options show as defaults: they import nothing heavy, so that it is there at once."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final, Literal

from ebbtide.deflation.placement.rebalance_pace import EVERY_S, MOST_MOVES, RebalancePace

DAY_S: Final = 86_400.0
#: How long a VM that is being moved waits for a host that does not answer any more, seconds beyond its deadline.
GONE_S: Final = 3600.0
#: How long certificates of hosts that have joined are valid; they renew them when a third of that is left.
CERTIFICATE_DAYS: Final = 90.0
#: Hosts that are registered at a time.
MOST_HOSTS: Final = 20_000


@dataclass(frozen=True, slots=True)
class Retention:
    """How long the store remembers.

    :param age_s: events, finished plans with their request ids, ended VMs and core changes are kept so long.
    :param most_events: and of events not more than these.
    :param batch: rows in one transaction.
    :param every_s: seconds between two looks.
    :param pause_s: seconds between two transactions, so that plans have the store most of the time.
    """

    age_s: float = 90 * DAY_S
    most_events: int = 1_000_000
    batch: int = 500
    every_s: float = 600.0
    pause_s: float = 0.05


@dataclass(frozen=True, slots=True)
class LeadershipTimes:
    """Of one manager, in seconds: ``check_s`` < ``limit_s`` < ``release_s``."""

    #: How often the lock is proved by the leader, and tried by the others.
    check_s: float = 1.0
    #: A leader that could not prove the lock for so long acts no more.
    limit_s: float = 3.0
    #: When the PostgreSQL server takes the lock from a leader that has fallen silent.
    release_s: float = 5.0
    #: How long a manager that had to step down leaves the lock to others.
    pause_s: float = 2.0


#: Which VMs move before one is preempted.
MoveFirst = Literal["shared", "copied", "never"]


@dataclass(frozen=True, slots=True)
class RebalancingRules:
    """How a manager moves VMs by itself."""

    pace: RebalancePace = field(default_factory=RebalancePace)
    #: Seconds between two looks.
    every_s: float = EVERY_S
    #: Moves under way at a time; of one host never more than one.
    most_moves: int = MOST_MOVES
    #: Whether VMs are moved whose disk has to be copied.
    copy_disks: bool = False
    #: Of one move, in MiB/s; 0: no limit.
    bandwidth_mib_s: float = 100.0
    #: For finding room, and once more for the move, in seconds.
    deadline_s: float = 600.0

    @property
    def longest_gap_s(self) -> float:
        """Between two looks; after a longer one nobody knows whether VMs have been deflated all the time."""
        return 3.0 * self.every_s
