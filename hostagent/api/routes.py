"""Routes of the host, its VMs' creation and sizes, and operations."""

from __future__ import annotations

from importlib.metadata import version
from typing import Annotated, Final, Literal

from aiohttp import web
from pydantic import Field

from ebbtide.messages.commands import (
    Command,
    CreateCommand,
    EpochCommand,
    ReclaimCommand,
    ReinflateCommand,
    TargetCommand,
)
from ebbtide.messages.common import Health, Name, RequestId, StopSeconds, Vector
from ebbtide.messages.dry_runs import Forecast
from ebbtide.messages.hosts import HostReport
from ebbtide.messages.operations import Operation
from ebbtide.messages.vms import VMSpec, VMStatus, VMStatusPage
from ebbtide.rest.access import require
from ebbtide.rest.descriptions import LOCATION, Answer, Parameter, describe
from ebbtide.rest.pages import AFTER, LIMIT, key_of, page_of
from ebbtide.rest.parameters import check_parameters, parameters_of
from ebbtide.rest.roles import Role
from hostagent.api.forms import AGENT, answer, begin, begun, body_of, check_leads
from hostagent.errors import RequestRefused

MAX_WAIT_S: Final = 30.0

NAME: Final = Parameter("name", Name, "the VM's name")
_REQUEST: Final = Parameter("request_id", RequestId, "the request that it was begun with", required=True)
_EPOCH: Final = Parameter("epoch", Annotated[int, Field(ge=0, le=2**53)], "of the manager that asks", default=0)
_ORDER: Final = Parameter(
    "order", Annotated[int, Field(ge=0, le=2**53)], "counts a manager's commands; a lower one is late", default=0
)
_REASON: Final = Parameter("reason", Literal["delete", "minimum", "shortfall"], "why it is stopped", default="delete")
_NOTICE: Final = Parameter("notice_s", StopSeconds, "preempted: how long its guest is told before", default=0.0)
_WAIT: Final = Parameter(
    "wait_s", Annotated[float, Field(ge=0, le=MAX_WAIT_S)], "how long to wait for its end, seconds", default=0.0
)
DRY_RUN: Final = Answer(Forecast, "What it would come to: an answer to `dry_run`.")
STARTED: Final = Answer(Operation, "It is under way; the same request again gets the same answer.", headers=LOCATION)

_SPEC: Final = VMSpec(
    name="web",
    nominal=Vector(cpu_cores=2.0, memory_mib=1024.0),
    minimum=Vector(cpu_cores=0.5, memory_mib=384.0),
)
_SIZE: Final = Vector(cpu_cores=1.5, memory_mib=640.0)

routes = web.RouteTableDef()


@routes.get("/healthz")
@describe("Whether the agent runs", tag="agent", answers={200: Health}, security="none")
async def _health(request: web.Request) -> web.Response:
    check_parameters(request)
    return answer(Health(version=version("ebbtide")))


@routes.get("/v1/host")
@describe("What the agent knows of its host", tag="host", answers={200: HostReport})
async def _get_host(request: web.Request) -> web.Response:
    check_parameters(request)
    host = request.app[AGENT].host
    return answer(host.report(), unknown=host.unknown_fields)


@routes.get("/v1/vms")
@describe("The VMs of this host", tag="vms", query=(LIMIT, AFTER), answers={200: VMStatusPage})
async def _get_vms(request: web.Request) -> web.Response:
    query = parameters_of(request)
    statuses = (vm.status() for vm in request.app[AGENT].host.vms.values())
    after = key_of("vms", query["after"], (str,))
    rows, following = page_of("vms", statuses, lambda vm: (vm.name,), query["limit"], after)
    return answer(VMStatusPage(vms=tuple(rows), next=following))


@routes.get("/v1/vms/{name}")
@describe("One VM", tag="vms", path=(NAME,), answers={200: VMStatus}, problems=(404,))
async def _get_vm(request: web.Request) -> web.Response:
    check_parameters(request)
    return answer(request.app[AGENT].host.vm(request.match_info["name"]).status())


