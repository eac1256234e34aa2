"""Requests about VMs that exist: checked against store and reports, then begun as plans."""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable
from typing import Any, Final

from pydantic import BaseModel, ValidationError

from cluster_manager.defaults import GONE_S, RebalancingRules
from cluster_manager.errors import InvalidBody, RequestError, already_exists, busy, not_configured, wrong_state
from cluster_manager.execution.operations import Operations
from cluster_manager.execution.running_plans import check_free, plan_id
from cluster_manager.inventory.hosts import Hosts
from cluster_manager.inventory.versions import ANY_VERSION, Precondition
from cluster_manager.plans.lifecycle import (
    MADE_AS,
    ResizePlan,
    sold_as,
    start_adoption,
    start_release,
    start_resize,
    start_start,
    start_stop,
    was_asked_for,
)
from cluster_manager.plans.live_migrations import start_live_migration
from cluster_manager.plans.migrations import start_migration
from cluster_manager.plans.placements import PlacementPlan
from cluster_manager.plans.plans import OFF, Finish, MoveAway, Plan, VMPhase
from cluster_manager.plans.reading import UnreadPlan
from cluster_manager.plans.removals import cancelled_already, start_cancel, why_not_cancelled
from cluster_manager.store import queries
from cluster_manager.store.rows import StoredVM, stored_plan
from cluster_manager.store.settling import settled_phase
from cluster_manager.store.store import Store
from ebbtide.deflation.allocations import Priority
from ebbtide.deflation.errors import InvalidField
from ebbtide.deflation.placement.policy_names import PlacementPolicy
from ebbtide.messages.common import NAME_PATTERN, problem_of
from ebbtide.messages.dry_runs import ProposedMove
from ebbtide.messages.operations import Operation, OperationState
from ebbtide.messages.problem_codes import ProblemCode
from ebbtide.messages.requests import (
    AdoptRequest,
    CancelRequest,
    MigrateRequest,
    ReleaseRequest,
    ResizeRequest,
    StartRequest,
    StopRequest,
)
from ebbtide.messages.vms import ADOPTED_TEMPLATE, VMSpec, VMState

Preparing = Callable[[], Awaitable[Plan]]
#: Changes of a VM that are looked at for what may have come of them.
CHANGES: Final = 50
#: Fields of a migration and a resize that came later than their requests.
YOUNGER: Final = ("live", "copy_storage", "bandwidth_mib_s", "on_preemption", "preemption_notice_s", "steady")


