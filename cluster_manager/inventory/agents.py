"""The client of the host agents' REST API: every call has a time limit, every repetition is harmless.

Commands are idempotent by request id, so a call whose answer was lost is simply sent again until the agent has been
away for too long.
"""

from __future__ import annotations

import asyncio
import ssl
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Final, TypeVar

import aiohttp
import structlog
from pydantic import BaseModel, ValidationError

from cluster_manager.errors import AgentError, AgentFailed, AgentRefused, AgentUnreachable
from cluster_manager.inventory.later_words import read_of_agent
from cluster_manager.settings import AgentLimits
from ebbtide.deflation.errors import InvalidField
from ebbtide.messages.adoptions import MEASURED_S, Adoptable
from ebbtide.messages.commands import (
    Budget,
    BudgetStatus,
    Command,
    EpochCommand,
    ModeCommand,
    SteadyCommand,
    SteadyStatus,
    TargetCommand,
)
from ebbtide.messages.common import cleaned_text, problem_in
from ebbtide.messages.dry_runs import Forecast
from ebbtide.messages.explanations import Explanation
from ebbtide.messages.hosts import HostReport, TemplateList
from ebbtide.messages.operations import Operation, OperationState
from ebbtide.rest.credentials import command_token
from ebbtide.rest.descriptions import JSON, PROBLEM_JSON
from ebbtide.rest.metrics import sheet
from ebbtide.tracing.spans import NO_SPAN, Kind, Span, span
from ebbtide.tracing.spans import headers as tracing_headers

log = structlog.get_logger()

B = TypeVar("B", bound=BaseModel)

#: No answer of an agent is larger; more is not read.
ANSWER_LIMIT: Final = 4 * 1024 * 1024
#: But metrics, which are not looked into: of 1,000 VMs all of whose layers have worked.
METRICS_LIMIT: Final = 4 * ANSWER_LIMIT
#: How much longer than other answers they may take, seconds: Prometheus waits for 10 s where nobody says otherwise.
METRICS_S: Final = 5.0
#: What an agent of an earlier version does not know, and does without: that a VM is preempted, so that its guest is
#: told first, or its memory saved; it is stopped all the same. And for which size a VM that departs has room.
CAN_DO_WITHOUT: Final = frozenset({"reason", "suspend", "notice_s", "size"})
_LONGEST_PAUSE_S: Final = 2.0
#: Connections with one host: its agent takes 256 from an address, and has one for each VM that is preempted together.
MOST_TO_ONE: Final = 100
#: How often it is asked how far an operation is whose progress is shown, seconds.
TOLD_S: Final = 1.0


@dataclass(frozen=True, slots=True)
class _Call:
    """What an agent is asked.

    :param held_s: how long it may hold its answer back, seconds.
    :param without: fields of the body that it can do without here, beside `CAN_DO_WITHOUT`.
    :param left_out: parameters, and fields of the body, that it does not know.
    """

    host: str
    method: str
    path: str
    params: Mapping[str, str] = field(default_factory=dict)
    body: BaseModel | None = None
    held_s: float = 0.0
    without: frozenset[str] = frozenset()
    left_out: frozenset[str] = frozenset()


@dataclass(slots=True)
class Sent:
    """Whether a call has begun to leave this machine."""

    begun: bool = False


def connector_to_hosts(tls: ssl.SSLContext | bool) -> aiohttp.TCPConnector:
    """For the session of `Agents`: a call waits for no other host's answer, which may be held back for long."""
    # aiohttp's own limit is 100 in all, and who waits for a connection waits within the time of the call.
    return aiohttp.TCPConnector(ssl=tls, limit=0, limit_per_host=MOST_TO_ONE)


def telling_what_was_sent() -> aiohttp.TraceConfig:
    """For the session of `Agents`."""

    async def begun(session: Any, context: Any, params: aiohttp.TraceRequestHeadersSentParams) -> None:
        if context.trace_request_ctx is not None:
            context.trace_request_ctx.begun = True

    trace = aiohttp.TraceConfig()
    trace.on_request_headers_sent.append(begun)
    return trace


