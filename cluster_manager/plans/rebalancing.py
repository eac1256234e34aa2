"""The rebalancer: the rows of its policy from the hosts' reports, and its moves one after the other.

After each move all VMs of both hosts are taken to grow into the room that there is, as they do.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Final

from cluster_manager.defaults import RebalancingRules
from cluster_manager.plans.claims import VMPhase
from cluster_manager.plans.live_migrations import cannot_leave, cannot_take
from cluster_manager.plans.report_queries import closed, has_template, shares_disk
from ebbtide.deflation.allocations import Allocation, Priority, undeclared
from ebbtide.deflation.errors import InvalidField
from ebbtide.deflation.floors import HARD_FLOOR
from ebbtide.deflation.modes import HostEvent, refusal
from ebbtide.deflation.placement.rebalancing import (
    HostRows,
    Move,
    Rebalancer,
    is_deflated,
    precedence,
    room_of,
)
from ebbtide.deflation.resources import ZERO, ResourceVector
from ebbtide.deflation.sharing.proportional import share_room
from ebbtide.deflation.sharing.undo import SMALLEST_GROWTH
from ebbtide.messages.common import Vector
from ebbtide.messages.dry_runs import LeftOut, ProposedMove, RebalancingReport
from ebbtide.messages.hosts import HostReport
from ebbtide.messages.vms import VMSpec, VMStatus

#: So many moves are looked for: each asks all hosts anew.
MOST_MOVES: Final = 20
MOST_LEFT_OUT: Final = 200
#: Of what a host does not declare there is as much as anybody asks for.
_ANY: Final = ResourceVector(disk_mib_s=1e12, network_mib_s=1e12)


@dataclass(frozen=True, slots=True)
class Recorded:
    """A VM by the manager's record."""

    phase: VMPhase
    spec: VMSpec
    #: Whether a plan is about it now.
    changing: bool = False


@dataclass(frozen=True, slots=True)
class Reported:
    """A host that answers, as it last reported."""

    report: HostReport
    #: Whether a plan is at work there.
    busy: bool
    #: What running plans have chosen there.
    reserved: ResourceVector
    #: Those that the manager's own record has there, by name.
    vms: Mapping[str, Recorded]
    #: Preempted VMs that wait for room there.
    waiting: int = 0


@dataclass(slots=True)
class _Host:
    """A host that takes part, and what becomes of it with each move."""

    report: HostReport
    free: ResourceVector
    vms: dict[str, Allocation] = field(default_factory=dict)
    #: Why a VM stays, by name.
    staying: dict[str, str] = field(default_factory=dict)
    _rows: HostRows | None = None

    @property
    def rows(self) -> HostRows:
        if self._rows is None:
            overhead_mib = self.report.vm_overhead_mib
            self._rows = HostRows.of(self.report.id, self.free, self.vms.values(), overhead_mib, self.staying.keys())
        return self._rows

    @property
    def lacking(self) -> dict[str, ResourceVector]:
        """What each VM lacks of its nominal size; those that lack nothing are left out."""
        lacks = {name: vm.nominal.less(vm.current) for name, vm in self.vms.items()}
        return {name: lack for name, lack in lacks.items() if not lack.is_zero()}

    def lets_go(self, name: str) -> Allocation:
        vm = self.vms.pop(name)
        self.free += vm.charge
        self._grow()
        return vm

    def takes(self, vm: Allocation) -> None:
        vm = replace(vm, overhead_mib=self.report.vm_overhead_mib)
        self.vms[vm.name] = vm
        self.free = self.free.less(vm.charge)
        self._grow()

    def _grow(self) -> None:
        for name, size in share_room(list(self.vms.values()), self.free).items():
            vm = self.vms[name]
            self.free = self.free.less(size.less(vm.current))
            self.vms[name] = replace(vm, current=size)
        self._rows = None


def rebalancing(reported: Sequence[Reported], unready: int, lasted_s: float) -> RebalancingReport:
    """What would be moved, and why not more.

    :param unready: so many hosts are known besides.
    :param lasted_s: for how long VMs are taken to have been deflated.
    """
    rebalancer = Rebalancer()
    hosts = [one.report.id for one in reported]
    rebalancer.observe(0.0, hosts)
    rebalancer.observe(lasted_s, hosts)
    return _proposed_by(rebalancer, lasted_s, reported, unready, None, copies=True)


def look(
    rebalancer: Rebalancer,
    now: float,
    reported: Sequence[Reported],
    unseen: Collection[str],
    rules: RebalancingRules,
    watched_s: float,
) -> tuple[Rebalancer, RebalancingReport]:
    """What is to be moved by what was seen until now, and what is known from now on.

    :param rebalancer: it stays as it is.
    :param unseen: hosts that are known besides, and do not answer.
    :param watched_s: for how long this was looked at.
    """
    known = Rebalancer(rules.pace, rebalancer.since, rebalancer.moved_at)
    known.observe(now, _deflated(_host(one, lambda _: "") for one in reported), unseen)
    trial = Rebalancer(rules.pace, dict(known.since), dict(known.moved_at))
    return known, _proposed_by(trial, now, reported, len(unseen), watched_s, copies=rules.copy_disks)


