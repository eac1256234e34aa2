"""The client of the host agents' REST API: every call has a time limit, every repetition is harmless.

Commands are idempotent by request id, so a call whose answer was lost is simply sent again until the agent has been
away for too long.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping
from typing import Any, Final, TypeVar

import aiohttp
from pydantic import BaseModel, ValidationError

from cluster_manager.errors import AgentRefused, AgentUnreachable
from cluster_manager.settings import AgentLimits
from deflation.budget_messages import Budget, BudgetStatus
from deflation.explanations import Explanation, Forecast
from deflation.lifecycle_messages import TemplateList
from deflation.messages import Command, HostReport, ModeCommand, Operation, OperationState, Problem, TargetCommand

B = TypeVar("B", bound=BaseModel)

#: No answer of an agent is larger; more is not read.
ANSWER_LIMIT: Final = 4 * 1024 * 1024
_LONGEST_PAUSE_S: Final = 2.0


class Agents:
    """All host agents, by host id.

    :param url_of: where a host's agent listens now; None for a host that is not known.
    :param token: what the agents ask for.
    :param check: raises LostLeadership where this manager must not speak to agents (any more).
    :param epoch: of this manager; an agent that answers it lets no command of an earlier one in any more.
    """

    def __init__(
        self,
        session: aiohttp.ClientSession,
        url_of: Callable[[str], str | None],
        token: str,
        limits: AgentLimits,
        check: Callable[[], None] = lambda: None,
        epoch: int = 0,
    ) -> None:
        self._session = session
        self._url_of = url_of
        self._headers = {"Authorization": f"Bearer {token}"}
        self._limits = limits
        self._check = check
        self._epoch = epoch

    async def host(self, host: str, patient: bool = True) -> HostReport:
        """What the agent says of its host at this moment.

        :param patient: whether to wait for an agent that is away for a moment.
        :raises AgentUnreachable: no usable answer.
        :raises AgentRefused: it answers 4xx, or as another host.
        """
        report = await self._call(HostReport, host, "GET", "/v1/host", patient=patient)
        if report.id != host:
            raise AgentRefused(409, f"the agent at {report.url} is {report.id}, not {host}")
        return report

    async def command(self, host: str, method: str, path: str, command: Command) -> Operation:
        """Send a command with a body.

        :raises AgentUnreachable: whether it arrived is unknown.
        :raises AgentRefused: it was not taken on.
        """
        return await self._call(Operation, host, method, path, body=command)

    async def grant(self, host: str, budget: Budget) -> BudgetStatus:
        """Give a host a budget for its harvest VMs. Raises as :meth:`command`; no absence is waited for."""
        return await self._call(BudgetStatus, host, "PUT", "/v1/budget", body=budget, patient=False)

    async def remove(self, host: str, vm: str, command: Command, reason: str) -> Operation:
        """Stop a VM. Raises as :meth:`command`; 404 where there is no such VM."""
        params = {name: str(value) for name, value in command.model_dump().items()} | {"reason": reason}
        return await self._call(Operation, host, "DELETE", f"/v1/vms/{vm}", params=params)

    async def operation(self, host: str, request_id: str, wait_s: float = 0.0) -> Operation | None:
        """The operation of a request; None if the agent knows nothing of it. Raises as :meth:`command`."""
        try:
            path = f"/v1/operations/{request_id}"
            params = {"wait_s": f"{wait_s:g}", "epoch": str(self._epoch)}
            return await self._call(Operation, host, "GET", path, params=params, held_s=wait_s)
        except AgentRefused as error:
            if error.status == 404:
                return None
            raise

    async def explain(self, host: str, vm: str) -> Explanation:
        """Why a VM has its size. Raises as :meth:`command`; asks once, since somebody waits."""
        return await self._call(Explanation, host, "GET", f"/v1/vms/{vm}/explain", patient=False)

    async def forecast(self, host: str, vm: str, command: TargetCommand) -> Forecast:
        """What a target would come to. Raises as :meth:`command`."""
        return await self._call(Forecast, host, "PUT", f"/v1/vms/{vm}/target", body=command, patient=False)

    async def templates(self, host: str) -> TemplateList:
        """The templates of a host. Raises as :meth:`command`; asks once, since somebody waits."""
        return await self._call(TemplateList, host, "GET", "/v1/templates", patient=False)

    async def set_mode(self, host: str, command: ModeCommand) -> Operation:
        """Change a host's mode. Raises as :meth:`command`."""
        return await self._call(Operation, host, "PUT", "/v1/mode", body=command, patient=False)

    async def follow(self, host: str, operation: Operation, limit_s: float) -> Operation | None:
        """Wait for the end of an operation by long polls.

        :returns: the final operation; None if the agent has forgotten it.
        :raises AgentUnreachable: it was not final within ``limit_s``, or the agent went away.
        """
        until = time.monotonic() + limit_s
        current: Operation | None = operation
        while current is not None and current.state is OperationState.RUNNING:
            left = until - time.monotonic()
            if left <= 0:
                raise AgentUnreachable(f"{host} did not end {operation.kind} within {limit_s:g} s")
            current = await self.operation(host, operation.request_id, min(self._limits.poll_s, left))
            if current is not None and current.state is OperationState.RUNNING:
                # An agent that does not hold its answer back must not be asked in a tight loop.
                await asyncio.sleep(self._limits.pause_s)
        return current

    async def _call(
        self,
        answer: type[B],
        host: str,
        method: str,
        path: str,
        *,
        params: Mapping[str, str] | None = None,
        body: BaseModel | None = None,
        held_s: float = 0.0,
        patient: bool = True,
    ) -> B:
        """One call, repeated while the agent is away for less than ``absence_s``."""
        until = time.monotonic() + (self._limits.absence_s if patient else 0.0)
        pause_s, sent = self._limits.pause_s, False
        while True:
            try:
                return await self._once(answer, host, method, path, params, body, held_s)
            except AgentRefused as error:
                error.sent_before = sent
                raise
            except AgentUnreachable as error:
                error.sent = sent = sent or error.sent
                if time.monotonic() + pause_s >= until:
                    raise
            await asyncio.sleep(pause_s)
            pause_s = min(pause_s * 2, _LONGEST_PAUSE_S)

    async def _once(
        self,
        answer: type[B],
        host: str,
        method: str,
        path: str,
        params: Mapping[str, str] | None,
        body: BaseModel | None,
        held_s: float,
    ) -> B:
        self._check()
        url = self._url_of(host)
        if url is None:
            raise AgentUnreachable(f"{host} is not known", sent=False)
        options: dict[str, Any] = {"headers": self._headers, "params": params, "allow_redirects": False}
        if body is not None:
            options["data"] = body.model_dump_json().encode()
            options["headers"] = {**self._headers, "Content-Type": "application/json"}
        # No connection after half of the time: then it is certain that nothing was sent.
        answer_s = self._limits.answer_s
        timeout = aiohttp.ClientTimeout(total=held_s + answer_s, sock_connect=answer_s / 2)
        try:
            async with self._session.request(method, url + path, timeout=timeout, **options) as response:
                raw = await _read(response)
                status = response.status
        except (aiohttp.ConnectionTimeoutError, aiohttp.ClientConnectorError) as error:
            raise AgentUnreachable(f"{host} cannot be reached ({type(error).__name__})", sent=False) from error
        except TimeoutError as error:
            raise AgentUnreachable(f"{host} did not answer within {timeout.total:g} s") from error
        except aiohttp.ClientError as error:
            why = f": {error}" if isinstance(error, aiohttp.ClientSSLError) else f" ({type(error).__name__})"
            raise AgentUnreachable(f"{host} cannot be reached{why}") from error
        if status >= 500 or status in (408, 429):
            # The last two are about this moment, not about the command.
            raise AgentUnreachable(f"{host} answered {status}: {_problem(raw)}")
        if status >= 300:
            raise AgentRefused(status, f"{host} refused {method} {path}: {_problem(raw)}", _parsed(raw))
        try:
            return answer.model_validate_json(raw)
        except ValidationError as error:
            raise AgentUnreachable(f"{host} answered {method} {path} with no {answer.__name__}") from error


async def _read(response: aiohttp.ClientResponse) -> bytes:
    """The whole body, which comes in as many pieces as the network likes; cut off at the limit."""
    pieces, size = [], 0
    async for piece in response.content.iter_any():
        pieces.append(piece)
        size += len(piece)
        if size > ANSWER_LIMIT:
            break
    return b"".join(pieces)[:ANSWER_LIMIT]


def _problem(raw: bytes) -> str:
    """The sentence of an error's body, cut short where it is none of ours."""
    problem = _parsed(raw)
    return problem.error if problem is not None else raw[:200].decode(errors="replace") or "no reason given"


def _parsed(raw: bytes) -> Problem | None:
    try:
        return Problem.model_validate_json(raw)
    except ValidationError:
        return None
