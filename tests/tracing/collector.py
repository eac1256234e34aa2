"""A collector of OTLP/HTTP on loopback: keeps what it is sent, or is slow, or fails."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web
from aiohttp.test_utils import TestServer
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.common.v1.common_pb2 import KeyValue
from opentelemetry.proto.trace.v1.trace_pb2 import Status

from tests.waiting import AT_ONCE_S


@dataclass(frozen=True)
class Sent:
    """A span as it arrived."""

    name: str
    service: str
    trace_id: str
    span_id: str
    parent: str
    began_ns: int
    ended_ns: int
    failed: str
    attributes: dict[str, Any]
    resource: dict[str, Any]


@dataclass
class Collector:
    """What has arrived, and how it answers."""

    spans: list[Sent] = field(default_factory=list)
    requests: int = 0
    #: Requests that wait for an answer.
    held: int = 0
    status: int = 200
    #: Set: answers come; unset, none ever does.
    answers: asyncio.Event = field(default_factory=asyncio.Event)
    port: int | None = None
    _server: TestServer | None = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    async def come_back(self) -> None:
        """Listen, always on the same port."""
        app = web.Application(client_max_size=64 * 2**20)
        app.router.add_post("/v1/traces", self.take)
        self._server = TestServer(app, port=self.port)
        await self._server.start_server(shutdown_timeout=AT_ONCE_S)
        self.port = self._server.port

    async def go_away(self) -> None:
        """Whoever connects is refused."""
        assert self._server is not None, "it listens"
        await self._server.close()

    async def take(self, request: web.Request) -> web.Response:
        self.requests += 1
        body = await request.read()
        self.held += 1
        await self.answers.wait()
        self.held -= 1
        if self.status == 200:
            self.spans += spans_in(body)
        return web.Response(status=self.status)

    def named(self, name: str) -> list[Sent]:
        return [one for one in self.spans if one.name == name]

    def above(self, one: Sent) -> list[str]:
        """The names of what is above a span, from the root down to itself."""
        by_id = {other.span_id: other for other in self.spans}
        path = [one.name]
        while one.parent in by_id:
            one = by_id[one.parent]
            path.insert(0, one.name)
        return path


def spans_in(body: bytes) -> list[Sent]:
    """What a request brings."""
    found = []
    for batch in ExportTraceServiceRequest.FromString(body).resource_spans:
        resource = _values(batch.resource.attributes)
        for scope in batch.scope_spans:
            for span in scope.spans:
                failed = span.status.message if span.status.code == Status.STATUS_CODE_ERROR else ""
                ids = (span.trace_id.hex(), span.span_id.hex(), span.parent_span_id.hex())
                times = (span.start_time_unix_nano, span.end_time_unix_nano)
                found.append(
                    Sent(span.name, resource["service.name"], *ids, *times, failed, _values(span.attributes), resource)
                )
    return found


def _values(attributes: Any) -> dict[str, Any]:
    pairs: list[KeyValue] = list(attributes)
    return {pair.key: getattr(pair.value, pair.value.WhichOneof("value") or "string_value") for pair in pairs}


@contextlib.asynccontextmanager
async def collecting() -> AsyncIterator[Collector]:
    """A collector that answers, until the block ends."""
    made = Collector()
    made.answers.set()
    await made.come_back()
    try:
        yield made
    finally:
        made.answers.set()
        await made.go_away()
