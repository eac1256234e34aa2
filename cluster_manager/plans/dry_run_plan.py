"""Dry run of a plan: the state machine of the plan itself, run over hosts that exist only here.

The hosts are as they last reported, and do all that they are told: a dry run tells what willing layers give. Nothing
of a plan's own decisions is repeated here, so a dry run cannot decide otherwise than the plan itself.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping
from dataclasses import dataclass, field, replace
from typing import Final

import numpy as np

from cluster_manager.defaults import MoveFirst
from cluster_manager.plans.live_migrations import cannot_take
from cluster_manager.plans.placements import PlacementPlan
from cluster_manager.plans.plans import (
    AwaitGuests,
    AwaitPlan,
    ChooseHosts,
    Create,
    EndedTogether,
    Event,
    Finish,
    HostBack,
    HostFailed,
    HostRead,
    HostsChosen,
    MoveAway,
    Moved,
    OperationEnded,
    Plan,
    Preempt,
    PreemptTogether,
    ReadHost,
    Reclaim,
    Reinflate,
    Remove,
    RoomPlan,
)
from cluster_manager.plans.report_queries import (
    allocations_of,
    closed,
    missing_on,
    pressed_on,
    room_by_deflation,
    room_to_share,
    rows_of_split,
    why_still,
)
from ebbtide.deflation.allocations import Allocation, deflatable_capacity, lack, shareable
from ebbtide.deflation.errors import ProtocolViolation
from ebbtide.deflation.modes import HostEvent, refusal
from ebbtide.deflation.placement.rebalancing import Rooms
from ebbtide.deflation.placement.waiting import MOVE_MIB_S
from ebbtide.deflation.resources import ZERO, ResourceVector
from ebbtide.deflation.sharing.harvest import without_harvest
from ebbtide.deflation.sharing.proportional import share_room, split_need
from ebbtide.messages.common import Vector
from ebbtide.messages.dry_runs import DryRunReport, HostChoice, SizeChange
from ebbtide.messages.hosts import HostReport
from ebbtide.messages.operations import Operation, OperationState, VMOutcome
from ebbtide.messages.problem_codes import ReasonCode
from ebbtide.messages.vms import VMSpec, VMState, VMStatus

#: Steps of one plan: hosts are few, and each is reclaimed, preempted and undone a few times at the most.
_MOST_STEPS: Final = 2000
#: What a host's mode may refuse.
_REFUSABLE: Final[tuple[tuple[type, HostEvent], ...]] = (
    (Reclaim, HostEvent.RECLAIM),
    (Reinflate, HostEvent.REINFLATE),
    (Create, HostEvent.CREATE),
)

Choose = Callable[[Plan, ChooseHosts], HostsChosen]


@dataclass(frozen=True, slots=True)
class Known:
    """What a manager knows beside the hosts' reports.

    :param sold: by host, as what the VMs are sold that it has there.
    :param reserved: by host, what running placements have chosen there and is not charged yet, with their overheads.
    :param at: now, seconds since the epoch.
    """

    sold: Mapping[str, Mapping[str, VMSpec]]
    reserved: Mapping[str, ResourceVector]
    at: float


def dry_run_plan(
    state: Plan,
    reports: Mapping[str, HostReport],
    choose: Choose,
    choices: Callable[[HostsChosen], tuple[HostChoice, ...]] = lambda chosen: (),
    known: Known | None = None,
    move_first: MoveFirst = "never",
    move_mib_s: float = MOVE_MIB_S,
) -> Generator[None, None, DryRunReport]:
    """Run a plan to its end, in steps: a host of a thousand VMs takes time in each.

    :param state: a creation or deletion before its first instruction.
    :param reports: of the hosts that answer, by id.
    :param choose: ranks the hosts as placement does.
    :param choices: the ranked hosts as they are shown.
    :param known: what the manager knows besides; default: it has all VMs that are reported, and no more of them.
    :param move_first: which VMs move before any is preempted, and what that copies in a second.
    """
    world = _World(reports, dict(reports), known, move_first, move_mib_s)
    hosts: tuple[HostChoice, ...] = ()
    need = Vector()
    first = True
    for _ in range(_MOST_STEPS):
        instruction = state.instruction
        if isinstance(instruction, Finish):
            return _told(state, instruction, reports, world, hosts, need)
        event: Event
        if isinstance(instruction, ChooseHosts):
            chosen = choose(state, instruction)
            # Those for preemption are shown only where deflation alone has none to offer.
            hosts, first = (choices(chosen), False) if first or not hosts else (hosts, False)
            event = chosen
        else:
            if isinstance(instruction, Reclaim):
                need = instruction.need
            elif isinstance(instruction, ReadHost) and isinstance(state, RoomPlan) and state.reclaims == 0:
                need = Vector()
            event = world.obey(state)
        yield
        state = state.next_step(event).state
    raise ProtocolViolation("plan", f"did not end after {_MOST_STEPS} steps of its dry run")


def _told(
    state: Plan,
    end: Finish,
    before: Mapping[str, HostReport],
    world: _World,
    hosts: tuple[HostChoice, ...],
    need: Vector,
) -> DryRunReport:
    done = end.state is OperationState.DONE
    host = state.host if done else None
    changes = [
        SizeChange(name=vm.name, before=vm.current, after=now.current)
        for vm in (before[host].vms if host is not None and host in before else ())
        if (now := world.vm(host, vm.name)) is not None and now.current != vm.current
    ]
    shrunk = [change for change in changes if not change.before.vector().fits_in(change.after.vector())]
    placing = state if isinstance(state, PlacementPlan) else None
    victims = placing.victims if placing is not None else ()
    return DryRunReport(
        request_id=state.request_id,
        kind="create" if placing is not None else "delete",
        would="done" if done else "failed",
        sentence=f"dry run, nothing is changed: {end.sentence}",
        host=host,
        hosts=hosts,
        need=need if done else Vector(),
        deflated=tuple(shrunk),
        grown=tuple(change for change in changes if change not in shrunk),
        preempted=victims,
        reason=placing.reason.value if placing is not None and victims and placing.reason is not None else None,
        steps=state.progress,
    )


@dataclass(slots=True)
class _World:
    """Hosts that do at once what they are told.

    :param before: as they have reported.
    """

    before: Mapping[str, HostReport]
    reports: dict[str, HostReport]
    known: Known | None
    move_first: MoveFirst
    move_mib_s: float
    _number: int = field(default=0)

    def vm(self, host: str | None, name: str) -> VMStatus | None:
        report = self.reports.get(host or "")
        return next((vm for vm in report.vms if vm.name == name), None) if report is not None else None

    def obey(self, state: Plan) -> Event:
        """Carry out an instruction that acts on a host."""
        instruction = state.instruction
        assert not isinstance(instruction, ChooseHosts | AwaitPlan | Finish), "these act on no host"
        if isinstance(instruction, MoveAway):
            return self._move(instruction)
        report = self.reports.get(instruction.host)
        if report is None:
            return HostFailed(0.0, f"{instruction.host} does not answer", uncertain=True)
        if why := self._refusal(instruction, report):
            return HostFailed(0.0, why, uncertain=False, code=ReasonCode.FAILED)
        match instruction:
            case ReadHost():
                return self._read(state, report)
            case AwaitGuests():
                self._put(report, tuple(vm.model_copy(update={"not_yet": None}) for vm in report.vms))
                return HostBack(0.0)
            case Reclaim(need=need, exclude=exclude):
                split = split_need(rows_of_split(report, exclude), need.vector())
                outcomes = self._resize(report, split.targets)
                short = split.shortfall
                told = ", ".join(f"{o.name} to {o.after.vector()}" for o in outcomes) or "no VM has anything to give"
                state_after = OperationState.DONE if short.is_zero() else OperationState.PARTIAL
                return self._ended("reclaim", state_after, f"would shrink {told}", outcomes, short)
            case Reinflate(room=most):
                rows = self._rows_to_grow(report)
                room = shareable(report.free.vector(), report.capacity.vector(), lack(rows))
                if (most := room_to_share(report, (), most)) is not None:
                    room = room.smaller(most.vector())
                outcomes = self._resize(report, share_room(rows, room, pressed_on(report)))
                told = ", ".join(f"{o.name} to {o.after.vector()}" for o in outcomes) or "no VM lacks anything"
                return self._ended("reinflate", OperationState.DONE, f"would grow {told}", outcomes)
            case Remove(vm=vm) | Preempt(vm=vm):
                self._put(report, tuple(row for row in report.vms if row.name != vm))
                return self._ended("delete", OperationState.DONE, f"would stop {vm}")
            case PreemptTogether(victims=victims):
                gone = [victim.vm for victim in victims]
                self._put(report, tuple(row for row in report.vms if row.name not in gone))
                ended = (self._ended("delete", OperationState.DONE, f"would stop {vm}") for vm in gone)
                return EndedTogether(0.0, tuple(ended))
            case Create(start_size=start_size):
                self._put(report, (*report.vms, _started(state, report, start_size)))
                return self._ended("create", OperationState.DONE, f"would start {state.vm}")
        raise ProtocolViolation("plan", f"{instruction.do} has no dry run")

    def _rows_to_grow(self, report: HostReport) -> list[Allocation]:
        """The rows by which its agent shares room: of VMs that can grow now, up to the size that a target holds."""
        held = {vm.name: vm.current.vector() for vm in self.before[report.id].vms if vm.held}
        still = {vm.name for vm in report.vms if why_still(vm)}
        rows = [row for row in without_harvest(allocations_of(report)) if row.name not in still]
        most = {row.name: row.current.larger(row.minimum).larger(held.get(row.name, row.nominal)) for row in rows}
        return [replace(row, nominal=most[row.name]) for row in rows]

    def _read(self, state: Plan, report: HostReport) -> HostRead:
        found = HostRead(
            0.0,
            report,
            frozenset(vm.name for vm in report.vms),
            rooms=self._rooms(state, report),
            copies=self.move_first == "copied",
            move_mib_s=self.move_mib_s,
        )
        if self.known is None:
            return found
        sold = self.known.sold.get(report.id, {})
        return replace(found, recorded=frozenset(sold), sold=sold, at=self.known.at)

    def _rooms(self, state: Plan, host: HostReport) -> Rooms | None:
        """What the other hosts have for one more VM, for a placement that may preempt."""
        if self.move_first == "never" or not isinstance(state, PlacementPlan) or state.purpose != "preempt":
            return None
        others = [one for one in self.reports.values() if one.id != host.id and _takes_running(one)]
        reserved = self.known.reserved if self.known is not None else {}
        room = np.array([tuple(room_by_deflation(one).less(reserved.get(one.id, ZERO))) for one in others])
        return Rooms([one.id for one in others], room) if others else None

    def _move(self, move: MoveAway) -> Moved:
        """Have a VM go, at its size, to a host whose VMs make room for it."""
        source, target = self.reports[move.source], self.reports[move.to]
        vm = next(row for row in source.vms if row.name == move.vm)
        self._put(source, tuple(row for row in source.vms if row.name != move.vm))
        need = missing_on(target, vm.current.vector() + ResourceVector(memory_mib=target.vm_overhead_mib))
        self._resize(target, split_need(rows_of_split(target), need).targets)
        target = self.reports[move.to]
        self._put(target, (*target.vms, vm.model_copy(update={"host": target.id})))
        return Moved(0.0, True, f"would move {move.vm} from {move.source} to {move.to}")

    def _refusal(self, instruction: object, report: HostReport) -> str:
        event = next((event for kind, event in _REFUSABLE if isinstance(instruction, kind)), None)
        return refusal(report.id, report.mode, report.mode_reason, event) if event is not None else ""

    def _resize(self, report: HostReport, targets: Mapping[str, ResourceVector]) -> tuple[VMOutcome, ...]:
        vms, outcomes = [], []
        for vm in report.vms:
            target = targets.get(vm.name)
            if target is not None:
                size = Vector.of(target)
                outcomes.append(_outcome(vm, size))
                vm = vm.model_copy(update={"current": size})
            vms.append(vm)
        self._put(report, tuple(vms))
        return tuple(outcomes)

    def _put(self, report: HostReport, vms: tuple[VMStatus, ...]) -> None:
        """The host with these VMs: what they hold less is free, what they hold more is not."""
        held = sum((vm.allocation().charge for vm in report.vms), ZERO)
        holds = sum((vm.allocation().charge for vm in vms), ZERO)
        free = (report.free.vector() + held.less(holds)).less(holds.less(held)).smaller(report.capacity.vector())
        after = report.model_copy(update={"vms": vms, "free": Vector.of(free)})
        deflatable = Vector.of(deflatable_capacity(rows_of_split(after)))
        self.reports[report.id] = after.model_copy(update={"deflatable": deflatable})

    def _ended(
        self,
        kind: str,
        state: OperationState,
        sentence: str,
        vms: tuple[VMOutcome, ...] = (),
        shortfall: ResourceVector = ZERO,
    ) -> OperationEnded:
        self._number += 1
        operation = Operation.model_validate(
            {
                "request_id": f"dry-run-{self._number}",
                "kind": kind,
                "state": state,
                "sentence": sentence,
                "vms": vms,
                "shortfall": Vector.of(shortfall),
                "started_at": 0.0,
            }
        )
        return OperationEnded(0.0, operation)


def _takes_running(report: HostReport) -> bool:
    """Whether a host takes VMs, also those that run."""
    refused = refusal(report.id, report.mode, report.mode_reason, HostEvent.CREATE)
    return not (refused or closed(report) or cannot_take(report))


def _outcome(vm: VMStatus, size: Vector) -> VMOutcome:
    return VMOutcome(
        name=vm.name,
        generation=vm.generation,
        before=vm.current,
        after=size,
        target=size,
        shortfall=Vector(),
        ledger=(),
        seconds=0.0,
        sentence=f"would go from {vm.current.vector()} to {size.vector()}",
    )


def _started(state: Plan, report: HostReport, start_size: Vector | None) -> VMStatus:
    assert isinstance(state, PlacementPlan), "only placements start VMs in a dry run"
    spec = state.spec
    return VMStatus(
        name=spec.name,
        host=report.id,
        domain="",
        state=VMState.RUNNING,
        priority=spec.priority,
        nominal=spec.nominal,
        minimum=Vector.of(spec.allocation(ZERO).minimum),
        ceiling=spec.ceiling,
        current=start_size or spec.nominal,
        overhead_mib=report.vm_overhead_mib,
        generation=1,
        guest_connected=False,
        template=spec.template,
        boot_memory_mib=spec.boot_memory_mib or 0.0,
    )