class Lifecycle:
    """Stop, start, resize, migrate, adopt, release.

    :param policy: how a migration's host is chosen.
    :param gone_s: for how long a VM waits for a host that has not answered until a request's own deadline.
    """

    def __init__(
        self, operations: Operations, store: Store, hosts: Hosts, policy: PlacementPolicy, gone_s: float = GONE_S
    ) -> None:
        self._operations = operations
        self._store = store
        self._hosts = hosts
        self._policy = policy
        self._gone_s = gone_s

    async def stop(self, name: str, request: StopRequest, precondition: Precondition = ANY_VERSION) -> Operation:
        """Have a VM power off. Raises `RequestError`: 404 unknown, 409 stopped already, 503 silent host."""

        async def prepare() -> Plan:
            row = await self._free(name, precondition)
            host = self._ready(row)
            if self._phase(row) is VMPhase.STOPPED and row.phase is VMPhase.STOPPED:
                raise wrong_state(f"{name} is stopped already", "name")
            waits = row.phase is VMPhase.PREEMPTED
            return start_stop(plan_id("stop", name), request.request_id, name, host, request.limit_s, waits=waits)

        return await self._begin("stop", name, request, prepare)

    async def start(self, name: str, request: StartRequest, precondition: Precondition = ANY_VERSION) -> Operation:
        """Start a VM that is off.

        Raises `RequestError`: 404 unknown, 409 where it runs or would lose its disk, 503 silent host.
        """

        async def prepare() -> Plan:
            row = await self._free(name, precondition)
            host = self._ready(row)
            # One that runs although it is off by the record is put on it as running.
            if row.phase not in OFF and (phase := self._phase(row)) not in OFF:
                raise wrong_state(f"{name} is {phase}, not stopped", "name")
            sold = await self._sold(row)
            if request.anywhere:
                self._check_disk(row, host, request.lose_disk)
            waits = row.phase is VMPhase.PREEMPTED
            new_id, off = plan_id("start", name), row.phase in OFF
            return start_start(new_id, request, sold, host, gone_s=self._gone_s, waits=waits, off=off)

        return await self._begin("start", name, request, prepare)

    async def resize(self, name: str, request: ResizeRequest, precondition: Precondition = ANY_VERSION) -> Operation:
        """Sell a VM as something else. Raises `RequestError`: 400 sizes that contradict each other."""

        async def prepare() -> Plan:
            row = await self._free(name, precondition)
            host = self._ready(row)
            if row.phase not in (VMPhase.RUNNING, *OFF):
                raise wrong_state(f"{name} is {row.phase}", "name")
            try:
                spec = request.onto(await self._sold(row))
            except (ValidationError, InvalidField) as error:
                raise InvalidBody(problem_of(error)) from error
            return start_resize(plan_id("resize", name), request.request_id, host, spec, request.deadline_s)

        return await self._begin("resize", name, request, prepare)

    async def cancel(self, request_id: str, request: CancelRequest) -> Operation:
        """Call an operation off. Raises `RequestError`: 404 unknown, 409 where it has ended or has come too far."""

        async def prepare() -> Plan:
            plan = await self._store.plan(request_id)
            unread = plan is not None and isinstance(plan.state, UnreadPlan)
            if plan is None or plan.state.vm is None or (plan.state.internal and not unread):
                raise RequestError(404, f"there is no operation {request_id}", "id")
            if plan.state.finished:
                sentence = f"{request_id} has ended: {plan.state.progress[-1] if plan.state.progress else 'at once'}"
                end, vm = plan.state.instruction, plan.state.vm
                if unread and isinstance(end, Finish) and end.state is OperationState.FAILED:
                    # Perhaps by this very request, whose own record came to nothing after that.
                    return cancelled_already(plan_id("cancel", vm), request.request_id, vm, sentence)
                raise wrong_state(sentence, "id")
            if isinstance(plan.state, UnreadPlan):
                return await self._end_unread(plan.state, plan.state.vm, request.request_id)
            starts = plan.state.starts if isinstance(plan.state, PlacementPlan) else 0
            if why := why_not_cancelled(plan.state, starts):
                raise wrong_state(f"{request_id} cannot be called off: {why}", "id")
            return start_cancel(plan_id("cancel", plan.state.vm), request.request_id, plan.state.vm, request_id)

        return await self._operations.begin(request.request_id, f"cancel {request_id}", prepare)

    async def _end_unread(self, state: UnreadPlan, vm: str, request_id: str) -> Plan:
        """End a plan that nobody can go on with; its VM is where its record says, or else where the plan was."""
        row = next((row for row in await self._store.vms(vm) if row.request_id == state.request_id), None)
        host = (row.host if row is not None else None) or state.host
        waits = row is not None and row.preempted_at is not None
        phase = settled_phase(row.phase if row is not None else VMPhase.FAILED, host is not None, waits)
        step = state.ended(phase, host)
        await self._store.save_step(step.state, step.effects)
        await self._operations.waiting.read()
        return cancelled_already(plan_id("cancel", vm), request_id, vm, step.state.progress[-1])

    async def migrate(self, name: str, request: MigrateRequest, precondition: Precondition = ANY_VERSION) -> Operation:
        """Move a VM to another host: by stopping it and starting it there, or while it runs.

        Raises `RequestError`: 404 unknown, 409 where it would lose its disk, 503 silent host.
        """

        async def prepare() -> Plan:
            row = await self._free(name, precondition)
            host = self._ready(row)
            phase = self._phase(row)
            if phase not in (VMPhase.RUNNING, *OFF):
                raise wrong_state(f"{name} is {phase}", "name")
            if request.host is not None:
                self._check_target(name, host, request.host)
            if request.live:
                return await self._live(plan_id("live-migrate", name), row, host, request)
            sold = await self._sold(row)
            self._check_disk(row, host, request.lose_disk)
            return start_migration(
                plan_id("migrate", name),
                request,
                sold,
                host,
                running=phase is VMPhase.RUNNING,
                stopped=phase in OFF and row.phase in OFF,
                policy=self._policy,
                gone_s=self._gone_s,
                waits=row.phase is VMPhase.PREEMPTED,
            )

        return await self._begin("migrate", name, request, prepare)

    async def rebalance(self, move: ProposedMove, rules: RebalancingRules) -> Operation:
        """Move a running VM because it is worth its bytes. Raises `RequestError`: it is not as it was proposed."""
        new_id = plan_id("rebalance", move.vm)
        request = MigrateRequest(
            request_id=new_id,
            host=move.target,
            deadline_s=rules.deadline_s,
            live=True,
            copy_storage=rules.copy_disks,
            bandwidth_mib_s=rules.bandwidth_mib_s,
        )

        why = f"{move.sentence}, for {move.lasted_s:.0f} s"
        return await self._operations.begin(
            new_id, new_id, lambda: self._moved(request, move.vm, move.source, move.target, why, shrinks=False)
        )

    async def move_away(self, request_id: str, move: MoveAway, arriving: str, wait_s: float) -> Operation:
        """Move a running VM so that none is preempted for another one; the operation at its end, or after ``wait_s``.

        :raises RequestError: it cannot be moved now.
        """
        request = MigrateRequest(
            request_id=request_id,
            host=move.to,
            deadline_s=move.deadline_s,
            live=True,
            copy_storage=move.copy_storage,
        )

        why = f"so that nobody is preempted for {arriving}"
        begun = await self._operations.begin(
            request_id, request_id, lambda: self._moved(request, move.vm, move.source, move.to, why)
        )
        return await self._operations.operation(request_id, wait_s) or begun

    async def _moved(
        self, request: MigrateRequest, vm: str, source: str, target: str, why: str, shrinks: bool = True
    ) -> Plan:
        """The plan of a move that was proposed; it has the request's id. Raises `RequestError`."""
        row = await self._free(vm, ANY_VERSION)
        host = self._ready(row)
        if host != source:
            raise wrong_state(f"{vm} is on {host}, no longer on {source}", "name")
        self._check_target(vm, host, target)
        return await self._live(request.request_id, row, host, request, why, shrinks=shrinks)

    async def adopt(self, request: AdoptRequest) -> Operation:
        """Look after a domain that was made outside Ebbtide. Raises `RequestError`: 404, 409 name taken, 503."""
        name = request.name or request.domain
        if request.name is None and not _is_name(name):
            sentence = f"name: {name} can be no VM's name, so one has to be given (lower-case letters, digits, hyphens)"
            raise RequestError(400, sentence, "name")

        async def prepare() -> Plan:
            for row in await self._store.vms(name):
                if row.host is not None or row.phase is not VMPhase.FAILED:
                    raise already_exists(f"name: {name} exists already ({row.phase})", "name")
            if self._hosts.get(request.host) is None:
                raise RequestError(404, f"there is no host {request.host}", "host")
            if why := self._hosts.why_not_ready(request.host):
                raise RequestError(503, f"{request.host} {why}", "host", code=ProblemCode.HOST_UNAVAILABLE)
            if request.priority is Priority.HARVEST:
                raise RequestError(400, "priority: a domain is adopted as fixed or deflatable", "priority")
            return start_adoption(plan_id("adopt", name), name, request)

        return await self._begin("adopt", name, request, prepare)

    async def release(self, name: str, request: ReleaseRequest, precondition: Precondition = ANY_VERSION) -> Operation:
        """Give an adopted VM back. Raises `RequestError`: 404 unknown, 409 where it was made here, 503."""

        async def prepare() -> Plan:
            row = await self._free(name, precondition)
            host = self._ready(row)
            if _readable(row).template != ADOPTED_TEMPLATE:
                raise wrong_state(f"{name} was not adopted: it can be deleted, not released", "name")
            new_id = plan_id("release", name)
            return start_release(new_id, request.request_id, name, host, request.deadline_s)

        return await self._begin("release", name, request, prepare)

    # --- what they share ---------------------------------------------------------------------------------------------

    async def _begin(self, kind: str, name: str, request: BaseModel, prepare: Preparing) -> Operation:
        # What earlier versions did not know is no part of it, so that their requests can be repeated.
        younger = {field for field in YOUNGER if field not in request.model_fields_set}
        body = request.model_dump_json(exclude={"request_id", *younger})
        request_id: str = request.model_dump()["request_id"]
        return await self._operations.begin(request_id, f"{kind} {name} {body}", prepare)

    async def _live(
        self, new_id: str, row: StoredVM, host: str, request: MigrateRequest, why: str = "", shrinks: bool = True
    ) -> Plan:
        """The plan of a live migration. Raises `RequestError` where it cannot be."""
        name, phase = row.name, self._phase(row)
        if phase is not VMPhase.RUNNING:
            raise wrong_state(f"live: {name} is {phase}, so it can only be moved without", "live")
        sold = await self._sold(row)
        if row.spec.xml is not None:
            raise not_configured(f"live: {name} was made from XML, which its new host does not have", "live")
        self._check_disk(row, host, request.copy_storage, "copy_storage")
        return start_live_migration(
            new_id, request, sold, host, policy=self._policy, gone_s=self._gone_s, why=why, shrinks=shrinks
        )

    async def _free(self, name: str, precondition: Precondition) -> StoredVM:
        """The row of a VM that no plan is at work on and that has the version which is asked for."""
        row = await self._operations.existing(name)
        precondition(row)
        check_free(row, self._operations.changing(name))
        if row.owes_removal:
            raise busy(f"{name} is removed as soon as {row.host} answers: {row.sentence}", "name")
        return row

    def _ready(self, row: StoredVM) -> str:
        """The host of a VM, which has reported lately."""
        if row.host is None:
            raise wrong_state(f"{row.name} is {row.phase} and on no host", "name")
        if why := self._hosts.why_not_ready(row.host):
            raise RequestError(503, f"{row.host}, where {row.name} is, {why}", code=ProblemCode.HOST_UNAVAILABLE)
        return row.host

    def _phase(self, row: StoredVM) -> VMPhase:
        """The phase, by the store and the host's last report together."""
        reported = self._hosts.vm(row.host, row.name)
        if reported is None or row.phase not in (VMPhase.RUNNING, VMPhase.FAILED, *OFF):
            return row.phase
        off = row.phase if row.phase in OFF else VMPhase.STOPPED
        return off if reported.state is VMState.STOPPED else VMPhase.RUNNING

    async def _sold(self, row: StoredVM) -> VMSpec:
        """What the VM is sold as: the host's word counts where the answer to an earlier change was lost, and only as
        far as a change has asked for it.
        """
        reported = self._hosts.vm(row.host, row.name)
        sold = sold_as(_readable(row), reported)
        if reported is not None and (later := reported.at_next_start) is not None:
            ours = {field: getattr(row.spec, field) for field in ("name", *MADE_AS)}
            boot_mib = row.spec.boot_memory_mib
            ours["boot_memory_mib"] = min(boot_mib, later.nominal.memory_mib) if boot_mib is not None else None
            sold = later.model_copy(update=ours)
        if sold == row.spec:
            return sold
        wanted: dict[str, Any] = {"state": None, "host": None, "since": None}
        found = await self._store.rows(queries.plans(CHANGES, None, kind="resize", vm=row.name, **wanted))
        plans = (stored_plan(plan).state for plan in found)
        asked = [row.spec, *(plan.spec for plan in plans if isinstance(plan, ResizePlan))]
        return sold if was_asked_for(sold, asked) else row.spec

    def _check_target(self, name: str, home: str, host: str) -> None:
        if host == home:
            raise already_exists(f"host: {name} is on {host} already", "host")
        if self._hosts.get(host) is None:
            raise RequestError(404, f"there is no host {host}", "host")
        if why := self._hosts.why_not_ready(host):
            raise RequestError(503, f"{host} {why}", "host", code=ProblemCode.HOST_UNAVAILABLE)

    def _check_disk(self, row: StoredVM, host: str, allowed: bool, field: str = "lose_disk") -> None:
        """Whether a VM may go elsewhere: its disk is shared, or its owner says that it may be lost, or is copied."""
        known = self._hosts.get(host)
        reported = self._hosts.vm(host, row.name)
        if row.spec.template == ADOPTED_TEMPLATE or (reported is not None and reported.adopted):
            raise wrong_state(f"{row.name} is adopted: its domain stays where it is", "name")
        templates = known.report.templates if known is not None else None
        shared = row.spec.xml is None and any(t.shared_disk for t in templates or () if t.name == row.spec.template)
        suspended = reported is not None and reported.saved_mib is not None
        if not allowed and (suspended or not shared):
            what = "saved memory" if suspended and shared else "disk"
            stays = " and stays behind" if field == "lose_disk" else ""
            sentence = f"{field}: must be true, since the {what} of {row.name} is on {host} alone{stays}"
            raise RequestError(409, sentence, field)


def _readable(row: StoredVM) -> VMSpec:
    """:raises RequestError: 409, what a VM is sold as cannot be read."""
    if row.unread:
        sentence = f"what {row.name} is sold as cannot be read in the manager's store ({row.unread})"
        raise wrong_state(f"{sentence}: it can be stopped or deleted", "name")
    return row.spec


def _is_name(text: str) -> bool:
    return re.fullmatch(NAME_PATTERN, text) is not None
