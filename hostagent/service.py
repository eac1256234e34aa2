"""Service around an agent: its API, its reports to the manager; and giving back all that it took."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import uuid
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final
from urllib.parse import urlsplit

import structlog
from aiohttp import web

from ebbtide.deflation.modes import HostMode
from ebbtide.messages.commands import ModeCommand
from ebbtide.messages.operations import OperationState
from ebbtide.rest.errors import AccessError
from ebbtide.rest.gate import Gate
from ebbtide.rest.listener import holding
from ebbtide.rest.metrics.port import ADDRESS, metrics_port
from ebbtide.rest.options import Given
from ebbtide.rest.reload import reloading
from ebbtide.rest.settings import AccessSettings
from ebbtide.rest.supervision import supervised
from hostagent.access import gate_of, manager_token
from hostagent.api import metrics
from hostagent.api.app import make_app
from hostagent.api.forms import AGENT
from hostagent.control.renewal import Renewing
from hostagent.control.reporter import Reporter
from hostagent.control.succession import Succession
from hostagent.errors import WAITS, HostAgentError
from hostagent.operations.agent import Agent
from hostagent.options import MANAGER_NAME
from hostagent.supervised_task import guarded

#: Before libvirt is asked again that does not answer at the start, in seconds: the first pause, which doubles.
FIRST_PAUSE_S: Final = 2.0
LONGEST_PAUSE_S: Final = 15.0

log = structlog.get_logger()


class _Stopped(Exception):
    """The agent is to stop, and has not started yet."""


class _Start:
    """Start of an agent, which waits for a hypervisor that does not answer, and what systemd is told from then on.

    Meanwhile nothing is served or reported: without its VMs the host would look empty. Systemd hears that it is ready
    all the same: no limit of time ends the wait, and nobody who starts it waits along.
    """

    def __init__(self, agent: Agent, stop: asyncio.Event) -> None:
        self._agent = agent
        self._stop = stop
        self._why = ""
        self._pause_s = FIRST_PAUSE_S
        #: At its end systemd is told of the end.
        self.told = contextlib.AsyncExitStack()
        self._tells = False

    async def run(self, _: web.Application) -> None:
        """Start the agent. Raises `_Stopped`: it is to stop meanwhile."""
        starting = asyncio.create_task(self._agent.start(self.wait), name="start")
        stopping = asyncio.create_task(self._stop.wait(), name="stop")
        try:
            # A libvirt that hangs is not waited for: what it has been asked is as after a kill.
            await asyncio.wait((starting, stopping), return_when=asyncio.FIRST_COMPLETED)
        finally:
            stopping.cancel()
            if not starting.done():
                starting.cancel()
                await asyncio.gather(starting, return_exceptions=True)
        if starting.cancelled():
            raise _Stopped
        starting.result()
        if self._why:
            log.info("libvirt answers: the agent starts", host=self._agent.host.slice.host_id)
        self._why = ""

    async def wait(self, why: str) -> None:
        """Wait before the hypervisor is asked again, ever longer. Raises `_Stopped`."""
        why = " ".join(why.split())
        if why != self._why:
            log.warning("libvirt does not answer: the agent waits for it, and reports nothing meanwhile", why=why)
        self._why = why
        await self.tell()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self._pause_s):
                await self._stop.wait()
        if self._stop.is_set():
            raise _Stopped
        self._pause_s = min(self._pause_s * 2, LONGEST_PAUSE_S)

    async def tell(self) -> None:
        """Begin to tell systemd, unless that has begun."""
        if not self._tells:
            self._tells = True
            await self.told.enter_async_context(supervised(self._status))

    def _status(self) -> str:
        if self._why:
            return f"{WAITS}: {self._why}"
        return f"{self._agent.host.modes.sentence}; {len(self._agent.host.vms)} VMs"


async def serve(
    agent: Agent,
    address: str,
    port: int,
    token_file: Path,
    manager: str | Sequence[str] | None,
    manager_token_file: Path | None,
    stop: asyncio.Event,
    access: AccessSettings = AccessSettings(),  # noqa: B008 - frozen
    manager_name: str = MANAGER_NAME,
    given: Given[Any] | None = None,
) -> None:
    """Serve an agent's API and report to the manager until ``stop`` is set.

    :param manager_name: with mutual TLS, the common name of all callers.
    :param given: options to be read again on SIGHUP.
    :raises AccessError: tokens or certificates that cannot be used.
    :raises OSError: an address is taken; nothing was begun.
    """
    own_token = await asyncio.to_thread(manager_token, token_file, manager, manager_token_file)
    gate = await asyncio.to_thread(gate_of, access, token_file, manager_name)
    own_tasks: list[asyncio.Task[None]] = []
    if access.own is not None:
        agent.certificate = lambda: gate.certificates()[:1]
    app, start = make_app(agent, gate.access), _Start(agent, stop)

    async def hang_up(_: web.Application) -> None:
        agent.requests.operations.hang_up()

    app.on_startup.append(start.run)
    app.on_shutdown.append(hang_up)
    try:
        async with (
            holding(ADDRESS, given.options.metrics_port if given is not None else None) as alone,
            # In front: serving begins when libvirt answers, which may take days.
            reloading(gate, given),
            gate.serve(app, address, port, shutdown_timeout_s=60.0),
            metrics_port(alone, "host agent", metrics.metrics, {AGENT: agent, metrics.LOOP: app[metrics.LOOP]}),
        ):
            if manager is not None:
                try:
                    own_token = await asyncio.to_thread(manager_token, token_file, manager, manager_token_file)
                except AccessError as error:
                    log.error("the token for reports stays that of the start", why=str(error))
                reporter = Reporter(agent.host, manager, own_token, gate.calls)
                own_tasks.append(asyncio.create_task(guarded(reporter.run), name="reporter"))
                gate.on_change = reporter.reconnect
                looking = _renewing(agent, address, access, manager, own_token, gate, manager_name)
                if looking is not None:
                    own_tasks.append(asyncio.create_task(guarded(looking.run), name="renewal of the certificate"))
            # What is there now stays: it is not to be gone through with each full collection.
            gc.collect()
            gc.freeze()
            log.info("ready", host=agent.host.slice.host_id, listen=f"{address}:{port}", vms=len(agent.host.vms))
            async with app[metrics.LOOP].watching(), start.told:
                await start.tell()
                await stop.wait()
    except _Stopped:
        log.info("stopped while it waited for libvirt")
    finally:
        await start.told.aclose()
        # Not before the server is down: while its last requests take their time the host is not silent.
        for task in own_tasks:
            task.cancel()
        await asyncio.gather(*own_tasks, return_exceptions=True)
        await agent.close()
        log.info("stopped", host=agent.host.slice.host_id)


def _renewing(
    agent: Agent,
    address: str,
    access: AccessSettings,
    manager: str | Sequence[str],
    token: str,
    gate: Gate,
    manager_name: str,
) -> Renewing | None:
    """What renews this host's certificate; None: it has none."""
    if access.own is None or gate.calls is None:
        return None
    part, managers = agent.host.slice, [manager] if isinstance(manager, str) else manager
    tls, apply = gate.calls, gate.read_again
    succession: Succession | None = None
    # Where the managers' certificates come from elsewhere, or the host has another one for its calls, it is by hand.
    if access.client_ca is not None and access.server_ca is None and access.caller is None:
        succession = Succession(access.client_ca, access.own, managers, tls, apply, manager_name)
    at = urlsplit(part.url).hostname or address
    return Renewing(part.host_id, at, access.own, managers, token, tls, apply, succession=succession)