def apart(moves: Iterable[ProposedMove], busy: Collection[str], most: int) -> list[ProposedMove]:
    """Of moves that were found one after the other those that can be made together: one a host, and none that counts
    on a move which is not made.
    """
    taken = set(busy)
    chosen: list[ProposedMove] = []
    for move in moves:
        if len(chosen) < most and not {move.source, move.target} & taken:
            chosen.append(move)
        taken |= {move.source, move.target}
    return chosen


def _proposed_by(
    rebalancer: Rebalancer,
    now: float,
    reported: Sequence[Reported],
    unready: int,
    watched_s: float | None,
    *,
    copies: bool,
) -> RebalancingReport:
    """The moves on trial.

    :param rebalancer: moves are noted in it.
    :param watched_s: for how long deflations were looked at; None: they are only taken to have lasted.
    :param copies: whether a VM may move whose disk is on its host alone.
    """
    pace = rebalancer.pace
    left_out: list[LeftOut] = []
    open_hosts = []
    for one in reported:
        if why := _stands_by(one):
            left_out.append(LeftOut(host=one.report.id, sentence=why))
        else:
            open_hosts.append(one)
    without = _without_template([one.report for one in open_hosts])
    hosts = {one.report.id: _host(one, without, copies) for one in open_hosts}
    deflated = _deflated(hosts.values())
    lasted_s = max((now - rebalancer.since.get(host, now) for host in deflated), default=0.0)
    for host_id in deflated:
        host = hosts[host_id]
        lacking = host.lacking
        left_out += [
            LeftOut(host=host_id, vm=name, sentence=f"{name} stays on {host_id}: {why}")
            for name, why in sorted(host.staying.items())
            if name in lacking or name not in host.vms
        ]
    moves = _moves(rebalancer, now, hosts, deflated)
    memory_mib = sum(move.memory_mib for move in moves)
    core_hours = round(sum(move.core_hours for move in moves), 2)
    gib_hours = round(sum(move.gib_hours for move in moves), 2)
    if moves:
        what = (
            f"{len(moves)} {'move' if len(moves) == 1 else 'moves'}, {memory_mib:g} MiB copied, "
            f"{core_hours:g} core-hours and {gib_hours:g} GiB-hours given back"
        )
    elif not deflated:
        what = "no move, since nobody lacks what is worth a resize"
    elif lasted_s < pace.hold_s:
        what = f"no move, since a host counts when its VMs have been deflated for {pace.hold_s:g} s"
    else:
        what = f"no move that is worth its bytes ({pace.least_worth:g} core-hours per GiB copied)"
    lasted = (
        f"taken to have been so for {now:g} s"
        if watched_s is None
        else f"for {lasted_s:.0f} s at most, as seen in the {watched_s:.0f} s in which this manager has looked"
    )
    return RebalancingReport(
        lasted_s=now if watched_s is None else None,
        watched_s=watched_s,
        hosts=len(hosts),
        deflated_hosts=len(deflated),
        unready_hosts=unready,
        moves=tuple(moves),
        more=len(moves) == MOST_MOVES,
        memory_mib=memory_mib,
        core_hours=core_hours,
        gib_hours=gib_hours,
        left_out=tuple(left_out[:MOST_LEFT_OUT]),
        sentence=f"dry run, nothing is moved: {what}; of {len(reported) + unready} hosts {len(hosts)} take part, "
        f"{len(deflated)} of them with deflated VMs, {lasted}",
    )


def _moves(
    rebalancer: Rebalancer, now: float, hosts: Mapping[str, _Host], deflated: Iterable[str]
) -> list[ProposedMove]:
    """The moves, the best first, each as if those before it had been made.

    Of thousands of hosts each is looked at once, and again only where a move has changed what its best one was. A host
    that a VM has left is offered to those that are looked at from then on.
    """
    able = {host_id: room for host_id, host in hosts.items() if (room := room_of(host.rows)) is not None}
    best: dict[str, Move] = {}

    def look(host_id: str) -> None:
        best.pop(host_id, None)
        if (move := rebalancer.best(now, hosts[host_id].rows, list(able.items()))) is not None:
            best[host_id] = move

    for host_id in deflated:
        look(host_id)
    moves: list[ProposedMove] = []
    stale: set[str] = set()
    while best and len(moves) < MOST_MOVES:
        move = max(best.values(), key=precedence)
        if move.source in stale:
            stale.discard(move.source)
            look(move.source)
            continue
        source, target = hosts[move.source], hosts[move.target]
        lasted_s = now - rebalancer.since[move.source]
        moves.append(_proposed(move, source, target, lasted_s, rebalancer.expected_h(now, move.source)))
        rebalancer.moved(now, move)
        target.takes(source.lets_go(move.vm))
        for host_id in (changed := {move.source, move.target}):
            able.pop(host_id, None)
            if (room := room_of(hosts[host_id].rows)) is not None:
                able[host_id] = room
        stale |= {host_id for host_id, other in best.items() if host_id in changed or other.target in changed}
    return moves


