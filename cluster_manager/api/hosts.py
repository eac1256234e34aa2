"""Routes of hosts: reports of their agents, what the manager knows of them, their modes."""

from __future__ import annotations

import asyncio
from typing import Annotated, Final

from aiohttp import web
from pydantic import Field

from cluster_manager.api.forms import (
    CHANGED_SINCE,
    MANAGER,
    SELECTOR,
    WENT_OUT,
    answer,
    begun,
    body_of,
    request_id_of,
    selector_in,
)
from cluster_manager.errors import RequestError
from cluster_manager.inventory.versions import host_version
from ebbtide.deflation.modes import HostMode
from ebbtide.messages.commands import SteadySettings, SteadyStatus
from ebbtide.messages.common import Name, RequestId
from ebbtide.messages.hosts import ForgottenHost, HostPage, HostReport, HostStatus, ReportReply
from ebbtide.messages.labels import LabelsRequest
from ebbtide.messages.operations import Operation
from ebbtide.messages.requests import ModeRequest
from ebbtide.rest.descriptions import Parameter, describe
from ebbtide.rest.pages import AFTER, LIMIT, cursor_of, key_of
from ebbtide.rest.parameters import check_parameters, parameters_of
from ebbtide.rest.versions import IF_NONE_MATCH, UNCHANGED, answer_tagged, tagged

#: What a host agent holds an answer back at the most, seconds.
LONGEST_HOST_WAIT_S: Final = 30.0

_ID: Final = Parameter("id", Name, "the host's id")
_STATE: Final = Parameter("state", HostStatus.model_fields["state"].annotation, "only hosts in this state")
_MODE: Final = Parameter("mode", HostMode, "only hosts of this mode")
_WAIT: Final = Parameter(
    "wait_s", Annotated[float, Field(ge=0, le=LONGEST_HOST_WAIT_S)], "how long to wait for its end", default=0.0
)
_LOST: Final = Parameter("lost_vms", bool, "whether its VMs are gone with it; refused where it has some", default=False)

routes = web.RouteTableDef()


@routes.post("/v1/hosts/{id}/report")
@describe(
    "A host agent's report", tag="hosts", path=(_ID,), body=HostReport, answers={200: ReportReply}, security="agent"
)
async def take_report(request: web.Request) -> web.Response:
    check_parameters(request)
    raw, manager = await request.read(), request.app[MANAGER]
    host = request.match_info["id"]
    manager.enrolments.refuse_revoked(host)
    if manager.enrolments.following is not None and (tls := request.get_extra_info("ssl_object")) is not None:
        manager.enrolments.note(host, tls.getpeercert(binary_form=True) or b"")
    # One after the other: a hundred at once would be read in one turn of the loop, and all others would wait.
    async with manager.reporting(host, len(raw)):
        if (repeated := await manager.repeat_report(host, raw)) is not None:
            return answer(repeated)
        async with manager.hosts.intake.turn(urgent=manager.hosts.ages(host)):
            report = await body_of(request, HostReport, agent=host)
        await asyncio.sleep(0)
        if report.id != host:
            raise RequestError(400, f"id: the report is of {report.id}, the path of {host}", "id")
        if why := manager.no_address(report.url):
            raise RequestError(400, f"url: {why}", "url")
        return answer(await manager.take_report(report, raw))


@routes.get("/v1/hosts")
@describe(
    "All hosts that ever reported",
    tag="hosts",
    query=(LIMIT, AFTER, _STATE, _MODE, SELECTOR, CHANGED_SINCE),
    answers={200: HostPage},
)
async def hosts(request: web.Request) -> web.Response:
    query = parameters_of(request)
    limit, after = query["limit"], key_of("hosts", query["after"], (str,))
    registry, since = request.app[MANAGER].hosts, query["changed_since"]
    changes = registry.changes.latest
    # What is not asked for any more has changed and is not gone: with a filter only the whole list is true.
    chosen = any(query[name] is not None for name in ("state", "mode", "selector"))
    if since is not None and (chosen or not registry.changes.knows(since)):
        since = None
    position = await request.app[MANAGER].feed.newest()
    found = await registry.page(
        limit,
        after[0] if after else None,
        state=query["state"],
        mode=query["mode"],
        since=since,
        selector=selector_in(query),
    )
    following = cursor_of("hosts", (found[limit - 1].id,)) if len(found) > limit else None
    gone = registry.changes.since("host", since) - registry.ids() if since is not None else ()
    return answer(
        HostPage(
            hosts=tuple(found[:limit]),
            next=following,
            position=position,
            changes=changes,
            changed_since=since,
            gone=tuple(sorted(gone)),
        )
    )


