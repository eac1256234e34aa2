"""The routes of the dashboard: a page for a browser, which reads the other routes with a token of its user's."""

from __future__ import annotations

import asyncio
from typing import Annotated, Final

from aiohttp import web
from pydantic import Field

from cluster_manager.dashboard import NAMES, PAGE, file_of
from cluster_manager.errors import RequestError
from ebbtide.rest.descriptions import Answer, Parameter, describe
from ebbtide.rest.parameters import check_parameters
from ebbtide.rest.versions import IF_NONE_MATCH, UNCHANGED, seen

_TAG: Final = {"ETag": "of the file's content"}
_FILE: Final = Parameter(
    "file", Annotated[str, Field(pattern=r"^[A-Za-z]{1,20}(\.[a-z]{2,4}){1,3}$")], "a module or style of the page"
)

routes = web.RouteTableDef()


@routes.get("/")
@describe(
    "The dashboard, for a browser; it holds no data and asks for a token",
    tag="manager",
    headers=(IF_NONE_MATCH,),
    answers={200: Answer(None, "One page, with nothing from elsewhere.", "text/html", _TAG), 304: UNCHANGED},
    security="none",
)
async def dashboard(request: web.Request) -> web.Response:
    check_parameters(request)
    return await _served(request, PAGE)


@routes.get("/page/{file}")
@describe(
    "What the dashboard consists of beside the page itself; it holds no data either",
    tag="manager",
    path=(_FILE,),
    headers=(IF_NONE_MATCH,),
    answers={200: Answer(None, "A module, or a style.", "text/javascript", _TAG), 304: UNCHANGED},
    problems=(404,),
    security="none",
)
async def part(request: web.Request) -> web.Response:
    check_parameters(request)
    if (name := request.match_info["file"]) not in NAMES:
        raise RequestError(404, f"the page has no part {name}", "file")
    return await _served(request, name)


async def _served(request: web.Request, name: str) -> web.Response:
    file = await asyncio.to_thread(file_of, name)
    if seen(request, file.tag):
        return web.Response(status=304, headers=file.headers)
    return web.Response(body=file.content, content_type=file.content_type, charset="utf-8", headers=file.headers)
