"""Routes of what happened: operations, core changes and what follows from them."""

from __future__ import annotations

from typing import Annotated, Any, Final

from aiohttp import web
from pydantic import Field

from cluster_manager.api.forms import LONGEST_DURATION_S, LONGEST_WAIT_S, MANAGER, answer
from cluster_manager.errors import RequestError
from ebbtide.matcher.match.ranking import Rank, rank_of
from ebbtide.messages.common import Name, RequestId
from ebbtide.messages.machines import CalibrationReport, CoreChangePage, MachinePage, MachineRanking
from ebbtide.messages.operations import Operation, OperationPage, OperationState
from ebbtide.rest.descriptions import Parameter, describe
from ebbtide.rest.pages import AFTER, LIMIT, cursor_of, key_of
from ebbtide.rest.parameters import check_parameters, parameters_of

#: A moment, in seconds since the epoch.
Moment = Annotated[float, Field(ge=0, le=1e11, allow_inf_nan=False)]
SINCE: Final = Parameter("since", Moment, "only from this moment on, seconds since the epoch")
VM: Final = Parameter("vm", Name, "only about this VM")
HOST: Final = Parameter("host", Name, "only about this host")
_KIND: Final = Parameter("kind", Operation.model_fields["kind"].annotation, "only operations of this kind")
_STATE: Final = Parameter("state", OperationState, "only operations in this state")
_MACHINE: Final = Parameter("machine", Name, "only of this machine")
WAIT: Final = Parameter(
    "wait_s", Annotated[float, Field(ge=0, le=LONGEST_WAIT_S)], "how long to wait for its end", default=0.0
)
_DURATION: Final = Parameter(
    "duration_s", Annotated[float, Field(ge=0, le=LONGEST_DURATION_S)], "how long the task runs", default=600.0
)

routes = web.RouteTableDef()


@routes.get("/v1/operations")
@describe(
    "What clients asked for, newest first",
    tag="operations",
    query=(LIMIT, AFTER, _KIND, _STATE, VM, HOST, SINCE),
    answers={200: OperationPage},
)
async def operations(request: web.Request) -> web.Response:
    return answer(await request.app[MANAGER].lists.operations(**parameters_of(request)))


@routes.get("/v1/operations/{id}")
@describe(
    "One operation; waits for its end",
    tag="operations",
    path=(Parameter("id", RequestId, "the request that began it"),),
    query=(WAIT,),
    answers={200: Operation},
    problems=(404,),
)
async def operation(request: web.Request) -> web.Response:
    wait_s = parameters_of(request)["wait_s"]
    found = await request.app[MANAGER].operations.operation(request.match_info["id"], wait_s)
    if found is None:
        raise RequestError(404, f"there is no operation {request.match_info['id']}", "id")
    return answer(found)


@routes.get("/v1/core-changes")
@describe(
    "How machines' cores grew and shrank, newest first",
    tag="machines",
    query=(LIMIT, AFTER, _MACHINE, SINCE),
    answers={200: CoreChangePage},
)
async def core_changes(request: web.Request) -> web.Response:
    return answer(await request.app[MANAGER].lists.core_changes(**parameters_of(request)))


@routes.get("/v1/machines")
@describe(
    "The machines by how likely they keep their cores for a task, best first",
    tag="machines",
    query=(LIMIT, AFTER, _DURATION),
    answers={200: MachinePage},
)
async def machines(request: web.Request) -> web.Response:
    query = parameters_of(request)
    limit = query["limit"]
    after: Any = key_of("machines", query["after"], (int, float, int, str))
    ranking = request.app[MANAGER].core_changes.ranking
    found = await ranking(query["duration_s"], most=limit + 1, after=after)
    following = cursor_of("machines", _rank(found[limit - 1])) if len(found) > limit else None
    return answer(MachinePage(machines=tuple(found[:limit]), next=following))


def _rank(machine: MachineRanking) -> Rank:
    return rank_of(machine.machine, machine.cores, machine.completion_probability)


@routes.get("/v1/calibration")
@describe(
    "Whether predictions that machines keep their cores come true",
    tag="machines",
    answers={200: CalibrationReport},
)
async def calibration(request: web.Request) -> web.Response:
    check_parameters(request)
    return answer(request.app[MANAGER].core_changes.calibration())


@routes.get("/v1/machines/{name}")
@describe(
    "How likely one machine keeps its cores",
    tag="machines",
    path=(Parameter("name", Name, "the machine's name"),),
    query=(_DURATION,),
    answers={200: MachineRanking},
    problems=(404,),
)
async def machine(request: web.Request) -> web.Response:
    query, name = parameters_of(request), request.match_info["name"]
    for ranked in await request.app[MANAGER].core_changes.ranking(query["duration_s"], name):
        return answer(ranked)
    raise RequestError(404, f"there is no running machine named {name}", "name")
