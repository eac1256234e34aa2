"""The lane of cold pages: what the guest can do without is made free ahead of unplugging, so that nothing hot is moved.

It changes no bound, and what it says of itself never lets a step take more: steps of memory are reckoned as before
(`ebbtide.deflation.cascade.memory_lane`), and are smaller while this is at work. How fast pages go is the guest's own
affair (`guestagent.cold.pace`).
"""

from __future__ import annotations

from typing import Final

from ebbtide.deflation.cascade.instructions import ColdReclaimed, ReclaimCold
from ebbtide.deflation.cascade.lanes import Job, Lane
from ebbtide.deflation.cascade.mechanisms import Mechanism
from ebbtide.deflation.cascade.memory_lane import MemoryLane
from ebbtide.deflation.cascade.steps import SMALLEST_STEP_MIB
from ebbtide.deflation.ledger import Layer
from ebbtide.deflation.resources import ResourceVector

#: One instruction asks for a quarter of all that is to become free, but at least for this, MiB: the first part is
#: unplugged while the next becomes free.
PART: Final = 1 / 4
SMALLEST_PART_MIB: Final = 64.0
#: The longest that one instruction takes, in seconds: it is waited for where memory has come to its end meanwhile.
LONGEST_PART_S: Final = 5.0
MEMORY: Final = ("memory_mib",)


class ColdLane:
    """See the module. `step` says what is to be done next; None: nothing now."""

    lane = Lane.COLD

    def __init__(self, job: Job) -> None:
        self.job = job
        self.done = False
        #: What has become free so far by the guest's word, MiB.
        self.freed_mib = 0.0
        #: What is to become free, MiB; None: not known yet.
        self._goal_mib: float | None = None
        self._answered = 0

    @property
    def parts(self) -> int | None:
        """How many instructions have been answered; None: it is not at work."""
        return None if self.done or self._goal_mib is None else self._answered

    def step(self, now: float, memory: MemoryLane) -> ReclaimCold | None:
        """The next instruction, if there is one now. The application has done.

        :param memory: the lane that it clears the way for, and whose fresh reading says what is free.
        """
        if self.done or not memory.begun:
            return None
        if memory.layer is not Layer.GUEST:
            self._end(now)
            return None
        if self._goal_mib is None and not self._begin(now, memory):
            return None
        left_mib = (self._goal_mib or 0.0) - self.freed_mib
        left_s = self.job.time_left(Layer.COLD, now)
        if left_mib < SMALLEST_STEP_MIB or left_s <= 0:
            self._end(now, "" if left_mib < SMALLEST_STEP_MIB else "stopped at its share of the deadline")
            return None
        part_mib = min(left_mib, max(SMALLEST_PART_MIB, (self._goal_mib or 0.0) * PART))
        return ReclaimCold(0, min(left_s, LONGEST_PART_S), part_mib)

    def see(self, event: ColdReclaimed) -> None:
        """Take in what became of the latest instruction."""
        self.freed_mib += event.freed_mib
        self._answered += 1
        self.job.accounts[Layer.COLD].say(event.reason)
        # A guest that goes on promising without giving is not asked again and again.
        if event.done or event.freed_mib < SMALLEST_STEP_MIB:
            self._end(event.now)

    def _begin(self, now: float, memory: MemoryLane) -> bool:
        """Reckon by the first reading of memory what free pages do not cover. False: it waits, or there is nothing."""
        guest, account = memory.guest, self.job.accounts[Layer.COLD]
        if not self.job.mechanisms.has(Mechanism.COLD):
            self._end(now)
            return False
        if not memory.just_read or guest is None:
            return False
        unpluggable = min(memory.held_beyond_target, self.job.bound.plugged_mib)
        if guest.free_mib is None or guest.cold_blocked:
            account.say(f"unsupported: {guest.cold_blocked or 'the guest agent does not say what is free'}")
            self._end(now)
            return False
        self._goal_mib = max(unpluggable - guest.free_mib, 0.0)
        if self._goal_mib < SMALLEST_STEP_MIB:
            account.say("free pages are enough: nothing had to become free")
            self._end(now)
            return False
        goal = ResourceVector(memory_mib=self._goal_mib)
        account.enter(MEMORY, goal, now)
        account.promise(goal)
        return True

    def _end(self, now: float, why: str = "") -> None:
        account = self.job.accounts[Layer.COLD]
        account.say(why)
        account.leave(MEMORY, now)
        self.done = True
