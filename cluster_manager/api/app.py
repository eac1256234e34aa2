"""The manager's REST interface as one application.

Bodies are those of `ebbtide.messages`; who may do what is `rest.access`' and `rest.roles`'. The
routes are the modules of this package.
"""

from __future__ import annotations

from typing import Final

from aiohttp import web

from cluster_manager.api import (
    backup,
    dashboard,
    enrolment,
    events,
    history,
    hosts,
    itself,
    lifecycle,
    metrics,
    records,
    tasks,
    vms,
)
from cluster_manager.api.forms import MANAGER
from cluster_manager.api.standby import leader_middleware, store_problem
from cluster_manager.errors import RequestError, StoreError
from cluster_manager.manager import Manager
from ebbtide.rest.access import Access, tokens_only
from ebbtide.rest.metrics.stalls import LoopWatch
from ebbtide.rest.openapi import put_document
from ebbtide.rest.problems import answer_problem, problem_middleware, put_headers
from ebbtide.tracing.middleware import trace_middleware

#: Each route carries a description (`rest.descriptions`), or the OpenAPI document cannot be made.
ROUTES: Final = (
    hosts.routes,
    history.routes,
    enrolment.routes,
    vms.routes,
    lifecycle.routes,
    records.routes,
    tasks.routes,
    events.routes,
    itself.routes,
    metrics.routes,
    backup.routes,
    dashboard.routes,
)


def make_app(manager: Manager, access: Access | None = None) -> web.Application:
    """The application of a manager; it starts and stops the manager with itself.

    :param access: default: by the token and the hosts' key of the manager's settings, without limits of rate.
    """
    settings = manager.settings
    access = access or tokens_only(settings.token, settings.hosts_key)
    app = web.Application(
        middlewares=[problem_middleware("manager", _known), access.middleware(), leader_middleware, trace_middleware],
        client_max_size=settings.body_limit,
    )
    app[MANAGER] = manager
    app[metrics.LOOP] = LoopWatch()
    for routes in ROUTES:
        app.add_routes(routes)
    put_document(app, itself.document)
    app.on_response_prepare.append(put_headers)
    app.on_shutdown.append(_hang_up)
    app.on_startup.append(_start)
    app.on_cleanup.append(_stop)
    return app


async def _start(app: web.Application) -> None:
    await app[MANAGER].start()


async def _stop(app: web.Application) -> None:
    await app[MANAGER].stop()


async def _hang_up(app: web.Application) -> None:
    """Streams of events never end by themselves, and a task that is waited for may run for long."""
    app[MANAGER].feed.hang_up()
    app[MANAGER].tasks.hang_up()


def _known(request: web.Request, error: Exception) -> web.Response | None:
    if isinstance(error, StoreError):
        return store_problem(request, error)
    return answer_problem(request, error.problem) if isinstance(error, RequestError) else None