def _stands_by(one: Reported) -> str:
    """Why a host takes no part; empty if it does."""
    report = one.report
    if one.busy:
        return f"a plan is at work on {report.id}"
    if one.waiting:
        return f"{one.waiting} preempted {'VM waits' if one.waiting == 1 else 'VMs wait'} for room on {report.id}"
    return (
        refusal(report.id, report.mode, report.mode_reason, HostEvent.CREATE) or closed(report) or cannot_take(report)
    )


def _without_template(hosts: Sequence[HostReport]) -> Callable[[VMSpec], str]:
    """Which host lacks what a VM is made of; empty: none. Asked of every VM, of which many have one template."""
    known: dict[str, str] = {}

    def without(spec: VMSpec) -> str:
        if spec.template not in known:
            known[spec.template] = next((host.id for host in hosts if not has_template(host, spec)), "")
        return known[spec.template]

    return without


def _host(one: Reported, without_template: Callable[[VMSpec], str], copies: bool = True) -> _Host:
    report = one.report
    free = report.free.vector().less(one.reserved).larger(undeclared(report.capacity.vector(), _ANY))
    host = _Host(report, free)
    for status in report.vms:
        recorded = one.vms.get(status.name)
        if recorded is None or status.priority is Priority.FIXED or status.start_size is not None:
            continue
        try:
            host.vms[status.name] = _row(status)
            why = _stays(report, status, recorded) or _elsewhere(recorded.spec, without_template)
            if not why and not copies and not shares_disk(report, status):
                why = f"its disk is on {report.id} alone, and none is copied (--rebalance-copy-disks)"
        except InvalidField as error:
            why = f"{report.id} says of it what cannot be ({error})"
        if why:
            host.staying[status.name] = why
    return host


def _row(vm: VMStatus) -> Allocation:
    """A VM's row up to its nominal size; one that a target holds lacks nothing, since it does not grow by itself."""
    row = vm.allocation()
    has = row.current.smaller(row.nominal)
    nominal = has.larger(row.minimum) if vm.held else row.nominal
    return replace(row, priority=Priority.DEFLATABLE, ceiling=None, current=has, nominal=nominal)


def _stays(report: HostReport, vm: VMStatus, recorded: Recorded) -> str:
    """Why a VM does not leave its host; empty if it can."""
    if recorded.changing or recorded.phase is not VMPhase.RUNNING:
        return "it is being changed" if recorded.changing else f"it is {recorded.phase}"
    if why := cannot_leave(report, vm):
        return why
    if vm.held:
        return "a target holds its size"
    if vm.current.memory_mib < HARD_FLOOR.memory_mib:
        return f"{report.id} says that it has less memory than any VM"
    return "" if vm.current.vector().fits_in(vm.nominal.vector()) else "it holds more than its nominal size"


def _elsewhere(spec: VMSpec, without_template: Callable[[VMSpec], str]) -> str:
    """Why a VM cannot run on every other host that takes part; empty if it can."""
    if spec.xml is not None:
        return "it was made from XML, which no other host has"
    without = without_template(spec)
    return f"{without} has no template {spec.template}" if without else ""


def _deflated(hosts: Iterable[_Host]) -> list[str]:
    return [host.report.id for host in hosts if is_deflated(host.rows, SMALLEST_GROWTH)]


def _proposed(move: Move, source: _Host, target: _Host, lasted_s: float, hours: float) -> ProposedMove:
    lacking = source.lacking
    room = target.free.less(sum(target.lacking.values(), ZERO))
    status = next(vm for vm in source.report.vms if vm.name == move.vm)
    lack = _rounded(*sum(lacking.values(), ZERO))
    spare = _rounded(room.cpu_cores, room.memory_mib)
    those = f"{len(lacking)} VM{'' if len(lacking) == 1 else 's'} of {move.source}"
    return ProposedMove(
        vm=move.vm,
        source=move.source,
        target=move.target,
        memory_mib=move.memory_mib,
        copies_disk=not shares_disk(source.report, status),
        lasted_s=round(lasted_s, 1),
        given_back=Vector.of(move.given_back),
        core_hours=round(move.given_back.cpu_cores * hours, 2),
        gib_hours=round(move.given_back.memory_mib / 1024 * hours, 2),
        worth=round(move.worth, 3),
        sentence=f"{those} lack {lack} together, and {move.target} has {spare} beyond what its own lack",
    )


def _rounded(*amounts: float) -> ResourceVector:
    return ResourceVector(*(round(amount, 2) for amount in amounts))
