"""Serving: the manager's parts put together as its options say, until a signal asks to stop."""

from __future__ import annotations

import asyncio
import datetime
import signal

import structlog

from cluster_manager.api import metrics
from cluster_manager.api.app import make_app
from cluster_manager.api.forms import MANAGER
from cluster_manager.inventory import certificate_end
from cluster_manager.manager import Manager
from cluster_manager.options import ManagerOptions
from cluster_manager.settings import Settings
from cluster_manager.store.periodic import Periodic
from ebbtide.rest.gate import Gate
from ebbtide.rest.listener import holding
from ebbtide.rest.metrics.port import ADDRESS, metrics_port
from ebbtide.rest.options import Given
from ebbtide.rest.reload import reloading
from ebbtide.rest.supervision import supervised
from ebbtide.tracing.exporting import exporting

log = structlog.get_logger()


async def serve(settings: Settings, gate: Gate, given: Given[ManagerOptions] | None = None) -> None:
    """Serve until a signal asks to stop; then close the server, then the plans, then the store.

    :raises ManagerError: the store cannot be used.
    :raises OSError: the address is taken.
    """
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    manager = Manager(settings, freezes_memory=True)
    app = make_app(manager, gate.access)
    serving = gate.serve(app, settings.host, settings.port, shutdown_timeout_s=2.0)

    async def warn() -> None:
        now = datetime.datetime.now(datetime.UTC)
        await asyncio.to_thread(certificate_end.warn_of_end, settings.certificates(), now)

    failed = "it was not looked when a certificate ends"
    ends = Periodic("warns that a certificate ends", warn, certificate_end.LOOKED_EVERY_S, failed)
    tracing, alone = (given.options.tracing, given.options.metrics_port) if given is not None else (False, None)
    async with (
        exporting(tracing, "ebb-manager"),
        holding(ADDRESS, alone) as held,
        serving as listener,
        metrics_port(held, "manager", metrics.metrics, {MANAGER: manager, metrics.LOOP: app[metrics.LOOP]}),
        reloading(gate, given),
    ):
        log.info("listening", url=f"{gate.scheme}://{settings.host}:{listener.port}")
        async with app[metrics.LOOP].watching(), supervised(manager.sentence):
            ends.start()
            try:
                await stop.wait()
                log.info("stopping", why="a signal asked for it")
            finally:
                await ends.stop()