class Agents:
    """All host agents, by host id.

    :param url_of: where a host's agent says that it listens; None for a host that is not known. Used once an agent
        there has proved to be that host's: by its certificate, on plain loopback by taking that host's token.
    :param key: of which the token of each is made.
    :param check: raises LostLeadership where this manager must not speak to agents (any more).
    :param epoch: of this manager; an agent that answers it lets no command of an earlier one in any more.
    :param revoked: the hosts that are lost: they hear nothing more.
    """

    def __init__(
        self,
        session: aiohttp.ClientSession,
        url_of: Callable[[str], str | None],
        key: str,
        limits: AgentLimits,
        check: Callable[[], None] = lambda: None,
        epoch: int = 0,
        revoked: Callable[[], frozenset[str]] = frozenset,
    ) -> None:
        self._session = session
        self._url_of = url_of
        self._key = key
        self._limits = limits
        self._check = check
        self._epoch = epoch
        self._revoked = revoked
        #: By host: where its agent was proved to listen; where it was not, and until when that is not tried again.
        self._proven: dict[str, str] = {}
        self._unproven: dict[str, tuple[str, float]] = {}
        #: Hosts that know our epoch.
        self._led: set[str] = set()

    async def host(self, host: str, retry: bool = True) -> HostReport:
        """What the agent says of its host at this moment.

        :param retry: whether to wait for an agent that is away for a moment.
        :raises AgentUnreachable: no usable answer.
        :raises AgentRefused: it answers 4xx, or as another host.
        """
        report = await self._call(HostReport, _Call(host, "GET", "/v1/host"), retry)
        if report.id != host:
            raise AgentRefused(409, f"the agent at {self._proven.get(host)} is {report.id}, not {host}")
        for vm in report.vms:
            try:
                vm.allocation()
            except InvalidField as error:
                raise AgentFailed(f"{host} says of {vm.name} what cannot be: {error}") from error
        # An answer registers no address: a report does.
        return report.model_copy(update={"url": self._url_of(host) or report.url})

    def proven(self, report: HostReport) -> HostReport:
        """A report with the address where its host's agent was proved to listen, if it was: VMs are sent there."""
        return report.model_copy(update={"url": self._proven.get(report.id, report.url)})

    async def command(
        self, host: str, method: str, path: str, command: Command, without: frozenset[str] = frozenset()
    ) -> Operation:
        """Send a command with a body.

        :param without: fields that an agent of an earlier version can do without here.
        :raises AgentUnreachable: whether it arrived is unknown.
        :raises AgentFailed: the agent could not deal with it; whether it did some of it is unknown.
        :raises AgentRefused: it was not taken on.
        """
        return await self._call(Operation, _Call(host, method, path, body=command, without=without))

    async def grant(self, host: str, budget: Budget) -> BudgetStatus:
        """Give a host a budget for its harvest VMs. Raises as `command`; no absence is waited for."""
        return await self._call(BudgetStatus, _Call(host, "PUT", "/v1/budget", body=budget), retry=False)

    async def steady(self, host: str, command: SteadyCommand | None = None) -> SteadyStatus:
        """Steady mode of a host, changed first where a command is given. Raises as `command`; a client waits."""
        method = "GET" if command is None else "PUT"
        return await self._call(SteadyStatus, _Call(host, method, "/v1/steady", body=command), retry=False)

    async def remove(self, host: str, vm: str, command: Command, reason: str, notice_s: float = 0.0) -> Operation:
        """Stop a VM. Raises as `command`; 404 where there is no such VM.

        :param notice_s: how long its guest is told before, in seconds.
        """
        params = {name: str(value) for name, value in command.model_dump().items()} | {"reason": reason}
        params |= {"notice_s": f"{notice_s:g}"} if notice_s else {}
        return await self._call(Operation, _Call(host, "DELETE", f"/v1/vms/{vm}", params))

    async def operation(self, host: str, request_id: str, wait_s: float = 0.0, retry: bool = True) -> Operation | None:
        """The operation of a request; None if the agent knows nothing of it. Raises as `command`.

        :param retry: wait for an agent that is away for a while.
        """
        if host not in self._led:
            # What is done next depends on the answer: a command of our predecessor's must not come any more.
            epoch = EpochCommand(epoch=self._epoch)
            await self._call(EpochCommand, _Call(host, "PUT", "/v1/epoch", body=epoch), retry)
            self._led.add(host)
        try:
            path = f"/v1/operations/{request_id}"
            params = {"wait_s": f"{wait_s:g}"}
            return await self._call(Operation, _Call(host, "GET", path, params, held_s=wait_s), retry)
        except AgentRefused as error:
            if error.status == 404:
                return None
            raise

    async def explain(self, host: str, vm: str) -> Explanation:
        """Why a VM has its size. Raises as `command`; asks once, since a client waits."""
        return await self._call(Explanation, _Call(host, "GET", f"/v1/vms/{vm}/explain"), retry=False)

    async def forecast(self, host: str, vm: str, command: TargetCommand) -> Forecast:
        """What a target would come to. Raises as `command`."""
        return await self._call(Forecast, _Call(host, "PUT", f"/v1/vms/{vm}/target", body=command), retry=False)

    async def templates(self, host: str) -> TemplateList:
        """The templates of a host. Raises as `command`; asks once, since a client waits."""
        return await self._call(TemplateList, _Call(host, "GET", "/v1/templates"), retry=False)

    async def adoptable(self, host: str, domain: str) -> Adoptable:
        """What a domain of a host could be adopted as. Raises as `command`; asks once, since a client waits."""
        call = _Call(host, "GET", "/v1/adoptions", {"domain": domain}, held_s=MEASURED_S)
        return await self._call(Adoptable, call, retry=False)

    async def metrics(self, host: str) -> bytes:
        """The metrics of a host agent, unread. Raises as `command`; asks once: the next scrape comes soon."""
        self._check_may_ask(host)
        call = _Call(host, "GET", sheet.PATH, held_s=METRICS_S)
        raw = await self._raw_at(await self._address(host), call, METRICS_LIMIT)
        if len(raw) >= METRICS_LIMIT:
            raise AgentFailed(f"{host} answers with more than {METRICS_LIMIT} bytes of metrics")
        return raw

    async def set_mode(self, host: str, command: ModeCommand) -> Operation:
        """Change a host's mode. Raises as `command`."""
        return await self._call(Operation, _Call(host, "PUT", "/v1/mode", body=command), retry=False)

    async def follow(
        self, host: str, operation: Operation, limit_s: float, told: Callable[[Operation], None] | None = None
    ) -> Operation | None:
        """Wait for the end of an operation by long polls.

        :param told: called every second or so with how far it is.
        :returns: the final operation; None if the agent has forgotten it.
        :raises AgentUnreachable: it was not final within ``limit_s``, or the agent went away.
        """
        until = time.monotonic() + limit_s
        poll_s = self._limits.poll_s if told is None else min(self._limits.poll_s, TOLD_S)
        current: Operation | None = operation
        while current is not None and current.state is OperationState.RUNNING:
            left = until - time.monotonic()
            if left <= 0:
                raise AgentUnreachable(f"{host} did not end {operation.kind} within {limit_s:g} s")
            current = await self.operation(host, operation.request_id, min(poll_s, left))
            if current is not None and current.state is OperationState.RUNNING:
                if told is not None:
                    told(current)
                # An agent that does not hold its answer back must not be asked in a tight loop.
                await asyncio.sleep(self._limits.pause_s)
        return current

    async def _call(self, answer: type[B], call: _Call, retry: bool = True) -> B:
        """One call, repeated while the agent is away for less than ``absence_s``; an answer of 500 is no absence."""
        until = time.monotonic() + (self._limits.absence_s if retry else 0.0)
        pause_s, sent = self._limits.pause_s, False
        while True:
            try:
                return await self._once(answer, call)
            except AgentRefused as error:
                error.sent_before = sent
                raise
            except AgentUnreachable as error:
                error.sent = sent = sent or error.sent
                if time.monotonic() + pause_s >= until:
                    raise
            await asyncio.sleep(pause_s)
            pause_s = min(pause_s * 2, _LONGEST_PAUSE_S)

    def _check_may_ask(self, host: str) -> None:
        self._check()
        if host in self._revoked():
            raise AgentUnreachable(f"{host} is revoked", sent=False)

    async def _once(self, answer: type[B], call: _Call) -> B:
        self._check_may_ask(call.host)
        found = await self._understood(await self._address(call.host), answer, call)
        if call.host in self._revoked():
            raise AgentUnreachable(f"{call.host} was revoked before it answered")
        return found

    async def _understood(self, url: str, answer: type[B], call: _Call) -> B:
        """One call, without what an agent of an earlier version does not know and can do without."""
        while True:
            try:
                return await self._at(url, answer, call)
            except AgentRefused as error:
                unknown = _unknown_field(error)
                if unknown not in CAN_DO_WITHOUT | call.without or unknown in call.left_out:
                    raise
                log.info(
                    "an agent of an earlier version is not told all", host=call.host, path=call.path, left_out=unknown
                )
                call = replace(call, left_out=call.left_out | {unknown})

    async def _address(self, host: str) -> str:
        """Where a host's agent listens. A new address counts once it has been proved; until then the old one does.

        :raises AgentUnreachable: there is none.
        """
        reported, proven = self._url_of(host), self._proven.get(host)
        if reported is None:
            raise AgentUnreachable(f"{host} is not known", sent=False)
        if reported == proven:
            return reported
        failed, until = self._unproven.get(host, ("", 0.0))
        why = "that was tried a moment ago"
        if failed != reported or time.monotonic() >= until:
            try:
                report = await self._at(reported, HostReport, _Call(host, "GET", "/v1/host"))
                if report.id == host:
                    self._proven[host] = reported
                    return reported
                why = f"it answers as {report.id}"
            except AgentError as error:
                why = str(error)
            self._unproven[host] = reported, time.monotonic() + self._limits.retry_s
            # Once: a host that is off is asked again and again.
            said = log.debug if failed == reported else log.warning
            said("an address is not used", host=host, address=reported, why=why)
        if proven is None:
            raise AgentUnreachable(f"{host} has not proved to be at {reported} ({why})", sent=False)
        return proven

    async def _at(self, url: str, answer: type[B], call: _Call) -> B:
        """One call at an address."""
        raw = await self._raw_at(url, call)
        try:
            return read_of_agent(answer, raw, call.host)
        except ValidationError as error:
            asked = f"{call.method} {call.path}"
            raise AgentUnreachable(f"{call.host} answered {asked} with no {answer.__name__}") from error

    async def _raw_at(self, url: str, call: _Call, most: int = ANSWER_LIMIT) -> bytes:
        """One call at an address, where only the agent of that host gets to see it; the body of what all is well."""
        host, method, path, body = call.host, call.method, call.path, call.body
        headers = {"Authorization": f"Bearer {command_token(self._key, host)}", "Accept": f"{JSON}, {PROBLEM_JSON}"}
        known = {name: value for name, value in call.params.items() if name not in call.left_out}
        options: dict[str, Any] = {"headers": headers, "params": known, "allow_redirects": False}
        # The name that the certificate must have: host ids are pooled apart, whatever their addresses.
        options["server_hostname"] = host
        if body is not None:
            # An agent of an earlier version refuses what it does not know: it is sent what is asked for, no defaults.
            options["data"] = body.model_dump_json(exclude_defaults=True, exclude=set(call.left_out)).encode()
            options["headers"] = {**headers, "Content-Type": "application/json"}
        # No connection after half of the time: then it is certain that nothing was sent.
        answer_s = self._limits.answer_s
        timeout = aiohttp.ClientTimeout(total=call.held_s + answer_s, sock_connect=answer_s / 2)
        # Where a connection breaks aiohttp itself sends what is idempotent once more, over a new one.
        options["trace_request_ctx"] = sent = Sent()
        try:
            with _call_span(host, method, path) as recorded:
                options["headers"] = {**options["headers"], **tracing_headers()}
                async with self._session.request(method, url + path, timeout=timeout, **options) as response:
                    raw = await _read(response, most)
                    status = response.status
                recorded.set(status=status)
                if recorded.is_recorded and (status >= 500 or status in (408, 429)):
                    recorded.failure = f"answered with {status}"
        except (aiohttp.ConnectionTimeoutError, aiohttp.ClientConnectorError) as error:
            raise AgentUnreachable(f"{host} cannot be reached{_reason(error)}", sent=sent.begun) from error
        except TimeoutError as error:
            raise AgentUnreachable(f"{host} did not answer within {timeout.total:g} s", sent=sent.begun) from error
        except (aiohttp.ClientError, ValueError) as error:
            raise AgentUnreachable(f"{host} cannot be reached{_reason(error)}") from error
        if status >= 500 and status != 503:
            # A fault of the agent's: it is there, and the same question gets the same answer.
            raise AgentFailed(f"{host} failed at {method} {path} with {status}: {_problem(raw)}")
        if status in (408, 429, 503):
            # About this moment, not about the command.
            raise AgentUnreachable(f"{host} answered {status}: {_problem(raw)}")
        if status >= 300:
            raise AgentRefused(status, f"{host} refused {method} {path}: {_problem(raw)}", problem_in(status, raw))
        return raw


