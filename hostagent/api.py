"""The host agent's REST API: bodies of :mod:`deflation.messages`, a bearer token, a sentence for every error."""

from __future__ import annotations

import hmac
from collections.abc import Awaitable, Callable
from typing import Final

import structlog
from aiohttp import web
from pydantic import ValidationError

from deflation.errors import InvalidField
from deflation.explanations import DecisionKind
from deflation.messages import (
    Command,
    CreateCommand,
    Problem,
    ReclaimCommand,
    ReinflateCommand,
    TargetCommand,
    problem_of,
)
from hostagent import api_explain
from hostagent.agent import Agent
from hostagent.api_forms import AGENT, accepted, answer, body_of, number, parameters
from hostagent.errors import HostAgentError, HypervisorError, RequestRefused

MAX_BODY: Final = 256 * 1024
MAX_WAIT_S: Final = 30.0
DELETE_REASONS: Final = ("delete", "minimum", "shortfall")
TOKEN: Final = web.AppKey("token", str)
#: Stands in a request that is a dry run.
WOULD_BE: Final = web.RequestKey("dry_run", bool)

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
log = structlog.get_logger()
routes = web.RouteTableDef()


def make_app(agent: Agent, token: str) -> web.Application:
    """The application; the caller starts and closes the agent."""
    app = web.Application(middlewares=[_problems, _authorise], client_max_size=MAX_BODY)
    app[AGENT] = agent
    app[TOKEN] = token
    app.add_routes(routes)
    app.add_routes(api_explain.routes)
    return app


@web.middleware
async def _problems(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Every error is answered with a :class:`Problem`."""
    try:
        return await handler(request)
    except RequestRefused as error:
        if error.status == 409 and WOULD_BE not in request:
            _note_refusal(request, str(error))
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


def _note_refusal(request: web.Request, sentence: str) -> None:
    """A command that fits its form and is not carried out all the same is a decision, and remembered."""
    host = request.app[AGENT].host
    vm = request.match_info.get("name")
    known = vm if vm in host.vms else None
    host.history.note(known, DecisionKind.REFUSED, sentence, {"method": request.method, "path": request.path})


@routes.get("/healthz")
async def _health(request: web.Request) -> web.Response:
    return web.json_response({"status": "ok"})


@routes.get("/v1/host")
async def _get_host(request: web.Request) -> web.Response:
    return answer(request.app[AGENT].host.report())


@routes.get("/v1/vms")
async def _get_vms(request: web.Request) -> web.Response:
    vms = request.app[AGENT].host.vms.values()
    return web.json_response({"vms": [vm.status().model_dump(mode="json") for vm in vms]})


@routes.get("/v1/vms/{name}")
async def _get_vm(request: web.Request) -> web.Response:
    return answer(request.app[AGENT].host.vm(request.match_info["name"]).status())


@routes.post("/v1/vms")
async def _create(request: web.Request) -> web.Response:
    return accepted(await request.app[AGENT].commands.create(await body_of(request, CreateCommand)))


@routes.delete("/v1/vms/{name}")
async def _delete(request: web.Request) -> web.Response:
    query = dict(request.query)
    reason = query.pop("reason", "delete")
    if reason not in DELETE_REASONS:
        raise RequestRefused(400, f"reason must be one of {', '.join(DELETE_REASONS)}", "reason")
    command = Command.model_validate_strings(query, strict=False)
    return accepted(await request.app[AGENT].commands.delete(request.match_info["name"], command, reason))


@routes.put("/v1/vms/{name}/target")
async def _target(request: web.Request) -> web.Response:
    agent, name = request.app[AGENT], request.match_info["name"]
    command = await body_of(request, TargetCommand)
    if command.dry_run:
        request[WOULD_BE] = True
        return answer(await agent.dry_run.target(name, command))
    return accepted(await agent.commands.target(name, command))


@routes.post("/v1/reclaims")
async def _reclaim(request: web.Request) -> web.Response:
    agent, command = request.app[AGENT], await body_of(request, ReclaimCommand)
    if command.dry_run:
        request[WOULD_BE] = True
        return answer(await agent.dry_run.reclaim(command))
    return accepted(await agent.commands.reclaim(command))


@routes.post("/v1/reinflations")
async def _reinflate(request: web.Request) -> web.Response:
    agent, command = request.app[AGENT], await body_of(request, ReinflateCommand)
    if command.dry_run:
        request[WOULD_BE] = True
        return answer(await agent.dry_run.reinflate(command))
    return accepted(await agent.commands.reinflate(command))


@routes.get("/v1/operations/{request_id}")
async def _get_operation(request: web.Request) -> web.Response:
    wait_s = number(parameters(request, ("wait_s",)), "wait_s", 0.0, MAX_WAIT_S)
    request_id = request.match_info["request_id"]
    operation = await request.app[AGENT].commands.operations.get(request_id, wait_s)
    if operation is None:
        raise RequestRefused(404, f"there is no operation {request_id}", "request_id")
    return answer(operation)


def _problem(status: int, problem: Problem) -> web.Response:
    return answer(problem, status)
