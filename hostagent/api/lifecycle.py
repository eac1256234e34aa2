"""Routes of a VM's lifecycle: stop, start, resize, adopt, release; and the host's templates."""

from __future__ import annotations

import uuid
from functools import partial
from typing import Final

from aiohttp import web

from ebbtide.messages.adoptions import Adoptable
from ebbtide.messages.commands import (
    AdoptCommand,
    ReleaseCommand,
    SpecCommand,
    StartCommand,
    StopCommand,
    WithdrawCommand,
)
from ebbtide.messages.common import DomainName, Vector
from ebbtide.messages.hosts import TemplateList
from ebbtide.messages.migrations import ArrivalCommand, DepartureCommand, MigrationAddress
from ebbtide.messages.vms import VMSpec
from ebbtide.rest.descriptions import Parameter, describe
from ebbtide.rest.parameters import check_parameters, parameters_of
from hostagent.api.forms import AGENT, answer, begin
from hostagent.api.routes import NAME, STARTED

#: A command about the VM in the path, which begins an operation.
_describe: Final = partial(describe, tag="vms", path=(NAME,), answers={202: STARTED}, problems=(404, 409))
_DOMAIN: Final = Parameter("domain", DomainName, "its name in libvirt", required=True)
_ADDRESS: Final = MigrationAddress(
    uri="qemu+tls://host-b.example/system",
    listen="host-b.example",
    disk_dir="/var/lib/ebbtide/disks",
    image_dir="/var/lib/ebbtide/image",
)
_SPEC: Final = VMSpec(name="web", nominal=Vector(cpu_cores=1.0, memory_mib=512.0))

routes = web.RouteTableDef()


@routes.post("/v1/vms/{name}/stop")
@_describe(
    "Have a VM power off and keep it; it holds no room any more",
    body=StopCommand,
    example=StopCommand(request_id="stop-web", limit_s=5.0),
)
async def _stop(request: web.Request) -> web.Response:
    return await begin(request, StopCommand, request.app[AGENT].lifecycle.stop)


@routes.post("/v1/vms/{name}/withdrawal")
@_describe(
    "Call off the preemption of a VM whose notice runs: it stays",
    body=WithdrawCommand,
    example=WithdrawCommand(request_id="stop-web.withdrawal", preemption="stop-web", reason="room has appeared"),
)
async def _withdraw(request: web.Request) -> web.Response:
    return await begin(request, WithdrawCommand, request.app[AGENT].lifecycle.withdraw)


@routes.post("/v1/vms/{name}/start")
@_describe(
    "Start a VM that is off, at its committed size",
    body=StartCommand,
    example=StartCommand(request_id="start-web"),
)
async def _start(request: web.Request) -> web.Response:
    return await begin(request, StartCommand, request.app[AGENT].lifecycle.start)


@routes.put("/v1/vms/{name}/spec")
@_describe(
    "Sell a VM as something else",
    body=SpecCommand,
    example=SpecCommand(request_id="resize-web", spec=_SPEC),
)
async def _resize(request: web.Request) -> web.Response:
    return await begin(request, SpecCommand, request.app[AGENT].lifecycle.resize)


@routes.post("/v1/vms/{name}/arrival")
@_describe(
    "Keep room for a VM that is to move here while it runs",
    body=ArrivalCommand,
    example=ArrivalCommand(
        request_id="arrive-web", vm=_SPEC, size=_SPEC.nominal, boot_memory_mib=384.0, uuid=str(uuid.UUID(int=1))
    ),
)
async def _arrive(request: web.Request) -> web.Response:
    return await begin(request, ArrivalCommand, request.app[AGENT].migrations.arrive)


@routes.post("/v1/vms/{name}/departure")
@_describe(
    "Move a running VM to another host",
    body=DepartureCommand,
    example=DepartureCommand(request_id="depart-web", to="host-b", address=_ADDRESS),
)
async def _depart(request: web.Request) -> web.Response:
    return await begin(request, DepartureCommand, request.app[AGENT].migrations.depart)


@routes.post("/v1/adoptions")
@describe(
    "Look after a running domain that another program has made",
    tag="vms",
    body=AdoptCommand,
    example=AdoptCommand(request_id="adopt-old", domain="Old_Web", name="old"),
    answers={202: STARTED},
    problems=(404, 409),
)
async def _adopt(request: web.Request) -> web.Response:
    return await begin(request, AdoptCommand, request.app[AGENT].adoptions.adopt)


@routes.get("/v1/adoptions")
@describe(
    "What a running domain could be adopted as, by what it uses for some seconds; nothing is adopted",
    tag="vms",
    query=(_DOMAIN,),
    answers={200: Adoptable},
    problems=(404,),
)
async def _adoptable(request: web.Request) -> web.Response:
    return answer(await request.app[AGENT].adoptions.adoptable(parameters_of(request)["domain"]))


@routes.post("/v1/vms/{name}/release")
@_describe(
    "Give an adopted domain back as it was",
    body=ReleaseCommand,
    example=ReleaseCommand(request_id="release-old"),
)
async def _release(request: web.Request) -> web.Response:
    return await begin(request, ReleaseCommand, request.app[AGENT].adoptions.release)


@routes.get("/v1/templates")
@describe("The host's templates", tag="host", answers={200: TemplateList})
async def _templates(request: web.Request) -> web.Response:
    check_parameters(request)
    return answer(TemplateList(templates=request.app[AGENT].host.hypervisor.templates()))
