"""The host agent's REST API: bodies of :mod:`deflation.messages`, a bearer token, a sentence for every error."""

from __future__ import annotations

import hmac
from collections.abc import Awaitable, Callable
from typing import Final, TypeVar

import structlog
from aiohttp import web
from pydantic import BaseModel, ValidationError

from deflation.errors import InvalidField
from deflation.messages import (
    Command,
    CreateCommand,
    Operation,
    Problem,
    ReclaimCommand,
    ReinflateCommand,
    TargetCommand,
    problem_of,
)
from hostagent.agent import Agent
from hostagent.errors import HostAgentError, HypervisorError, RequestRefused

MAX_BODY: Final = 256 * 1024
MAX_WAIT_S: Final = 30.0
DELETE_REASONS: Final = ("delete", "minimum", "shortfall")
AGENT: Final = web.AppKey("agent", Agent)
TOKEN: Final = web.AppKey("token", str)

BodyT = TypeVar("BodyT", bound=BaseModel)
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
log = structlog.get_logger()
routes = web.RouteTableDef()


def make_app(agent: Agent, token: str) -> web.Application:
    """The application; the caller starts and closes the agent."""
    app = web.Application(middlewares=[_problems, _authorise], client_max_size=MAX_BODY)
    app[AGENT] = agent
    app[TOKEN] = token
    app.add_routes(routes)
    return app


@web.middleware
async def _problems(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Every error is answered with a :class:`Problem`."""
    try:
        return await handler(request)
    except RequestRefused as error:
        return _problem(error.status, Problem(error=str(error), field=error.field))
    except (ValidationError, InvalidField) as error:
        return _problem(400, problem_of(error))
    except HypervisorError as error:
        return _problem(503, Problem(error=f"the hypervisor: {error}"))
    except HostAgentError as error:
        return _problem(400, Problem(error=str(error)))
    except web.HTTPException as error:
        if error.status < 400:
            raise
        return _problem(error.status, Problem(error=f"{request.method} {request.path}: {error.reason}"))


@web.middleware
async def _authorise(request: web.Request, handler: Handler) -> web.StreamResponse:
    if request.path != "/healthz":
        given = request.headers.get("Authorization", "").encode(errors="surrogateescape")
        if not hmac.compare_digest(given, f"Bearer {request.app[TOKEN]}".encode()):
            raise RequestRefused(401, "the bearer token is missing or wrong", "Authorization")
    return await handler(request)


@routes.get("/healthz")
async def _health(request: web.Request) -> web.Response:
    return web.json_response({"status": "ok"})


@routes.get("/v1/host")
async def _get_host(request: web.Request) -> web.Response:
    return _answer(request.app[AGENT].host.report())


@routes.get("/v1/vms")
async def _get_vms(request: web.Request) -> web.Response:
    vms = request.app[AGENT].host.vms.values()
    return web.json_response({"vms": [vm.status().model_dump(mode="json") for vm in vms]})


@routes.get("/v1/vms/{name}")
async def _get_vm(request: web.Request) -> web.Response:
    return _answer(request.app[AGENT].host.vm(request.match_info["name"]).status())


@routes.post("/v1/vms")
async def _create(request: web.Request) -> web.Response:
    return _accepted(await request.app[AGENT].commands.create(await _body(request, CreateCommand)))


@routes.delete("/v1/vms/{name}")
async def _delete(request: web.Request) -> web.Response:
    query = dict(request.query)
    reason = query.pop("reason", "delete")
    if reason not in DELETE_REASONS:
        raise RequestRefused(400, f"reason must be one of {', '.join(DELETE_REASONS)}", "reason")
    command = Command.model_validate_strings(query, strict=False)
    return _accepted(await request.app[AGENT].commands.delete(request.match_info["name"], command, reason))


@routes.put("/v1/vms/{name}/target")
async def _target(request: web.Request) -> web.Response:
    command = await _body(request, TargetCommand)
    return _accepted(await request.app[AGENT].commands.target(request.match_info["name"], command))


@routes.post("/v1/reclaims")
async def _reclaim(request: web.Request) -> web.Response:
    return _accepted(await request.app[AGENT].commands.reclaim(await _body(request, ReclaimCommand)))


@routes.post("/v1/reinflations")
async def _reinflate(request: web.Request) -> web.Response:
    return _accepted(await request.app[AGENT].commands.reinflate(await _body(request, ReinflateCommand)))


@routes.get("/v1/operations/{request_id}")
async def _get_operation(request: web.Request) -> web.Response:
    for name in request.query.keys() - {"wait_s"}:
        raise RequestRefused(400, f"{name} is no parameter of this route", name)
    try:
        wait_s = float(request.query.get("wait_s", "0"))
    except ValueError:
        wait_s = -1.0
    if not 0 <= wait_s <= MAX_WAIT_S:
        raise RequestRefused(400, f"wait_s must be a number from 0 to {MAX_WAIT_S:g}", "wait_s")
    request_id = request.match_info["request_id"]
    operation = await request.app[AGENT].commands.operations.get(request_id, wait_s)
    if operation is None:
        raise RequestRefused(404, f"there is no operation {request_id}", "request_id")
    return _answer(operation)


async def _body(request: web.Request, model: type[BodyT]) -> BodyT:
    """:raises ValidationError: the body is no JSON or does not fit the model."""
    return model.model_validate_json(await request.read())


def _answer(body: BaseModel, status: int = 200) -> web.Response:
    return web.Response(text=body.model_dump_json(), status=status, content_type="application/json")


def _accepted(operation: Operation) -> web.Response:
    return _answer(operation, 202)


def _problem(status: int, problem: Problem) -> web.Response:
    return _answer(problem, status)
