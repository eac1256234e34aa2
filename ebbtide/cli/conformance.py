"""Conformance test of a host agent, by whomever it was written: what docs/reference/agent-contract.md asks of it.

It makes one small VM, which it shrinks, grows, stops, starts and deletes. Each check says what a manager relies on.
"""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any, Final, TypeVar

import aiohttp
from pydantic import BaseModel, ValidationError

from ebbtide.deflation.errors import InvalidField
from ebbtide.deflation.resources import COMPONENTS, TOLERANCE, ResourceVector
from ebbtide.messages.common import Problem, Vector, problem_in
from ebbtide.messages.hosts import HostReport
from ebbtide.messages.operations import Operation, OperationState
from ebbtide.messages.vms import VMState, VMStatus
from ebbtide.rest.descriptions import JSON, PROBLEM_JSON

B = TypeVar("B", bound=BaseModel)

#: What an operation on one small VM may take, seconds, and one long poll.
ENDS_S: Final = 120.0
POLL_S: Final = 20.0
VM: Final = "ebb-conformance"
NOMINAL: Final = Vector(cpu_cores=1.0, memory_mib=512.0)
MINIMUM: Final = Vector(cpu_cores=0.5, memory_mib=384.0)
SMALLER: Final = Vector(cpu_cores=0.75, memory_mib=448.0)


class Violation(Exception):
    """What the agent does that no manager can work with, in a sentence."""


@dataclass(frozen=True, slots=True)
class Check:
    """The outcome of one check. ``why``: of a failure."""

    name: str
    ok: bool
    why: str = ""


