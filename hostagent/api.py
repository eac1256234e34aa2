"""The host agent's REST API: bodies of :mod:`deflation.messages`, a bearer token, a sentence for every error."""

from __future__ import annotations

import hmac
from collections.abc import Awaitable, Callable
from typing import Final

import structlog
from aiohttp import hdrs, web
from pydantic import ValidationError

from deflation.errors import InvalidField
from deflation.explanations import DecisionKind
from deflation.messages import Problem, problem_of
from hostagent import api_explain, api_openapi, api_routes
from hostagent.agent import Agent
from hostagent.api_forms import AGENT, answer
from hostagent.api_routes import WOULD_BE
from hostagent.errors import HostAgentError, HypervisorError, RequestRefused

MAX_BODY: Final = 256 * 1024
#: Each route carries a description (:mod:`rest.descriptions`), or the OpenAPI document cannot be made.
ROUTES: Final = (api_routes.routes, api_explain.routes, api_openapi.routes)
TOKEN: Final = web.AppKey("token", str)

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
log = structlog.get_logger()


def make_app(agent: Agent, token: str) -> web.Application:
    """The application; the caller starts and closes the agent."""
    app = web.Application(middlewares=[_problems, _authorise], client_max_size=MAX_BODY)
    app[AGENT] = agent
    app[TOKEN] = token
    for routes in ROUTES:
        app.add_routes(routes)
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
        response = _problem(error.status, Problem(error=f"{request.method} {request.path}: {error.reason}"))
        if allow := error.headers.get(hdrs.ALLOW):
            response.headers[hdrs.ALLOW] = allow
        return response


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


def _problem(status: int, problem: Problem) -> web.Response:
    return answer(problem, status)
