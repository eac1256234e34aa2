"""Queue of the preempted VMs of one host: whom room that appears brings back, oldest first, without flapping.

A VM comes back where it can at least start: in what is free and what the others can be deflated by. One whose disk
other hosts see comes back on another one where there is room for all of it, and here there is not enough, or the last
try was here: the two take turns. Room counts once it has been there for a while; a VM rests after its preemption, and
one that could not be started, or was soon preempted again, waits ever longer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

from ebbtide.deflation.resources import ZERO, ResourceVector
from ebbtide.deflation.sharing.hysteresis import LONGEST_GAP_S, Pace, RoomWatch


@dataclass(frozen=True, slots=True)
class Waiting:
    """A VM in the queue."""

    name: str
    #: What has to be free for the smallest size that it can start with.
    least: ResourceVector
    #: Whether another host that sees its disk has room for all of it.
    elsewhere: bool = False


@dataclass(frozen=True, slots=True)
class ReturnPace:
    """How soon preempted VMs come back, in seconds."""

    #: Room that has been there for so long counts.
    hold_s: float = 20.0
    #: A VM that was just preempted does not come back for so long.
    rest_s: float = 30.0
    #: Between two tries of one VM: the first pause, which doubles up to the longest.
    pause_s: float = 30.0
    longest_s: float = 900.0
    #: A VM that was out of the queue for so long begins with the first pause again.
    calm_s: float = 600.0


DEFAULT_PACE: Final = ReturnPace()


@dataclass(slots=True)
class _Try:
    at: float
    pause_s: float
    elsewhere: bool


@dataclass(slots=True)
class ReturnQueue:
    """One host's queue. Fed with every reading; knows no clock but ``now``: seconds that never go back."""

    pace: ReturnPace = DEFAULT_PACE
    _watch: RoomWatch = field(init=False)
    _room: ResourceVector = ZERO
    _waiting: tuple[Waiting, ...] = ()
    _since: dict[str, float] = field(default_factory=dict)
    _left: dict[str, float] = field(default_factory=dict)
    _tries: dict[str, _Try] = field(default_factory=dict)
    #: Since when each could start elsewhere, and when that was looked at last.
    _elsewhere: dict[str, float] = field(default_factory=dict)
    _looked_at: float = float("-inf")

    def __post_init__(self) -> None:
        self._watch = RoomWatch(Pace(hold_s=self.pace.hold_s))

    def observe(self, now: float, waiting: Sequence[Waiting], room: ResourceVector) -> None:
        """Take in a reading.

        :param waiting: the queue, oldest first.
        :param room: what is free, and what the others can be deflated by.
        """
        names = {one.name for one in waiting}
        for name in self._since.keys() - names:
            del self._since[name]
            self._left[name] = now
        for name in names:
            self._since.setdefault(name, now)
            if now - self._left.pop(name, now) >= self.pace.calm_s:
                self._tries.pop(name, None)
        for name in [name for name, at in self._left.items() if now - at >= self.pace.calm_s]:
            del self._left[name]
            self._tries.pop(name, None)
        known = self._elsewhere if now - self._looked_at <= LONGEST_GAP_S else {}
        self._elsewhere = {one.name: known.get(one.name, now) for one in waiting if one.elsewhere}
        self._looked_at = now
        self._waiting, self._room = tuple(waiting), room
        self._watch.observe(now, (), room)

    def due(self, now: float) -> str | None:
        """Who is to be started now: the oldest of those that fit and have rested; None: none is."""
        room = self._room.smaller(self._watch.steady(now))
        return next((one.name for one in self._waiting if one.least.fits_in(room) and self._here(now, one)), None)

    def due_elsewhere(self, now: float) -> str | None:
        """Who is to be started on another host now: the oldest that has rested and does not fit, or was tried, here."""
        return next(
            (one.name for one in self._waiting if self._goes(now, one) and self._rested(now, one.name)),
            None,
        )

    def kept(self, now: float) -> ResourceVector:
        """What growth of others is to leave free meanwhile: the least of who comes back next, once room is steady."""
        fits = (one.least for one in self._waiting if one.least.fits_in(self._room) and self._here(now, one))
        return next(fits, ZERO)

    def _here(self, now: float, one: Waiting) -> bool:
        return self._rested(now, one.name) and not self._goes(now, one)

    def _goes(self, now: float, one: Waiting) -> bool:
        """Whether it comes back elsewhere: there has been room for long enough, and here it does not fit, or the last
        try was here.
        """
        lasts, last = now - self._elsewhere.get(one.name, now) >= self.pace.hold_s, self._tries.get(one.name)
        tried_here = last is not None and not last.elsewhere
        return lasts and (tried_here or not one.least.fits_in(self._room))

    def tried(self, now: float, name: str, elsewhere: bool = False) -> None:
        """It is started now, here or on another host."""
        earlier = self._tries.get(name)
        pause_s = self.pace.pause_s if earlier is None else min(earlier.pause_s * 2, self.pace.longest_s)
        self._tries[name] = _Try(now, pause_s, elsewhere)

    def _rested(self, now: float, name: str) -> bool:
        last = self._tries.get(name)
        if now - self._since[name] < self.pace.rest_s:
            return False
        return last is None or now - last.at >= last.pause_s
