"""Routes of a VM's lifecycle: stop, start, resize, adopt, release; and the host's templates."""

from __future__ import annotations

from typing import Final

from aiohttp import web

from deflation.lifecycle_messages import AdoptCommand, ReleaseCommand, SpecCommand, StopCommand, TemplateList
from deflation.messages import Command, Vector, VMSpec
from hostagent.api_forms import AGENT, accepted, answer, body_of
from hostagent.api_routes import NAME, STARTED
from rest.descriptions import describe
from rest.parameters import check_parameters

_SPEC: Final = VMSpec(name="web", nominal=Vector(cpu_cores=1.0, memory_mib=512.0))

routes = web.RouteTableDef()


@routes.post("/v1/vms/{name}/stop")
@describe(
    "Have a VM power off and keep it; it holds no room any more",
    tag="vms",
    path=(NAME,),
    body=StopCommand,
    example=StopCommand(request_id="stop-web", limit_s=5.0),
    answers={202: STARTED},
    problems=(404, 409),
)
async def _stop(request: web.Request) -> web.Response:
    check_parameters(request)
    command = await body_of(request, StopCommand)
    return accepted(await request.app[AGENT].lifecycle.stop(request.match_info["name"], command))


@routes.post("/v1/vms/{name}/start")
@describe(
    "Start a VM that is off, at its committed size",
    tag="vms",
    path=(NAME,),
    body=Command,
    example=Command(request_id="start-web"),
    answers={202: STARTED},
    problems=(404, 409),
)
async def _start(request: web.Request) -> web.Response:
    check_parameters(request)
    command = await body_of(request, Command)
    return accepted(await request.app[AGENT].lifecycle.start(request.match_info["name"], command))


@routes.put("/v1/vms/{name}/spec")
@describe(
    "Sell a VM as something else",
    tag="vms",
    path=(NAME,),
    body=SpecCommand,
    example=SpecCommand(request_id="resize-web", spec=_SPEC),
    answers={202: STARTED},
    problems=(404, 409),
)
async def _resize(request: web.Request) -> web.Response:
    check_parameters(request)
    command = await body_of(request, SpecCommand)
    return accepted(await request.app[AGENT].lifecycle.resize(request.match_info["name"], command))


@routes.post("/v1/adoptions")
@describe(
    "Look after a running domain that somebody else has made",
    tag="vms",
    body=AdoptCommand,
    example=AdoptCommand(request_id="adopt-old", domain="Old_Web", name="old"),
    answers={202: STARTED},
    problems=(404, 409),
)
async def _adopt(request: web.Request) -> web.Response:
    check_parameters(request)
    return accepted(await request.app[AGENT].adoptions.adopt(await body_of(request, AdoptCommand)))


@routes.post("/v1/vms/{name}/release")
@describe(
    "Give an adopted domain back as it was",
    tag="vms",
    path=(NAME,),
    body=ReleaseCommand,
    example=ReleaseCommand(request_id="release-old"),
    answers={202: STARTED},
    problems=(404, 409),
)
async def _release(request: web.Request) -> web.Response:
    check_parameters(request)
    command = await body_of(request, ReleaseCommand)
    return accepted(await request.app[AGENT].adoptions.release(request.match_info["name"], command))


@routes.get("/v1/templates", allow_head=False)
@describe("The host's templates", tag="host", answers={200: TemplateList})
async def _templates(request: web.Request) -> web.Response:
    check_parameters(request)
    return answer(TemplateList(templates=request.app[AGENT].host.hypervisor.templates()))
