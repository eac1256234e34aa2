"""Service around an agent: its API, its reports to the manager, its logs."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TextIO, cast

import structlog

from ebbtide.rest.access import Certificates
from ebbtide.rest.errors import AccessError
from ebbtide.rest.gate import Gate, reloading
from ebbtide.rest.roles import Role
from ebbtide.rest.settings import AccessSettings
from ebbtide.rest.supervision import supervised
from ebbtide.rest.tokens import principal, read_token
from hostagent.api.app import make_app
from hostagent.control.reporter import Reporter
from hostagent.operations.agent import Agent
from hostagent.options import MANAGER_NAME
from hostagent.supervised_task import guarded

log = structlog.get_logger()


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
) -> None:
    """Serve an agent's API and report to the manager until ``stop`` is set.

    :param manager_name: with mutual TLS, the common name of all callers.
    :raises AccessError: tokens or certificates that cannot be used.
    """
    token = await asyncio.to_thread(read_token, token_file)
    manager_token = ""
    if manager is not None:
        if manager_token_file is None:
            raise AccessError("a manager needs a token of its own")
        manager_token = await asyncio.to_thread(read_token, manager_token_file)
    if manager_token == token:
        raise AccessError("--token-file and --manager-token-file hold the same token: there is one for each direction")
    own = [principal("token-file", Role.MANAGER, token)]
    gate = await asyncio.to_thread(Gate, access, own, Certificates(name=manager_name), True)
    await agent.start()
    reporting: asyncio.Task[None] | None = None
    try:
        app = make_app(agent, gate.access)
        async with gate.serve(app, address, port, shutdown_timeout_s=60.0), reloading(gate):
            try:
                if manager is not None:
                    reporter = Reporter(agent.host, manager, manager_token, gate.calls)
                    reporting = asyncio.create_task(guarded(reporter.run), name="reporter")
                log.info("ready", host=agent.host.slice.host_id, listen=f"{address}:{port}", vms=len(agent.host.vms))
                async with supervised(lambda: f"{agent.host.modes.sentence}; {len(agent.host.vms)} VMs"):
                    await stop.wait()
            finally:
                if reporting is not None:
                    reporting.cancel()
                    await asyncio.gather(reporting, return_exceptions=True)
    finally:
        await agent.close()
        log.info("stopped", host=agent.host.slice.host_id)


class _Log:
    """Standard error, as far as it takes something: a full disk under the log is no reason to stop working."""

    def write(self, text: str) -> None:
        with contextlib.suppress(OSError):
            sys.stderr.write(text)

    def flush(self) -> None:
        with contextlib.suppress(OSError):
            sys.stderr.flush()


def configure_logs(as_json: bool, verbose: bool) -> None:
    """Key-value logs on standard error."""
    renderer: Any = structlog.processors.JSONRenderer() if as_json else structlog.dev.ConsoleRenderer(colors=False)
    structlog.configure(
        processors=[
            structlog.contextvars.merge_contextvars,
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso"),
            structlog.processors.format_exc_info,
            renderer,
        ],
        wrapper_class=structlog.make_filtering_bound_logger(logging.DEBUG if verbose else logging.INFO),
        logger_factory=structlog.PrintLoggerFactory(cast(TextIO, _Log())),
    )
