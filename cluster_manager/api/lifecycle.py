"""Routes of a VM's lifecycle: stop, start, resize, migrate, adopt, release; and the templates of a host."""

from __future__ import annotations

from typing import Final

from aiohttp import web

from cluster_manager.api.forms import MANAGER, WENT_OUT, answer, body_of
from cluster_manager.api.vms import NAME
from cluster_manager.inventory.versions import Precondition, only
from ebbtide.messages.common import Name, PartialVector
from ebbtide.messages.hosts import TemplateList
from ebbtide.messages.requests import (
    AdoptRequest,
    MigrateRequest,
    ReleaseRequest,
    ResizeRequest,
    StartRequest,
    StopRequest,
)
from ebbtide.rest.descriptions import Parameter, describe
from ebbtide.rest.parameters import check_parameters
from ebbtide.rest.versions import IF_MATCH, wanted_versions

_ID: Final = Parameter("id", Name, "the host's id")
_HEADERS: Final = (IF_MATCH,)
_PROBLEMS: Final = (404, 409, 412)

routes = web.RouteTableDef()


@routes.post("/v1/vms/{name}/stop")
@describe(
    "Have a VM power off and keep it; others grow into its room",
    tag="vms",
    path=(NAME,),
    headers=_HEADERS,
    body=StopRequest,
    example=StopRequest(request_id="stop-web", limit_s=30.0),
    answers={202: WENT_OUT},
    problems=_PROBLEMS,
)
async def stop(request: web.Request) -> web.Response:
    name, precondition = _named(request)
    wanted = await body_of(request, StopRequest)
    return answer(await request.app[MANAGER].lifecycle.stop(name, wanted, precondition), 202)


@routes.post("/v1/vms/{name}/start")
@describe(
    "Start a VM that is off, deflating others where that is needed",
    tag="vms",
    path=(NAME,),
    headers=_HEADERS,
    body=StartRequest,
    example=StartRequest(request_id="start-web"),
    answers={202: WENT_OUT},
    problems=_PROBLEMS,
)
async def start(request: web.Request) -> web.Response:
    name, precondition = _named(request)
    wanted = await body_of(request, StartRequest)
    return answer(await request.app[MANAGER].lifecycle.start(name, wanted, precondition), 202)


@routes.patch("/v1/vms/{name}")
@describe(
    "Sell a VM as something else: nominal size, minimum, ceiling, priority",
    tag="vms",
    path=(NAME,),
    headers=_HEADERS,
    body=ResizeRequest,
    example=ResizeRequest(request_id="resize-web", nominal=PartialVector(cpu_cores=1.0)),
    answers={202: WENT_OUT},
    problems=_PROBLEMS,
)
async def resize(request: web.Request) -> web.Response:
    name, precondition = _named(request)
    wanted = await body_of(request, ResizeRequest)
    return answer(await request.app[MANAGER].lifecycle.resize(name, wanted, precondition), 202)


@routes.post("/v1/vms/{name}/migrate")
@describe(
    "Stop a VM where it is and start it on another host",
    tag="vms",
    path=(NAME,),
    headers=_HEADERS,
    body=MigrateRequest,
    example=MigrateRequest(request_id="move-web", lose_disk=True),
    answers={202: WENT_OUT},
    problems=_PROBLEMS,
)
async def migrate(request: web.Request) -> web.Response:
    name, precondition = _named(request)
    wanted = await body_of(request, MigrateRequest)
    return answer(await request.app[MANAGER].lifecycle.migrate(name, wanted, precondition), 202)


@routes.post("/v1/vms/{name}/release")
@describe(
    "Give an adopted VM back as it was",
    tag="vms",
    path=(NAME,),
    headers=_HEADERS,
    body=ReleaseRequest,
    example=ReleaseRequest(request_id="release-old"),
    answers={202: WENT_OUT},
    problems=_PROBLEMS,
)
async def release(request: web.Request) -> web.Response:
    name, precondition = _named(request)
    wanted = await body_of(request, ReleaseRequest)
    return answer(await request.app[MANAGER].lifecycle.release(name, wanted, precondition), 202)


@routes.post("/v1/adoptions")
@describe(
    "Look after a running domain that was made outside Ebbtide",
    tag="vms",
    body=AdoptRequest,
    example=AdoptRequest(request_id="adopt-old", host="host-a", domain="Old_Web", name="old"),
    answers={202: WENT_OUT},
    problems=(404, 409),
)
async def adopt(request: web.Request) -> web.Response:
    check_parameters(request)
    return answer(await request.app[MANAGER].lifecycle.adopt(await body_of(request, AdoptRequest)), 202)


@routes.get("/v1/hosts/{id}/templates", allow_head=False)
@describe("The templates of a host", tag="hosts", path=(_ID,), answers={200: TemplateList}, problems=(404,))
async def templates(request: web.Request) -> web.Response:
    check_parameters(request)
    return answer(await request.app[MANAGER].questions.templates(request.match_info["id"]))


def _named(request: web.Request) -> tuple[str, Precondition]:
    """The VM that the path names, and the version that it must have."""
    check_parameters(request)
    return request.match_info["name"], only(wanted_versions(request))
