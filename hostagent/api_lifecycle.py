"""Routes of a VM's lifecycle: stop, start, resize, adopt, release; and the host's templates."""

from __future__ import annotations

from aiohttp import web

from deflation.lifecycle_messages import AdoptCommand, ReleaseCommand, SpecCommand, StopCommand, TemplateList
from deflation.messages import Command
from hostagent.api_forms import AGENT, accepted, answer, body_of, parameters

routes = web.RouteTableDef()


@routes.post("/v1/vms/{name}/stop")
async def _stop(request: web.Request) -> web.Response:
    command = await body_of(request, StopCommand)
    return accepted(await request.app[AGENT].lifecycle.stop(request.match_info["name"], command))


@routes.post("/v1/vms/{name}/start")
async def _start(request: web.Request) -> web.Response:
    command = await body_of(request, Command)
    return accepted(await request.app[AGENT].lifecycle.start(request.match_info["name"], command))


@routes.put("/v1/vms/{name}/spec")
async def _resize(request: web.Request) -> web.Response:
    command = await body_of(request, SpecCommand)
    return accepted(await request.app[AGENT].lifecycle.resize(request.match_info["name"], command))


@routes.post("/v1/adoptions")
async def _adopt(request: web.Request) -> web.Response:
    return accepted(await request.app[AGENT].adoptions.adopt(await body_of(request, AdoptCommand)))


@routes.post("/v1/vms/{name}/release")
async def _release(request: web.Request) -> web.Response:
    command = await body_of(request, ReleaseCommand)
    return accepted(await request.app[AGENT].adoptions.release(request.match_info["name"], command))


@routes.get("/v1/templates")
async def _templates(request: web.Request) -> web.Response:
    parameters(request, ())
    return answer(TemplateList(templates=request.app[AGENT].host.hypervisor.templates()))