@routes.post("/v1/vms")
@describe(
    "Start a VM at its nominal size",
    tag="vms",
    body=CreateCommand,
    example=CreateCommand(request_id="create-web", vm=_SPEC),
    answers={202: STARTED},
    problems=(409,),
)
async def _create(request: web.Request) -> web.Response:
    check_parameters(request)
    command = await body_of(request, CreateCommand)
    if command.vm.xml is not None:
        require(request, Role.ADMIN, "vm.xml")
    return begun(await request.app[AGENT].creations.create(command))


@routes.delete("/v1/vms/{name}")
@describe(
    "Stop a VM and remove it",
    tag="vms",
    path=(NAME,),
    query=(_REQUEST, _EPOCH, _ORDER, _REASON, _NOTICE),
    answers={202: STARTED},
    problems=(404, 409),
)
async def _delete(request: web.Request) -> web.Response:
    query = parameters_of(request)
    command = Command(request_id=query["request_id"], epoch=query["epoch"], order=query["order"])
    check_leads(request, command.epoch, command.order)
    name = request.match_info["name"]
    return begun(await request.app[AGENT].creations.delete(name, command, query["reason"], query["notice_s"]))


@routes.put("/v1/vms/{name}/target")
@describe(
    "Bring a VM to a size",
    tag="vms",
    path=(NAME,),
    body=TargetCommand,
    example=TargetCommand(request_id="smaller-web", generation=100, target=_SIZE),
    answers={202: STARTED, 200: DRY_RUN},
    problems=(404, 409),
)
async def _target(request: web.Request) -> web.Response:
    agent = request.app[AGENT]
    return await begin(request, TargetCommand, agent.sizes.target, agent.dry_run.target)


@routes.post("/v1/reclaims")
@describe(
    "Free an amount, split in proportion over the VMs",
    tag="host",
    body=ReclaimCommand,
    example=ReclaimCommand(request_id="room-for-db", need=Vector(cpu_cores=1.0, memory_mib=256.0)),
    answers={202: STARTED, 200: DRY_RUN},
    problems=(409,),
)
async def _reclaim(request: web.Request) -> web.Response:
    agent = request.app[AGENT]
    return await begin(request, ReclaimCommand, agent.sizes.reclaim, agent.dry_run.reclaim)


@routes.post("/v1/reinflations")
@describe(
    "Share room among the VMs that lack something",
    tag="host",
    body=ReinflateCommand,
    example=ReinflateCommand(request_id="give-back"),
    answers={202: STARTED, 200: DRY_RUN},
    problems=(409,),
)
async def _reinflate(request: web.Request) -> web.Response:
    agent = request.app[AGENT]
    return await begin(request, ReinflateCommand, agent.sizes.reinflate, agent.dry_run.reinflate)


@routes.put("/v1/epoch")
@describe(
    "Have commands of earlier managers refused",
    tag="agent",
    body=EpochCommand,
    example=EpochCommand(epoch=0),
    answers={200: EpochCommand},
    problems=(409,),
)
async def _put_epoch(request: web.Request) -> web.Response:
    check_parameters(request)
    command = await body_of(request, EpochCommand)
    await request.app[AGENT].requests.leadership.follow(Command(request_id="epoch", epoch=command.epoch))
    return answer(command)


@routes.get("/v1/operations/{request_id}")
@describe(
    "One operation; waits for its end",
    tag="operations",
    path=(Parameter("request_id", RequestId, "the request that began it"),),
    query=(_WAIT,),
    answers={200: Operation},
    problems=(404,),
)
async def _get_operation(request: web.Request) -> web.Response:
    query = parameters_of(request)
    wait_s = query["wait_s"]
    request_id = request.match_info["request_id"]
    operation = await request.app[AGENT].requests.operations.get(request_id, wait_s)
    if operation is None:
        raise RequestRefused(404, f"there is no operation {request_id}", "request_id")
    return answer(operation)
