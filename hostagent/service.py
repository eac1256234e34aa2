"""Runs an agent: its API, its reports to the manager, its logs."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import sys
from pathlib import Path
from typing import Any, TextIO, cast

import structlog
from aiohttp import web

from hostagent.agent import Agent
from hostagent.api import make_app
from hostagent.eternal import guarded
from hostagent.reporter import Reporter

log = structlog.get_logger()


async def serve(
    agent: Agent,
    address: str,
    port: int,
    token_file: Path,
    manager: str | None,
    manager_token_file: Path | None,
    stop: asyncio.Event,
) -> None:
    """Serve an agent's API and report to the manager until ``stop`` is set."""
    token = await asyncio.to_thread(read_token, token_file)
    manager_token = await asyncio.to_thread(read_token, manager_token_file or token_file)
    await agent.start()
    runner = web.AppRunner(make_app(agent, token), handle_signals=False, access_log=None)
    await runner.setup()
    reporting: asyncio.Task[None] | None = None
    try:
        await web.TCPSite(runner, address, port).start()
        if manager is not None:
            reporter = Reporter(agent.host, manager, manager_token)
            reporting = asyncio.create_task(guarded(reporter.run()), name="reporter")
        log.info("ready", host=agent.host.slice.host_id, listen=f"{address}:{port}", vms=len(agent.host.vms))
        await stop.wait()
    finally:
        if reporting is not None:
            reporting.cancel()
            await asyncio.gather(reporting, return_exceptions=True)
        await runner.cleanup()
        await agent.close()
        log.info("stopped", host=agent.host.slice.host_id)


def read_token(path: Path) -> str:
    """:raises ValueError: the file is empty."""
    token = path.read_text().strip()
    if not token:
        raise ValueError(f"the token file {path} is empty")
    return token


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
