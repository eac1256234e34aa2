"""Middleware of a REST server: what a request does belongs to the span that its ``traceparent`` names."""

from __future__ import annotations

from aiohttp import web
from aiohttp.typedefs import Handler

from ebbtide.rest.access import PRINCIPAL
from ebbtide.rest.roles import Role
from ebbtide.tracing.context import HEADER, read_context
from ebbtide.tracing.spans import is_on, within


@web.middleware
async def trace_middleware(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Behind the one that knows the caller: nobody who is not let in has a trace, and no host adds to one of ours.

    Nor does a request that only reads.
    """
    if not is_on() or request.method in ("GET", "HEAD"):
        return await handler(request)
    caller = request.get(PRINCIPAL)
    if caller is None or caller.role is Role.AGENT:
        return await handler(request)
    with within(read_context(request.headers.get(HEADER))):
        return await handler(request)
