"""A typed client of the manager's REST API, used by the command line, the demo and tests."""

from __future__ import annotations

import asyncio
import ssl
import uuid
from collections.abc import Callable
from types import TracebackType
from typing import Any, Self, TypeVar

import aiohttp
from pydantic import BaseModel, ConfigDict, ValidationError

from deflation.explanations import Forecast, VMExplanation
from deflation.instructions import Mode
from deflation.messages import (
    CoreChange,
    HostStatus,
    MachineRanking,
    ManagedVM,
    ModeCommand,
    Operation,
    OperationState,
    TargetCommand,
    Vector,
    VMRequest,
    VMSpec,
)
from deflation.modes import HostMode
from deflation.placement_policies import PlacementPolicy
from ebb.errors import ManagerRefused, ManagerUnreachable
from ebb.tls import tls_problem

#: How long one long poll waits; short, so that progress is seen while an operation runs.
POLL_S = 1.0
#: Beyond an operation's own deadline, what its plan may take for starting guests and for undoing.
REQUEST_TIMEOUT_S = 30.0

Model = TypeVar("Model", bound=BaseModel)
Progress = Callable[[str], None]


class Event(BaseModel):
    """One entry of the manager's event log. ``at``: seconds since the epoch."""

    model_config = ConfigDict(extra="ignore", frozen=True)

    at: float
    vm: str | None = None
    host: str | None = None
    kind: str
    sentence: str