class Conformance:
    """The checks, over one session with an agent, in their order; what a failed one leaves is deleted at the end.

    :param epoch: of the manager that is played.
    :param template: of the VM that is made.
    """

    def __init__(self, session: aiohttp.ClientSession, url: str, token: str, epoch: int, template: str) -> None:
        self._session = session
        self._url = url.rstrip("/")
        self._token = token
        self._epoch = epoch
        self._template = template
        self._run = f"conformance-{time.time_ns():x}"
        self._numbers = 0
        self._created = False
        self._spec = {
            "name": VM,
            "nominal": NOMINAL.model_dump(),
            "minimum": MINIMUM.model_dump(),
            "template": template,
        }

    async def run(self, progress: Callable[[str], None] = lambda name: None) -> list[Check]:
        """All checks; after a failed one that others build on, those are left out.

        :param progress: called with the name of each, before it.
        """
        found: list[Check] = []
        try:
            for name, check, needed in CHECKS:
                progress(name)
                try:
                    await check(self)
                    found.append(Check(name, True))
                except (Violation, InvalidField) as error:  # InvalidField: sizes of a VM that cannot be
                    found.append(Check(name, False, str(error)))
                    if needed:
                        break
        finally:
            if self._created:  # also by a check that was interrupted; never a VM that was there before
                # It is not there any more, or the check of the deletion has said why not.
                with contextlib.suppress(Violation):
                    await self._begin("DELETE", f"/v1/vms/{VM}", query={"reason": "delete"})
        return found

    # --- checks ------------------------------------------------------------------------------------------------------

    async def health(self) -> None:
        """Whoever asks learns that it runs; it needs no token."""
        status, body = await self._ask("GET", "/healthz", token="")
        _holds(
            status == 200 and isinstance(body, dict) and body.get("status") == "ok", f"GET /healthz: {status} {body}"
        )

    async def token(self) -> None:
        """Nothing else is answered without the right token."""
        for token in ("", "wrong"):
            status, _ = await self._ask("GET", "/v1/host", token=token)
            _holds(status == 401, f"GET /v1/host with {'a wrong' if token else 'no'} token: {status} instead of 401")

    async def report(self) -> None:
        """GET /v1/host is a HostReport whose figures agree."""
        report = await self._report()
        charges = sum((vm.allocation().charge for vm in report.vms if vm.start_size is None), ResourceVector())
        left = report.capacity.vector().less(charges)
        _holds(
            report.free.vector().fits_in(left),
            f"free ({report.free.vector()}) is more than capacity less what the VMs are charged ({left})",
        )
        _holds(VM not in {vm.name for vm in report.vms}, f"there is a VM named {VM}: delete it first")
        need = NOMINAL.vector() + ResourceVector(memory_mib=report.vm_overhead_mib)
        _holds(need.fits_in(report.free.vector()), f"the host has too little free for this test, which needs {need}")

    async def epoch(self) -> None:
        """PUT /v1/epoch lets earlier managers' commands in no more."""
        status, body = await self._ask("PUT", "/v1/epoch", {"epoch": self._epoch})
        _holds(status == 200, f"PUT /v1/epoch: {status} {_said(body)}")
        await self._refused(409, "epoch", "POST", "/v1/reinflations", {"epoch": self._epoch - 1})

    async def problems(self) -> None:
        """A refusal names the field and changes nothing; what is not there is 404."""
        bad = {**self._spec, "nominal": {"cpu_cores": "1", "memory_mib": 512.0}}
        await self._refused(400, "vm.nominal.cpu_cores", "POST", "/v1/vms", {"vm": bad})
        for method, path in (("GET", "/v1/vms/ebb-nobody"), ("GET", "/v1/operations/ebb-nothing")):
            status, body = await self._ask(method, path)
            _holds(
                status == 404 and _said(body) is not None, f"{method} {path}: {status} {body} instead of a 404 problem"
            )

    async def create(self) -> None:
        """A VM runs at its nominal size, and its host has that much less free."""
        before = await self._report()
        self._created = True
        await self._begin("POST", "/v1/vms", {"vm": self._spec})
        vm, after = await self._vm(), await self._report()
        _holds(vm.state is VMState.RUNNING, f"the VM is {vm.state} after its creation was done")
        self._has(vm, NOMINAL)
        _holds(
            MINIMUM.vector().fits_in(vm.minimum.vector()),
            f"the effective minimum ({vm.minimum.vector()}) is below the one asked for",
        )
        fell = before.free.cpu_cores - after.free.cpu_cores
        _holds(fell >= NOMINAL.cpu_cores - TOLERANCE, f"free fell by {fell:g} cores for a VM of {NOMINAL.cpu_cores:g}")

    async def repetition(self) -> None:
        """The same request again is the same operation; the same id with another body is refused."""
        body = {"target": SMALLER.model_dump(), "generation": (await self._vm()).generation + 1}
        first = await self._begin("PUT", f"/v1/vms/{VM}/target", body)
        sent = {**body, "request_id": first.request_id, "epoch": self._epoch}
        status, answer = await self._ask("PUT", f"/v1/vms/{VM}/target", sent)
        _holds(status == 202, f"a repeated request: {status} {_said(answer)} instead of 202")
        again = _parsed(Operation, answer, "a repeated request")
        _holds(again.request_id == first.request_id and again.state is first.state, "a repeated request began anew")
        other = {**sent, "target": NOMINAL.model_dump()}
        status, answer = await self._ask("PUT", f"/v1/vms/{VM}/target", other)
        _holds(status == 409, f"the same request id with another body: {status} {_said(answer)} instead of 409")

    async def target(self) -> None:
        """A target is reached, measured, counted and held; one that comes late is refused."""
        vm = await self._vm()
        self._has(vm, SMALLER)
        _holds(vm.held, "the VM is not `held` after a target below its nominal size: the manager would grow it again")
        old = {"target": NOMINAL.model_dump(), "generation": max(vm.generation - 1, 1)}
        await self._refused(409, "generation", "PUT", f"/v1/vms/{VM}/target", old)
        low = {"target": {"cpu_cores": 0.05, "memory_mib": 448.0}, "generation": vm.generation + 1}
        await self._refused(400, "target.cpu_cores", "PUT", f"/v1/vms/{VM}/target", low)
        self._has(await self._vm(), SMALLER)

    async def part(self) -> None:
        """What a target leaves out keeps its size."""
        body = {"target": {"cpu_cores": 1.0}, "generation": (await self._vm()).generation + 1}
        await self._begin("PUT", f"/v1/vms/{VM}/target", body)
        self._has(await self._vm(), Vector(cpu_cores=1.0, memory_mib=SMALLER.memory_mib))

    async def reinflate(self) -> None:
        """VMs that are named grow up to their nominal sizes, and are held no longer."""
        await self._begin("POST", "/v1/reinflations", {"vms": [VM]})
        vm = await self._vm()
        self._has(vm, NOMINAL)
        _holds(not vm.held, "the VM is still `held` after a reinflation that names it")

    async def reclaim(self) -> None:
        """A need is freed from what VMs have above their minimums; what is missing is a shortfall, and no failure."""
        others = [vm.name for vm in (await self._report()).vms if vm.name != VM]
        before = await self._vm()
        need = {"cpu_cores": 0.25}
        done = await self._begin("POST", "/v1/reclaims", {"need": need, "exclude": others})
        vm = await self._vm()
        _holds(vm.current.cpu_cores <= before.current.cpu_cores - 0.25 + TOLERANCE, "nothing was freed by a reclaim")
        named = {outcome.name: outcome for outcome in done.vms}
        _holds(VM in named, "the operation says nothing of the VM that it has shrunk (`vms`)")
        self._has(vm, named[VM].after)
        short = await self._begin(
            "POST", "/v1/reclaims", {"need": {"cpu_cores": 4096.0}, "exclude": others}, partial=True
        )
        _holds(short.state is OperationState.PARTIAL, f"a reclaim that falls short is {short.state}, not partial")
        _holds(short.shortfall.cpu_cores > 0, "a reclaim that falls short has no `shortfall`")
        vm = await self._vm()
        _holds(vm.minimum.vector().fits_in(vm.current.vector()), "a VM was shrunk below its minimum")

    async def off(self) -> None:
        """A VM that is off holds no room and keeps its name; it comes up again at the size that it had."""
        body = {"target": SMALLER.model_dump(), "generation": (await self._vm()).generation + 1}
        await self._begin("PUT", f"/v1/vms/{VM}/target", body)
        size = (await self._vm()).current
        await self._begin("POST", f"/v1/vms/{VM}/stop", {"limit_s": 30.0})
        vm = await self._vm()
        _holds(vm.state is VMState.STOPPED, f"the VM is {vm.state} after it was stopped")
        _holds(vm.current == Vector(), f"the VM is charged {vm.current.vector()} while it is off")
        _holds(vm.start_size is not None, "the VM has no `start_size` while it is off")
        with contextlib.suppress(Violation):  # to refuse it is as good
            await self._begin("POST", f"/v1/vms/{VM}/stop", {"limit_s": 30.0})
        again = (await self._vm()).start_size
        _holds(again == vm.start_size, f"`start_size` became {again} by a stop of the VM that was off already")
        await self._begin("POST", f"/v1/vms/{VM}/start", {})
        vm = await self._vm()
        self._has(vm, size)
        _holds(not vm.held, "the VM is still `held` after its start")

    async def room(self) -> None:
        """No VM comes up larger than what its host has free."""
        await self._begin("POST", f"/v1/vms/{VM}/stop", {"limit_s": 5.0})
        size = {**NOMINAL.model_dump(), "cpu_cores": 4096.0}
        with contextlib.suppress(Violation):  # refused, failed, or cut to what the VM may have
            await self._begin("POST", f"/v1/vms/{VM}/start", {"start_size": size})
        cores = (await self._vm()).current.cpu_cores
        _holds(cores < 4096.0, f"the VM was started with {cores:g} cores, which its host does not have")

    async def delete(self) -> None:
        """A VM that is deleted is gone, and its room is free."""
        await self._begin("DELETE", f"/v1/vms/{VM}", query={"reason": "delete"})
        status, _ = await self._ask("GET", f"/v1/vms/{VM}")
        _holds(status == 404, f"GET of a deleted VM: {status} instead of 404")
        _holds(VM not in {vm.name for vm in (await self._report()).vms}, "a deleted VM is still in GET /v1/host")

    # --- helpers -----------------------------------------------------------------------------------------------------

    async def _ask(
        self, method: str, path: str, body: Any = None, *, token: str | None = None, query: dict[str, str] | None = None
    ) -> tuple[int, Any]:
        token = self._token if token is None else token
        headers = {"Accept": f"{JSON}, {PROBLEM_JSON}"} | ({"Authorization": f"Bearer {token}"} if token else {})
        try:
            async with self._session.request(method, self._url + path, json=body, headers=headers, params=query) as got:
                return got.status, await got.json(content_type=None)
        except (aiohttp.ClientError, TimeoutError, ValueError) as error:
            raise Violation(f"{method} {path}: no answer in JSON ({str(error) or type(error).__name__})") from error

    async def _begin(
        self,
        method: str,
        path: str,
        body: dict[str, Any] | None = None,
        *,
        query: dict[str, str] | None = None,
        partial: bool = False,
    ) -> Operation:
        """Send a command and wait for its end, which is `done` (or partial)."""
        command = {"request_id": self._next_id(), "epoch": self._epoch}
        if query is not None:
            sent = {**query, **{name: str(value) for name, value in command.items()}}
            status, answer = await self._ask(method, path, query=sent)
        else:
            status, answer = await self._ask(method, path, {**command, **(body or {})})
        where = f"{method} {path}"
        _holds(status == 202, f"{where}: {status} {_said(answer) or answer} instead of 202")
        operation = _parsed(Operation, answer, where)
        _holds(operation.request_id == command["request_id"], f"{where} answers with another request id")
        until = time.monotonic() + ENDS_S
        while operation.state is OperationState.RUNNING:
            _holds(time.monotonic() < until, f"{where} has not ended within {ENDS_S:g} s")
            asked = f"/v1/operations/{operation.request_id}"
            status, answer = await self._ask("GET", asked, query={"wait_s": f"{POLL_S:g}"})
            _holds(status == 200, f"GET {asked}: {status} {_said(answer)}")
            operation = _parsed(Operation, answer, f"GET {asked}")
        wanted = (OperationState.DONE, OperationState.PARTIAL) if partial else (OperationState.DONE,)
        _holds(operation.state in wanted, f"{where} ended {operation.state}: {operation.sentence}")
        return operation

    async def _refused(self, status: int, field: str, method: str, path: str, body: dict[str, Any]) -> None:
        command = {"request_id": self._next_id(), "epoch": self._epoch, **body}
        given, answer = await self._ask(method, path, command)
        _holds(
            given == status,
            f"{method} {path} with a wrong {field}: {given} {_said(answer) or answer} instead of {status}",
        )
        problem = _said(answer)
        fields = {problem.field, *(error.field for error in problem.errors)} if problem is not None else set()
        _holds(field in fields, f"{method} {path}: the refusal names {sorted(map(str, fields))} instead of {field}")

    async def _report(self) -> HostReport:
        status, body = await self._ask("GET", "/v1/host")
        _holds(status == 200, f"GET /v1/host: {status} {_said(body)}")
        return _parsed(HostReport, body, "GET /v1/host")

    async def _vm(self) -> VMStatus:
        """The VM as the report has it, which is what a manager goes by."""
        for vm in (await self._report()).vms:
            if vm.name == VM:
                return vm
        raise Violation(f"{VM} is not among the VMs of GET /v1/host")

    def _has(self, vm: VMStatus, size: Vector) -> None:
        wrong = [name for name in COMPONENTS if abs(vm.current.vector()[name] - size.vector()[name]) > 0.01]
        _holds(not wrong, f"the VM has {vm.current.vector()} instead of {size.vector()}")

    def _next_id(self) -> str:
        self._numbers += 1
        return f"{self._run}-{self._numbers}"


