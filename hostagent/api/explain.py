"""Routes that explain: a VM, the history of decisions, the host's mode."""

from __future__ import annotations

from typing import Annotated, Final

from aiohttp import web
from pydantic import Field

from ebbtide.deflation.modes import HostMode
from ebbtide.messages.commands import ModeCommand
from ebbtide.messages.common import Name
from ebbtide.messages.explanations import DecisionPage, Explanation
from ebbtide.messages.hosts import ModeStatus
from ebbtide.rest.descriptions import Parameter, describe
from ebbtide.rest.pages import LIMIT
from ebbtide.rest.parameters import check_parameters, parameters_of
from hostagent.api.forms import AGENT, answer, begin
from hostagent.api.routes import NAME, STARTED
from hostagent.operations.explain import explain
from hostagent.vm.earlier_manager import of_one_vm

_VM: Final = Parameter("vm", Name, "only about this VM")
_SINCE: Final = Parameter("since", Annotated[int, Field(ge=0, le=2**53)], "only after this number; default: the latest")
routes = web.RouteTableDef()


@routes.get("/v1/vms/{name}/explain")
@describe("Why a VM has its size", tag="vms", path=(NAME,), answers={200: Explanation}, problems=(404,))
async def _explain(request: web.Request) -> web.Response:
    check_parameters(request)
    host = request.app[AGENT].host
    explanation = await explain(host, request.match_info["name"])
    return answer(explanation, unknown=of_one_vm(host.unknown_fields))


@routes.get("/v1/decisions")
@describe("What was decided and why", tag="host", query=(_VM, _SINCE, LIMIT), answers={200: DecisionPage})
async def _decisions(request: web.Request) -> web.Response:
    query = parameters_of(request)
    vm, since = query["vm"], query["since"]
    host = request.app[AGENT].host
    history = host.history
    return answer(
        DecisionPage(
            host=host.slice.host_id,
            incarnation=host.incarnation,
            decisions=history.decisions(vm, since, query["limit"]),
            newest=history.newest,
            forgotten=history.forgotten(vm, since),
        )
    )


@routes.get("/v1/mode")
@describe("What the host is to do", tag="host", answers={200: ModeStatus})
async def _get_mode(request: web.Request) -> web.Response:
    check_parameters(request)
    return answer(request.app[AGENT].host.modes.status())


@routes.put("/v1/mode")
@describe(
    "Change what the host is to do",
    tag="host",
    body=ModeCommand,
    example=ModeCommand(request_id="back", mode=HostMode.ACTIVE, reason="the new disks are in"),
    answers={202: STARTED},
    problems=(409,),
)
async def _put_mode(request: web.Request) -> web.Response:
    return await begin(request, ModeCommand, request.app[AGENT].mode_commands.set)
