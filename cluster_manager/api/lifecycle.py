"""Routes of a VM's lifecycle: stop, start, resize, migrate, adopt, release; moves on trial; templates of a host."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Annotated, Final, TypeVar

from aiohttp import web
from pydantic import BaseModel, Field

from cluster_manager.api.forms import MANAGER, WENT_OUT, answer, begun, body_of, request_id_of
from cluster_manager.api.vms import NAME
from cluster_manager.inventory.versions import Precondition, only
from ebbtide.deflation.placement.rebalance_pace import RebalancePace
from ebbtide.messages.adoptions import Adoptable
from ebbtide.messages.common import DomainName, Name, PartialVector, RequestId
from ebbtide.messages.dry_runs import RebalancingReport
from ebbtide.messages.hosts import TemplateList
from ebbtide.messages.operations import Operation
from ebbtide.messages.requests import (
    AdoptRequest,
    CancelRequest,
    MigrateRequest,
    ReleaseRequest,
    ResizeRequest,
    StartRequest,
    StopRequest,
)
from ebbtide.rest.descriptions import H, Parameter, describe
from ebbtide.rest.parameters import check_parameters, parameters_of
from ebbtide.rest.versions import IF_MATCH, wanted_versions

B = TypeVar("B", bound=BaseModel)
_ID: Final = Parameter("id", Name, "the host's id")
_HOST: Final = Parameter("host", Name, "the host that it runs on", required=True)
_DOMAIN: Final = Parameter("domain", DomainName, "its name in libvirt", required=True)
_LASTED: Final = Parameter(
    "lasted_s",
    Annotated[float, Field(ge=0, le=86_400)],
    "for how long VMs are taken to have been deflated, and as long again it would last; default: for as long as this "
    f"manager has seen it, and without --rebalance {RebalancePace().hold_s:g}",
)

routes = web.RouteTableDef()


def _of_vm(summary: str, example: BaseModel) -> Callable[[H], H]:
    """Describe the route of a change of one VM."""
    return describe(
        summary,
        tag="vms",
        path=(NAME,),
        headers=(IF_MATCH,),
        body=type(example),
        example=example,
        answers={202: WENT_OUT},
        problems=(404, 409, 412),
    )


async def _begun(
    request: web.Request, form: type[B], begin: Callable[[str, B, Precondition], Awaitable[Operation]]
) -> web.Response:
    """Begin a change of the VM that the path names, if it has the version that is asked for."""
    check_parameters(request)
    precondition = only(wanted_versions(request))
    return begun(await begin(request.match_info["name"], await body_of(request, form), precondition))


@routes.post("/v1/vms/{name}/stop")
@_of_vm("Have a VM power off and keep it; others grow into its room", StopRequest(request_id="stop-web", limit_s=30.0))
async def stop(request: web.Request) -> web.Response:
    return await _begun(request, StopRequest, request.app[MANAGER].lifecycle.stop)


@routes.post("/v1/vms/{name}/start")
@_of_vm("Start a VM that is off, deflating others where that is needed", StartRequest(request_id="start-web"))
async def start(request: web.Request) -> web.Response:
    return await _begun(request, StartRequest, request.app[MANAGER].lifecycle.start)


@routes.patch("/v1/vms/{name}")
@_of_vm(
    "Sell a VM as something else: nominal size, minimum, ceiling, priority",
    ResizeRequest(request_id="resize-web", nominal=PartialVector(cpu_cores=1.0)),
)
async def resize(request: web.Request) -> web.Response:
    return await _begun(request, ResizeRequest, request.app[MANAGER].lifecycle.resize)


@routes.post("/v1/vms/{name}/migrate")
@_of_vm("Stop a VM where it is and start it on another host", MigrateRequest(request_id="move-web", lose_disk=True))
async def migrate(request: web.Request) -> web.Response:
    return await _begun(request, MigrateRequest, request.app[MANAGER].lifecycle.migrate)


@routes.post("/v1/operations/{id}/cancel")
@describe(
    "Call a placement off before its VM starts; what was taken for it is given back",
    tag="operations",
    path=(Parameter("id", RequestId, "the request that began it"),),
    body=CancelRequest,
    example=CancelRequest(request_id="no-web"),
    answers={202: WENT_OUT},
    problems=(404, 409),
)
async def cancel_operation(request: web.Request) -> web.Response:
    check_parameters(request)
    operation = request_id_of(request.match_info["id"])
    return begun(await request.app[MANAGER].lifecycle.cancel(operation, await body_of(request, CancelRequest)))


@routes.post("/v1/vms/{name}/release")
@_of_vm("Give an adopted VM back as it was", ReleaseRequest(request_id="release-old"))
async def release(request: web.Request) -> web.Response:
    return await _begun(request, ReleaseRequest, request.app[MANAGER].lifecycle.release)


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
    return begun(await request.app[MANAGER].lifecycle.adopt(await body_of(request, AdoptRequest)))


@routes.get("/v1/adoptions")
@describe(
    "What a running domain of a host could be adopted as, by what it uses for some seconds; nothing is adopted",
    tag="vms",
    query=(_HOST, _DOMAIN),
    answers={200: Adoptable},
    problems=(404,),
)
async def adoptable(request: web.Request) -> web.Response:
    query = parameters_of(request)
    return answer(await request.app[MANAGER].agent_proxy.adoptable(query["host"], query["domain"]))


@routes.get("/v1/hosts/{id}/templates")
@describe("The templates of a host", tag="hosts", path=(_ID,), answers={200: TemplateList}, problems=(404,))
async def templates(request: web.Request) -> web.Response:
    check_parameters(request)
    return answer(await request.app[MANAGER].agent_proxy.templates(request.match_info["id"]))


@routes.get("/v1/rebalancing")
@describe(
    "Which VMs would be moved to hosts with room, and what for; nothing is moved",
    tag="vms",
    query=(_LASTED,),
    answers={200: RebalancingReport},
)
async def rebalancing(request: web.Request) -> web.Response:
    return answer(await request.app[MANAGER].rebalancing.propose(parameters_of(request)["lasted_s"]))
