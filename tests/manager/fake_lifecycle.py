"""The lifecycle commands of a fake agent: stop, start, resize, adopt, release, on VMs in memory."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from aiohttp import web
from pydantic import BaseModel

from ebbtide.deflation.resources import ZERO, ResourceVector
from ebbtide.messages.adoptions import Adoptable
from ebbtide.messages.commands import (
    AdoptCommand,
    Command,
    ReleaseCommand,
    SpecCommand,
    StartCommand,
    StopCommand,
    WithdrawCommand,
)
from ebbtide.messages.common import EarlierProblem, Vector
from ebbtide.messages.migrations import ArrivalCommand, DepartureCommand
from ebbtide.messages.operations import OperationState
from ebbtide.messages.vms import VMSpec, VMState, VMStatus
from hostagent.operations.respec import respec


def runs(vm: VMStatus) -> bool:
    """Whether a VM has room that may be taken or given."""
    return vm.state is not VMState.STOPPED


class FakeLifecycle:
    """Part of `tests.manager.fake_agent.FakeAgent`."""

    id: str
    vms: dict[str, VMStatus]
    overhead_mib: float
    #: Why each VM was preempted, or deleted.
    reasons: dict[str, str]
    free: Callable[[], ResourceVector]
    add_change: Callable[..., None]
    _carry_out: Callable[..., Any]
    #: Whether a request was taken on and is remembered.
    knows: Callable[[str], bool]

    #: End a pending operation in part, with a sentence; whether there is one.
    end_partly: Callable[[str, str], bool]
    #: Where VMs move to while they run, by host id; none: this host takes part in no live migration.
    peers: dict[str, FakeLifecycle]
    #: Why the next move does not end well; it is called off.
    sticks: str = ""

    #: What a running domain can be given at the most.
    most = ResourceVector(cpu_cores=64.0, memory_mib=65_536.0)
    #: Domains that somebody else has made: name and size.
    domains: dict[str, ResourceVector]

    def add_lifecycle(self, app: web.Application) -> None:
        app.router.add_post("/v1/vms/{name}/stop", self._stop)
        app.router.add_post("/v1/vms/{name}/withdrawal", self._withdraw)
        app.router.add_post("/v1/vms/{name}/start", self._start)
        app.router.add_put("/v1/vms/{name}/spec", self._respec)
        app.router.add_post("/v1/vms/{name}/release", self._release)
        app.router.add_post("/v1/vms/{name}/arrival", self._arrive)
        app.router.add_post("/v1/vms/{name}/departure", self._depart)
        app.router.add_post("/v1/adoptions", self._adopt)
        app.router.add_get("/v1/adoptions", self._adoptable)
        app.router.add_get("/v1/templates", self._templates)

    @property
    def running(self) -> set[str]:
        """The VMs that are not off."""
        return {name for name, vm in self.vms.items() if runs(vm)}

    async def _templates(self, request: web.Request) -> web.Response:
        return web.json_response({"templates": [{"name": "lab", "description": "the lab's guest"}]})

    async def _stop(self, request: web.Request) -> web.StreamResponse:
        name = request.match_info["name"]
        command = StopCommand.model_validate_json(await request.read())

        def work() -> dict[str, Any]:
            vm = self.vms[name]
            if runs(vm):
                self.add_change(name, vm.current.cpu_cores, 0.0)
                change = {"state": VMState.STOPPED, "start_size": vm.current, "current": Vector(), "overhead_mib": 0.0}
                if command.suspend:
                    # As deflated as it goes, and with the memory that it comes up with.
                    size = vm.current.vector().with_component("memory_mib", vm.minimum.memory_mib)
                    change |= {"start_size": Vector.of(size), "saved_mib": 100.0}
                self.vms[name] = vm.model_copy(update=change)
            if command.reason != "stop":
                self.reasons[name] = command.reason
            return {"sentence": f"{name} is stopped"}

        return await self._carried(command, "stop", name, work)

    async def _withdraw(self, request: web.Request) -> web.StreamResponse:
        name = request.match_info["name"]
        command = WithdrawCommand.model_validate_json(await request.read())
        if not self.end_partly(command.preemption, f"{name} runs on: {command.reason}"):
            return json_answer(EarlierProblem(error="no such notice runs", field="preemption"), 409)
        return await self._carried(command, "withdraw", name, lambda: {"sentence": "called off"})

    async def _start(self, request: web.Request) -> web.StreamResponse:
        name = request.match_info["name"]
        command = StartCommand.model_validate_json(await request.read())
        vm = self.vms.get(name)
        problem = None
        if vm is not None and vm.start_size is not None and command.start_size is not None:
            if vm.saved_mib is not None:
                assert command.start_size.memory_mib == vm.start_size.memory_mib, "its memory is what was saved"
            self.vms[name] = vm = vm.model_copy(update={"start_size": command.start_size})
        if vm is not None and vm.start_size is not None:
            charge = vm.start_size.vector() + ResourceVector(memory_mib=self.overhead_mib)
            if not charge.fits_in(self.free()):
                problem = EarlierProblem(error=f"{charge} exceeds what is free ({self.free()})", field="name")

        def work() -> dict[str, Any]:
            vm = self.vms[name]
            if vm.start_size is not None:
                change = {"current": vm.start_size, "start_size": None, "overhead_mib": self.overhead_mib}
                change["saved_mib"] = None
                self.vms[name] = vm.model_copy(update={**change, "state": VMState.RUNNING})
                self.add_change(name, 0.0, vm.start_size.cpu_cores)
            return {"sentence": f"{name} runs"}

        return await self._carried(command, "start", name, work, problem)

    async def _respec(self, request: web.Request) -> web.StreamResponse:
        name = request.match_info["name"]
        command = SpecCommand.model_validate_json(await request.read())

        def work() -> dict[str, Any]:
            vm = self.vms[name]
            old = sold(vm)
            size = vm.start_size or vm.current
            way = respec(old, command.spec, size.vector(), self.most)
            now, target = way.now.allocation(ZERO), Vector.of(way.target)
            grown = way.target.less(size.vector())
            if vm.start_size is None and not grown.fits_in(self.free()):
                return {"state": OperationState.FAILED, "sentence": f"{grown} exceeds what is free"}
            fields: dict[str, Any] = {"current": target} if vm.start_size is None else {"start_size": target}
            fields |= {"nominal": way.now.nominal, "ceiling": way.now.ceiling, "priority": way.now.priority}
            fields |= {"minimum": Vector.of(now.minimum), "at_next_start": way.at_next_start}
            self.vms[name] = vm.model_copy(update={**fields, "generation": vm.generation + 1})
            if vm.start_size is None and size.cpu_cores != target.cpu_cores:
                self.add_change(name, size.cpu_cores, target.cpu_cores)
            return {"sentence": f"{name} is sold {way.now.nominal.vector()}"}

        return await self._carried(command, "resize", name, work)

    async def _arrive(self, request: web.Request) -> web.StreamResponse:
        name = request.match_info["name"]
        command = ArrivalCommand.model_validate_json(await request.read())
        charge = command.size.vector() + ResourceVector(memory_mib=self.overhead_mib)
        problem = None
        if name in self.vms:
            # As an agent that was started again knows by its intents.
            if (self.vms[name].state, self.vms[name].uuid) != (VMState.MIGRATING, command.uuid):
                problem = EarlierProblem(error=f"there is a VM {name} already", field="name")
        elif not charge.fits_in(self.free()):
            problem = EarlierProblem(error=f"{charge} exceeds what is free ({self.free()})", field="size")

        def work() -> dict[str, Any]:
            spec = command.vm
            self.vms[name] = VMStatus(
                name=name,
                host=self.id,
                domain=f"ebb-{self.id}.{name}",
                state=VMState.MIGRATING,
                priority=spec.priority,
                nominal=spec.nominal,
                minimum=Vector.of(spec.allocation(ZERO).minimum),
                ceiling=spec.ceiling,
                current=command.size,
                overhead_mib=self.overhead_mib,
                generation=command.generation,
                guest_connected=False,
                template=spec.template,
                boot_memory_mib=command.boot_memory_mib,
                uuid=command.uuid,
            )
            return {"sentence": f"{self.id} has room for {name}"}

        return await self._carry_out(command, "arrive", name, work, problem)  # type: ignore[no-any-return]

    async def _depart(self, request: web.Request) -> web.StreamResponse:
        name = request.match_info["name"]
        command = DepartureCommand.model_validate_json(await request.read())

        def work() -> dict[str, Any]:
            here, there = self.vms[name], self.peers[command.to].vms.get(name)
            if here.state is VMState.STOPPED:
                return {"state": OperationState.FAILED, "sentence": f"{name} is off here"}
            assert here.state is VMState.RUNNING, "it moves from where it runs"
            if self.sticks or there is None or there.state is not VMState.MIGRATING:
                why = self.sticks or f"{command.to} does not expect it"
                return {"state": OperationState.FAILED, "sentence": f"{name} stays on {self.id}: {why}"}
            if command.size is not None and not here.current.vector().fits_in(command.size.vector()):
                return {"state": OperationState.FAILED, "sentence": f"{name} cannot move now: it has grown"}
            off = {"state": VMState.STOPPED, "start_size": here.current, "current": Vector(), "overhead_mib": 0.0}
            self.vms[name] = here.model_copy(update=off)
            self.peers[command.to].vms[name] = there.model_copy(update={"state": VMState.RUNNING})
            return {"sentence": f"{name} runs on {command.to}"}

        return await self._carried(command, "depart", name, work)

    async def _adoptable(self, request: web.Request) -> web.StreamResponse:
        domain = request.query["domain"]
        size = self.domains.get(domain)
        if size is None:
            return json_answer(EarlierProblem(error=f"there is no domain {domain}", field="domain"), 404)
        return json_answer(Adoptable(domain=domain, size=Vector.of(size)), 200)

    async def _adopt(self, request: web.Request) -> web.StreamResponse:
        command = AdoptCommand.model_validate_json(await request.read())
        size = self.domains.get(command.domain)
        if size is None:
            return json_answer(EarlierProblem(error=f"there is no domain {command.domain}", field="domain"), 404)

        def work() -> dict[str, Any]:
            spec = VMSpec(
                name=command.name, priority=command.priority, nominal=Vector.of(size), minimum=command.minimum
            )
            self.vms[command.name] = VMStatus(
                name=command.name,
                host=self.id,
                domain=command.domain,
                state=VMState.RUNNING,
                priority=command.priority,
                nominal=spec.nominal,
                minimum=Vector.of(spec.allocation(ZERO).minimum),
                current=spec.nominal,
                overhead_mib=self.overhead_mib,
                generation=1,
                guest_connected=False,
                template="adopted",
                boot_memory_mib=size.memory_mib,
                adopted=True,
            )
            return {"sentence": f"{command.domain} is adopted"}

        return await self._carry_out(command, "adopt", command.name, work)  # type: ignore[no-any-return]

    async def _release(self, request: web.Request) -> web.StreamResponse:
        name = request.match_info["name"]
        command = ReleaseCommand.model_validate_json(await request.read())

        def work() -> dict[str, Any]:
            gone = self.vms.pop(name)
            self.add_change(name, gone.nominal.cpu_cores, 0.0, cause=command.request_id)
            return {"sentence": f"{name} is given back"}

        return await self._carried(command, "release", name, work)

    async def _carried(
        self,
        command: Command,
        kind: str,
        name: str,
        work: Callable[[], dict[str, Any]],
        problem: EarlierProblem | None = None,
    ) -> web.StreamResponse:
        if name not in self.vms and not self.knows(command.request_id):
            return json_answer(EarlierProblem(error=f"no VM {name}", field="name"), 404)
        return await self._carry_out(command, kind, name, work, problem)  # type: ignore[no-any-return]


def sold(vm: VMStatus) -> VMSpec:
    """The spec that a status was made of."""
    minimum = Vector() if vm.priority.value == "fixed" else vm.minimum
    return VMSpec(name=vm.name, priority=vm.priority, nominal=vm.nominal, minimum=minimum, ceiling=vm.ceiling)


def json_answer(body: BaseModel, status: int = 200) -> web.Response:
    return web.Response(text=body.model_dump_json(), status=status, content_type="application/json")
