"""A host agent whose network and whose process fail at random, and a watch over all agents at every change."""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections import Counter
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import dataclass, field
from typing import Any

import aiohttp
from aiohttp import web

from ebbtide.deflation.allocations import Priority, check_target
from ebbtide.deflation.errors import InvalidField
from ebbtide.deflation.resources import TOLERANCE, ZERO, ResourceVector
from ebbtide.messages.commands import Command, TargetCommand
from ebbtide.messages.common import EarlierProblem, Vector
from ebbtide.messages.operations import Operation, OperationState
from ebbtide.messages.vms import VMState
from tests.manager.fake_agent import FakeAgent
from tests.manager.fake_lifecycle import runs

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]

#: Commands that must not be carried out twice, not even after the agent forgot them.
ONCE = ("create", "reclaim")
#: Commands about a VM that is there.
OF_A_VM = ("stop", "start", "resize", "target")


@dataclass
class Weather:
    """How often things go wrong, as shares, and for how long, seconds."""

    #: A request that never arrives; an answer that never arrives.
    lost: float = 0.0
    unanswered: float = 0.0
    #: A request that arrives when its sender has given it up; one that arrives a second time, later.
    late: float = 0.0
    doubled: float = 0.0
    #: An answer that takes its time.
    slow: float = 0.0
    #: Reports that are lost, and that come again later, when they are no longer true.
    reports_lost: float = 0.0
    reports_stale: float = 0.0
    late_s: float = 1.2
    slow_s: float = 0.15
    #: How long an operation takes at the most.
    work_s: float = 0.06


CALM = Weather()
ROUGH = Weather(lost=0.06, unanswered=0.06, late=0.04, doubled=0.08, slow=0.1, reports_lost=0.1, reports_stale=0.1)


@dataclass
class Aim:
    """A moment at an agent: ``where`` is arrived, carried-out or polled; ``after`` so many others."""

    where: str
    after: int
    reached: asyncio.Event = field(default_factory=asyncio.Event)
    #: Until this is set, nobody gets an answer.
    passed: asyncio.Event = field(default_factory=asyncio.Event)

    async def here(self, where: str) -> None:
        if where != self.where or self.passed.is_set():
            return
        self.after -= 1
        if self.after < 0:
            self.reached.set()
            await self.passed.wait()


class Watch:
    """What must be true at every moment, over all agents. What was not stands in ``violations``."""

    def __init__(self) -> None:
        self.agents: list[ChaosAgent] = []
        self.violations: list[str] = []
        self.carried_out: Counter[str] = Counter()
        #: Reason of each preemption, by VM.
        self.preempted: dict[str, str] = {}

    def look(self, agent: ChaosAgent, what: str) -> None:
        charged = sum((vm.allocation().charge for vm in agent.vms.values()), ZERO)
        if not charged.fits_in(agent.capacity):
            self.violations.append(f"{agent.id} is overfull with {charged} after {what}")
        for name, vm in agent.vms.items():
            # A VM that moves is on two hosts for a while, and is off on one of them.
            running = [other.id for other in self.agents if name in other.vms and runs(other.vms[name])]
            if len(running) > 1:
                self.violations.append(f"{name} runs on {running} after {what}")
            if not runs(vm):
                continue
            allocation = vm.allocation()
            least = allocation.nominal if allocation.priority is Priority.FIXED else allocation.minimum
            if any(low > now + TOLERANCE for low, now in zip(least, allocation.current, strict=True)):
                self.violations.append(f"{name} is below its least size with {allocation.current} after {what}")

    def carry_out(self, kind: str, request_id: str) -> None:
        self.carried_out[request_id] += 1
        if kind in ONCE and self.carried_out[request_id] > 1:
            self.violations.append(f"{kind} {request_id} was carried out {self.carried_out[request_id]} times")


