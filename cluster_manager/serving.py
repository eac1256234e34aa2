"""Serving: the manager's parts put together as its options say, until a signal asks to stop."""

from __future__ import annotations

import asyncio
import datetime
import signal
from collections.abc import Iterable
from typing import Final

import structlog

from cluster_manager.api import metrics
from cluster_manager.api.app import make_app
from cluster_manager.api.forms import MANAGER
from cluster_manager.manager import Manager
from cluster_manager.options import ManagerOptions
from cluster_manager.settings import Settings
from cluster_manager.store.periodic import Periodic
from cluster_manager.store.tasks import TaskNote
from ebbtide.rest.gate import Gate
from ebbtide.rest.listener import holding
from ebbtide.rest.metrics.port import ADDRESS, metrics_port
from ebbtide.rest.options import Given
from ebbtide.rest.reload import reloading
from ebbtide.rest.supervision import supervised
from ebbtide.rest.tls import first_end
from ebbtide.tracing.exporting import exporting

log = structlog.get_logger()

#: Before a certificate ends; the alert EbbtideCertificateEnds has the same.
WARNED_BEFORE: Final = datetime.timedelta(days=30)
#: Seconds between two looks at when it ends.
LOOKED_EVERY_S: Final = 86_400.0


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
    failed = "that a certificate ends was not told"
    ends = Periodic("warns that a certificate ends", lambda: tell_of_end(manager), LOOKED_EVERY_S, failed)
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


async def tell_of_end(manager: Manager) -> None:
    """Warn of the end of a certificate; who leads tells webhooks, too.

    :raises StoreError: they are not told.
    """
    now = datetime.datetime.now(datetime.UTC)
    told = await asyncio.to_thread(warn_of_end, manager.settings.certificates(), now)
    if told is not None and manager.leadership.leads():
        await manager.store.save_tasks((), [TaskNote("certificate-ends", None, told)])


def warn_of_end(certificates: Iterable[bytes], now: datetime.datetime) -> str | None:
    """Say in the log that the manager's certificate or the CA's ends soon: neither renews itself.

    :returns: the same as a sentence with its time; None: there is nothing to say.
    """
    end = first_end(certificates)
    if end is None or end - now >= WARNED_BEFORE:
        return None
    ends, then = end.isoformat(timespec="seconds"), "then no host and no client reaches it any more"
    days = round((end - now).total_seconds() / 86_400, 1)
    log.warning(f"the manager's certificate, or the CA's, ends soon: {then}", ends=ends, days=days)
    return f"the manager's certificate, or the CA's, ends at {ends}: {then}"
