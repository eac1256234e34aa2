"""Routes of VMs: ask for one, look at it, delete it, bring it to a size."""

from __future__ import annotations

from aiohttp import web

from cluster_manager.api_forms import MANAGER, answer, answers, body_of, query_of, request_id_of
from cluster_manager.errors import RequestError
from deflation.allocations import check_target
from deflation.messages import TargetCommand, VMRequest
from deflation.resources import ZERO

routes = web.RouteTableDef()


@routes.post("/v1/vms")
async def create(request: web.Request) -> web.Response:
    query_of(request, ())
    return answer(await request.app[MANAGER].operations.create(await body_of(request, VMRequest)), 202)


@routes.get("/v1/vms", allow_head=False)
async def vms(request: web.Request) -> web.Response:
    query_of(request, ())
    return answers("vms", await request.app[MANAGER].vms())


@routes.get("/v1/vms/{name}", allow_head=False)
async def vm(request: web.Request) -> web.Response:
    query_of(request, ())
    for found in await request.app[MANAGER].vms(request.match_info["name"]):
        return answer(found)
    raise RequestError(404, f"there is no VM named {request.match_info['name']}", "name")


@routes.get("/v1/vms/{name}/explain", allow_head=False)
async def explain(request: web.Request) -> web.Response:
    query_of(request, ())
    manager, name = request.app[MANAGER], request.match_info["name"]
    for found in await manager.vms(name):
        return answer(await manager.questions.explain(found))
    raise RequestError(404, f"there is no VM named {name}", "name")


@routes.delete("/v1/vms/{name}")
async def delete(request: web.Request) -> web.Response:
    query = query_of(request, ("request_id",))
    if "request_id" not in query:
        raise RequestError(400, "request_id: is required", "request_id")
    request_id = request_id_of(query["request_id"])
    return answer(await request.app[MANAGER].operations.delete(request.match_info["name"], request_id), 202)


@routes.put("/v1/vms/{name}/target")
async def target(request: web.Request) -> web.Response:
    query_of(request, ())
    manager, name = request.app[MANAGER], request.match_info["name"]
    command = await body_of(request, TargetCommand)
    for row in await manager.store.vms(name):
        reported = manager.hosts.vm(row.host, name)
        allocation = reported.allocation() if reported is not None else row.spec.allocation(ZERO)
        check_target(allocation, command.target.vector())
    if command.dry_run:
        for found in await manager.vms(name):
            return answer(await manager.questions.forecast(found, command))
    return answer(await manager.operations.target(name, command), 202)
