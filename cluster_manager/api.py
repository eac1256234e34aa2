"""The manager's REST interface as one application.

Bodies are those of :mod:`deflation.messages`; who may do what is :mod:`rest.access`' and :mod:`deflation.roles`'. The
routes are in ``api_hosts``, ``api_vms``, ``api_lifecycle``, ``api_records``, ``api_tasks``, ``api_events``,
``api_itself`` and ``api_dashboard``.
"""

from __future__ import annotations

from typing import Final

from aiohttp import web

from cluster_manager import (
    api_dashboard,
    api_events,
    api_hosts,
    api_itself,
    api_lifecycle,
    api_records,
    api_tasks,
    api_vms,
)
from cluster_manager.api_forms import MANAGER
from cluster_manager.errors import RequestError, StoreError
from cluster_manager.manager import Manager
from cluster_manager.standby import leader_middleware, store_problem
from rest.access import Access, tokens_only
from rest.problems import answer_problem, problem_middleware

#: Each route carries a description (:mod:`rest.descriptions`), or the OpenAPI document cannot be made.
ROUTES: Final = (
    api_hosts.routes,
    api_vms.routes,
    api_lifecycle.routes,
    api_records.routes,
    api_tasks.routes,
    api_events.routes,
    api_itself.routes,
    api_dashboard.routes,
)


def make_app(manager: Manager, access: Access | None = None) -> web.Application:
    """The application of a manager; it starts and stops the manager with itself.

    :param access: default: the two tokens of the manager's settings, without limits of rate.
    """
    settings = manager.settings
    access = access or tokens_only(settings.token, settings.agent_token)
    app = web.Application(
        middlewares=[problem_middleware("manager", _known), access.middleware(), leader_middleware],
        client_max_size=settings.body_limit,
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


def _known(request: web.Request, error: Exception) -> web.Response | None:
    if isinstance(error, StoreError):
        return store_problem(request, error)
    return answer_problem(error.problem, error.status) if isinstance(error, RequestError) else None
