"""Routes of hosts: reports of their agents, what the manager knows of them, their modes."""

from __future__ import annotations

from typing import Final

from aiohttp import web

from cluster_manager.api_forms import MANAGER, answer, answers, body_of, number, query_of, request_id_of
from cluster_manager.errors import RequestError
from deflation.messages import HostReport, ModeCommand

#: What a host agent holds an answer back at the most, seconds.
LONGEST_HOST_WAIT_S: Final = 30.0


routes = web.RouteTableDef()


@routes.post("/v1/hosts/{id}/report")
async def take_report(request: web.Request) -> web.Response:
    query_of(request, ())
    raw, manager = await request.read(), request.app[MANAGER]
    if (repeated := await manager.repeat_report(request.match_info["id"], raw)) is not None:
        return answer(repeated)
    report = await body_of(request, HostReport)
    if report.id != request.match_info["id"]:
        raise RequestError(400, f"id: the report is of {report.id}, the path of {request.match_info['id']}", "id")
    if not report.url.startswith(("http://", "https://")):
        raise RequestError(400, "url: must begin with http:// or https://", "url")
    if manager.settings.agent_tls is not None and not report.url.startswith("https://"):
        raise RequestError(400, "url: must begin with https://; this manager sends its token to no other", "url")
    return answer(await manager.take_report(report, raw))


@routes.get("/v1/hosts", allow_head=False)
async def hosts(request: web.Request) -> web.Response:
    query_of(request, ())
    registry = request.app[MANAGER].hosts
    statuses = (registry.status(host.report.id) for host in registry.all())
    return answers("hosts", [status for status in statuses if status is not None])


@routes.get("/v1/hosts/{id}", allow_head=False)
async def host(request: web.Request) -> web.Response:
    query_of(request, ())
    status = request.app[MANAGER].hosts.status(request.match_info["id"])
    if status is None:
        raise RequestError(404, f"there is no host {request.match_info['id']}", "id")
    return answer(status)


@routes.put("/v1/hosts/{id}/mode")
async def set_mode(request: web.Request) -> web.Response:
    query_of(request, ())
    command = await body_of(request, ModeCommand)
    return answer(await request.app[MANAGER].questions.set_mode(request.match_info["id"], command), 202)


@routes.get("/v1/hosts/{id}/operations/{request_id}", allow_head=False)
async def host_operation(request: web.Request) -> web.Response:
    query = query_of(request, ("wait_s",))
    wait_s = number(query, "wait_s", 0.0, 0.0, LONGEST_HOST_WAIT_S)
    host_id, request_id = request.match_info["id"], request_id_of(request.match_info["request_id"])
    return answer(await request.app[MANAGER].questions.host_operation(host_id, request_id, wait_s))