@routes.get("/v1/hosts/{id}")
@describe(
    "One host",
    tag="hosts",
    path=(_ID,),
    headers=(IF_NONE_MATCH,),
    answers={200: tagged(HostStatus), 304: UNCHANGED},
    problems=(404,),
)
async def host(request: web.Request) -> web.StreamResponse:
    check_parameters(request)
    registry, host_id = request.app[MANAGER].hosts, request.match_info["id"]
    known, status = registry.get(host_id), registry.status(host_id)
    if known is None or status is None:
        raise RequestError(404, f"there is no host {host_id}", "id")
    # It reports every two seconds: that alone is no news.
    return answer_tagged(request, status, host_version(known.report), aside={"seen_at": 0.0})


@routes.delete("/v1/hosts/{id}")
@describe(
    "Forget a silent host that does not come back",
    tag="hosts",
    path=(_ID,),
    query=(_LOST,),
    answers={200: ForgottenHost},
    problems=(404, 409),
)
async def forget(request: web.Request) -> web.Response:
    lost_vms = parameters_of(request)["lost_vms"]
    return answer(await request.app[MANAGER].host_removal.forget(request.match_info["id"], lost_vms))


@routes.patch("/v1/hosts/{id}/labels")
@describe(
    "Set labels of a host, or take them away",
    tag="hosts",
    path=(_ID,),
    body=LabelsRequest,
    example=LabelsRequest(labels={"rack": "r7", "old": None}),
    answers={200: HostStatus},
    problems=(404,),
)
async def label_host(request: web.Request) -> web.Response:
    check_parameters(request)
    registry, host_id = request.app[MANAGER].hosts, request.match_info["id"]
    await registry.label(host_id, await body_of(request, LabelsRequest))
    if (status := registry.status(host_id)) is None:
        raise RequestError(404, f"there is no host {host_id}", "id")
    return answer(status)


@routes.put("/v1/hosts/{id}/mode")
@describe(
    "Change what a host is to do",
    tag="hosts",
    path=(_ID,),
    body=ModeRequest,
    example=ModeRequest(request_id="back", mode=HostMode.ACTIVE, reason="the new disks are in"),
    answers={202: WENT_OUT},
    problems=(404, 409),
)
async def set_mode(request: web.Request) -> web.Response:
    check_parameters(request)
    host_id, wanted = request.match_info["id"], await body_of(request, ModeRequest)
    return begun(await request.app[MANAGER].agent_proxy.set_mode(host_id, wanted), f"/v1/hosts/{host_id}")


@routes.get("/v1/hosts/{id}/steady")
@describe("How a host keeps room", tag="hosts", path=(_ID,), answers={200: SteadyStatus}, problems=(404, 503))
async def steady(request: web.Request) -> web.Response:
    check_parameters(request)
    return answer(await request.app[MANAGER].agent_proxy.steady(request.match_info["id"]))


@routes.put("/v1/hosts/{id}/steady")
@describe(
    "Have a host keep room before it is asked for, or no longer",
    tag="hosts",
    path=(_ID,),
    body=SteadySettings,
    example=SteadySettings(enabled=True, reserve_mib="auto"),
    answers={200: SteadyStatus},
    problems=(404, 409, 503),
)
async def set_steady(request: web.Request) -> web.Response:
    check_parameters(request)
    wanted = await body_of(request, SteadySettings)
    return answer(await request.app[MANAGER].agent_proxy.steady(request.match_info["id"], wanted))


@routes.get("/v1/hosts/{id}/operations/{request_id}")
@describe(
    "One operation of a host; waits for its end",
    tag="hosts",
    path=(_ID, Parameter("request_id", RequestId, "the request that began it")),
    query=(_WAIT,),
    answers={200: Operation},
    problems=(404,),
)
async def host_operation(request: web.Request) -> web.Response:
    wait_s = parameters_of(request)["wait_s"]
    host_id, request_id = request.match_info["id"], request_id_of(request.match_info["request_id"])
    return answer(await request.app[MANAGER].agent_proxy.host_operation(host_id, request_id, wait_s))