class ManagerClient:
    """One conversation with a manager. Use as an asynchronous context manager.

    :param url: where the manager listens, for example ``http://127.0.0.1:7100``.
    :param token: the bearer token of the manager's users.
    :param tls: for an https URL; default: whom this machine trusts.

    Every method raises ManagerUnreachable when nobody (or no manager) answers, ManagerRefused for a 4xx or 5xx.
    """

    def __init__(self, url: str, token: str, *, tls: ssl.SSLContext | None = None) -> None:
        self.url = url.rstrip("/")
        self._token = token
        self._tls = tls
        self._session: aiohttp.ClientSession | None = None

    async def __aenter__(self) -> Self:
        self._session = aiohttp.ClientSession(
            headers={"Authorization": f"Bearer {self._token}"},
            timeout=aiohttp.ClientTimeout(total=REQUEST_TIMEOUT_S),
            connector=aiohttp.TCPConnector(ssl=self._tls or True),
        )
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._session is not None:
            await self._session.close()

    async def hosts(self) -> list[HostStatus]:
        """All hosts that ever reported."""
        return await self._list("/v1/hosts", "hosts", HostStatus)

    async def vms(self) -> list[ManagedVM]:
        """All VMs."""
        return await self._list("/v1/vms", "vms", ManagedVM)

    async def vm(self, name: str) -> ManagedVM:
        """One VM; ManagerRefused with status 404 if there is none of that name."""
        return await self._one("GET", f"/v1/vms/{name}", ManagedVM)

    async def create(
        self,
        spec: VMSpec,
        *,
        policy: PlacementPolicy | None = None,
        deadline_s: float = 60.0,
        request_id: str | None = None,
    ) -> Operation:
        """Place and start a VM; others are deflated for it where that is needed. Returns the running operation."""
        body = VMRequest(request_id=request_id or new_request_id(), vm=spec, policy=policy, deadline_s=deadline_s)
        return await self._one("POST", "/v1/vms", Operation, body=body)

    async def delete(self, name: str, *, request_id: str | None = None) -> Operation:
        """Stop a VM; its host's deflated VMs grow into the room. Returns the running operation."""
        query = {"request_id": request_id or new_request_id()}
        return await self._one("DELETE", f"/v1/vms/{name}", Operation, query=query)

    async def set_target(
        self,
        name: str,
        target: Vector,
        *,
        generation: int,
        deadline_s: float = 60.0,
        mode: Mode = Mode.ASK,
        request_id: str | None = None,
    ) -> Operation:
        """Bring one VM to a size. ``generation`` must be above the VM's. Returns the running operation."""
        body = TargetCommand(
            request_id=request_id or new_request_id(),
            generation=generation,
            target=target,
            deadline_s=deadline_s,
            mode=mode,
        )
        return await self._one("PUT", f"/v1/vms/{name}/target", Operation, body=body)

    async def forecast(
        self, name: str, target: Vector, *, generation: int, deadline_s: float = 60.0, mode: Mode = Mode.ASK
    ) -> Forecast:
        """What bringing one VM to a size would come to; nothing is changed."""
        body = TargetCommand(
            request_id=new_request_id(),
            generation=generation,
            target=target,
            deadline_s=deadline_s,
            mode=mode,
            dry_run=True,
        )
        return await self._one("PUT", f"/v1/vms/{name}/target", Forecast, body=body)

    async def explain(self, name: str) -> VMExplanation:
        """Why a VM has its size, what could still be taken, and what is blocked."""
        return await self._one("GET", f"/v1/vms/{name}/explain", VMExplanation)

    async def set_mode(
        self, host: str, mode: HostMode, *, reason: str = "", request_id: str | None = None
    ) -> Operation:
        """Change a host's mode. Returns the running operation, which is the host's: wait for it with ``host``."""
        body = ModeCommand(request_id=request_id or new_request_id(), mode=mode, reason=reason)
        return await self._one("PUT", f"/v1/hosts/{host}/mode", Operation, body=body)

    async def operations(self, limit: int = 20) -> list[Operation]:
        """The latest operations, newest first."""
        return await self._list("/v1/operations", "operations", Operation, {"limit": str(limit)})

    async def operation(self, request_id: str, wait_s: float = 0.0, host: str | None = None) -> Operation:
        """One operation, of the manager or of a host; waits up to ``wait_s`` seconds for its end."""
        query = {"wait_s": f"{wait_s:g}"}
        where = "/v1" if host is None else f"/v1/hosts/{host}"
        return await self._one("GET", f"{where}/operations/{request_id}", Operation, query=query)

    async def core_changes(self, machine: str | None = None, limit: int = 100) -> list[CoreChange]:
        """Core changes as the hosts reported them."""
        query = {"limit": str(limit)} | ({"machine": machine} if machine is not None else {})
        return await self._list("/v1/core-changes", "core_changes", CoreChange, query)

    async def machines(self, duration_s: float) -> list[MachineRanking]:
        """Machines by the probability that they keep their cores for a task of that many seconds, best first."""
        return await self._list("/v1/machines", "machines", MachineRanking, {"duration_s": f"{duration_s:g}"})

    async def events(self, limit: int = 50) -> list[Event]:
        """What happened and why, newest first."""
        return await self._list("/v1/events", "events", Event, {"limit": str(limit)})

    async def wait(
        self,
        operation: Operation,
        *,
        limit_s: float = 600.0,
        progress: Progress | None = None,
        host: str | None = None,
    ) -> Operation:
        """Follow an operation to its end; each new sentence of its progress goes to ``progress``.

        ``host``: whose operation it is, where it is not the manager's own.
        Raises TimeoutError after ``limit_s`` seconds; the operation itself goes on.
        """
        told = 0
        async with asyncio.timeout(limit_s):
            while True:
                for sentence in operation.progress[told:]:
                    if progress is not None:
                        progress(sentence)
                told = max(told, len(operation.progress))
                if operation.state is not OperationState.RUNNING:
                    return operation
                operation = await self.operation(operation.request_id, POLL_S, host)

    async def _list(self, path: str, key: str, model: type[Model], query: dict[str, str] | None = None) -> list[Model]:
        body = await self._request("GET", path, query=query)
        try:
            return [model.model_validate(row) for row in body[key]]
        except (ValidationError, KeyError, TypeError) as error:
            raise ManagerUnreachable(f"{self.url} does not answer like a manager: {error}") from error

    async def _one(
        self,
        method: str,
        path: str,
        model: type[Model],
        *,
        query: dict[str, str] | None = None,
        body: BaseModel | None = None,
    ) -> Model:
        answer = await self._request(method, path, query=query, body=body)
        try:
            return model.model_validate(answer)
        except ValidationError as error:
            raise ManagerUnreachable(f"{self.url} does not answer like a manager: {error}") from error

    async def _request(
        self, method: str, path: str, *, query: dict[str, str] | None = None, body: BaseModel | None = None
    ) -> Any:
        if self._session is None:
            raise RuntimeError("ManagerClient is used outside of its context")
        data = body.model_dump(mode="json") if body is not None else None
        try:
            async with self._session.request(method, self.url + path, params=query, json=data) as answer:
                content = await answer.json(content_type=None)
                if answer.status >= 400:
                    raise _refusal(answer.status, content)
                return content
        except (aiohttp.ClientError, TimeoutError, ValueError) as error:
            if (why := tls_problem(self.url, error)) is not None:
                raise ManagerUnreachable(f"no connection with {self.url}: {why}") from error
            raise ManagerUnreachable(f"no manager answers at {self.url}: {error or type(error).__name__}") from error


def new_request_id() -> str:
    """A request id that nobody else has."""
    return f"ebb-{uuid.uuid4().hex[:20]}"


def _refusal(status: int, content: Any) -> ManagerRefused:
    problem = content if isinstance(content, dict) else {}
    sentence = problem.get("error") or f"the manager answered with status {status}"
    field = problem.get("field")
    return ManagerRefused(status, str(sentence), str(field) if field else None)
