"""Routes of tasks: submit one, look at it, ask why it waits, cancel it; and of the engine that runs them."""

from __future__ import annotations

from typing import Annotated, Final

from aiohttp import hdrs, web
from pydantic import Field

from cluster_manager.api.forms import MANAGER, answer, body_of
from cluster_manager.api.records import WAIT
from cluster_manager.tasks.output import check_reader, read_output
from cluster_manager.tasks.pages import TaskPages
from ebbtide.messages.common import Name
from ebbtide.messages.tasks import (
    AcquirerStatus,
    EngineStatus,
    ManagedTask,
    TaskExplanation,
    TaskOutput,
    TaskPage,
    TaskRequest,
    TaskSpec,
    TaskState,
)
from ebbtide.rest.access import PRINCIPAL
from ebbtide.rest.descriptions import LOCATION, Answer, Parameter, describe
from ebbtide.rest.pages import AFTER, LIMIT
from ebbtide.rest.parameters import check_parameters, parameters_of
from ebbtide.rest.roles import Role, covers

NAME: Final = Parameter("name", Name, "the task's name")
_STATE: Final = Parameter("state", TaskState, "only tasks in this state")
_MACHINE: Final = Parameter(
    "machine", Annotated[str, Field(pattern=r"^[A-Za-z0-9._-]{1,200}$")], "only tasks that run, or ran last, there"
)
_PREFIX: Final = Parameter("prefix", Annotated[str, Field(pattern=r"^[a-z0-9-]{1,40}$")], "names that begin so")
_OFFSET: Final = Parameter(
    "offset",
    Annotated[int, Field(ge=-(2**53), le=2**53)],
    "where the part begins, bytes; negative: so many before the end",
    default=0,
)
_MOST: Final = Parameter(
    "limit", Annotated[int, Field(ge=1, le=1_048_576)], "how long the part is at the most, bytes", default=65_536
)
_MACHINES: Final = Parameter("machines", bool, "with its machines, which may be many", default=True)
_TAKEN: Final = Answer(
    ManagedTask, "It is in the store; the same request again gets the same answer.", headers=LOCATION
)

routes = web.RouteTableDef()


@routes.post("/v1/tasks")
@describe(
    "Submit a task",
    tag="tasks",
    body=TaskRequest,
    example=TaskRequest(
        request_id="submit-train",
        task=TaskSpec(name="train", command=("/usr/bin/sleep", "60"), cores=2, duration_s=60.0, restartable=True),
    ),
    answers={202: _TAKEN},
    problems=(409,),
)
async def submit(request: web.Request) -> web.Response:
    check_parameters(request)
    wanted = await body_of(request, TaskRequest)
    pages = _pages(request)
    return _taken(pages.shown(await request.app[MANAGER].tasks.submit(wanted, request[PRINCIPAL].name)))


@routes.get("/v1/tasks")
@describe(
    "The tasks, newest first",
    tag="tasks",
    query=(LIMIT, AFTER, _STATE, _MACHINE, _PREFIX),
    answers={200: TaskPage},
)
async def tasks(request: web.Request) -> web.Response:
    return answer(await _pages(request).tasks(**parameters_of(request)))


@routes.get("/v1/tasks/{name}")
@describe(
    "One task; waits for its end",
    tag="tasks",
    path=(NAME,),
    query=(WAIT,),
    answers={200: ManagedTask},
    problems=(404,),
)
async def task(request: web.Request) -> web.Response:
    wait_s = parameters_of(request)["wait_s"]
    return answer(_pages(request).shown(await request.app[MANAGER].tasks.wait(request.match_info["name"], wait_s)))


@routes.get("/v1/tasks/{name}/output")
@describe(
    "A part of what a task's last attempt prints",
    tag="tasks",
    path=(NAME,),
    query=(_OFFSET, _MOST),
    answers={200: TaskOutput},
    problems=(404, 409),
)
async def output(request: web.Request) -> web.Response:
    part, manager, caller = parameters_of(request), request.app[MANAGER], request[PRINCIPAL]
    found = await manager.tasks.task(request.match_info["name"])
    if not covers(caller.role, Role.ADMIN):
        check_reader(manager.settings.engine, found, caller.name)
    return answer(await read_output(manager.settings.engine, found, **part))


@routes.get("/v1/tasks/{name}/explanation")
@describe(
    "Why a task waits, and what it waits for",
    tag="tasks",
    path=(NAME,),
    answers={200: TaskExplanation},
    problems=(404,),
)
async def explanation(request: web.Request) -> web.Response:
    check_parameters(request)
    found = await request.app[MANAGER].tasks.task(request.match_info["name"])
    return answer(_pages(request).explanation(found))


@routes.delete("/v1/tasks/{name}")
@describe(
    "Cancel a task; harmless where it has ended",
    tag="tasks",
    path=(NAME,),
    answers={202: Answer(ManagedTask, "It ends, or has ended.", headers=LOCATION)},
    problems=(404, 409),
)
async def cancel(request: web.Request) -> web.Response:
    check_parameters(request)
    return _taken(_pages(request).shown(await request.app[MANAGER].tasks.cancel(request.match_info["name"])))


@routes.get("/v1/engine")
@describe("What runs the tasks, and its machines", tag="tasks", query=(_MACHINES,), answers={200: EngineStatus})
async def engine(request: web.Request) -> web.Response:
    return answer(await _pages(request).engine(**parameters_of(request)))


@routes.get("/v1/acquirer")
@describe("The harvest VMs that are kept for tasks, and why", tag="tasks", answers={200: AcquirerStatus})
async def acquirer(request: web.Request) -> web.Response:
    check_parameters(request)
    return answer(request.app[MANAGER].acquirer.status())


def _taken(task: ManagedTask) -> web.Response:
    response = answer(task, 202)
    response.headers[hdrs.LOCATION] = f"/v1/tasks/{task.name}"
    return response


def _pages(request: web.Request) -> TaskPages:
    manager = request.app[MANAGER]
    return TaskPages(manager.tasks, manager.store)
