"""Routes about the manager itself: whether it runs, and what its routes are."""

from __future__ import annotations

import asyncio
from importlib.metadata import version
from typing import Any, Final

from aiohttp import web

from cluster_manager.api.forms import MANAGER, answer
from cluster_manager.api.standby import not_leading, unavailable
from ebbtide.messages.hosts import Caller, ManagerHealth, Readiness
from ebbtide.messages.problem_codes import ProblemCode
from ebbtide.rest.access import PRINCIPAL
from ebbtide.rest.descriptions import describe
from ebbtide.rest.openapi import PATH, Document, document_of, serve_document
from ebbtide.rest.parameters import check_parameters
from ebbtide.rest.roles import Role

#: How long a store that works may take for one row, seconds.
STORE_ANSWER_S: Final = 2.0

routes = web.RouteTableDef()


@routes.get("/healthz")
@describe("Whether the manager runs", tag="manager", answers={200: ManagerHealth}, security="none")
async def healthz(request: web.Request) -> web.Response:
    check_parameters(request)
    leads = request.app[MANAGER].leadership.leads()
    return answer(ManagerHealth(role="leader" if leads else "standby", version=version("ebbtide")))


@routes.get("/readyz")
@describe("Whether the manager leads and its store answers", tag="manager", answers={200: Readiness}, security="none")
async def readyz(request: web.Request) -> web.Response:
    check_parameters(request)
    manager = request.app[MANAGER]
    if not manager.leadership.leads():
        return unavailable(request, not_leading(manager), ProblemCode.STANDBY)
    try:
        async with asyncio.timeout(STORE_ANSWER_S):
            answers = await manager.store.answers()
    except TimeoutError:
        answers = False
    if not answers:
        return unavailable(request, "the store does not answer")
    return answer(Readiness(epoch=manager.epoch, sentence=f"this manager leads with epoch {manager.epoch}"))


@routes.get("/v1/whoami")
@describe("What the request's token is good for", tag="manager", answers={200: Caller})
async def whoami(request: web.Request) -> web.Response:
    check_parameters(request)
    caller = request[PRINCIPAL]
    role = caller.role.value if caller.role is not Role.MANAGER else "admin"
    return answer(Caller(name=caller.name, role=role, sentence=f"{caller.name} has the role {role}"))


def document(app: web.Application) -> dict[str, Any]:
    """The OpenAPI document of a manager's application."""
    return document_of(app, "Ebbtide manager", "Places VMs, deflating others instead of killing them.")


@routes.get(PATH)
@describe("This document", tag="manager", answers={200: Document})
async def openapi(request: web.Request) -> web.Response:
    check_parameters(request)
    return serve_document(request)
