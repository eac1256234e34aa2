"""Hysteresis of growth, so that sizes do not flap: room was there for a while, or is worth a resize at once.

What takes is never delayed by this; nor is what a departure frees, since that has a cause. It is for room that appears
by itself: processes that are not ours end, a host is heard of again, a target made another VM smaller.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Final

from ebbtide.deflation.allocations import Allocation
from ebbtide.deflation.resources import COMPONENTS, TOLERANCE, ZERO, ResourceVector
from ebbtide.deflation.sharing.proportional import share_room
from ebbtide.deflation.sharing.undo import SMALLEST_GROWTH

#: Readings of one host that lie further apart than this say nothing of the time between them, in seconds.
LONGEST_GAP_S: Final = 15.0


@dataclass(frozen=True, slots=True)
class Pace:
    """How patient growth is."""

    #: Room that has been there for so long counts as steady, in seconds.
    hold_s: float = 20.0
    #: A VM that was shrunk does not grow for so long, unless it is under pressure, in seconds.
    rest_s: float = 30.0
    #: A growth by this share of the largest size, in any component, is worth a resize before the room is steady.
    large_share: float = 0.25


DEFAULT_PACE: Final = Pace()


@dataclass(slots=True)
class RoomWatch:
    """What one host's room and VMs did lately. Fed with every reading; knows no clock but ``now``.

    :param pace: how patient growth is.
    """

    pace: Pace = DEFAULT_PACE
    _rooms: deque[tuple[float, ResourceVector]] = field(default_factory=deque)
    _sizes: dict[str, ResourceVector] = field(default_factory=dict)
    _shrunk_at: dict[str, float] = field(default_factory=dict)
    _grown_at: dict[str, float] = field(default_factory=dict)

    def observe(self, now: float, allocations: Iterable[Allocation], room: ResourceVector) -> None:
        """Take in a reading.

        :param now: seconds of one monotonic clock, never less than before.
        :param room: what the host has free to share.
        """
        if self._rooms and now - self._rooms[-1][0] > LONGEST_GAP_S:
            self._rooms.clear()
        # The newest reading that is as old as the hold time stays: the window must reach back that far.
        while len(self._rooms) > 1 and self._rooms[1][0] <= now - self.pace.hold_s:
            self._rooms.popleft()
        sizes, taken = {allocation.name: allocation.current for allocation in allocations}, ZERO
        for name, size in sizes.items():
            before = self._sizes.get(name, size)
            if not before.fits_in(size):
                self._shrunk_at[name] = now
            if not size.fits_in(before):
                self._grown_at[name] = now
                taken += size.less(before)
        # What was given away since was there before, but is not there any more.
        if not taken.is_zero():
            self._rooms = deque((at, had.less(taken)) for at, had in self._rooms)
        self._rooms.append((now, room))
        self._sizes = sizes
        for moments in (self._shrunk_at, self._grown_at):
            for name in moments.keys() - sizes.keys():
                del moments[name]

    def steady(self, now: float) -> ResourceVector:
        """What has been there all through the hold time; nothing if the host was not watched for so long."""
        if not self._rooms or self._rooms[0][0] > now - self.pace.hold_s:
            return ZERO
        least = self._rooms[0][1]
        for _, room in self._rooms:
            least = least.smaller(room)
        return least

    def rested(self, now: float, name: str) -> bool:
        """Whether a VM was not shrunk lately."""
        at = self._shrunk_at.get(name)
        return at is None or now - at >= self.pace.rest_s

    def grown(
        self,
        now: float,
        allocations: Sequence[Allocation],
        room: ResourceVector,
        pressed: Collection[str] = (),
    ) -> dict[str, ResourceVector]:
        """Who of these VMs is to grow to what now: those under pressure at once, the others with patience.

        :param allocations: the VMs that may grow at all.
        :param room: what there is to share.
        :returns: targets, which never hand out more than ``room``.
        """
        rows = [a for a in allocations if a.name in pressed or self.rested(now, a.name)]
        at_once = share_room(rows, room, pressed)
        patient = share_room(rows, room.smaller(self.steady(now)), pressed)
        targets = {}
        for row in rows:
            most = at_once.get(row.name, row.current)
            # Never above its share of the whole room, or rounding could hand out a step too much.
            size = patient.get(row.name, row.current).smaller(most)
            if row.name in pressed or _grows_by(row, most, row.upper * self.pace.large_share):
                size = most
            elif now - self._grown_at.get(row.name, -self.pace.hold_s) < self.pace.hold_s:
                continue
            if size != row.current and (row.name in pressed or _is_worth_while(row, size)):
                targets[row.name] = size
        return targets


def _is_worth_while(row: Allocation, size: ResourceVector) -> bool:
    """Whether a growth is more than a flutter, or all that the VM lacks in some component."""
    completes = any(
        size[component] > row.current[component] and size[component] >= row.upper[component] for component in COMPONENTS
    )
    return completes or _grows_by(row, size, SMALLEST_GROWTH)


def _grows_by(row: Allocation, size: ResourceVector, amount: ResourceVector) -> bool:
    """Whether some component that the VM has at all grows by so much."""
    return any(
        size[component] - row.current[component] >= amount[component] - TOLERANCE
        for component in COMPONENTS
        if row.upper[component] > TOLERANCE and size[component] > row.current[component] + TOLERANCE
    )
