"""A host agent without a hypervisor, over real HTTP: VMs in memory, the real policies, and trouble on request."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import time
import uuid
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import aiohttp
from aiohttp import web
from aiohttp.test_utils import TestServer

from ebbtide.deflation.allocations import Priority, deflatable_capacity, free_capacity, undeclared
from ebbtide.deflation.fencing import Fence
from ebbtide.deflation.modes import HostMode
from ebbtide.deflation.resources import ZERO, ResourceVector
from ebbtide.deflation.sharing.harvest import harvested, without_harvest
from ebbtide.deflation.sharing.overcommitment import overcommitment
from ebbtide.deflation.sharing.proportional import share_room, split_need
from ebbtide.messages.commands import (
    Budget,
    BudgetStatus,
    Command,
    CreateCommand,
    EpochCommand,
    ModeCommand,
    ReclaimCommand,
    ReinflateCommand,
    TargetCommand,
)
from ebbtide.messages.common import EarlierProblem, Vector
from ebbtide.messages.hosts import HostReport, HostTemplate, ReportReply
from ebbtide.messages.machines import CoreChange
from ebbtide.messages.operations import Operation, OperationState
from ebbtide.messages.vms import VMState, VMStatus
from ebbtide.rest.credentials import command_token, report_token
from tests.hostagent.fake_moves import ADDRESS
from tests.manager.fake_lifecycle import FakeLifecycle, json_answer, runs
from tests.manager.outcomes import outcome_of
from tests.manager.plan_events import row_of
from tests.waiting import AT_ONCE_S

HOSTS_KEY = "hosts-key"
REPORT_S = 0.05


@dataclass
class Trouble:
    """What goes wrong at the agent."""

    #: The share of what a VM is asked for that it gives, by name; the others give all.
    gives: dict[str, float] = field(default_factory=dict)
    #: Kinds of operations that fail, with the sentence.
    fails: dict[str, str] = field(default_factory=dict)
    #: The number of a command (from 1) whose answer never comes, and whether it is carried out all the same.
    hangs_at: int | None = None
    carries_out: bool = True
    #: Nothing is answered at all.
    mute: bool = False
    #: Operations are accepted and do not end, unless by ``end_pending``.
    never_ends: bool = False
    #: The same, of some kinds only.
    pend: tuple[str, ...] = ()
    #: It is not read before this is set.
    read_after: asyncio.Event | None = None
    #: The status that every command is refused with.
    refuses: int | None = None
    #: The same of every question what became of one.
    tells_nothing: int | None = None


class FakeAgent(FakeLifecycle):
    """One host. ``start`` first, ``close`` last; ``die`` and ``revive`` in between keep the VMs and the port."""

    def __init__(self, host_id: str, overhead_mib: float = 100.0, **capacity: float) -> None:
        self.id = host_id
        self.capacity = ResourceVector(**capacity)
        self.overhead_mib = overhead_mib
        self.vms: dict[str, VMStatus] = {}
        self.domains: dict[str, ResourceVector] = {}
        self.peers: dict[str, FakeLifecycle] = {}
        self.trouble = Trouble()
        self.mode = HostMode.ACTIVE
        self.templates: tuple[HostTemplate, ...] | None = None
        self.can_create = True
        self.mode_reason = ""
        #: Why its hypervisor does not answer.
        self.unavailable = ""
        #: (kind, name or "") of every command that was carried out, in order; and all that arrived.
        self.done: list[tuple[str, str]] = []
        self.arrived: list[str] = []
        #: How often the host was read.
        self.reads = 0
        self.bodies: list[dict[str, Any]] = []
        self.reasons: dict[str, str] = {}
        self.changes: list[CoreChange] = []
        self.fence = Fence()
        #: What harvest VMs may hold above their minimums; they take up what they may at once. All that were granted.
        self.budget = ZERO
        self.budgets: list[Budget] = []
        #: Set when the command ``trouble.hangs_at`` has arrived (and been carried out, if it is).
        self.hanging = asyncio.Event()
        #: One URL, or several with commas between them, of which one leads.
        self.manager: str | None = None
        self.reported = asyncio.Event()
        #: Set when an operation that has not ended is asked for.
        self.polled = asyncio.Event()
        self._operations: dict[str, tuple[Operation, str]] = {}
        self._pending: dict[str, Callable[[], Operation]] = {}
        self._server: TestServer | None = None
        self._port: int | None = None
        self._sequence = 0
        self.incarnation = "one"
        self._reports = itertools.count(1)
        self._reporting: asyncio.Task[None] | None = None
        self._sending = asyncio.Lock()
        self._ever = asyncio.Event()

    # --- life ------------------------------------------------------------------------------------------------------

    async def start(self) -> None:
        app = web.Application(middlewares=[self._guard])
        app.router.add_get("/v1/host", self._get_host)
        app.router.add_get("/v1/operations/{id}", self._get_operation)
        app.router.add_post("/v1/vms", self._create)
        app.router.add_delete("/v1/vms/{name}", self._delete)
        app.router.add_put("/v1/vms/{name}/target", self._target)
        app.router.add_post("/v1/reclaims", self._reclaim)
        app.router.add_post("/v1/reinflations", self._reinflate)
        app.router.add_put("/v1/budget", self._budget)
        app.router.add_put("/v1/mode", self._set_mode)
        app.router.add_put("/v1/epoch", self._put_epoch)
        self.add_lifecycle(app)
        self._server = TestServer(app, port=self._port)
        await self._server.start_server(shutdown_timeout=AT_ONCE_S)
        self._port = self._server.port
        self._reporting = asyncio.create_task(self._report_for_ever(), name=f"reports of {self.id}")

    async def die(self, forget: bool = True) -> None:
        """Stop answering and reporting; operations are forgotten as by an agent that was killed."""
        await self.close()
        if forget:
            self._operations.clear()

    async def revive(self) -> None:
        self.trouble = Trouble()
        await self.start()

    async def close(self) -> None:
        if self._reporting is not None:
            self._reporting.cancel()
            await asyncio.gather(self._reporting, return_exceptions=True)
            self._reporting = None
        if self._server is not None:
            await self._server.close()
            self._server = None

    def knows(self, request_id: str) -> bool:
        return request_id in self._operations

    def forget(self) -> None:
        self._operations.clear()

    @property
    def epoch(self) -> int:
        return self.fence.epoch

    # --- figures ---------------------------------------------------------------------------------------------------

    def free(self) -> ResourceVector:
        return free_capacity(self.capacity, [vm.allocation() for vm in self.vms.values()])

    def report(self) -> HostReport:
        charged = sum((vm.allocation().charge for vm in self.vms.values()), ZERO)
        return HostReport(
            id=self.id,
            url=f"http://127.0.0.1:{self._port or 9}",
            incarnation=self.incarnation,
            sequence=next(self._reports),
            capacity=Vector.of(self.capacity),
            free=Vector.of(self.free()),
            deflatable=Vector.of(deflatable_capacity(row_of(vm) for vm in self.vms.values())),
            vm_overhead_mib=self.overhead_mib,
            accelerator="qemu",
            mode=self.mode,
            mode_reason=self.mode_reason,
            unavailable=self.unavailable,
            overcommitted=Vector.of(overcommitment(self.capacity, charged)),
            vms=tuple(self.vms.values()),
            core_changes=tuple(self.changes),
            budget=Vector.of(self.budget),
            budget_number=self.budgets[-1].number if self.budgets else 0,
            templates=self.templates,
            can_create=self.can_create,
            migration=ADDRESS if self.peers else None,
            epoch=self.epoch,
        )

    def cores(self, name: str) -> float:
        return self.vms[name].current.cpu_cores

    def memory(self, name: str) -> float:
        return self.vms[name].current.memory_mib

    def add_change(
        self, machine: str, before: float, after: float, at: float | None = None, cause: str = "test"
    ) -> None:
        self._sequence += 1
        moment = time.time() if at is None else at
        self.changes.append(
            CoreChange(
                sequence=self._sequence,
                machine=machine,
                host=self.id,
                at=moment,
                cores_before=before,
                cores_after=after,
                cause=cause,
            )
        )

    @property
    def headers(self) -> dict[str, str]:
        """Of its calls of the manager."""
        return {"Authorization": f"Bearer {report_token(HOSTS_KEY, self.id)}"}

    async def send_report(self) -> None:
        """One report now."""
        assert self.manager is not None
        async with aiohttp.ClientSession(headers=self.headers) as session:
            await self._send(session)

    async def _report_for_ever(self) -> None:
        timeout = aiohttp.ClientTimeout(total=1.0)
        async with aiohttp.ClientSession(headers=self.headers, timeout=timeout) as session:
            while True:
                with contextlib.suppress(aiohttp.ClientError, TimeoutError):
                    if self.manager is not None and not self.trouble.mute:
                        await self._send(session)
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(REPORT_S):
                        await self._ever.wait()

    async def _send(self, session: aiohttp.ClientSession) -> None:
        for manager in (self.manager or "").split(","):
            url = f"{manager}/v1/hosts/{self.id}/report"
            # One at a time, like an agent's: an older report must not overtake a newer one.
            with contextlib.suppress(aiohttp.ClientError, TimeoutError):
                async with self._sending, session.post(url, json=self.report().model_dump(mode="json")) as response:
                    if response.status == 200:
                        return self._taken(ReportReply.model_validate(await response.json()))

    def _taken(self, reply: ReportReply) -> None:
        if reply.epoch < self.epoch:
            return
        self.fence = self.fence.after(reply.epoch)
        self.changes = [change for change in self.changes if change.sequence > reply.acknowledged]
        self.reported.set()

    # --- REST ------------------------------------------------------------------------------------------------------

    @web.middleware
    async def _guard(
        self, request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
    ) -> web.StreamResponse:
        if self.trouble.mute:
            await self._ever.wait()
        if request.headers.get("Authorization") != f"Bearer {command_token(HOSTS_KEY, self.id)}":
            return json_answer(EarlierProblem(error="wrong token", field=None), 401)
        return await handler(request)

    async def _get_host(self, request: web.Request) -> web.Response:
        self.reads += 1
        if self.trouble.read_after is not None:
            await self.trouble.read_after.wait()
        return json_answer(self.report())

    async def _get_operation(self, request: web.Request) -> web.Response:
        if self.trouble.tells_nothing is not None:
            self.polled.set()
            return json_answer(EarlierProblem(error="refused by the test", field=None), self.trouble.tells_nothing)
        found = self._operations.get(request.match_info["id"])
        if found is None:
            return json_answer(EarlierProblem(error="no such operation", field=None), 404)
        if found[0].state is OperationState.RUNNING:
            self.polled.set()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(float(request.query.get("wait_s", 0))):
                    await self._ever.wait()
        return json_answer(found[0])

    async def _create(self, request: web.Request) -> web.StreamResponse:
        command = CreateCommand.model_validate_json(await request.read())
        spec, initial = command.vm, command.start_size or command.vm.nominal
        self.budget = ZERO

        def work() -> dict[str, Any]:
            self.vms[spec.name] = VMStatus(
                name=spec.name,
                host=self.id,
                domain=f"ebb-{self.id}.{spec.name}",
                state=VMState.RUNNING,
                priority=spec.priority,
                nominal=spec.nominal,
                minimum=Vector.of(spec.allocation(ZERO).minimum),
                ceiling=spec.ceiling,
                current=initial,
                overhead_mib=self.overhead_mib,
                generation=1,
                guest_connected=True,
                boot_memory_mib=384,
                template=spec.template,
                uuid=str(uuid.uuid4()),
            )
            self.add_change(spec.name, 0.0, initial.cpu_cores)
            return {"sentence": f"{spec.name} runs"}

        charge = initial.vector() + ResourceVector(memory_mib=self.overhead_mib)
        problem = None
        if not charge.fits_in(self.free()):
            # Harvest VMs make room for others.
            rows = [vm.allocation() for vm in self.vms.values() if vm.priority is Priority.HARVEST]
            self._resize(dict(split_need(rows, charge.less(self.free())).targets))
        if spec.name in self.vms:
            problem = EarlierProblem(error=f"there is a VM {spec.name} already", field="vm.name")
        elif not charge.fits_in(self.free().larger(undeclared(self.capacity, charge))):
            problem = EarlierProblem(error=f"{charge} exceeds what is free ({self.free()})", field="vm.nominal")
        return await self._carry_out(command, "create", spec.name, work, problem)

    async def _delete(self, request: web.Request) -> web.StreamResponse:
        name = request.match_info["name"]
        query = {name: value for name, value in request.query.items() if name not in ("reason", "notice_s")}
        command = Command.model_validate_strings(query, strict=False)
        # What fails tells nothing of the VM, as a hypervisor that does not answer.
        known = name in self.vms or command.request_id in self._operations or "delete" in self.trouble.fails
        if not known:
            self.fence = self.fence.after(command.epoch, command.order)
            return json_answer(EarlierProblem(error=f"no VM {name}", field="name"), 404)
        self.reasons[name] = request.query["reason"]

        def work() -> dict[str, Any]:
            gone = self.vms.pop(name)
            self.add_change(name, gone.current.cpu_cores, 0.0)
            return {"sentence": f"{name} is gone"}

        return await self._carry_out(command, "delete", name, work)

    async def _target(self, request: web.Request) -> web.StreamResponse:
        command = TargetCommand.model_validate_json(await request.read())
        name = request.match_info["name"]

        def work() -> dict[str, Any]:
            return self._resize({name: command.target.size_of(row_of(self.vms[name]))}, command.generation, True)

        return await self._carry_out(command, "target", name, work)

    async def _reclaim(self, request: web.Request) -> web.StreamResponse:
        command = ReclaimCommand.model_validate_json(await request.read())
        self.budget = ZERO

        def work() -> dict[str, Any]:
            rows = [row_of(vm) for vm in self.vms.values() if vm.name not in command.exclude and runs(vm)]
            ended = self._resize(dict(split_need(rows, command.need.vector()).targets))
            freed = sum((o.before.vector().less(o.after.vector()) for o in ended["vms"]), ZERO)
            short = command.need.vector().less(freed)
            if short.is_zero():
                return ended
            return {**ended, "state": OperationState.PARTIAL, "shortfall": Vector.of(short)}

        return await self._carry_out(command, "reclaim", "", work)

    async def _reinflate(self, request: web.Request) -> web.StreamResponse:
        command = ReinflateCommand.model_validate_json(await request.read())

        def work() -> dict[str, Any]:
            rows = without_harvest([vm.allocation() for vm in self.vms.values() if runs(vm)])
            rows = [row for row in rows if row.name in command.vms] if command.vms else rows
            room = self.free() if command.room is None else self.free().smaller(command.room.vector())
            return self._resize(share_room(rows, room))

        return await self._carry_out(command, "reinflate", "", work)

    async def _put_epoch(self, request: web.Request) -> web.Response:
        command = EpochCommand.model_validate_json(await request.read())
        why, field = self.fence.refusal(command.epoch, 0)
        if why:
            return json_answer(EarlierProblem(error=why, field=field), 409)
        self.fence = self.fence.after(command.epoch)
        return json_answer(command)

    async def _set_mode(self, request: web.Request) -> web.StreamResponse:
        command = ModeCommand.model_validate_json(await request.read())

        def work() -> dict[str, Any]:
            self.mode, self.mode_reason = command.mode, command.reason
            return {"sentence": f"{self.id} is {command.mode}"}

        return await self._carry_out(command, "mode", "", work)

    async def _budget(self, request: web.Request) -> web.Response:
        budget = Budget.model_validate_json(await request.read())
        why, field = self.fence.refusal(budget.epoch, budget.order)
        if why:
            return json_answer(EarlierProblem(error=why, field=field), 409)
        self.fence = self.fence.after(budget.epoch, budget.order)
        if self.budgets and budget.number <= self.budgets[-1].number:
            return json_answer(EarlierProblem(error="an old number", field="number"), 409)
        self.budgets.append(budget)
        self.budget = budget.room.vector()
        rows = [vm.allocation() for vm in self.vms.values() if runs(vm)]
        # Without patience: that is the real agent's.
        mine = [row for row in rows if row.priority is Priority.HARVEST]
        self._resize(share_room(mine, self.free().smaller(self.budget.less(harvested(rows)))))
        held = harvested([vm.allocation() for vm in self.vms.values()])
        return json_answer(BudgetStatus(number=budget.number, room=budget.room, held=Vector.of(held)))

    # --- operations ------------------------------------------------------------------------------------------------

    async def _carry_out(
        self,
        command: Command,
        kind: Any,
        name: str,
        work: Callable[[], dict[str, Any]],
        problem: EarlierProblem | None = None,
    ) -> web.StreamResponse:
        self.arrived.append(kind)
        why, field = self.fence.refusal(command.epoch, command.order)
        if why:
            return json_answer(EarlierProblem(error=why, field=field), 409)
        self.fence = self.fence.after(command.epoch, command.order)
        if self.trouble.refuses is not None:
            return json_answer(EarlierProblem(error="refused by the test", field=None), self.trouble.refuses)
        hangs = self.trouble.hangs_at == len(self.arrived)
        body = command.model_dump_json(exclude={"epoch", "order"})
        known = self._operations.get(command.request_id)
        if known is not None:
            return (
                json_answer(known[0], 202)
                if known[1] == body
                else json_answer(EarlierProblem(error="another body", field=None), 409)
            )
        if not hangs or self.trouble.carries_out:
            if problem is not None:
                return json_answer(problem, 409)
            self.bodies.append({"kind": kind, **command.model_dump(mode="json")})
            self._operations[command.request_id] = (self._operation(command, kind, name, work), body)
        if hangs:
            self.hanging.set()
            await self._ever.wait()
        return json_answer(self._operations[command.request_id][0], 202)

    def _operation(self, command: Command, kind: Any, name: str, work: Callable[[], dict[str, Any]]) -> Operation:
        operation = Operation(
            request_id=command.request_id,
            kind=kind,
            state=OperationState.RUNNING,
            sentence="under way",
            vm=name or None,
            host=self.id,
            started_at=time.time(),
        )
        if self.trouble.never_ends or kind in self.trouble.pend:
            self._pending[command.request_id] = lambda: self._end(operation, work)
            return operation
        return self._end(operation, work)

    def end_pending(self) -> None:
        """End the operations that did not end."""
        self.trouble.never_ends, self.trouble.pend = False, ()
        for request_id, end in self._pending.items():
            self._operations[request_id] = (end(), self._operations[request_id][1])
        self._pending.clear()

    def end_partly(self, request_id: str, sentence: str) -> bool:
        """End one of them in part; whether it was there."""
        if self._pending.pop(request_id, None) is None:
            return False
        operation, body = self._operations[request_id]
        ended = operation.model_copy(update={"state": OperationState.PARTIAL, "sentence": sentence})
        self._operations[request_id] = (ended, body)
        return True

    def _end(self, operation: Operation, work: Callable[[], dict[str, Any]]) -> Operation:
        kind = operation.kind
        if kind in self.trouble.fails:
            changes: Mapping[str, Any] = {"state": OperationState.FAILED, "sentence": self.trouble.fails[kind]}
        else:
            changes = {"state": OperationState.DONE, **work()}
            self.done.append((kind, operation.vm or ""))
        return operation.model_copy(update=changes)

    def _resize(
        self, targets: dict[str, ResourceVector], generation: int | None = None, held: bool = False
    ) -> dict[str, Any]:
        outcomes = []
        for name, target in sorted(targets.items()):
            vm = self.vms[name]
            before, share = vm.current.vector(), self.trouble.gives.get(name, 1.0)
            taken = before.less(target) * share
            after = before.less(taken).larger(target.smaller(before)) + target.less(before)
            change = {"current": Vector.of(after), "generation": generation or vm.generation + 1, "held": held}
            self.vms[name] = vm.model_copy(update=change)
            outcomes.append(outcome_of(name, self.vms[name].generation, before, after, target))
            if before.cpu_cores != after.cpu_cores:
                self.add_change(name, before.cpu_cores, after.cpu_cores)
        return {"vms": tuple(outcomes), "sentence": f"resized {', '.join(sorted(targets)) or 'nothing'}"}
