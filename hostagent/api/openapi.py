"""Route of the OpenAPI document."""

from __future__ import annotations

from typing import Any

from aiohttp import web

from ebbtide.rest.descriptions import describe
from ebbtide.rest.openapi import PATH, Document, document_of, serve_document
from ebbtide.rest.parameters import check_parameters

routes = web.RouteTableDef()


def document(app: web.Application) -> dict[str, Any]:
    """The OpenAPI document of a host agent's application."""
    return document_of(app, "Ebbtide host agent", "Carries out what the manager decides on one host.")


@routes.get(PATH)
@describe("This document", tag="agent", answers={200: Document})
async def _openapi(request: web.Request) -> web.Response:
    check_parameters(request)
    return serve_document(request)
