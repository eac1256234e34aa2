"""Port of the metrics alone, on loopback and without a token: for a Prometheus on the same machine."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from typing import Any, Final

import structlog
from aiohttp import web

from ebbtide.rest.errors import Refused
from ebbtide.rest.listener import serving
from ebbtide.rest.metrics.sheet import PATH
from ebbtide.rest.problems import problem_middleware, put_headers
from ebbtide.rest.tls import is_loopback

log = structlog.get_logger()

ADDRESS: Final = "127.0.0.1"


@contextlib.asynccontextmanager
async def metrics_port(
    held: Sequence[socket.socket],
    daemon: str,
    handler: Callable[[web.Request], Awaitable[web.StreamResponse]],
    parts: Mapping[web.AppKey[Any], Any],
) -> AsyncIterator[None]:
    """Serve the metrics from here to the end of the block; nothing is held: nothing.

    :param held: by `rest.listener.holding` at `ADDRESS`, before anything of the daemon begins.
    :param handler: of ``GET /metrics``, as it is in the daemon's own application.
    :param parts: what it finds in its application.
    """
    if not held:
        yield
        return
    app = web.Application(middlewares=[problem_middleware(daemon, _none_known), _from_here])
    for key, part in parts.items():
        app[key] = part
    app.router.add_get(PATH, handler)
    app.on_response_prepare.append(put_headers)
    async with serving(app, ADDRESS, 0, shutdown_timeout_s=2.0, held=held) as listener:
        log.info("metrics", url=f"http://{ADDRESS}:{listener.port}{PATH}")
        yield


def _none_known(request: web.Request, error: Exception) -> None:
    """No error here is a daemon's own."""


@web.middleware
async def _from_here(request: web.Request, handler: Any) -> web.StreamResponse:
    """A page in a browser of this machine reaches loopback, too, by a name of its own: no other name is answered."""
    try:
        host = request.url.host or ""
    except ValueError as error:
        raise Refused(400, "the Host header must be a name or an address, with a port or without", "Host") from error
    if not is_loopback(host):
        raise Refused(403, "the metrics are for this machine: ask for 127.0.0.1 or localhost")
    response: web.StreamResponse = await handler(request)
    return response
