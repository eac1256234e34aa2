"""Routes of a VM's lifecycle: stop, start, resize, migrate, adopt, release; and the templates of a host."""

from __future__ import annotations

from aiohttp import web

from cluster_manager.api_forms import MANAGER, answer, body_of, query_of
from deflation.lifecycle_messages import (
    AdoptRequest,
    MigrateRequest,
    ReleaseRequest,
    ResizeRequest,
    StartRequest,
    StopRequest,
)

routes = web.RouteTableDef()


@routes.post("/v1/vms/{name}/stop")
async def stop(request: web.Request) -> web.Response:
    query_of(request, ())
    lifecycle, name = request.app[MANAGER].lifecycle, request.match_info["name"]
    return answer(await lifecycle.stop(name, await body_of(request, StopRequest)), 202)


@routes.post("/v1/vms/{name}/start")
async def start(request: web.Request) -> web.Response:
    query_of(request, ())
    lifecycle, name = request.app[MANAGER].lifecycle, request.match_info["name"]
    return answer(await lifecycle.start(name, await body_of(request, StartRequest)), 202)


@routes.patch("/v1/vms/{name}")
async def resize(request: web.Request) -> web.Response:
    query_of(request, ())
    lifecycle, name = request.app[MANAGER].lifecycle, request.match_info["name"]
    return answer(await lifecycle.resize(name, await body_of(request, ResizeRequest)), 202)


@routes.post("/v1/vms/{name}/migrate")
async def migrate(request: web.Request) -> web.Response:
    query_of(request, ())
    lifecycle, name = request.app[MANAGER].lifecycle, request.match_info["name"]
    return answer(await lifecycle.migrate(name, await body_of(request, MigrateRequest)), 202)


@routes.post("/v1/vms/{name}/release")
async def release(request: web.Request) -> web.Response:
    query_of(request, ())
    lifecycle, name = request.app[MANAGER].lifecycle, request.match_info["name"]
    return answer(await lifecycle.release(name, await body_of(request, ReleaseRequest)), 202)


@routes.post("/v1/adoptions")
async def adopt(request: web.Request) -> web.Response:
    query_of(request, ())
    return answer(await request.app[MANAGER].lifecycle.adopt(await body_of(request, AdoptRequest)), 202)


@routes.get("/v1/hosts/{id}/templates", allow_head=False)
async def templates(request: web.Request) -> web.Response:
    query_of(request, ())
    return answer(await request.app[MANAGER].questions.templates(request.match_info["id"]))