#: Name, check, and whether the others need it.
CHECKS: Final[tuple[tuple[str, Callable[[Conformance], Awaitable[None]], bool], ...]] = (
    ("it says that it runs", Conformance.health, True),
    ("it answers nothing without a token", Conformance.token, False),
    ("its report is complete and agrees with itself", Conformance.report, True),
    ("it refuses managers that are over", Conformance.epoch, False),
    ("its refusals name the field", Conformance.problems, False),
    ("a VM is created at its nominal size", Conformance.create, True),
    ("repeated requests are harmless", Conformance.repetition, False),
    ("targets are reached, counted and held", Conformance.target, False),
    ("a part of a target leaves the rest", Conformance.part, False),
    ("VMs grow back", Conformance.reinflate, False),
    ("needs are reclaimed, and shortfalls told", Conformance.reclaim, False),
    ("a VM that is off holds nothing", Conformance.off, False),
    ("a start needs room", Conformance.room, False),
    ("a deleted VM is gone", Conformance.delete, False),
)


async def examine(
    url: str,
    token: str,
    epoch: int = 1,
    template: str = "lab",
    progress: Callable[[str], None] = lambda name: None,
) -> list[Check]:
    """Run all checks against the agent at a URL."""
    timeout = aiohttp.ClientTimeout(total=POLL_S + 30.0)
    async with aiohttp.ClientSession(timeout=timeout) as session:
        return await Conformance(session, url, token, epoch, template).run(progress)


def _holds(holds: bool, sentence: str) -> None:
    if not holds:
        raise Violation(sentence)


def _parsed(model: type[B], body: Any, where: str) -> B:
    try:
        return model.model_validate(body, extra="ignore")
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        field = ".".join(map(str, first["loc"]))
        raise Violation(f"{where} is no {model.__name__}: {field}: {first['msg']}") from error


class _Told(Problem):
    """A problem that prints as its sentence."""

    def __str__(self) -> str:
        return self.detail


def _said(body: Any) -> Problem | None:
    """The problem in an answer; None: it holds none."""
    found = problem_in(400, json.dumps(body))
    return None if found is None else _Told(**found.model_dump())