def _call_span(host: str, method: str, path: str) -> Span:
    """Of what is only read there is none: operations are asked after again and again."""
    return NO_SPAN if method == "GET" else span(f"call {method}", Kind.CLIENT, host=host, path=path)


def _unknown_field(error: AgentRefused) -> str | None:
    """What an agent refused since it does not know it."""
    said = error.problem
    if error.status != 400 or said is None:
        return None
    if " is no query parameter of " in said.detail:
        return said.field
    return next((error.field for error in said.errors if error.code == "unknown"), None)


def _reason(error: Exception) -> str:
    """Why there is no connection; what a certificate lacks in words."""
    if isinstance(error, aiohttp.ClientConnectorCertificateError):
        return f": {error.certificate_error}"
    return f": {error}" if isinstance(error, aiohttp.ClientSSLError) else f" ({type(error).__name__})"


async def _read(response: aiohttp.ClientResponse, most: int) -> bytes:
    """The whole body, which comes in as many pieces as the network likes; cut off at the limit."""
    pieces, size = [], 0
    async for piece in response.content.iter_any():
        pieces.append(piece)
        size += len(piece)
        if size > most:
            break
    return b"".join(pieces)[:most]


def _problem(raw: bytes) -> str:
    """The sentence of an error's body, cut short where it is none of ours."""
    problem = problem_in(400, raw)
    said = problem.detail if problem is not None else cleaned_text(raw[:200].decode(errors="replace"))
    return said or "no reason given"
