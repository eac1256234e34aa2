"""Routes of the metrics: the manager's own, those of a host's agent, and where all of them are."""

from __future__ import annotations

import asyncio
import shutil
from collections import Counter
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Final

from aiohttp import web
from pydantic import Field, RootModel

from cluster_manager.api.forms import MANAGER, answer
from cluster_manager.api.metric_families import MANAGER as OF_MANAGER
from cluster_manager.api.metric_families import OneHost, TermFacts, declared, put_first_of, put_hosts, put_term
from cluster_manager.errors import DISK_FULL
from cluster_manager.inventory.hosts import Host
from cluster_manager.manager import Manager
from cluster_manager.settings import Settings
from ebbtide.messages.common import Body, Name
from ebbtide.rest.descriptions import Parameter, describe
from ebbtide.rest.metrics import sheet as sheets
from ebbtide.rest.metrics.stalls import LoopWatch
from ebbtide.rest.parameters import check_parameters
from ebbtide.rest.tls import first_end

LOOP: Final = web.AppKey("loop", LoopWatch)
TARGETS: Final = "/v1/prometheus/targets"

routes = web.RouteTableDef()


class TargetGroup(Body):
    """Where the metrics of one host are, as Prometheus' HTTP service discovery reads it."""

    targets: tuple[str, ...] = Field(description="the address of this manager, which passes the metrics on")
    labels: Mapping[str, str] = Field(description="path and scheme, and the host that all its series are labelled with")


class TargetGroups(RootModel[tuple[TargetGroup, ...]]):
    """GET /v1/prometheus/targets: a group for each host."""


@routes.get(sheets.PATH)
@describe("The manager's metrics; a standby tells that it is one", tag="manager", answers={200: sheets.ANSWER})
async def metrics(request: web.Request) -> web.Response:
    check_parameters(request)
    manager = request.app[MANAGER]
    sheet = sheets.Sheet(declared())
    sheet.put_common(request.app[LOOP])
    leads = manager.leadership.leads()
    sheet.put(OF_MANAGER.leader, leads)
    sheet.put(OF_MANAGER.epoch, manager.epoch)
    sheet.put(OF_MANAGER.disk_full, manager.leadership.why == DISK_FULL)
    hosts: list[tuple[Host, str, str]] | None = None
    if leads:
        put_term(sheet, term_facts(manager))
        revoked = manager.revoked()
        # One that is revoked is silent to clients; but it stays so until it is forgotten, and that is no alarm.
        states = {id_: "revoked" if id_ in revoked else manager.hosts.state(id_)[0] for id_ in manager.hosts.ids()}
        hosts = [(host, id_, states[id_]) for id_, host in manager.hosts.items()]
    else:
        put_first_of(sheet, {}, {webhook.name: {} for webhook in manager.settings.webhooks})
    return sheets.answer(await asyncio.to_thread(_written, sheet, hosts, manager.now(), manager.settings))


@routes.get("/v1/hosts/{id}/metrics")
@describe(
    "The metrics of a host's agent, passed on as they are",
    tag="hosts",
    path=(Parameter("id", Name, "the host's id"),),
    answers={200: sheets.ANSWER},
    problems=(404,),
)
async def host_metrics(request: web.Request) -> web.Response:
    check_parameters(request)
    return sheets.answer(await request.app[MANAGER].agent_proxy.metrics(request.match_info["id"]))


@routes.get(TARGETS)
@describe("Where the metrics of all hosts are, for http_sd_config", tag="hosts", answers={200: TargetGroups})
async def targets(request: web.Request) -> web.Response:
    check_parameters(request)
    manager = request.app[MANAGER]
    revoked = manager.revoked()
    groups = (
        TargetGroup(
            # Where it has asked just now: whatever others call this manager, that way it is reached.
            targets=(request.host,),
            labels={
                "__scheme__": request.scheme,
                "__metrics_path__": f"/v1/hosts/{host}/metrics",
                "host": host,
                "instance": host,
            },
        )
        for host in sorted(manager.hosts.ids() - revoked)
    )
    return answer(TargetGroups(tuple(groups)))


def term_facts(manager: Manager) -> TermFacts:
    """What is counted while this manager leads."""
    operations, tasks = manager.operations, manager.tasks
    machines = tuple(tasks.machines.values())
    return TermFacts(
        reports=manager.reports,
        operations=operations.under_way(),
        durations=operations.totals.durations,
        preempted=operations.totals.preempted,
        moves=operations.rebalancing(),
        waiting=operations.waiting.since(),
        calibration=manager.core_changes.calibration(),
        tasks=Counter(task.phase.value for task in tasks.unfinished.values()),
        ended=tasks.ended,
        killed=tasks.killed,
        engine_up=None if tasks.kind == "none" else tasks.works,
        machines=Counter("down" if not one.up else "drained" if one.drained else "up" for one in machines),
        usable_cores=sum(one.usable_cores for one in machines if one.up),
        outboxes=tuple(manager.alerts.outboxes.values()),
    )


def _written(sheet: sheets.Sheet, hosts: list[tuple[Host, str, str]] | None, now: float, settings: Settings) -> bytes:
    """Blocks: reports of an earlier run are read, and there may be thousands. A standby knows of no hosts."""
    if hosts is not None:
        put_hosts(sheet, [OneHost(id_, state, max(now - host.seen_at, 0.0), host.report) for host, id_, state in hosts])
    if isinstance(settings.database, Path):
        with suppress(OSError):
            sheet.put(OF_MANAGER.disk_free, float(shutil.disk_usage(settings.database.parent).free))
    if (end := first_end(settings.certificates())) is not None:
        sheet.put(OF_MANAGER.certificate_end, end.timestamp())
    return sheet.text()
