"""Memory that a VM is started without: it boots with its boot memory, and the rest is plugged a little later.

So a VM that has just started is the easiest to keep small: what is not plugged yet can be had without its guest. Times
are seconds of one monotonic clock.
"""

from __future__ import annotations

from typing import Final

from ebbtide.deflation.cascade.reconcile import RepairPace

#: After its agent's hello a VM's memory waits for so long: a plan that has waited for the guest comes first, seconds.
AFTER_HELLO_S: Final = 2.0
#: One whose agent never comes has its memory after so long.
WITHOUT_AGENT_S: Final = 120.0


class LateMemory:
    """What one VM holds until the rest is plugged, and when that is due."""

    def __init__(self) -> None:
        #: What it was started with, MiB; None: it has all that its size asks for, or is not known to lack any.
        self.held_mib: float | None = None
        self._due_at: float | None = None
        self._pace = RepairPace()

    def started(self, now: float, held_mib: float | None = None) -> None:
        """It may have been started with less than its size; None: nobody has looked what it holds."""
        self.held_mib, self._due_at = held_mib, now + WITHOUT_AGENT_S
        self._pace.held()

    def heard(self, now: float) -> None:
        """Its agent has said hello."""
        if self._due_at is not None:
            self._due_at = min(self._due_at, now + AFTER_HELLO_S)
            self._pace.held()

    def due(self, now: float, pressed: bool) -> bool:
        """Whether the rest is to be plugged: at once if the guest is short of memory."""
        return self._due_at is not None and self._pace.due(now) and (pressed or now >= self._due_at)

    @property
    def expected(self) -> bool:
        """Whether something may still be plugged."""
        return self._due_at is not None

    def fell_short(self, now: float, held_mib: float | None) -> None:
        """It did not take all, and holds so much now: that is tried again, ever more rarely; None as above."""
        self.held_mib = held_mib
        self._pace.tried(now)

    def plugged(self) -> None:
        """It has what its size asks for."""
        self.held_mib = self._due_at = None

    def missing_mib(self, committed_mib: float) -> float:
        """What of its size is not plugged yet, and can be had without the guest."""
        return 0.0 if self.held_mib is None else max(committed_mib - self.held_mib, 0.0)
