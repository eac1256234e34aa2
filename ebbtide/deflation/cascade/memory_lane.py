"""The lane of memory: unplugging in the guest, also while the application goes on releasing, then balloon and limit."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Final

from ebbtide.deflation.bounds import Bound
from ebbtide.deflation.cascade.instructions import GuestKind, GuestReading, Instruction, ReadGuest, Throttle, Unplug
from ebbtide.deflation.cascade.lanes import Job, Lane, ResourceLane
from ebbtide.deflation.cascade.mechanisms import Mechanism
from ebbtide.deflation.cascade.steps import STEP_SHARE, balloon_to_keep, memory_to_keep
from ebbtide.deflation.floors import HARD_FLOOR
from ebbtide.deflation.ledger import Layer
from ebbtide.deflation.resources import TOLERANCE, ResourceVector

#: For giving back what the guest misses, in seconds, whatever the deadline.
GIVE_BACK_S: Final = 10.0
#: While the application goes on releasing, a step is not worth its readings below this, MiB, and this share of all
#: that is to be taken: small steps come at the end.
PIPELINED_STEP_MIB: Final = 64.0
PIPELINED_STEP_SHARE: Final = 1 / 16
#: For hearing from the host what the guest says it has given, in seconds, whatever the deadline.
HEAR_S: Final = 2.0
#: The guest's word is taken for a step only while so much of its layer's time is left, in seconds.
WORD_S: Final = 4.0
#: What MemTotal may be off, MiB.
SLACK_MIB: Final = 1.0


@dataclass(frozen=True, slots=True)
class Release:
    """An application that is releasing memory, by its own word, MiB. Untrusted: fresh readings hold a step too."""

    promised_mib: float
    relinquished_mib: float


class MemoryLane(ResourceLane):
    """See the module. `step` says what is to be done next; None: it waits, or is ``done``."""

    lane = Lane.MEMORY

    def __init__(self, job: Job) -> None:
        super().__init__(job)
        self.begun = False
        #: What was tried without getting all that was asked: it is not asked again.
        self._refused = False
        self._balloon_stalled = False
        self._limit_tried = False
        #: The balloon before its latest step, MiB, for giving that back; None: it made none, or gave it back.
        self._balloon_before: float | None = None
        self._given_back = False
        #: What the guest held beyond the target when this began, MiB.
        self._wanted_mib = 0.0
        #: What the application had relinquished when there was nothing to take until it releases more, MiB; None: there
        #: may be.
        self._waits_since_mib: float | None = None
        #: Whether there was a reading for the hypervisor's layer.
        self._read_outside = False
        #: The plugged memory that the guest has by its own word, MiB, while the host has not heard of it: the next step
        #: goes on from there, and nothing else does. None: the host knows.
        self._said_mib: float | None = None
        #: How much more than that it still has, by its MemTotal, MiB.
        self._behind_mib = 0.0
        #: The release that is going on, if one is.
        self._release: Release | None = None
        #: How many parts of the cold pages have become free; None: none are becoming so. And how many had when there
        #: was nothing to take until the next; None: there may be.
        self._parts: int | None = None
        self._waits_since_part: int | None = None

    def step(self, now: float, release: Release | None, parts: int | None = None) -> Instruction | None:
        """The next instruction, if there is one now.

        :param release: of the application, as long as it goes on.
        :param parts: how many parts of the guest's cold pages have become free, as long as that goes on: meanwhile no
            more is unplugged than what is free.
        """
        self._release, self._parts = release, parts
        if parts is None:
            self._waits_since_part = None
        if not self.begun:
            self.begun = True
            self._begin(now)
        if self.layer is Layer.GUEST:
            if (instruction := self._in_the_guest(now)) is not None:
                return instruction
            if release is None and self._waits_since_part is None:
                self._enter(Layer.HYPERVISOR, now)
        if self.done or release is not None or self._waits_since_part is not None:
            return None
        if (instruction := self._from_outside(now) or self._heard(now)) is not None:
            return instruction
        self._end(now)
        return None

    def judge(self, taking: Instruction, bound: Bound | None, guest: GuestReading | None) -> None:
        """See by a reading what did not give all that it was asked for, before the reading is taken over.

        :param bound: None: it could not be read, so the host may not have heard of what the guest gave.
        """
        if isinstance(taking, Throttle) and taking.balloon_mib is not None and bound is not None:
            self._balloon_stalled = self.job.bound.balloon_mib - bound.balloon_mib < 1.0
        if self._said_mib is not None and bound is not None and bound.plugged_mib <= self._said_mib + TOLERANCE:
            self._said_mib = None
        if not isinstance(taking, Unplug) or taking.plugged_mib is None:
            return
        behind_mib = self._behind_mib if self._said_mib is not None else 0.0
        self._said_mib = None
        if bound is None or bound.plugged_mib > taking.plugged_mib + TOLERANCE:
            total_mib = guest.total_mib if guest is not None else None
            until_mib = taking.until_total_mib
            if until_mib is not None and total_mib is not None and total_mib <= until_mib + SLACK_MIB:
                self._said_mib = taking.plugged_mib
                self._behind_mib = behind_mib + max(total_mib - until_mib, 0.0)
                return
            if bound is None:
                return
            if self._release is not None:
                # What is in use now may be what the application is about to release.
                self._waits_since_mib = self._release.relinquished_mib
                return
            if self._parts is not None:
                self._waits_since_part = self._parts
                return
            self._refused = True
            self.job.accounts[Layer.GUEST].say("the guest gave up less memory than it was asked for")

    def _begin(self, now: float) -> None:
        if self.job.need.memory_mib <= TOLERANCE:
            self._end(now)
            return
        self._wanted_mib = self.held_beyond_target
        if not self._enter_the_guest(now):
            self._enter(Layer.HYPERVISOR, now)

    # --- the guest ---------------------------------------------------------------------------------------------------

    @property
    def _bound(self) -> Bound:
        """What the next step goes on from: what is known, but what the guest says of plugged memory."""
        bound = self.job.bound
        return bound if self._said_mib is None else replace(bound, plugged_mib=min(bound.plugged_mib, self._said_mib))

    @property
    def _need_mib(self) -> float:
        return self._bound.size.less(self.job.target).memory_mib

    def _heard(self, now: float) -> Unplug | None:
        """Have the host hear, once, what the guest says it has given: only what it hears counts."""
        said_mib, self._said_mib = self._said_mib, None
        limit_s = max(self.job.time_left(Layer.GUEST, now), HEAR_S)
        return Unplug(0, limit_s, None, said_mib) if said_mib is not None else None

    @property
    def held_beyond_target(self) -> float:
        """What unplugging and ballooning would have to take: an earlier limit makes the need less, but not this."""
        return max(self._bound.held_mib - self.job.target.memory_mib, 0.0)

    def _in_the_guest(self, now: float) -> Instruction | None:
        left = self.job.time_left(Layer.GUEST, now)
        if self._need_mib <= TOLERANCE and (heard := self._heard(now)) is not None:
            return heard
        if self._need_mib <= TOLERANCE or self._refused:
            self._waits_since_part = None
            return None
        if self._waits():
            return None
        if not self.just_read and left > 0:
            return ReadGuest(0, left)
        if why := self._why_nothing_of_the_guest(now):
            self._account.say(why)
            self._wait()
            return None
        plugged = self._plugged_to_keep(self._may_take_mib())
        taken = 0.0 if plugged is None else self._bound.plugged_mib - plugged
        pipelined = self._release is not None or self._parts is not None
        if plugged is None or (pipelined and taken < self.worth_mib):
            self._wait()
            return None
        self._account.promise(ResourceVector(memory_mib=taken))
        total_mib = self.guest.total_mib if self.guest is not None else None
        until_mib = None if total_mib is None or left < WORD_S else total_mib - taken
        return Unplug(0, left, None, plugged, until_total_mib=until_mib)

    @property
    def worth_mib(self) -> float:
        """The least step while the application or the guest's cold pages go on, MiB."""
        return max(PIPELINED_STEP_MIB, PIPELINED_STEP_SHARE * self._wanted_mib)

    def _wait(self) -> None:
        """Until the application has released more, or more cold pages are free, if that goes on."""
        self._waits_since_mib = self._release.relinquished_mib if self._release is not None else None
        self._waits_since_part = self._parts

    def _waits(self) -> bool:
        """Whether there is nothing to take until the application has released more, or more cold pages are free."""
        if self._parts is not None and self._waits_since_part is not None:
            return self._parts == self._waits_since_part
        if self._release is None or self._waits_since_mib is None:
            return False
        return self._release.relinquished_mib < self._waits_since_mib + self.worth_mib

    def _may_take_mib(self) -> float:
        """While the application goes on: what it has released so far, and what it is not going to release. While cold
        pages become free: what is."""
        if self._parts is not None and self.guest is not None and self.guest.free_mib is not None:
            return min(self.guest.free_mib, self.held_beyond_target)
        if self._release is None:
            return self.held_beyond_target
        others = max(self._wanted_mib - self._release.promised_mib, 0.0)
        taken = self._wanted_mib - self.held_beyond_target
        return min(max(self._release.relinquished_mib + others - taken, 0.0), self.held_beyond_target)

    def _plugged_to_keep(self, take_mib: float) -> float | None:
        """The next step of plugged memory, by virtio-mem or by a whole DIMM."""
        job, need = self.job, self._need_mib
        dimms = bool(job.bound.dimms_mib) and job.mechanisms.has(Mechanism.DIMM)
        # Where there are DIMMs to take, a missing virtio-mem device is nothing to tell of.
        device = job.mechanisms.has(Mechanism.VIRTIO_MEM) if dimms else job.usable(Mechanism.VIRTIO_MEM, need)
        if need <= TOLERANCE or self.guest is None or not (device or dimms):
            return None
        block = job.mechanisms.block_mib if device else 0.0
        guest = self.guest
        if self._said_mib is not None:
            # What it is behind comes on top of the step.
            guest = replace(guest, spare_mib=max(guest.spare_mib - self._behind_mib / STEP_SHARE, 0.0))
        return memory_to_keep(self._bound, guest, take_mib, block, dimms)

    # --- from outside ------------------------------------------------------------------------------------------------

    def _from_outside(self, now: float) -> Instruction | None:
        """Balloon steps for as long as they move anything; at last, once, a limit on what is still missing."""
        job = self.job
        limit_s = max(job.time_left(Layer.HYPERVISOR, now), 1.0)
        if self._need_mib <= TOLERANCE and self._balloon_before is None:
            return None
        if not (self._knows_all or (self.just_read and self._read_outside)):
            self._read_outside = True
            return ReadGuest(0, limit_s)
        self._read_outside = True
        if self._balloon_before is not None and self.guest is not None and self.guest.missed:
            return self._give_back(self._balloon_before, self.guest.missed)
        if not self._may_be_taken(now):
            return None
        self._balloon_before = None
        if (balloon := self._balloon_step()) is not None:
            self._account.promise(ResourceVector(memory_mib=job.bound.balloon_mib - balloon))
            self._balloon_before = job.bound.balloon_mib
            return Throttle(0, limit_s, None, balloon)
        if (heard := self._heard(now)) is not None:
            return heard
        if (limit := self._limit_step()) is not None:
            self._account.promise(ResourceVector(memory_mib=job.need.memory_mib))
            return Throttle(0, limit_s, None, None, limit_mib=limit)
        return None

    def _give_back(self, balloon_mib: float, why: str) -> Instruction:
        """Undo the latest balloon step. Until it is read what the guest took of that, it counts as all."""
        self._account.say(f"{why}; the last {balloon_mib - self.job.bound.balloon_mib:.0f} MiB go back")
        self.job.bound = replace(self.job.bound, balloon_mib=balloon_mib)
        self._balloon_before, self._given_back = None, True
        return Throttle(0, GIVE_BACK_S, None, balloon_mib)

    def _may_be_taken(self, now: float) -> bool:
        """Whether memory is missing, and all that is known lets it be taken; says why not."""
        if self._need_mib < 1.0 or self._given_back:
            return False
        why = ""
        if self.guest is None or self.guest.silent:
            why = "no fresh reading of the guest, so no memory is taken"
        elif self.blind:
            why = "the size of the VM could not be read, so no memory is taken"
        elif self.guest.missed:
            why = self.guest.missed
        elif self.job.time_left(Layer.HYPERVISOR, now) <= 0:
            why = "stopped at the deadline"
        usable, mechanisms = (Mechanism.BALLOON, Mechanism.MEMORY_LIMIT), self.job.mechanisms
        if not any(mechanisms.has(mechanism) for mechanism in usable):
            why = "; ".join(dict.fromkeys(mechanisms.reason(mechanism) for mechanism in usable))
        self._account.say(why)
        return not why

    def _balloon_step(self) -> float | None:
        """The next balloon size, or None with the reason why there is none."""
        if not self.job.mechanisms.has(Mechanism.BALLOON):
            self._account.say(self.job.mechanisms.reason(Mechanism.BALLOON))
        elif self._balloon_stalled:
            self._account.say("the balloon made no further progress")
        elif self.guest is not None:
            if self.guest.kind is not GuestKind.AGENT:
                kind = self.guest.kind.value
                self._account.say(f"the guest's kind is {kind}: by its balloon statistics, in small steps")
            if (balloon := balloon_to_keep(self.job.bound, self.guest, self.held_beyond_target)) is not None:
                return balloon
            self._account.say("the guest has no more memory to spare above its floor")
        return None

    def _limit_step(self) -> float | None:
        """The limit to set from outside on what neither guest nor balloon gave, or None; it is tried once."""
        if self._limit_tried or not self.job.usable(Mechanism.MEMORY_LIMIT, self.job.need.memory_mib):
            return None
        limit = max(self.job.target.memory_mib, HARD_FLOOR.memory_mib)
        if limit > self.job.bound.memory_mib - 1.0:
            return None
        self._limit_tried = True
        return limit
