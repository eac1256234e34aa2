"""Arithmetic of the dry run: a resize in which every layer gives what it can by the latest readings.

The very machines that resize a VM are run over a bound and a guest that exist only here and do all that they are
instructed to do. The application is not asked: what it could release is unknown until it is, and comes on top. So a
dry run tells the least that a willing host and guest give, and the reasons for what is missing.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Final

from ebbtide.deflation.bounds import Bound
from ebbtide.deflation.cascade.cascade import Cascade
from ebbtide.deflation.cascade.instructions import (
    Finish,
    GuestReading,
    Instruction,
    Measured,
    Outcome,
    ReadGuest,
    Throttle,
    Unplug,
)
from ebbtide.deflation.cascade.mechanisms import Mechanism, Mechanisms
from ebbtide.deflation.cascade.reconcile import cap_of, quota_of
from ebbtide.deflation.cascade.reinflation import Reinflation
from ebbtide.deflation.cascade.steps import dimms_to_take
from ebbtide.deflation.errors import ProtocolViolation
from ebbtide.deflation.ledger import Layer
from ebbtide.deflation.resources import ResourceVector

NOT_ASKED: Final = "not asked: a dry run asks no application"
NOT_RECLAIMED: Final = "not asked: a dry run has no pages made free"
#: Instructions of one machine; each memory step takes half of what is left, so real ones need some twenty.
_MOST_INSTRUCTIONS: Final = 500


@dataclass(frozen=True, slots=True)
class Present:
    """A VM as it was just read."""

    bound: Bound
    #: None: the guest does not say, so no memory is taken.
    guest: GuestReading | None
    boot_mib: float
    #: vCPUs that the domain has or could have plugged again, on line or not.
    vcpus: int
    mechanisms: Mechanisms
    #: What can be used to give, where that is more than what can be used to take.
    to_give: Mechanisms | None = None


def forecast(present: Present, target: ResourceVector, deadline_s: float) -> tuple[Outcome, ...]:
    """What bringing a VM to ``target`` would come to: what is taken first, then what is given.

    The ledgers' *verified* is what would be verified if all went well; ``seconds`` is 0, since no time passes here.

    :returns: one outcome, or two where the target goes down in one component and up in another.
    """
    mechanisms = present.mechanisms.without([Mechanism.APPLICATION], NOT_ASKED)
    mechanisms = mechanisms.without([Mechanism.COLD], NOT_RECLAIMED)
    block_mib = mechanisms.block_mib if mechanisms.has(Mechanism.VIRTIO_MEM) else 0.0
    world = _World(present.bound, present.guest, present.vcpus, block_mib)
    before = present.bound
    down = None
    if not (before.size.fits_in(target) and not target.fits_in(before.size)):
        down = world.run(Cascade(before, target, deadline_s, mechanisms))
        if target.fits_in(down.after.size) or before.size.fits_in(target):
            return (down,)
    to_give = (present.to_give or present.mechanisms).without([Mechanism.APPLICATION], NOT_ASKED)
    up = world.run(Reinflation(world.bound, target, present.boot_mib, present.vcpus, deadline_s, to_give))
    return (up,) if down is None else (down, up)


@dataclass(slots=True)
class _World:
    """A VM that does all that is asked of it at once."""

    bound: Bound
    guest: GuestReading | None
    vcpus: int
    #: Granularity of virtio-mem; 0 where it cannot be used.
    block_mib: float

    def run(self, machine: Cascade | Reinflation) -> Outcome:
        pending: list[Instruction] = machine.start(0.0)
        for _ in range(_MOST_INSTRUCTIONS):
            instruction = pending.pop(0)
            if isinstance(instruction, Finish):
                return instruction.outcome
            self._obey(instruction)
            pending += machine.handle(Measured(0.0, instruction.step, self.bound, self.guest))
        raise ProtocolViolation(f"a forecast did not end after {_MOST_INSTRUCTIONS} instructions")

    def _obey(self, instruction: Instruction) -> None:
        before = self.bound.held_mib
        match instruction:
            case ReadGuest():
                pass
            case Unplug():
                self._unplug(instruction)
            case Throttle():
                self._throttle(instruction)
            case _:
                raise ProtocolViolation(f"a forecast cannot carry out {type(instruction).__name__}")
        if self.guest is not None:
            spare = max(self.guest.spare_mib + self.bound.held_mib - before, 0.0)
            self.guest = replace(self.guest, spare_mib=spare)

    def _unplug(self, instruction: Unplug) -> None:
        if instruction.online is not None:
            self.bound = replace(self.bound, cpus_online=len(instruction.online))
            if self.guest is not None:
                self.guest = replace(self.guest, online=instruction.online)
        if instruction.plugged_mib is not None:
            self._plug(instruction.plugged_mib)

    def _plug(self, plugged_mib: float) -> None:
        """Virtio-mem moves as it is asked to; DIMMs leave as a whole, and come back as if there were one that fits."""
        bound, dimms = self.bound, list(self.bound.dimms_mib)
        taken = dimms_to_take(dimms, bound.virtio_mib, max(bound.plugged_mib - plugged_mib, 0.0), self.block_mib)
        for dimm in taken:
            dimms.remove(dimm)
        self.bound = replace(bound, plugged_mib=max(plugged_mib, sum(dimms) + bound.fixed_mib), dimms_mib=tuple(dimms))

    def _throttle(self, instruction: Throttle) -> None:
        if instruction.cpu_cores is not None:
            cpus = instruction.cpus_online or self.bound.cpus_online
            quota, cap = quota_of(instruction.cpu_cores, cpus), cap_of(instruction.cpu_cores, self.vcpus)
            self.bound = replace(self.bound, quota_per_cpu=quota, cap_cores=cap)
        if instruction.balloon_mib is not None:
            self.bound = replace(self.bound, balloon_mib=instruction.balloon_mib)
        if instruction.disk_mib_s is not None:
            self.bound = replace(self.bound, disk_mib_s=instruction.disk_mib_s)
        if instruction.network_mib_s is not None:
            self.bound = replace(self.bound, network_mib_s=instruction.network_mib_s)
        if instruction.limit_mib is not None:
            limit = instruction.limit_mib if math.isfinite(instruction.limit_mib) else None
            self.bound = replace(self.bound, limit_mib=limit)


def tell(outcomes: tuple[Outcome, ...], asks_application: bool) -> str:
    """A forecast in one sentence.

    :param asks_application: whether there is an application that the real thing would ask.
    """
    parts = [_tell_one(outcome) for outcome in outcomes]
    missing = any(not outcome.shortfall.is_zero() for outcome in outcomes)
    if missing and asks_application:
        parts.append("its application, which a dry run does not ask, may make more possible")
    return "; ".join(parts)


def _tell_one(outcome: Outcome) -> str:
    before, after = outcome.before.size, outcome.after.size
    down = not outcome.before.size.fits_in(outcome.target)
    moved = before.less(after) if down else after.less(before)
    asked = before.less(outcome.target) if down else outcome.target.less(before)
    if asked.is_zero():
        return "would change nothing: it has this size"
    by_layer = {
        layer: ResourceVector(**{row.resource: row.verified for row in outcome.ledger if row.layer is layer})
        for layer in (Layer.GUEST, Layer.HYPERVISOR)
    }
    shares = "; ".join(f"{layer.value} {share}" for layer, share in by_layer.items())
    text = f"would {'take' if down else 'give back'} {moved} of {asked} ({shares})"
    if outcome.shortfall.is_zero():
        return text
    reasons = dict.fromkeys(
        row.reason for row in outcome.ledger if row.reason and row.asked > row.verified and row.reason != NOT_ASKED
    )
    return f"{text}; short of {outcome.shortfall}" + (f", because {'; '.join(reasons)}" if reasons else "")