class ChaosAgent(FakeAgent):
    """A fake agent in bad weather. ``kill`` and ``revive``: its VMs outlive it, what it had in hand may not."""

    def __init__(self, host_id: str, watch: Watch, chance: random.Random, **capacity: float) -> None:
        super().__init__(host_id, **capacity)
        self.weather = CALM
        self.aim: Aim | None = None
        self._watch = watch
        self._chance = chance
        self._working: dict[str, tuple[str, str]] = {}
        self._tasks: set[asyncio.Task[Any]] = set()
        watch.agents.append(self)

    # --- life ------------------------------------------------------------------------------------------------------

    async def kill(self) -> None:
        """As by SIGKILL: connections break, operations under way are lost or will be gone on with."""
        await self.close()
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        # What stands in a VM's intent is remembered: the operation that its present size comes from.
        causes = {name: request_id for request_id, (o, _) in self._operations.items() for name in _vms_of(o)}
        remembered = {request_id for name, request_id in causes.items() if name in self.vms}
        forgets = self._chance.random() < 0.5
        for request_id, (operation, _) in list(self._operations.items()):
            if operation.state is not OperationState.RUNNING and forgets and request_id not in remembered:
                del self._operations[request_id]
        for request_id, (kind, name) in list(self._working.items()):
            if self._chance.random() < 0.5:
                continue
            # It had not got so far that anything of it would be found again.
            del self._working[request_id]
            self._operations.pop(request_id, None)
            self._pending.pop(request_id, None)
            if kind == "create":
                self.vms.pop(name, None)
            elif kind in ("start", "stop") and name in self.vms:
                self._as_it_was(name)
        self.incarnation += "+"

    async def revive(self) -> None:
        await self.start()
        for request_id in list(self._pending):
            self._spawn(self._finish(request_id))

    async def close(self) -> None:
        await super().close()
        if self.aim is not None:
            self.aim.passed.set()

    async def settle(self) -> None:
        """Until everything that was delayed has come or gone, and every operation has ended."""
        while self._tasks:
            await asyncio.gather(*self._tasks, return_exceptions=True)

    def _spawn(self, work: Coroutine[Any, Any, Any]) -> None:
        task = asyncio.create_task(work, name=f"chaos at {self.id}")
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    # --- the network -----------------------------------------------------------------------------------------------

    @web.middleware
    async def _guard(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        weather, chance = self.weather, self._chance
        await request.read()
        if chance.random() < weather.lost:
            return _hang_up(request)
        if chance.random() < weather.late:
            self._spawn(self._again(request, handler))
            return _hang_up(request)
        answer = await super()._guard(request, handler)
        if chance.random() < weather.doubled:
            self._spawn(self._again(request, handler))
        if chance.random() < weather.slow:
            await asyncio.sleep(chance.uniform(0, weather.slow_s))
        return _hang_up(request) if chance.random() < weather.unanswered else answer

    async def _again(self, request: web.Request, handler: Handler) -> None:
        """Nobody hears this answer."""
        await asyncio.sleep(self._chance.uniform(0, self.weather.late_s))
        with contextlib.suppress(web.HTTPException):
            await super()._guard(request, handler)

    async def _send(self, session: aiohttp.ClientSession) -> None:
        weather, chance = self.weather, self._chance
        if chance.random() < weather.reports_stale:
            self._spawn(self._report_later(self.report().model_dump(mode="json")))
        if chance.random() >= weather.reports_lost:
            await super()._send(session)

    async def _report_later(self, body: dict[str, Any]) -> None:
        await asyncio.sleep(self._chance.uniform(0, self.weather.late_s))
        headers, timeout = self.headers, aiohttp.ClientTimeout(total=1.0)
        url = f"{self.manager}/v1/hosts/{self.id}/report"
        with contextlib.suppress(aiohttp.ClientError, TimeoutError):
            async with aiohttp.request("POST", url, json=body, headers=headers, timeout=timeout) as response:
                await response.read()

    # --- operations ------------------------------------------------------------------------------------------------

    async def _carry_out(
        self,
        command: Command,
        kind: Any,
        name: str,
        work: Callable[[], dict[str, Any]],
        problem: EarlierProblem | None = None,
    ) -> web.StreamResponse:
        if self.aim is not None:
            await self.aim.here("arrived")
            if self.aim.where == "arrived" and self.aim.reached.is_set() and self._chance.random() < 0.5:
                raise web.HTTPServiceUnavailable  # lost with its sender
        if isinstance(command, TargetCommand) and (why := self._no_target(name, command)):
            problem = EarlierProblem(error=why, field="target")
        if kind == "start" and (why := self._no_start(name)):
            problem = EarlierProblem(error=why, field="name")
        answer = await super()._carry_out(command, kind, name, work, problem)
        if self.aim is not None:
            await self.aim.here("carried-out")
        return answer

    async def _get_operation(self, request: web.Request) -> web.Response:
        answer = await super()._get_operation(request)
        if self.aim is not None:
            await self.aim.here("polled")
        return answer

    def _operation(self, command: Command, kind: Any, name: str, work: Callable[[], dict[str, Any]]) -> Operation:
        """Charged when it is admitted, as a real agent does; carried out a moment later."""
        self.trouble.never_ends = True
        said: dict[str, Any] = {}
        reason = self.reasons.get(name, "delete") if kind == "delete" else getattr(command, "reason", "stop")
        if kind == "create":
            said = work()
            self.vms[name] = self.vms[name].model_copy(update={"state": VMState.STARTING})
            self._look(kind, command.request_id)
        if kind == "start":
            self._begin_start(name, command.request_id)
        if kind == "stop" and name in self.vms and runs(self.vms[name]):
            self.vms[name] = self.vms[name].model_copy(update={"state": VMState.STOPPING})

        def begun() -> dict[str, Any]:
            if name and kind in OF_A_VM and name not in self.vms:
                return {"state": OperationState.FAILED, "sentence": f"{name} has gone meanwhile"}
            if kind == "create":
                self.vms[name] = self.vms[name].model_copy(update={"state": VMState.RUNNING})
                return said
            if kind == "start":
                return self._end_start(name)
            if isinstance(command, TargetCommand) and (why := self._no_target(name, command)):
                return {"state": OperationState.FAILED, "sentence": why}
            if reason not in ("delete", "stop"):
                self._watch.preempted[name] = reason
            return work()

        operation = super()._operation(command, kind, name, begun)
        self._working[command.request_id] = (kind, name)
        self._spawn(self._finish(command.request_id))
        return operation

    def _begin_start(self, name: str, request_id: str) -> None:
        """Charged from this moment on."""
        vm = self.vms[name]
        if vm.start_size is not None:
            change = {"current": vm.start_size, "start_size": None, "overhead_mib": self.overhead_mib}
            self.vms[name] = vm.model_copy(update={**change, "state": VMState.STARTING})
            self._look("start", request_id)

    def _end_start(self, name: str) -> dict[str, Any]:
        vm = self.vms[name]
        if vm.state is not VMState.STARTING:
            return {"sentence": f"{name} runs already"}
        self.vms[name] = vm.model_copy(update={"state": VMState.RUNNING})
        self.add_change(name, 0.0, vm.current.cpu_cores)
        return {"sentence": f"{name} runs"}

    def _as_it_was(self, name: str) -> None:
        """A start or a stop that came to nothing."""
        vm = self.vms[name]
        if vm.state is VMState.STOPPING:
            self.vms[name] = vm.model_copy(update={"state": VMState.RUNNING})
        elif vm.state is VMState.STARTING:
            change = {"start_size": vm.current, "current": Vector(), "overhead_mib": 0.0, "state": VMState.STOPPED}
            self.vms[name] = vm.model_copy(update=change)

    def _no_start(self, name: str) -> str:
        """Why a VM cannot be started; empty if it can."""
        if name not in self.vms:
            return f"there is no VM {name}"
        size = self.vms[name].start_size
        charge = demand(size.vector(), self.overhead_mib) if size is not None else ZERO
        return "" if charge.fits_in(self.free()) else f"{charge} is more than what is free"

    def _no_target(self, name: str, command: TargetCommand) -> str:
        """Why a VM cannot be brought to a size; empty if it can."""
        if name not in self.vms or not runs(self.vms[name]):
            return f"no VM {name} runs here"
        size = command.target.size_of(self.vms[name].allocation())
        try:
            check_target(self.vms[name].allocation(), size)
        except InvalidField as error:
            return str(error)
        growth = size.less(self.vms[name].current.vector())
        return "" if growth.fits_in(self.free()) else f"{growth} is more than what is free"

    async def _finish(self, request_id: str) -> None:
        await asyncio.sleep(self._chance.uniform(0, self.weather.work_s))
        end = self._pending.pop(request_id, None)
        if end is None:
            return
        kind, name = self._working.pop(request_id)
        if kind == "delete" and name not in self.vms:
            self._operations.pop(request_id)
            return
        operation = end()
        self._operations[request_id] = (operation, self._operations[request_id][1])
        self._watch.carry_out(kind, request_id)
        self._look(kind, request_id)

    def _look(self, kind: str, request_id: str) -> None:
        self._watch.look(self, f"{kind} {request_id} on {self.id}")


def demand(size: ResourceVector, overhead_mib: float) -> ResourceVector:
    """What a VM of a size needs of its host."""
    return size + ResourceVector(memory_mib=overhead_mib)


def _vms_of(operation: Operation) -> list[str]:
    """The VMs that an operation touched."""
    return [outcome.name for outcome in operation.vms] or [operation.vm or ""]


def _hang_up(request: web.Request) -> web.StreamResponse:
    """The connection breaks."""
    if request.transport is not None:
        request.transport.close()
    return web.Response()
