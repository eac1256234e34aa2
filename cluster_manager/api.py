"""The manager's REST interface as one application: tokens, limits, and one form for every error.

Bodies are those of :mod:`deflation.messages`; all but ``GET /healthz`` needs a bearer token, the agents' token on
their reports and the clients' on everything else. The routes are in ``api_hosts``, ``api_vms``,
``api_records``, ``api_events`` and ``api_itself``.
"""

from __future__ import annotations

import hmac
from collections.abc import Awaitable, Callable
from typing import Final

import structlog
from aiohttp import hdrs, web

from cluster_manager import api_events, api_hosts, api_itself, api_records, api_vms
from cluster_manager.api_forms import MANAGER, answer
from cluster_manager.errors import RequestError
from cluster_manager.manager import Manager
from deflation.errors import InvalidField
from deflation.messages import Problem, problem_of

log = structlog.get_logger()

#: Each route carries a description (:mod:`rest.descriptions`), or the OpenAPI document cannot be made.
ROUTES: Final = (api_hosts.routes, api_vms.routes, api_records.routes, api_events.routes, api_itself.routes)

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


def make_app(manager: Manager) -> web.Application:
    """The application of a manager; it starts and stops the manager with itself."""
    app = web.Application(
        middlewares=[problem_middleware, token_middleware], client_max_size=manager.settings.body_limit
    )
    app[MANAGER] = manager
    for routes in ROUTES:
        app.add_routes(routes)
    app.on_shutdown.append(_hang_up)
    app.on_startup.append(_start)
    app.on_cleanup.append(_stop)
    return app


async def _start(app: web.Application) -> None:
    await app[MANAGER].start()


async def _stop(app: web.Application) -> None:
    await app[MANAGER].stop()


async def _hang_up(app: web.Application) -> None:
    """Streams of events never end by themselves."""
    app[MANAGER].feed.hang_up()


# --- middlewares -----------------------------------------------------------------------------------------------------


@web.middleware
async def problem_middleware(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Every error becomes a Problem."""
    try:
        return await handler(request)
    except RequestError as error:
        return answer(error.problem, error.status)
    except InvalidField as error:
        return answer(problem_of(error), 400)
    except web.HTTPException as error:
        sentences = {
            404: f"there is nothing at {request.path}",
            405: f"{request.path} does not take {request.method}",
            413: f"the body is larger than {request.app[MANAGER].settings.body_limit} bytes",
        }
        response = answer(Problem(error=sentences.get(error.status, error.reason), field=None), error.status)
        if allow := error.headers.get(hdrs.ALLOW):
            response.headers[hdrs.ALLOW] = allow
        return response
    except Exception:
        log.exception("request failed by a defect of the manager", method=request.method, path=request.path)
        return answer(Problem(error="the manager failed; its log says more", field=None), 500)


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
