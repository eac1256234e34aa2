"""The manager's REST interface: routes, tokens, limits, and one form for every error.

Bodies are those of :mod:`deflation.messages`; all but ``GET /healthz`` needs a bearer token, the agents' token on
their reports and the clients' on everything else.
"""

from __future__ import annotations

import hmac
import math
from collections.abc import Awaitable, Callable, Collection
from typing import Final, TypeVar

import structlog
from aiohttp import hdrs, web
from pydantic import BaseModel, TypeAdapter, ValidationError

from cluster_manager.errors import RequestError
from cluster_manager.manager import Manager
from cluster_manager.rows import StoredEvent
from deflation.allocations import check_target
from deflation.errors import InvalidField
from deflation.messages import HostReport, ModeCommand, Problem, RequestId, TargetCommand, VMRequest, problem_of
from deflation.resources import ZERO

log = structlog.get_logger()

B = TypeVar("B", bound=BaseModel)
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]

MANAGER: Final = web.AppKey("manager", Manager)

#: Longest long poll, seconds; most rows in one answer; longest task duration that is ranked for, seconds.
LONGEST_WAIT_S: Final = 60.0
#: What a host agent holds an answer back at the most, seconds.
LONGEST_HOST_WAIT_S: Final = 30.0
MOST_ROWS: Final = 1000
LONGEST_DURATION_S: Final = 30 * 86_400.0

_REQUEST_ID: Final[TypeAdapter[str]] = TypeAdapter(RequestId)
routes = web.RouteTableDef()


def make_app(manager: Manager) -> web.Application:
    """The application of a manager; it starts and stops the manager with itself."""
    app = web.Application(
        middlewares=[problem_middleware, token_middleware], client_max_size=manager.settings.body_limit
    )
    app[MANAGER] = manager
    app.add_routes(routes)
    app.on_startup.append(_start)
    app.on_cleanup.append(_stop)
    return app


async def _start(app: web.Application) -> None:
    await app[MANAGER].start()


async def _stop(app: web.Application) -> None:
    await app[MANAGER].stop()


# --- middlewares -----------------------------------------------------------------------------------------------------


