"""Routes about the manager itself: whether it runs, and what its routes are."""

from __future__ import annotations

from typing import Any

from aiohttp import web

from cluster_manager.api_forms import answer
from deflation.pages import Health
from rest.descriptions import describe
from rest.openapi import PATH, Document, document_of
from rest.parameters import check_parameters

routes = web.RouteTableDef()


@routes.get("/healthz", allow_head=False)
@describe("Whether the manager runs", tag="manager", answers={200: Health}, security="none")
async def healthz(request: web.Request) -> web.Response:
    check_parameters(request)
    return answer(Health())


def document(app: web.Application) -> dict[str, Any]:
    """The OpenAPI document of a manager's application."""
    return document_of(app, "Ebbtide manager", "Places VMs, deflating others instead of killing them.")


@routes.get(PATH, allow_head=False)
@describe("This document", tag="manager", answers={200: Document})
async def openapi(request: web.Request) -> web.Response:
    check_parameters(request)
    return web.json_response(document(request.app))
