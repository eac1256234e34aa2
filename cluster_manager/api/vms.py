"""Routes of VMs: ask for one, look at it, delete it, bring it to a size."""

from __future__ import annotations

from typing import Annotated, Final

from aiohttp import web
from pydantic import Field

from cluster_manager.api.forms import CHANGED_SINCE, MANAGER, SELECTOR, WENT_OUT, answer, begun, body_of, selector_in
from cluster_manager.errors import RequestError
from cluster_manager.inventory.versions import only
from ebbtide.deflation.allocations import Priority
from ebbtide.messages.common import Name, PartialVector, RequestId, Vector
from ebbtide.messages.dry_runs import DryRunReport, Forecast
from ebbtide.messages.explanations import VMExplanation
from ebbtide.messages.labels import LabelsRequest
from ebbtide.messages.requests import TargetRequest, VMRequest
from ebbtide.messages.vms import ClusterVM, VMPage, VMSpec
from ebbtide.rest.access import require
from ebbtide.rest.descriptions import Answer, Parameter, describe
from ebbtide.rest.pages import AFTER, LIMIT
from ebbtide.rest.parameters import check_parameters, parameters_of
from ebbtide.rest.roles import Role
from ebbtide.rest.versions import IF_MATCH, IF_NONE_MATCH, UNCHANGED, answer_tagged, tagged, wanted_versions

NAME: Final = Parameter("name", Name, "the VM's name")
_HOST: Final = Parameter("host", Name, "only VMs of this host")
_STATE: Final = Parameter("state", ClusterVM.model_fields["state"].annotation, "only VMs in this state")
_PRIORITY: Final = Parameter("priority", Priority, "only VMs of this priority")
_PREFIX: Final = Parameter("prefix", Annotated[str, Field(pattern=r"^[a-z0-9-]{1,40}$")], "names that begin so")
_REQUEST: Final = Parameter("request_id", RequestId, "makes a repeated request harmless", required=True)
_DRY_RUN: Final = Parameter("dry_run", bool, "say what would be done and change nothing", default=False)

_SPEC: Final = VMSpec(
    name="web",
    nominal=Vector(cpu_cores=2.0, memory_mib=1024.0),
    minimum=Vector(cpu_cores=0.5, memory_mib=384.0),
)

routes = web.RouteTableDef()


@routes.post("/v1/vms")
@describe(
    "Place a VM, deflating others where that is needed",
    tag="vms",
    body=VMRequest,
    example=VMRequest(request_id="create-web", vm=_SPEC),
    answers={202: WENT_OUT, 200: Answer(DryRunReport, "What it would come to: an answer to `dry_run`.")},
    problems=(409,),
)
async def create(request: web.Request) -> web.Response:
    check_parameters(request)
    manager, wanted = request.app[MANAGER], await body_of(request, VMRequest)
    check_admin(request, wanted)
    if wanted.dry_run:
        return answer(await manager.dry_runs.create(wanted))
    return begun(await manager.operations.create(wanted))


@routes.get("/v1/vms")
@describe(
    "The VMs",
    tag="vms",
    query=(LIMIT, AFTER, _HOST, _STATE, _PRIORITY, _PREFIX, SELECTOR, CHANGED_SINCE),
    answers={200: VMPage},
)
async def vms(request: web.Request) -> web.Response:
    query = parameters_of(request)
    return answer(await request.app[MANAGER].lists.vms(**{**query, "selector": selector_in(query)}))


@routes.get("/v1/vms/{name}")
@describe(
    "One VM",
    tag="vms",
    path=(NAME,),
    headers=(IF_NONE_MATCH,),
    answers={200: tagged(ClusterVM), 304: UNCHANGED},
    problems=(404,),
)
async def vm(request: web.Request) -> web.StreamResponse:
    check_parameters(request)
    found = await _shown(request)
    return answer_tagged(request, found, found.version)


@routes.patch("/v1/vms/{name}/labels")
@describe(
    "Set labels of a VM, or take them away",
    tag="vms",
    path=(NAME,),
    headers=(IF_MATCH,),
    body=LabelsRequest,
    example=LabelsRequest(labels={"env": "prod", "old": None}),
    answers={200: ClusterVM},
    problems=(404, 409, 412),
)
async def label_vm(request: web.Request) -> web.Response:
    check_parameters(request)
    manager, precondition = request.app[MANAGER], only(wanted_versions(request))
    wanted = await body_of(request, LabelsRequest)
    row = await manager.operations.existing(request.match_info["name"])
    precondition(row)
    if not await manager.store.label_vm(row, wanted.onto(row.labels)):
        raise RequestError(409, f"{row.name} has changed meanwhile: ask again", "name")
    return answer(await _shown(request))


@routes.get("/v1/vms/{name}/explain")
@describe("Why a VM has its size", tag="vms", path=(NAME,), answers={200: VMExplanation}, problems=(404,))
async def explain(request: web.Request) -> web.Response:
    check_parameters(request)
    manager, found = request.app[MANAGER], await _shown(request)
    return answer(await manager.agent_proxy.explain(found, manager.operations.acting_on(found.name, found.host)))


@routes.delete("/v1/vms/{name}")
@describe(
    "Stop a VM and remove it, or call its placement off; others grow into its room",
    tag="vms",
    path=(NAME,),
    query=(_REQUEST, _DRY_RUN),
    headers=(IF_MATCH,),
    answers={202: WENT_OUT, 200: Answer(DryRunReport, "What it would come to: an answer to `dry_run`.")},
    problems=(404, 409, 412),
)
async def delete(request: web.Request) -> web.Response:
    query = parameters_of(request)
    manager, name, precondition = request.app[MANAGER], request.match_info["name"], only(wanted_versions(request))
    if query["dry_run"]:
        return answer(await manager.dry_runs.delete(name, query["request_id"], precondition))
    return begun(await manager.operations.delete(name, query["request_id"], precondition))


@routes.put("/v1/vms/{name}/target")
@describe(
    "Bring a VM to a size",
    tag="vms",
    path=(NAME,),
    headers=(IF_MATCH,),
    body=TargetRequest,
    example=TargetRequest(request_id="smaller-web", target=PartialVector(cpu_cores=1.5, memory_mib=640.0)),
    answers={202: WENT_OUT, 200: Answer(Forecast, "What it would come to: an answer to `dry_run`.")},
    problems=(404, 409, 412),
)
async def target(request: web.Request) -> web.Response:
    check_parameters(request)
    manager, name, precondition = request.app[MANAGER], request.match_info["name"], only(wanted_versions(request))
    wanted = await body_of(request, TargetRequest)
    if wanted.dry_run:
        row = await manager.operations.existing(name)
        precondition(row)
        command = manager.operations.target_command(row, wanted)
        return answer(await manager.agent_proxy.forecast(await _shown(request), command))
    return begun(await manager.operations.target(name, wanted, precondition))


def check_admin(request: web.Request, body: VMRequest) -> None:
    """Only an admin may give domain XML, which reaches further than a template does.

    :raises Refused: 403 with the field.
    """
    if body.vm.xml is not None:
        require(request, Role.ADMIN, "vm.xml")


async def _shown(request: web.Request) -> ClusterVM:
    """The VM that the path names.

    :raises RequestError: 404.
    """
    name = request.match_info["name"]
    for found in await request.app[MANAGER].vms(name):
        return found
    raise RequestError(404, f"there is no VM named {name}", "name")