@web.middleware
async def problem_middleware(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Every error becomes a Problem."""
    try:
        return await handler(request)
    except RequestError as error:
        return _answer(error.problem, error.status)
    except InvalidField as error:
        return _answer(problem_of(error), 400)
    except web.HTTPException as error:
        sentences = {
            404: f"there is nothing at {request.path}",
            405: f"{request.path} does not take {request.method}",
            413: f"the body is larger than {request.app[MANAGER].settings.body_limit} bytes",
        }
        answer = _answer(Problem(error=sentences.get(error.status, error.reason), field=None), error.status)
        if allow := error.headers.get(hdrs.ALLOW):
            answer.headers[hdrs.ALLOW] = allow
        return answer
    except Exception:
        log.exception("request failed by a defect of the manager", method=request.method, path=request.path)
        return _answer(Problem(error="the manager failed; its log says more", field=None), 500)


@web.middleware
async def token_middleware(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Nobody without the right token learns even which paths exist."""
    resource = request.match_info.route.resource
    if resource is not None and resource.canonical == "/healthz":
        return await handler(request)
    settings = request.app[MANAGER].settings
    is_report = resource is not None and resource.canonical == "/v1/hosts/{id}/report"
    expected = settings.agent_token if is_report else settings.token
    scheme, _, given = request.headers.get(hdrs.AUTHORIZATION, "").partition(" ")
    right = hmac.compare_digest(given.strip().encode(errors="replace"), expected.encode())
    if scheme.lower() != "bearer" or not right:
        raise RequestError(401, "the Authorization header must be 'Bearer' with the right token", "Authorization")
    return await handler(request)


# --- hosts -----------------------------------------------------------------------------------------------------------


@routes.get("/healthz", allow_head=False)
async def healthz(request: web.Request) -> web.Response:
    _query(request, ())
    return web.json_response({"status": "ok"})


@routes.post("/v1/hosts/{id}/report")
async def take_report(request: web.Request) -> web.Response:
    _query(request, ())
    report = await _body(request, HostReport)
    if report.id != request.match_info["id"]:
        raise RequestError(400, f"id: the report is of {report.id}, the path of {request.match_info['id']}", "id")
    if not report.url.startswith(("http://", "https://")):
        raise RequestError(400, "url: must begin with http:// or https://", "url")
    return _answer(await request.app[MANAGER].take_report(report))


@routes.get("/v1/hosts", allow_head=False)
async def hosts(request: web.Request) -> web.Response:
    _query(request, ())
    registry = request.app[MANAGER].hosts
    statuses = (registry.status(host.report.id) for host in registry.all())
    return _answers("hosts", [status for status in statuses if status is not None])


@routes.get("/v1/hosts/{id}", allow_head=False)
async def host(request: web.Request) -> web.Response:
    _query(request, ())
    status = request.app[MANAGER].hosts.status(request.match_info["id"])
    if status is None:
        raise RequestError(404, f"there is no host {request.match_info['id']}", "id")
    return _answer(status)


@routes.put("/v1/hosts/{id}/mode")
async def set_mode(request: web.Request) -> web.Response:
    _query(request, ())
    command = await _body(request, ModeCommand)
    return _answer(await request.app[MANAGER].questions.set_mode(request.match_info["id"], command), 202)


@routes.get("/v1/hosts/{id}/operations/{request_id}", allow_head=False)
async def host_operation(request: web.Request) -> web.Response:
    query = _query(request, ("wait_s",))
    wait_s = _number(query, "wait_s", 0.0, 0.0, LONGEST_HOST_WAIT_S)
    host_id, request_id = request.match_info["id"], _request_id(request.match_info["request_id"])
    return _answer(await request.app[MANAGER].questions.host_operation(host_id, request_id, wait_s))


# --- VMs and operations ----------------------------------------------------------------------------------------------


@routes.post("/v1/vms")
async def create(request: web.Request) -> web.Response:
    _query(request, ())
    return _answer(await request.app[MANAGER].operations.create(await _body(request, VMRequest)), 202)


@routes.get("/v1/vms", allow_head=False)
async def vms(request: web.Request) -> web.Response:
    _query(request, ())
    return _answers("vms", await request.app[MANAGER].vms())


@routes.get("/v1/vms/{name}", allow_head=False)
async def vm(request: web.Request) -> web.Response:
    _query(request, ())
    for found in await request.app[MANAGER].vms(request.match_info["name"]):
        return _answer(found)
    raise RequestError(404, f"there is no VM named {request.match_info['name']}", "name")


@routes.get("/v1/vms/{name}/explain", allow_head=False)
async def explain(request: web.Request) -> web.Response:
    _query(request, ())
    manager, name = request.app[MANAGER], request.match_info["name"]
    for found in await manager.vms(name):
        return _answer(await manager.questions.explain(found))
    raise RequestError(404, f"there is no VM named {name}", "name")


@routes.delete("/v1/vms/{name}")
async def delete(request: web.Request) -> web.Response:
    query = _query(request, ("request_id",))
    if "request_id" not in query:
        raise RequestError(400, "request_id: is required", "request_id")
    request_id = _request_id(query["request_id"])
    return _answer(await request.app[MANAGER].operations.delete(request.match_info["name"], request_id), 202)


@routes.put("/v1/vms/{name}/target")
async def target(request: web.Request) -> web.Response:
    _query(request, ())
    manager, name = request.app[MANAGER], request.match_info["name"]
    command = await _body(request, TargetCommand)
    for row in await manager.store.vms(name):
        reported = manager.hosts.vm(row.host, name)
        allocation = reported.allocation() if reported is not None else row.spec.allocation(ZERO)
        check_target(allocation, command.target.vector())
    if command.dry_run:
        for found in await manager.vms(name):
            return _answer(await manager.questions.forecast(found, command))
    return _answer(await manager.operations.target(name, command), 202)


@routes.get("/v1/operations", allow_head=False)
async def operations(request: web.Request) -> web.Response:
    query = _query(request, ("limit",))
    return _answers("operations", await request.app[MANAGER].operations.newest(_limit(query)))


@routes.get("/v1/operations/{id}", allow_head=False)
async def operation(request: web.Request) -> web.Response:
    query = _query(request, ("wait_s",))
    wait_s = _number(query, "wait_s", 0.0, 0.0, LONGEST_WAIT_S)
    found = await request.app[MANAGER].operations.operation(request.match_info["id"], wait_s)
    if found is None:
        raise RequestError(404, f"there is no operation {request.match_info['id']}", "id")
    return _answer(found)


# --- core changes, machines, events ----------------------------------------------------------------------------------


@routes.get("/v1/core-changes", allow_head=False)
async def core_changes(request: web.Request) -> web.Response:
    query = _query(request, ("machine", "limit"))
    changes = await request.app[MANAGER].core_changes.newest(query.get("machine"), _limit(query))
    return _answers("core_changes", changes)


@routes.get("/v1/machines", allow_head=False)
async def machines(request: web.Request) -> web.Response:
    query = _query(request, ("duration_s",))
    return _answers("machines", await request.app[MANAGER].core_changes.ranking(_duration(query)))


@routes.get("/v1/machines/{name}", allow_head=False)
async def machine(request: web.Request) -> web.Response:
    query, name = _query(request, ("duration_s",)), request.match_info["name"]
    for ranked in await request.app[MANAGER].core_changes.ranking(_duration(query)):
        if ranked.machine == name:
            return _answer(ranked)
    raise RequestError(404, f"there is no running machine named {name}", "name")


@routes.get("/v1/events", allow_head=False)
async def events(request: web.Request) -> web.Response:
    query = _query(request, ("limit",))
    rows = await request.app[MANAGER].store.events(_limit(query))
    return web.json_response({"events": [_event(row) for row in rows]})


def _event(row: StoredEvent) -> dict[str, object]:
    return {"at": row.at, "vm": row.vm, "host": row.host, "kind": row.kind, "sentence": row.sentence}


# --- requests and answers --------------------------------------------------------------------------------------------


async def _body(request: web.Request, form: type[B]) -> B:
    """The body in its form.

    :raises RequestError: 400 with the field.
    """
    try:
        return form.model_validate_json(await request.read())
    except ValidationError as error:
        problem = problem_of(error)
        raise RequestError(400, problem.error, problem.field) from error


def _query(request: web.Request, names: Collection[str]) -> dict[str, str]:
    """The query's parameters, each known and given once.

    :raises RequestError: 400 with the parameter.
    """
    for name in request.query:
        if name not in names:
            known = f"known here: {', '.join(names)}" if names else "none is known here"
            raise RequestError(400, f"{name}: is no query parameter of {request.path} ({known})", name)
        if len(request.query.getall(name)) > 1:
            raise RequestError(400, f"{name}: is given more than once", name)
    return dict(request.query)


def _request_id(text: str) -> str:
    """:raises RequestError: it can be none."""
    try:
        return _REQUEST_ID.validate_python(text)
    except ValidationError as error:
        raise RequestError(400, f"request_id: {problem_of(error).error}", "request_id") from error


def _number(query: dict[str, str], name: str, default: float, low: float, high: float) -> float:
    try:
        value = float(query.get(name, default))
    except ValueError:
        value = math.nan
    if not low <= value <= high:
        raise RequestError(400, f"{name}: must be a number within [{low:g}, {high:g}]", name)
    return value


def _limit(query: dict[str, str]) -> int:
    value = _number(query, "limit", 100, 1, MOST_ROWS)
    if not value.is_integer():
        raise RequestError(400, "limit: must be a whole number", "limit")
    return int(value)


def _duration(query: dict[str, str]) -> float:
    return _number(query, "duration_s", 600.0, 0.0, LONGEST_DURATION_S)


def _answer(body: BaseModel, status: int = 200) -> web.Response:
    return web.Response(text=body.model_dump_json(), status=status, content_type="application/json")


def _answers(name: str, bodies: Collection[BaseModel]) -> web.Response:
    return web.json_response({name: [body.model_dump(mode="json") for body in bodies]})
