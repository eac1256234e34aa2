"""Client of the manager's REST interface: hosts, VMs, operations, machines and events."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterable, AsyncIterator, Callable, Mapping
from typing import Any, BinaryIO, Literal

import aiohttp
from pydantic import ValidationError

from ebbtide.client.connection import MOST_HELD, Changed, query_of, refusal_of
from ebbtide.client.errors import ClientError, ManagerBusy, ManagerUnreachable, passes
from ebbtide.client.history import HistoryCalls
from ebbtide.client.lifecycle import LifecycleCalls, if_match, new_request_id
from ebbtide.client.tasks import TaskCalls
from ebbtide.client.tls import tls_problem
from ebbtide.deflation.allocations import Priority
from ebbtide.deflation.cascade.instructions import Mode
from ebbtide.deflation.modes import HostMode
from ebbtide.deflation.placement.policy_names import PlacementPolicy
from ebbtide.messages.commands import SteadySettings, SteadyStatus
from ebbtide.messages.common import PartialVector, Vector
from ebbtide.messages.dry_runs import DryRunReport, Forecast, RebalancingReport
from ebbtide.messages.enrolment import (
    Invitation,
    InvitationRequest,
    Revocation,
    RevocationRequest,
    Rollover,
    VoidedInvitations,
)
from ebbtide.messages.explanations import Event, VMExplanation
from ebbtide.messages.hosts import Caller, ForgottenHost, HostStatus, ManagerHealth, Readiness
from ebbtide.messages.labels import LabelsRequest
from ebbtide.messages.machines import CalibrationReport, CoreChange, MachineRanking
from ebbtide.messages.operations import Operation, OperationState
from ebbtide.messages.requests import CancelRequest, ModeRequest, TargetRequest, VMRequest
from ebbtide.messages.vms import ClusterVM, VMSpec

#: How long one long poll waits, where progress is to be told at first, and at the longest, seconds.
POLL_S = 1.0
LONGEST_POLL_S = 10.0
#: All that wait together ask no more often than so many times a second, after a rest so often at once: half of what a
#: token may.
POLLS_PER_S = 25.0
POLLS_AT_ONCE = 100
#: Between two attempts to go on with a stream, and how many may fail in a row.
STREAM_PAUSE_S = 1.0
STREAM_ATTEMPTS = 30
#: How long an operation is followed while no manager answers, seconds.
AWAY_S = 30.0
#: How long a manager may take to make a backup before it sends it, seconds.
BACKUP_S = 900.0
#: No event is longer; what is, is no stream of a manager.
LINE_LIMIT = 1024 * 1024

Progress = Callable[[str], None]


def poll_s(waits: int, told_s: float | None) -> float:
    """For how long a poll waits that follows an operation, in seconds.

    :param waits: how many operations this client follows now.
    :param told_s: for how long it has followed this one, whose progress is told a tenth of that late; None: it is not.
    """
    # Where they have to take turns, each comes the sooner.
    most_s = max(LONGEST_POLL_S * min(MOST_HELD / waits, 1.0), POLL_S)
    return most_s if told_s is None else min(max(POLL_S, told_s / 10), most_s)


class ManagerClient(LifecycleCalls, TaskCalls, HistoryCalls):
    """One conversation with a manager. Use as an asynchronous context manager.

    :param url: where the manager listens, for example ``http://127.0.0.1:7100``; several, of which one leads, with
        commas between them.
    :param token: the bearer token of the manager's users.
    :param tls: for an https URL; default: whom this machine trusts.

    Every method raises ManagerUnreachable when no manager answers, ManagerRefused for a 4xx or 5xx, and another
    ClientError for a name that is none. A field that cannot be is a pydantic.ValidationError. Neither is sent.
    """

    #: Operations that are followed now, and when the last poll of all of them had its turn, by the loop's clock.
    _waits = 0
    _polled_at = float("-inf")

    async def health(self) -> ManagerHealth:
        """Whether the manager runs. Needs no token."""
        return await self._one("GET", "/healthz", ManagerHealth)

    async def readiness(self) -> Readiness:
        """Whether a manager leads and its store answers; ManagerStandsBy where none does."""
        return await self._one("GET", "/readyz", Readiness)

    async def whoami(self) -> Caller:
        """The name and role of the token that this client has."""
        return await self._one("GET", "/v1/whoami", Caller)

    async def openapi(self) -> dict[str, Any]:
        """The document that describes the manager's API."""
        return dict(await self._request("GET", "/v1/openapi.json"))

    async def hosts(
        self, *, state: str | None = None, mode: HostMode | None = None, selector: str | None = None
    ) -> list[HostStatus]:
        """All hosts that ever reported, or those in a state (``ready``, ``silent``), of a mode, with such labels."""
        query = {"state": state, "mode": mode, "selector": selector}
        return await self._list("/v1/hosts", "hosts", HostStatus, query)

    async def label_host(self, host: str, labels: Mapping[str, str | None]) -> HostStatus:
        """Set labels of a host; None takes one away."""
        body = LabelsRequest(labels=dict(labels))
        return await self._one("PATCH", f"/v1/hosts/{host}/labels", HostStatus, body=body)

    async def label_vm(self, name: str, labels: Mapping[str, str | None], *, version: str | None = None) -> ClusterVM:
        """Set labels of a VM; None takes one away."""
        body = LabelsRequest(labels=dict(labels))
        path = f"/v1/vms/{name}/labels"
        return await self._one("PATCH", path, ClusterVM, body=body, headers=if_match(version))

    async def changed_hosts(self, since: int) -> Changed[HostStatus]:
        """Hosts that have changed since an earlier answer's ``changes``, and those that are not ready; 0: all."""
        return await self._pages("/v1/hosts", "hosts", HostStatus, {"changed_since": since})

    async def changed_vms(self, since: int) -> Changed[ClusterVM]:
        """VMs that have changed since an earlier answer's ``changes``; 0: all."""
        return await self._pages("/v1/vms", "vms", ClusterVM, {"changed_since": since})

    async def host(self, host: str) -> HostStatus:
        """One host; ManagerRefused with status 404 if there is none of that id."""
        return await self._one("GET", f"/v1/hosts/{host}", HostStatus)

    async def forget_host(self, host: str, *, lost_vms: bool = False) -> ForgottenHost:
        """Drop a silent host that does not come back.

        ``lost_vms``: its VMs are gone with it, and their names are free; without it a host that has VMs is refused.
        """
        query = {"lost_vms": "true"} if lost_vms else {}
        return await self._one("DELETE", f"/v1/hosts/{host}", ForgottenHost, query=query)

    async def invite_host(self, host: str | None = None, *, expires_s: float = 3600.0) -> Invitation:
        """Make an invitation, which enrols one host. Role admin."""
        body = InvitationRequest(host=host, expires_s=expires_s)
        return await self._one("POST", "/v1/invitations", Invitation, body=body)

    async def void_invitations(self) -> VoidedInvitations:
        """Take back the invitations that nobody has used. Role admin."""
        return await self._one("DELETE", "/v1/invitations", VoidedInvitations)

    async def ca_rollover(self) -> Rollover:
        """Which hosts have no certificate yet of the CA that is to follow."""
        return await self._one("GET", "/v1/ca/rollover", Rollover)

    async def revoke_host(self, host: str, reason: str) -> Revocation:
        """Have nothing of a host count any more, for good. Role admin."""
        return await self._one(
            "POST", f"/v1/hosts/{host}/revocation", Revocation, body=RevocationRequest(reason=reason)
        )

    async def vms(
        self,
        *,
        host: str | None = None,
        state: str | None = None,
        priority: Priority | None = None,
        prefix: str | None = None,
        selector: str | None = None,
    ) -> list[ClusterVM]:
        """All VMs, or those on a host, in a state, of a priority, whose names begin so, with such labels."""
        query = {"host": host, "state": state, "priority": priority, "prefix": prefix, "selector": selector}
        return await self._list("/v1/vms", "vms", ClusterVM, query)

    async def vm(self, name: str) -> ClusterVM:
        """One VM; ManagerRefused with status 404 if there is none of that name."""
        return await self._one("GET", f"/v1/vms/{name}", ClusterVM)

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

    async def dry_run_creation(
        self, spec: VMSpec, *, policy: PlacementPolicy | None = None, deadline_s: float = 60.0
    ) -> DryRunReport:
        """Where a VM would go and who would give what for it; nothing is changed."""
        body = VMRequest(request_id=new_request_id(), vm=spec, policy=policy, deadline_s=deadline_s, dry_run=True)
        return await self._one("POST", "/v1/vms", DryRunReport, body=body)

    async def delete(self, name: str, *, version: str | None = None, request_id: str | None = None) -> Operation:
        """Stop a VM; its host's deflated VMs grow into the room. Returns the running operation.

        ``version``: of the VM that is meant; ManagerRefused with status 412 if it has another by now.
        """
        query = {"request_id": request_id or new_request_id()}
        return await self._one("DELETE", f"/v1/vms/{name}", Operation, query=query, headers=if_match(version))

    async def dry_run_deletion(self, name: str) -> DryRunReport:
        """Who would grow if a VM were deleted; nothing is changed."""
        query = {"request_id": new_request_id(), "dry_run": "true"}
        return await self._one("DELETE", f"/v1/vms/{name}", DryRunReport, query=query)

    async def dry_run_rebalancing(self, *, lasted_s: float | None = None) -> RebalancingReport:
        """Which VMs would be moved between hosts, and what for; nothing is moved.

        ``lasted_s``: for how long VMs are taken to have been deflated; default: as long as the manager has seen
        it, or, where it moves none by itself, as long as it takes to count.
        """
        query = {} if lasted_s is None else {"lasted_s": f"{lasted_s:g}"}
        return await self._one("GET", "/v1/rebalancing", RebalancingReport, query=query)

    async def set_target(
        self,
        name: str,
        target: PartialVector | Vector,
        *,
        generation: int | None = None,
        deadline_s: float = 60.0,
        mode: Mode = Mode.ASK,
        version: str | None = None,
        request_id: str | None = None,
    ) -> Operation:
        """Bring one VM to a size; what a PartialVector leaves out keeps its size. Returns the running operation.

        ``generation``: above the VM's; default: the next one, whatever has changed meanwhile.

        ``version``: of the VM that is meant; ManagerRefused with status 412 if it has another by now.
        """
        body = TargetRequest(
            request_id=request_id or new_request_id(),
            generation=generation,
            target=target,
            deadline_s=deadline_s,
            mode=mode,
        )
        return await self._one("PUT", f"/v1/vms/{name}/target", Operation, body=body, headers=if_match(version))

    async def forecast(
        self,
        name: str,
        target: PartialVector | Vector,
        *,
        generation: int | None = None,
        deadline_s: float = 60.0,
        mode: Mode = Mode.ASK,
    ) -> Forecast:
        """What bringing one VM to a size would come to; nothing is changed."""
        body = TargetRequest(
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
        body = ModeRequest(request_id=request_id or new_request_id(), mode=mode, reason=reason)
        return await self._one("PUT", f"/v1/hosts/{host}/mode", Operation, body=body)

    async def steady(self, host: str) -> SteadyStatus:
        """How a host keeps room before it is asked for."""
        return await self._one("GET", f"/v1/hosts/{host}/steady", SteadyStatus)

    async def set_steady(
        self, host: str, *, enabled: bool | None = None, reserve_mib: float | Literal["auto"] | None = None
    ) -> SteadyStatus:
        """Change how a host keeps room; what is left out stays. ``"auto"``: the reserve is learned."""
        body = SteadySettings(enabled=enabled, reserve_mib=reserve_mib)
        return await self._one("PUT", f"/v1/hosts/{host}/steady", SteadyStatus, body=body)

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

    async def cancel(self, operation: str, *, request_id: str | None = None) -> Operation:
        """Call a placement off before its VM starts. Returns the running operation that does so.

        ManagerRefused with status 409 where the operation has ended, has come too far, or is none that can be called
        off.
        """
        body = CancelRequest(request_id=request_id or new_request_id())
        return await self._one("POST", f"/v1/operations/{operation}/cancel", Operation, body=body)

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
        query = query_of({"kind": kind, "vm": vm, "host": host})
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
                        content = await answer.json(content_type=None)
                        raise refusal_of(answer.status, content, answer.headers.get("Retry-After"))
                    failed = 0
                    async for event in events_in(answer.content.iter_any()):
                        after = event.id
                        yield event
            except ManagerBusy as error:
                await asyncio.sleep(error.after_s)
            except (aiohttp.ClientError, TimeoutError, ValueError) as error:
                failed += 1
                self._managers.turn()
                if failed > STREAM_ATTEMPTS:
                    why = str(error) or type(error).__name__
                    raise ManagerUnreachable(f"no manager answers at {url}: {why}") from error
            await asyncio.sleep(STREAM_PAUSE_S)

    async def backup(self, file: BinaryIO) -> int:
        """Write a backup of the manager's store into a file that was empty; returns its size in bytes.

        Raises ManagerRefused: without the role admin, or where none could be made; ManagerUnreachable: also where it
        has broken off, so that the file holds none.
        """

        async def once(url: str) -> int:
            file.seek(0)
            file.truncate()
            try:
                async with self._stream("/v1/backup", {}, {}, BACKUP_S) as answer:
                    if answer.status >= 400:
                        content = await answer.json(content_type=None)
                        raise refusal_of(answer.status, content, answer.headers.get("Retry-After"))
                    async for piece in answer.content.iter_any():
                        file.write(piece)
            except (aiohttp.ClientError, TimeoutError, ValueError) as error:
                why = tls_problem(url, error) or str(error) or type(error).__name__
                raise ManagerUnreachable(f"no backup came from {url}: {why}") from error
            return file.tell()

        return await self._managers.ask(once)

    async def wait(
        self,
        operation: Operation,
        *,
        limit_s: float | None = 600.0,
        progress: Progress | None = None,
        host: str | None = None,
    ) -> Operation:
        """Follow an operation to its end; each new sentence of its progress goes to ``progress``, but for its outcome.

        ``host``: whose operation it is, where it is not the manager's own.
        The manager says at once that it has ended; many that are followed at the same time have their turns for that.
        Raises TimeoutError after ``limit_s`` seconds (None: never), and ManagerUnreachable, ManagerStandsBy or
        ManagerBusy once no manager that leads has answered for half a minute, ManagerRefused with the code
        ``host-unavailable`` where that is so of the host; the operation itself goes on.
        """
        told, clock = 0, asyncio.get_running_loop().time
        began_at, away_from = clock(), None
        self._waits += 1
        try:
            async with asyncio.timeout(limit_s):
                while True:
                    over = operation.state is not OperationState.RUNNING
                    for sentence in operation.progress[told:]:
                        # The sentence of an operation that has ended is its outcome, which the caller has.
                        if progress is not None and not (over and sentence == operation.sentence):
                            progress(sentence)
                    told = max(told, len(operation.progress))
                    if over:
                        return operation
                    await self._turn()
                    wait_s = poll_s(self._waits, clock() - began_at if progress is not None else None)
                    try:
                        operation, away_from = await self.operation(operation.request_id, wait_s, host), None
                    except ClientError as error:
                        # It is started again, or another one takes over; or the host is. Before, the poll may have
                        # been held back, or have stood in line.
                        away_from = clock() - error.silent_s if away_from is None else away_from
                        if not passes(error) or clock() - away_from > AWAY_S:
                            raise
                        await asyncio.sleep(STREAM_PAUSE_S)
        finally:
            self._waits -= 1

    async def _turn(self) -> None:
        """Wait until one more poll is not too much: what else is asked with this token is not to be refused for it."""
        # One that does not wait for its turn any more takes none.
        async with self._polls:
            now = asyncio.get_running_loop().time()
            turn_at = max(self._polled_at, now - POLLS_AT_ONCE / POLLS_PER_S) + 1 / POLLS_PER_S
            if turn_at > now:
                await asyncio.sleep(turn_at - now)
            self._polled_at = turn_at


async def events_in(chunks: AsyncIterable[bytes]) -> AsyncIterator[Event]:
    """Events of a stream of server-sent events (WHATWG HTML); comments are signs of life and nothing more.

    :raises ValueError: it is no stream of a manager.
    """
    rest, data = b"", []
    async for chunk in chunks:
        *lines, rest = (rest + chunk).split(b"\n")
        if len(rest) > LINE_LIMIT:
            raise ValueError("a line without an end")
        for line in (line.rstrip(b"\r").decode() for line in lines):
            name, _, value = line.partition(":")
            if name == "data":
                data.append(value.removeprefix(" "))
            elif not line and data:
                yield _event("\n".join(data))
                data = []


def _event(text: str) -> Event:
    try:
        return Event.model_validate_json(text, extra="ignore")
    except ValidationError as error:
        raise ValueError(f"no event: {text[:200]}") from error