async def give_back(agent: Agent, within_s: float = 300.0) -> str:
    """Undo what was taken from every VM and leave the host off, without a server; the agent is closed then.

    :returns: one sentence on what was done.
    :raises HostAgentError: something is left after ``within_s`` seconds; it says what.
    """
    modes, operations = agent.host.modes, agent.requests.operations
    await agent.start()
    try:
        command = ModeCommand(
            request_id=f"release-{uuid.uuid4().hex[:12]}",
            epoch=agent.host.journal.epoch,
            mode=HostMode.OFF,
            reason="ebb-hostagent release",
        )
        begun = await agent.mode_commands.set(command)
        try:
            async with asyncio.timeout(within_s):
                await operations.ended(begun.request_id)
                ended = await operations.get(begun.request_id)
                if ended is not None and ended.state is OperationState.FAILED and not modes.unfinished:
                    raise HostAgentError(f"it failed before anything was tried: {ended.sentence}")
                # Mode off goes on by itself, and has no event for its end.
                while modes.unfinished:  # noqa: ASYNC110
                    await asyncio.sleep(1.0)
        except TimeoutError:
            left = "; ".join(modes.unfinished) or "it has not ended"
            raise HostAgentError(f"after {within_s:g} s there is something left: {left}") from None
        return f"{modes.sentence}; nothing is taken from its {len(agent.host.vms)} VMs"
    finally:
        await agent.close()
