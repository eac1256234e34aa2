"""Routes of the event log: pages of it, and a stream that goes on (server-sent events)."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Annotated, Any, Final

import structlog
from aiohttp import ClientConnectionResetError, web
from pydantic import Field

from cluster_manager.api.forms import MANAGER, answer
from cluster_manager.api.records import HOST, SINCE, VM
from cluster_manager.errors import StoreError
from cluster_manager.inventory.event_feed import Listener
from cluster_manager.inventory.lists import check_position
from ebbtide.messages.explanations import Event, EventPage
from ebbtide.rest.access import PRINCIPAL, still_known
from ebbtide.rest.descriptions import Answer, Parameter, describe
from ebbtide.rest.pages import AFTER, LIMIT
from ebbtide.rest.parameters import parameters_of

log = structlog.get_logger()

STREAM: Final = "/v1/events/stream"
#: Seconds between two signs of life, and what one write may take.
HEARTBEAT_S: Final = 15.0
WRITE_S: Final = 15.0

EventId = Annotated[int, Field(ge=0, le=2**53)]
_KIND: Final = Parameter("kind", Annotated[str, Field(pattern=r"^[a-z-]{1,40}$")], "only events of this kind")
_SINCE_ID: Final = Parameter("since_id", EventId, "only events with a higher id")
_LAST: Final = Parameter("Last-Event-ID", EventId, "go on behind this event; counts before `since_id`")

routes = web.RouteTableDef()


@routes.get("/v1/events")
@describe(
    "What happened and why, newest first",
    tag="events",
    query=(LIMIT, AFTER, _KIND, VM, HOST, SINCE, _SINCE_ID),
    answers={200: EventPage},
)
async def events(request: web.Request) -> web.Response:
    return answer(await request.app[MANAGER].lists.events(**parameters_of(request)))


@routes.get(STREAM, allow_head=False)
@describe(
    "What happens from now on, or behind an event; one that is read too slowly ends",
    tag="events",
    query=(_KIND, VM, HOST, _SINCE_ID),
    headers=(_LAST,),
    answers={200: Answer(None, "Server-sent events: `id`, and an Event as `data`.", "text/event-stream")},
)
async def event_stream(request: web.Request) -> web.StreamResponse:
    query = parameters_of(request)
    last = query["Last-Event-ID"]
    after = last if last is not None else query["since_id"]
    await check_position(request.app[MANAGER].store, after, "since_id" if last is None else "Last-Event-ID")
    filters = {name: query[name] for name in ("kind", "vm", "host")}
    feed = request.app[MANAGER].feed
    listener = Listener(_wanted(query), filters=filters, gone=lambda: request.transport is None)
    response = web.StreamResponse(headers={"Cache-Control": "no-store", "X-Accel-Buffering": "no"})
    response.content_type = "text/event-stream"
    try:
        await response.prepare(request)
        await _write(request, response, ": Ebbtide events\n\n")
        async for event in feed.listen(listener, after):
            await _write(request, response, _text(event))
        while not listener.ended:
            if (news := await listener.next(HEARTBEAT_S)) is not None:
                await _write(request, response, _text(news))
            elif not listener.ended:
                await _write(request, response, ": still here\n\n")
        await _write(request, response, f": ended, {listener.ended}\n\n")
    except _TokenGone:
        log.info("a stream of events ends: its token does not count any more", who=request[PRINCIPAL].name)
    except (TimeoutError, ClientConnectionResetError, StoreError):
        # A term that ends under a stream ends it, too: its client comes back with the last id that it has.
        # A client that does not read any more is not waited for, nor is what it has not read.
        if request.transport is not None:
            request.transport.abort()
    finally:
        feed.leave(listener)
    return response


class _TokenGone(Exception):
    """The tokens were read again, and the reader's is not among them as it was."""


async def _write(request: web.Request, response: web.StreamResponse, text: str) -> None:
    if not still_known(request):
        raise _TokenGone
    async with asyncio.timeout(WRITE_S):
        await response.write(text.encode())


def _text(event: Event) -> str:
    return f"id: {event.id}\ndata: {event.model_dump_json()}\n\n"


def _wanted(query: dict[str, Any]) -> Callable[[Event], bool]:
    kind, vm, host = query["kind"], query["vm"], query["host"]

    def wanted(event: Event) -> bool:
        return all(value in (None, found) for value, found in ((kind, event.kind), (vm, event.vm), (host, event.host)))

    return wanted
