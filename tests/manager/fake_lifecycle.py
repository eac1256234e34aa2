"""The lifecycle commands of a fake agent: stop, start, resize, adopt, release, on VMs in memory."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from aiohttp import web
from pydantic import BaseModel

from ebbtide.deflation.resources import ZERO, ResourceVector
from ebbtide.messages.commands import AdoptCommand, Command, ReleaseCommand, SpecCommand, StartCommand, StopCommand
from ebbtide.messages.common import Problem, Vector
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

    #: What a running domain can be given at the most.
    most = ResourceVector(cpu_cores=64.0, memory_mib=65_536.0)
    #: Domains that somebody else has made: name and size.
    domains: dict[str, ResourceVector]

    def add_lifecycle(self, app: web.Application) -> None:
        app.router.add_post("/v1/vms/{name}/stop", self._stop)
        app.router.add_post("/v1/vms/{name}/start", self._start)
        app.router.add_put("/v1/vms/{name}/spec", self._respec)
        app.router.add_post("/v1/vms/{name}/release", self._release)
        app.router.add_post("/v1/adoptions", self._adopt)
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
                self.vms[name] = vm.model_copy(update=change)
            if command.reason != "stop":
                self.reasons[name] = command.reason
            return {"sentence": f"{name} is stopped"}

        return await self._carried(command, "stop", name, work)

    async def _start(self, request: web.Request) -> web.StreamResponse:
        name = request.match_info["name"]
        command = StartCommand.model_validate_json(await request.read())
        vm = self.vms.get(name)
        problem = None
        if vm is not None and vm.start_size is not None and command.start_size is not None:
            self.vms[name] = vm = vm.model_copy(update={"start_size": command.start_size})
        if vm is not None and vm.start_size is not None:
            charge = vm.start_size.vector() + ResourceVector(memory_mib=self.overhead_mib)
            if not charge.fits_in(self.free()):
                problem = Problem(error=f"{charge} exceeds what is free ({self.free()})", field="name")

        def work() -> dict[str, Any]:
            vm = self.vms[name]
            if vm.start_size is not None:
                change = {"current": vm.start_size, "start_size": None, "overhead_mib": self.overhead_mib}
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

    async def _adopt(self, request: web.Request) -> web.StreamResponse:
        command = AdoptCommand.model_validate_json(await request.read())
        size = self.domains.get(command.domain)
        if size is None:
            return json_answer(Problem(error=f"there is no domain {command.domain}", field="domain"), 404)

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
        problem: Problem | None = None,
    ) -> web.StreamResponse:
        if name not in self.vms and not self.knows(command.request_id):
            return json_answer(Problem(error=f"no VM {name}", field="name"), 404)
        return await self._carry_out(command, kind, name, work, problem)  # type: ignore[no-any-return]


def sold(vm: VMStatus) -> VMSpec:
    """The spec that a status was made of."""
    minimum = Vector() if vm.priority.value == "fixed" else vm.minimum
    return VMSpec(name=vm.name, priority=vm.priority, nominal=vm.nominal, minimum=minimum, ceiling=vm.ceiling)


def json_answer(body: BaseModel, status: int = 200) -> web.Response:
    return web.Response(text=body.model_dump_json(), status=status, content_type="application/json")
