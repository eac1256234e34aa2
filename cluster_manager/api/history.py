"""Routes of the history: what agents say of their VMs' use, and how hosts and VMs were over hours and days."""

from __future__ import annotations

from typing import Annotated, Final

from aiohttp import web
from pydantic import Field

from cluster_manager.api.forms import MANAGER, answer, body_of
from cluster_manager.api.records import Moment
from ebbtide.messages.common import Name
from ebbtide.messages.history import SAMPLED_EVERY_S, HostHistory, HostUsage, UsageReply, VMHistory
from ebbtide.rest.descriptions import Parameter, describe
from ebbtide.rest.parameters import check_parameters, parameters_of

_ID: Final = Parameter("id", Name, "the host's id")
_NAME: Final = Parameter("name", Name, "the VM's name")
_FROM: Final = Parameter("from", Moment, "seconds since the epoch; default: six hours before `to`")
_TO: Final = Parameter("to", Moment, "seconds since the epoch; default, and at the latest: now")
_POINTS: Final = Parameter(
    "points", Annotated[int, Field(ge=2, le=2000)], "steps in the answer, at most; each is at least a minute", 300
)

#: When an agent is to ask again whether this manager keeps a history, where it does not.
UNWANTED_S: Final = 3600.0

routes = web.RouteTableDef()


@routes.post("/v1/hosts/{id}/usage")
@describe(
    "What a host's VMs use, for the history alone",
    tag="hosts",
    path=(_ID,),
    body=HostUsage,
    answers={200: UsageReply},
    problems=(404,),
    security="agent",
)
async def take_usage(request: web.Request) -> web.Response:
    check_parameters(request)
    host, manager = request.match_info["id"], request.app[MANAGER]
    manager.enrolments.refuse_revoked(host)
    raw = await request.read()
    async with manager.reporting(host, len(raw)):
        manager.take_usage(host, await body_of(request, HostUsage, agent=host))
    return answer(UsageReply(every_s=SAMPLED_EVERY_S if manager.settings.history else UNWANTED_S))


@routes.get("/v1/hosts/{id}/history")
@describe(
    "How a host was over hours and days, in equal steps",
    tag="hosts",
    path=(_ID,),
    query=(_FROM, _TO, _POINTS),
    answers={200: HostHistory},
    problems=(404,),
)
async def host_history(request: web.Request) -> web.Response:
    query, histories = parameters_of(request), request.app[MANAGER].histories
    return answer(await histories.of_host(request.match_info["id"], query["from"], query["to"], query["points"]))


@routes.get("/v1/vms/{name}/history")
@describe(
    "How a VM was over hours and days, on whatever hosts, in equal steps",
    tag="vms",
    path=(_NAME,),
    query=(_FROM, _TO, _POINTS),
    answers={200: VMHistory},
    problems=(404,),
)
async def vm_history(request: web.Request) -> web.Response:
    query, histories = parameters_of(request), request.app[MANAGER].histories
    return answer(await histories.of_vm(request.match_info["name"], query["from"], query["to"], query["points"]))
