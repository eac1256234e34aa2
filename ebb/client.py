"""A typed client of the manager's REST API, used by the command line, the demo and tests."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AbstractAsyncContextManager
from types import TracebackType
from typing import Any, Self

import aiohttp
from pydantic import BaseModel, ValidationError

from deflation.allocations import Priority
from deflation.explanations import Forecast, VMExplanation
from deflation.health_messages import ManagerHealth, Readiness
from deflation.instructions import Mode
from deflation.lifecycle_messages import ForgottenHost
from deflation.machine_messages import CalibrationReport, MachineRanking
from deflation.messages import (
    CoreChange,
    HostStatus,
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
from deflation.pages import Event
from deflation.placement_policies import PlacementPolicy
from deflation.rehearsals import Rehearsal
from ebb.client_calls import Model
from ebb.client_lifecycle import LifecycleCalls
from ebb.client_lifecycle import new_request_id as new_request_id
from ebb.client_tasks import TaskCalls
from ebb.errors import ManagerRefused, ManagerStandsBy, ManagerUnreachable
from ebb.event_stream import events_in
from ebb.managers import ANSWER_S, Managers
from ebb.request_paths import check_path
from ebb.tls import tls_problem

#: How long one long poll waits; short, so that progress is seen while an operation runs.
POLL_S = 1.0
#: Beyond an operation's own deadline, what its plan may take for starting guests and for undoing.
REQUEST_TIMEOUT_S = 30.0
#: A stream of events that is silent for so long is dead: the manager gives a sign of life every 15 s.
SILENT_STREAM_S = 40.0
#: Between two attempts to go on with a stream, and how many may fail in a row.
STREAM_PAUSE_S = 1.0
STREAM_ATTEMPTS = 30
#: Rows of one page.
PAGE = 1000

Progress = Callable[[str], None]


class ManagerClient(LifecycleCalls, TaskCalls):
    """One conversation with a manager. Use as an asynchronous context manager.

    :param url: where the manager listens, for example ``http://127.0.0.1:7100``; several, of which one leads, with
        commas between them.
    :param token: the bearer token of the manager's users.
    :param tls: for an https URL; default: whom this machine trusts.

    Every method raises ManagerUnreachable when nobody (or no manager) answers, ManagerRefused for a 4xx or 5xx.
    """

    def __init__(self, url: str, token: str, *, tls: ssl.SSLContext | None = None) -> None:
        self._managers = Managers(url)
        self._token = token
        self._tls = tls
        self._session: aiohttp.ClientSession | None = None

    @property
    def url(self) -> str:
        """Where the manager listens that answered last."""
        return self._managers.url

    @url.setter
    def url(self, url: str) -> None:
        self._managers = Managers(url)

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

    async def health(self) -> ManagerHealth:
        """Whether the manager runs. Needs no token."""
        return await self._one("GET", "/healthz", ManagerHealth)

    async def readiness(self) -> Readiness:
        """Whether a manager leads and its store answers; ManagerStandsBy where none does."""
        return await self._one("GET", "/readyz", Readiness)

    async def openapi(self) -> dict[str, Any]:
        """The document that describes the manager's API."""
        return dict(await self._request("GET", "/v1/openapi.json"))

    async def hosts(self, *, state: str | None = None, mode: HostMode | None = None) -> list[HostStatus]:
        """All hosts that ever reported, or those in a state (``ready``, ``silent``) and of a mode."""
        return await self._list("/v1/hosts", "hosts", HostStatus, {"state": state, "mode": mode})

    async def host(self, host: str) -> HostStatus:
        """One host; ManagerRefused with status 404 if there is none of that id."""
        return await self._one("GET", f"/v1/hosts/{host}", HostStatus)

    async def forget_host(self, host: str, *, lost_vms: bool = False) -> ForgottenHost:
        """Drop a silent host that does not come back.

        ``lost_vms``: its VMs are gone with it, and their names are free; without it a host that has VMs is refused.
        """
        query = {"lost_vms": "true"} if lost_vms else {}
        return await self._one("DELETE", f"/v1/hosts/{host}", ForgottenHost, query=query)

    async def vms(
        self,
        *,
        host: str | None = None,
        state: str | None = None,
        priority: Priority | None = None,
        prefix: str | None = None,
    ) -> list[ManagedVM]:
        """All VMs, or those on a host, in a state, of a priority, whose names begin so."""
        query = {"host": host, "state": state, "priority": priority, "prefix": prefix}
        return await self._list("/v1/vms", "vms", ManagedVM, query)

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

    async def rehearse_creation(
        self, spec: VMSpec, *, policy: PlacementPolicy | None = None, deadline_s: float = 60.0
    ) -> Rehearsal:
        """Where a VM would go and who would give what for it; nothing is changed."""
        body = VMRequest(request_id=new_request_id(), vm=spec, policy=policy, deadline_s=deadline_s, dry_run=True)
        return await self._one("POST", "/v1/vms", Rehearsal, body=body)

    async def delete(self, name: str, *, version: str | None = None, request_id: str | None = None) -> Operation:
        """Stop a VM; its host's deflated VMs grow into the room. Returns the running operation.

        ``version``: of the VM that is meant; ManagerRefused with status 412 if it has another by now.
        """
        query = {"request_id": request_id or new_request_id()}
        return await self._one("DELETE", f"/v1/vms/{name}", Operation, query=query, headers=_if_match(version))

    async def rehearse_deletion(self, name: str) -> Rehearsal:
        """Who would grow if a VM were deleted; nothing is changed."""
        query = {"request_id": new_request_id(), "dry_run": "true"}
        return await self._one("DELETE", f"/v1/vms/{name}", Rehearsal, query=query)

    async def set_target(
        self,
        name: str,
        target: Vector,
        *,
        generation: int,
        deadline_s: float = 60.0,
        mode: Mode = Mode.ASK,
        version: str | None = None,
        request_id: str | None = None,
    ) -> Operation:
        """Bring one VM to a size. ``generation`` must be above the VM's. Returns the running operation.

        ``version``: of the VM that is meant; ManagerRefused with status 412 if it has another by now.
        """
        body = TargetCommand(
            request_id=request_id or new_request_id(),
            generation=generation,
            target=target,
            deadline_s=deadline_s,
            mode=mode,
        )
        return await self._one("PUT", f"/v1/vms/{name}/target", Operation, body=body, headers=_if_match(version))

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

    async def operations(
        self,
        limit: int = 20,
        *,
        kind: str | None = None,
        state: OperationState | None = None,
        vm: str | None = None,
        host: str | None = None,
        since: float | None = None,
    ) -> list[Operation]:
        """The latest operations, newest first. ``since``: seconds since the epoch."""
        query = {"kind": kind, "state": state, "vm": vm, "host": host, "since": since}
        return await self._list("/v1/operations", "operations", Operation, query, limit)

    async def operation(self, request_id: str, wait_s: float = 0.0, host: str | None = None) -> Operation:
        """One operation, of the manager or of a host; waits up to ``wait_s`` seconds for its end."""
        query = {"wait_s": f"{wait_s:g}"}
        where = "/v1" if host is None else f"/v1/hosts/{host}"
        path = f"{where}/operations/{request_id}"
        return await self._one("GET", path, Operation, query=query, held_s=wait_s)

    async def core_changes(
        self, machine: str | None = None, limit: int = 100, *, since: float | None = None
    ) -> list[CoreChange]:
        """Core changes as the hosts reported them, newest first. ``since``: seconds since the epoch."""
        query = {"machine": machine, "since": since}
        return await self._list("/v1/core-changes", "core_changes", CoreChange, query, limit)

    async def machines(self, duration_s: float) -> list[MachineRanking]:
        """Machines by the probability that they keep their cores for a task of that many seconds, best first."""
        return await self._list("/v1/machines", "machines", MachineRanking, {"duration_s": duration_s})

    async def machine(self, name: str, duration_s: float) -> MachineRanking:
        """How likely one machine keeps its cores; ManagerRefused with status 404 if none of that name runs."""
        return await self._one("GET", f"/v1/machines/{name}", MachineRanking, query={"duration_s": f"{duration_s:g}"})

    async def calibration(self) -> CalibrationReport:
        """Whether predictions that machines keep their cores come true."""
        return await self._one("GET", "/v1/calibration", CalibrationReport)

    async def events(
        self,
        limit: int = 50,
        *,
        kind: str | None = None,
        vm: str | None = None,
        host: str | None = None,
        since: float | None = None,
        since_id: int | None = None,
    ) -> list[Event]:
        """What happened and why, newest first. ``since``: seconds since the epoch; ``since_id``: an event's."""
        query = {"kind": kind, "vm": vm, "host": host, "since": since, "since_id": since_id}
        return await self._list("/v1/events", "events", Event, query, limit)

    async def follow_events(
        self, *, after: int | None = None, kind: str | None = None, vm: str | None = None, host: str | None = None
    ) -> AsyncIterator[Event]:
        """Events as they happen, for ever; behind an event, or from now on.

        A stream that breaks off is gone on with behind its last event; only a manager that cannot be reached at first,
        or for half a minute, is ManagerUnreachable.
        """
        query = _query({"kind": kind, "vm": vm, "host": host})
        if after is None:
            # A stream that breaks off before its first event must go on from here, too.
            after = next((event.id for event in await self.events(1)), 0)
        failed = 0 if self._managers.several else STREAM_ATTEMPTS
        while True:
            url = self.url
            try:
                async with self._stream("/v1/events/stream", query, {"Last-Event-ID": str(after)}) as answer:
                    if answer.status == 503:
                        raise ValueError("it is not ready")
                    if answer.status >= 400:
                        raise _refusal(answer.status, await answer.json(content_type=None))
                    failed = 0
                    async for event in events_in(answer.content.iter_any()):
                        after = event.id
                        yield event
            except (aiohttp.ClientError, TimeoutError, ValueError) as error:
                failed += 1
                self._managers.turn()
                if failed > STREAM_ATTEMPTS:
                    why = str(error) or type(error).__name__
                    raise ManagerUnreachable(f"no manager answers at {url}: {why}") from error
            await asyncio.sleep(STREAM_PAUSE_S)

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

    async def _list(
        self, path: str, key: str, model: type[Model], query: Mapping[str, object], limit: int | None = None
    ) -> list[Model]:
        """The rows of all pages, or the first ``limit``."""
        rows: list[Model] = []
        after: str | None = None
        while limit is None or len(rows) < limit:
            page = {"limit": PAGE if limit is None else min(limit - len(rows), PAGE), "after": after}
            body = await self._request("GET", path, query=_query({**query, **page}))
            try:
                rows += [model.model_validate(row) for row in body[key]]
                after = body["next"]
            except (ValidationError, KeyError, TypeError) as error:
                raise ManagerUnreachable(f"{self.url} does not answer like a manager: {error}") from error
            if after is None:
                break
        return rows

    async def _one(
        self,
        method: str,
        path: str,
        model: type[Model],
        *,
        query: dict[str, str] | None = None,
        body: BaseModel | None = None,
        headers: dict[str, str] | None = None,
        held_s: float = 0.0,
    ) -> Model:
        answer = await self._request(method, path, query=query, body=body, headers=headers, held_s=held_s)
        try:
            return model.model_validate(answer)
        except ValidationError as error:
            raise ManagerUnreachable(f"{self.url} does not answer like a manager: {error}") from error

    def _stream(
        self, path: str, query: dict[str, str], headers: dict[str, str]
    ) -> AbstractAsyncContextManager[aiohttp.ClientResponse]:
        if self._session is None:
            raise RuntimeError("ManagerClient is used outside of its context")
        check_path(path)
        limits = aiohttp.ClientTimeout(total=None, sock_connect=REQUEST_TIMEOUT_S, sock_read=SILENT_STREAM_S)
        return self._session.get(self.url + path, params=query, headers=headers, timeout=limits)

    async def _request(
        self,
        method: str,
        path: str,
        *,
        query: dict[str, str] | None = None,
        body: BaseModel | None = None,
        headers: dict[str, str] | None = None,
        held_s: float = 0.0,
    ) -> Any:
        if self._session is None:
            raise RuntimeError("ManagerClient is used outside of its context")
        check_path(path)
        answered_s = ANSWER_S if self._managers.several else REQUEST_TIMEOUT_S
        timeout = aiohttp.ClientTimeout(total=answered_s + held_s)
        session, data = self._session, body.model_dump(mode="json") if body is not None else None
        options: dict[str, Any] = {"params": query, "json": data, "headers": headers, "timeout": timeout}

        async def once(url: str) -> Any:
            try:
                async with session.request(method, url + path, **options) as answer:
                    content = await answer.json(content_type=None)
                    if answer.status >= 400:
                        raise _refusal(answer.status, content, "Retry-After" in answer.headers)
                    return content
            except (aiohttp.ClientError, TimeoutError, ValueError) as error:
                if (why := tls_problem(url, error)) is not None:
                    raise ManagerUnreachable(f"no connection with {url}: {why}") from error
                raise ManagerUnreachable(
                    f"no manager answers at {url}: {str(error) or type(error).__name__}"
                ) from error

        return await self._managers.ask(once)


def _query(values: Mapping[str, object]) -> dict[str, str]:
    """Parameters without those that are not given."""
    return {
        name: f"{value:.6f}" if isinstance(value, float) else str(value)
        for name, value in values.items()
        if value is not None
    }


def _if_match(version: str | None) -> dict[str, str] | None:
    return None if version is None else {"If-Match": f'"{version}"'}


def _refusal(status: int, content: Any, may_come: bool = False) -> ManagerRefused:
    problem = content if isinstance(content, dict) else {}
    sentence = problem.get("error") or f"the manager answered with status {status}"
    field = problem.get("field")
    kind = ManagerStandsBy if status == 503 and may_come else ManagerRefused
    return kind(status, str(sentence), str(field) if field else None)
