"""The host agent's REST API: bodies of `ebbtide.messages`, access by `rest.access`, an answer for every error."""

from __future__ import annotations

from typing import Final

from aiohttp import web
from pydantic import ValidationError

from ebbtide.messages.common import Problem, problem_of
from ebbtide.messages.explanations import DecisionKind
from ebbtide.messages.problem_codes import ProblemCode
from ebbtide.rest.access import Access, tokens_only
from ebbtide.rest.metrics.stalls import LoopWatch
from ebbtide.rest.openapi import put_document
from ebbtide.rest.problems import answer_problem, problem_middleware, put_headers
from ebbtide.rest.roles import Role
from ebbtide.tracing.middleware import trace_middleware
from hostagent.api import budget, explain, lifecycle, metrics, openapi, steady
from hostagent.api import routes as api_routes
from hostagent.api.forms import AGENT, WOULD_BE
from hostagent.errors import HostAgentError, HypervisorError, JournalError, RequestRefused
from hostagent.operations.agent import Agent

MAX_BODY: Final = 256 * 1024
#: Each route carries a description (`rest.descriptions`), or the OpenAPI document cannot be made.
ROUTES: Final = (
    api_routes.routes,
    explain.routes,
    budget.routes,
    steady.routes,
    lifecycle.routes,
    openapi.routes,
    metrics.routes,
)


def make_app(agent: Agent, access: Access | str) -> web.Application:
    """The application; the caller starts and closes the agent.

    :param access: a token alone is the manager's, without limits of rate.
    """
    if isinstance(access, str):
        access = tokens_only(access, role=Role.MANAGER)
    middlewares = [problem_middleware("host agent", _known), access.middleware(), trace_middleware]
    app = web.Application(middlewares=middlewares, client_max_size=MAX_BODY)
    app.on_response_prepare.append(put_headers)
    app[AGENT] = agent
    app[metrics.LOOP] = LoopWatch()
    for routes in ROUTES:
        app.add_routes(routes)
    put_document(app, openapi.document)
    return app


def _known(request: web.Request, error: Exception) -> web.Response | None:
    if isinstance(error, RequestRefused):
        if error.status == 409 and WOULD_BE not in request:
            _note_refusal(request, str(error))
        return answer_problem(request, Problem.of(error.status, str(error), error.field, error.code))
    if isinstance(error, ValidationError):
        return answer_problem(request, problem_of(error))
    if isinstance(error, HypervisorError):
        code = ProblemCode.HYPERVISOR_UNAVAILABLE
        return answer_problem(request, Problem.of(503, f"the hypervisor: {error}", None, code))
    if isinstance(error, JournalError):
        return answer_problem(request, Problem.of(503, str(error)))
    if isinstance(error, HostAgentError):
        return answer_problem(request, Problem.of(400, str(error)))
    return None


def _note_refusal(request: web.Request, sentence: str) -> None:
    """A command that fits its form and is not carried out all the same is a decision, and remembered."""
    host = request.app[AGENT].host
    vm = request.match_info.get("name")
    known = vm if vm in host.vms else None
    # As it was sent: decoded, it could hold line breaks and whatever else a log must not show as its own.
    inputs = {"method": request.method, "path": request.rel_url.raw_path}
    host.history.note(known, DecisionKind.REFUSED, sentence, inputs)
