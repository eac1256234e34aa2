"""Victims of a preemption: who they are, how each of them goes, and what became of that."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from cluster_manager.plans.plans import (
    Effect,
    Event,
    HostFailed,
    HostRead,
    Instruction,
    Note,
    OperationEnded,
    Preempt,
    PreemptTogether,
    Remove,
    SetPreempted,
    SetVM,
    VMPhase,
    preempted_by,
)
from cluster_manager.plans.preemption import PreemptionReason, costs, is_deleted, notice
from cluster_manager.plans.report_queries import allocations_of, withheld_by
from ebbtide.deflation.errors import ProtocolViolation
from ebbtide.deflation.resources import ResourceVector
from ebbtide.deflation.sharing.proportional import choose_victims
from ebbtide.deflation.sharing.suspension import POWER_OFF_SHARE, SAVING_SHARE
from ebbtide.messages.common import Vector
from ebbtide.messages.hosts import HostReport
from ebbtide.messages.operations import OperationState
from ebbtide.messages.vms import OnPreemption, VMSpec

Victim = Preempt | Remove


def victims_for(
    event: HostRead, missing: ResourceVector, targets: Mapping[str, Vector], left_out: Collection[str]
) -> list[str] | None:
    """Those farthest from their targets, of the VMs that the record has there; None: all of them would not do.

    :param left_out: VMs whose calls failed: they could not be relied on to go either.
    """
    rows = [row for row in allocations_of(event.report) if row.name in event.recorded.difference(left_out)]
    sizes = {name: target.vector() for name, target in targets.items()}
    return choose_victims(rows, missing, sizes, costs(event.report.vms, event.sold, event.at))


def go_for_an_error(
    event: HostRead,
    missing: ResourceVector,
    targets: Mapping[str, Vector],
    left_out: Collection[str],
    minimums_in_the_way: bool,
) -> bool:
    """Whether victims would go in the place of what VMs that are left out could give.

    Where the minimums are in the way the same ones may have to go whatever those gave.
    """
    withheld = withheld_by(event.report, left_out)
    if withheld.smaller(missing).is_zero():
        return False
    if not minimums_in_the_way:
        return True
    rest = missing.less(withheld)
    go, would_go = (set(victims_for(event, one, targets, left_out) or ()) for one in (missing, rest))
    return go != would_go


def going(
    report: HostReport,
    sold: Mapping[str, VMSpec],
    names: Sequence[str],
    reason: PreemptionReason,
    left_s: float,
    step: int,
) -> Victim | PreemptTogether:
    """How these VMs of a host go: each as its owner said, several of them side by side.

    :param sold: as what, by the manager's record.
    :param left_s: of the arriving VM's deadline.
    :param step: that of the first command.
    """
    adopted = {vm.name for vm in report.vms if vm.adopted}
    victims: list[Victim] = []
    for number, name in enumerate(names):
        spec = sold.get(name)
        where: dict[str, Any] = {"host": report.id, "step": step + number, "vm": name, "reason": reason}
        where["notice_s"] = notice(spec, left_s)
        if is_deleted(spec, name in adopted):
            victims.append(Remove(**where))
        else:
            suspend = spec is not None and spec.on_preemption is OnPreemption.SUSPEND
            victims.append(Preempt(**where, suspend=suspend))
    if len(victims) == 1:
        return victims[0]
    return PreemptTogether(host=report.id, step=step, victims=tuple(victims))


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of one victim."""

    effects: tuple[Effect, ...] = ()
    said: str = ""
    #: Why it could not go; empty if it could.
    failure: str = ""
    reachable: bool = True
    #: Whether it stays, since its preemption was called off.
    stays: bool = False


def outcome(arriving: str, victim: Victim, event: Event) -> Outcome:
    """What became of a victim, by the answer to its command.

    :param arriving: the VM for which it was to go.
    :raises ProtocolViolation: this answers no preemption.
    """
    vm, host = victim.vm, victim.host
    sentence = f"preempted {vm} on {host} for {arriving} (reason {victim.reason})"
    match event:
        case OperationEnded(operation=operation) if operation.state is OperationState.FAILED:
            return Outcome(failure=f"{vm} could not be stopped: {operation.sentence}")
        case OperationEnded(operation=operation) if operation.state is OperationState.PARTIAL:
            sentence = f"{vm} stays on {host}: {operation.sentence}"
            return Outcome((Note("preemption-withdrawn", vm, host, sentence),), sentence, stays=True)
        case OperationEnded(operation=operation):
            sentence += f": {operation.sentence}"
            if isinstance(victim, Preempt):
                sentence += "; it keeps its disk and waits for room"
            return Outcome((*_gone(victim, sentence), Note("preempted", vm, host, sentence)), sentence)
        case HostFailed(sentence=why, uncertain=uncertain):
            effects = (_perhaps_gone(arriving, victim, why),) if uncertain else ()
            return Outcome(effects, failure=why, reachable=event.reached and not uncertain)
    raise ProtocolViolation("event", f"{type(event).__name__} does not answer {victim.do}")


def _gone(victim: Victim, sentence: str) -> tuple[Effect, ...]:
    if isinstance(victim, Preempt):
        return (SetPreempted(victim.vm, victim.host, victim.reason, sentence),)
    vm, host, reason = victim.vm, victim.host, PreemptionReason(victim.reason)
    # Another plan may be at work on it, and has its name then: when that has come to nothing, its way back ends it.
    return SetVM(vm, VMPhase.ENDED, host, sentence), SetPreempted(vm, host, reason, sentence)


def _perhaps_gone(arriving: str, victim: Victim, failure: str) -> SetPreempted:
    """One that may have gone waits for room, also where it was to be deleted: for an error nobody is. Whether it runs,
    or is there at all, its way back finds out.
    """
    vm, host, reason = victim.vm, victim.host, PreemptionReason(victim.reason)
    sentence = f"{vm} may have been preempted on {host} for {arriving} (reason {reason}): {failure}"
    return SetPreempted(vm, host, reason, sentence, unsure=True)


def notices_of(instruction: Instruction) -> dict[str, float]:
    """The VMs that an instruction preempts, and how long the programs of each have, in seconds."""
    found = {}
    for victim in preempted_by(instruction):
        kept = 0.0
        if isinstance(victim, Preempt):
            kept = SAVING_SHARE if victim.suspend else POWER_OFF_SHARE
        found[victim.vm] = victim.notice_s * (1 - kept)
    return found
