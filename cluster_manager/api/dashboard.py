"""The route of the dashboard: a page for a browser, which reads the other routes with a token of its user's."""

from __future__ import annotations

import asyncio

from aiohttp import web

from cluster_manager.dashboard import page
from ebbtide.rest.descriptions import Answer, describe
from ebbtide.rest.parameters import check_parameters

routes = web.RouteTableDef()


@routes.get("/")
@describe(
    "The dashboard, for a browser; it holds no data and asks for a token",
    tag="manager",
    answers={200: Answer(None, "One page, with nothing from elsewhere.", "text/html")},
    security="none",
)
async def dashboard(request: web.Request) -> web.Response:
    check_parameters(request)
    made = await asyncio.to_thread(page)
    return web.Response(text=made.html, content_type="text/html", charset="utf-8", headers=made.headers)
