"""Route of the metrics: what the agent knows at this moment, for Prometheus."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Final

from aiohttp import web

from ebbtide.rest.descriptions import describe
from ebbtide.rest.metrics import sheet as sheets
from ebbtide.rest.metrics.stalls import LoopWatch
from ebbtide.rest.parameters import check_parameters
from ebbtide.rest.tls import first_end
from hostagent.api.forms import AGENT
from hostagent.api.metric_families import HostFacts, Machine, VMFacts, put_machine, sheet_of
from hostagent.limits.footprints import host_swap
from hostagent.operations.agent import Agent

LOOP: Final = web.AppKey("loop", LoopWatch)

routes = web.RouteTableDef()


@routes.get(sheets.PATH)
@describe("The agent's metrics, those of its VMs and what their guests say", tag="agent", answers={200: sheets.ANSWER})
async def metrics(request: web.Request) -> web.Response:
    check_parameters(request)
    agent = request.app[AGENT]
    sheet = sheet_of(facts_of(agent))
    sheet.put_common(request.app[LOOP])
    return sheets.answer(await asyncio.to_thread(_written, sheet, agent.host.directories))


def facts_of(agent: Agent) -> HostFacts:
    """What an agent knows now; nobody is asked for it."""
    host, operations, now = agent.host, agent.requests.operations, asyncio.get_running_loop().time()
    vms = []
    # One pass over the VMs: a report makes the same statuses.
    report = host.report()
    for status in report.vms:
        vm = host.vms[status.name]
        said = vm.pressure.said
        online = vm.link.online
        vms.append(
            VMFacts(
                status=status,
                resident_mib=vm.resident_mib if vm.running else None,
                tally=host.tallies.of(status.name),
                said=(said[0], now - said[1]) if said is not None and vm.running else None,
                online=len(online) if online is not None and vm.running and status.guest_connected else None,
            )
        )
    return HostFacts(
        report=report,
        vms=tuple(vms),
        tally=host.tallies.whole,
        decisions=host.history.made,
        operations=operations.under_way(),
        durations=operations.durations,
        reports=host.reports,
        calls=host.hypervisor.calls,
        changes=len(host.journal.changes),
        epoch=host.journal.epoch,
        available_mib=host.available_mib,
        untouched_mib=host.untouched_mib(),
        trimmed_mib=host.steady_taken_mib,
        given_back_mib=host.steady_given_mib,
        certificate_end=end.timestamp() if (end := first_end(agent.certificate())) is not None else None,
        certificate_begin=_begin(agent.certificate()),
    )


def _begin(certificates: Sequence[bytes]) -> float | None:
    """When the first of these, PEM, began to be valid; None where none can be read."""
    if not certificates:
        return None  # Over plain HTTP the import would cost the agent its memory for nothing.
    try:
        from cryptography import x509

        return x509.load_pem_x509_certificate(certificates[0]).not_valid_before_utc.timestamp()
    except (ImportError, ValueError):
        return None


def _written(sheet: sheets.Sheet, directories: Mapping[str, Path]) -> bytes:
    """Blocks."""
    swap, rooms = host_swap(), {}
    for name, directory in directories.items():
        # One that is not there has no room to tell of.
        with suppress(OSError):
            usage = shutil.disk_usage(directory)
            rooms[name] = float(usage.total), float(usage.free)
    put_machine(sheet, Machine((swap.total_mib * sheets.MIB, swap.free_mib * sheets.MIB), rooms))
    return sheet.text()
