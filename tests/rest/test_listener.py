"""Connections: caps, slow heads and handshakes, answers that nobody reads. All over real sockets."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import cast

import aiohttp
import pytest
from aiohttp import web

from ebbtide.rest.listener import Listener, serving
from ebbtide.rest.rates import ConnectionLimits
from ebbtide.rest.tls import server_context
from tests.rest.pki import Pki
from tests.waiting import until

#: Nothing of this is waited for in a test that does not mean it.
PATIENT = ConnectionLimits(in_all=50, per_address=20, idle_s=60, handshake_s=60, unread_s=60, lingering_s=0.2)
LARGE = 32 * 1024 * 1024
GET = b"GET / HTTP/1.1\r\nHost: x\r\n\r\n"


def an_app() -> web.Application:
    app = web.Application()

    async def small(request: web.Request) -> web.Response:
        return web.Response(text="ok")

    async def large(request: web.Request) -> web.Response:
        return web.Response(body=b"x" * LARGE)

    app.router.add_get("/", small)
    app.router.add_get("/large", large)
    return app


@contextlib.asynccontextmanager
async def listening(limits: ConnectionLimits, tls: object = None) -> AsyncIterator[Listener]:
    async with serving(an_app(), "127.0.0.1", 0, tls, limits, shutdown_timeout_s=0.5) as listener:  # type: ignore[arg-type]
        yield listener
    assert listener.open_connections == 0


@contextlib.asynccontextmanager
async def connected(
    listener: Listener, address: str = "127.0.0.1"
) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    reader, writer = await asyncio.open_connection("127.0.0.1", listener.port, local_addr=(address, 0))
    try:
        yield reader, writer
    finally:
        writer.close()
        with contextlib.suppress(OSError):
            await writer.wait_closed()


async def closed(reader: asyncio.StreamReader) -> None:
    """Until the server has closed the connection."""
    async with asyncio.timeout(20):
        with contextlib.suppress(ConnectionError):
            while await reader.read(65536):
                pass


async def served(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, begun: int = 0) -> bool:
    """:param begun: so many bytes of the request were sent before."""
    writer.write(GET[begun:])
    with contextlib.suppress(ConnectionError):
        async with asyncio.timeout(20):
            return (await reader.readline()).startswith(b"HTTP/1.1 200")
    return False


async def test_one_address_gets_only_its_share_and_others_are_served() -> None:
    async with listening(replace(PATIENT, per_address=3)) as listener, contextlib.AsyncExitStack() as stack:
        greedy = [await stack.enter_async_context(connected(listener, "127.0.0.2")) for _ in range(3)]
        for _, writer in greedy:
            writer.write(GET[:8])
        await until(lambda: listener.open_connections == 3 and not listener._silent)
        async with connected(listener, "127.0.0.2") as (reader, _):
            await closed(reader)
        async with connected(listener, "127.0.0.3") as streams:
            assert await served(*streams)
        for streams in greedy:
            assert await served(*streams, begun=8)
        greedy[0][1].close()
        await until(lambda: listener.open_connections == 2)
        async with connected(listener, "127.0.0.2") as streams:
            assert await served(*streams)


async def test_there_are_only_so_many_connections_in_all() -> None:
    async with listening(replace(PATIENT, in_all=2)) as listener, contextlib.AsyncExitStack() as stack:
        for address in ("127.0.0.2", "127.0.0.3"):
            assert await served(*await stack.enter_async_context(connected(listener, address)))
        async with connected(listener, "127.0.0.4") as (reader, _):
            await closed(reader)


@pytest.mark.parametrize("limit", ["in_all", "per_address"])
async def test_who_says_nothing_keeps_nobody_out_who_has_something_to_say(limit: str) -> None:
    async with listening(replace(PATIENT, **{limit: 4})) as listener, contextlib.AsyncExitStack() as stack:
        speaker = await stack.enter_async_context(connected(listener))
        speaker[1].write(GET[:8])
        await until(lambda: listener.open_connections == 1 and not listener._silent)
        silent = [await stack.enter_async_context(connected(listener)) for _ in range(3)]
        await until(lambda: listener.open_connections == 4)
        late = await stack.enter_async_context(connected(listener))
        assert await served(*late)
        await closed(silent[0][0])
        assert await served(*speaker, begun=8)
        for streams in silent[1:]:
            assert await served(*streams)


async def test_of_an_address_that_has_its_share_one_of_its_own_makes_way() -> None:
    async with listening(replace(PATIENT, per_address=1)) as listener, contextlib.AsyncExitStack() as stack:
        other, first = [await stack.enter_async_context(connected(listener, f"127.0.0.{n}")) for n in (2, 3)]
        await until(lambda: listener.open_connections == 2)
        second = await stack.enter_async_context(connected(listener, "127.0.0.3"))
        assert await served(*second)
        await closed(first[0])
        assert await served(*other)


@pytest.mark.parametrize(
    "head", [b"", b"GET / HT", b"GET / HTTP/1.1\r\nHost: x\r\n"], ids=["nothing", "line", "header"]
)
async def test_a_head_that_does_not_arrive_ends_the_connection(head: bytes) -> None:
    async with listening(replace(PATIENT, idle_s=0.4)) as listener, connected(listener) as (reader, writer):
        writer.write(head)
        await closed(reader)
        await until(lambda: listener.open_connections == 0)


async def test_a_head_that_drips_ends_the_connection_however_often_something_comes() -> None:
    async with listening(replace(PATIENT, idle_s=0.5)) as listener, connected(listener) as (reader, writer):
        writer.write(b"GET / HTTP/1.1\r\n")
        ended = asyncio.create_task(closed(reader), name="closed")
        while not ended.done():
            with contextlib.suppress(ConnectionError):
                writer.write(b"X-Drip: 1\r\n")
                await writer.drain()
            await asyncio.sleep(0.05)
        await ended


async def test_a_second_head_must_arrive_as_well() -> None:
    async with listening(replace(PATIENT, idle_s=0.4)) as listener:
        for _ in range(20):
            async with connected(listener) as (reader, writer):
                if not await served(reader, writer):
                    continue  # on a busy machine the first one may be late, too
                writer.write(b"GET / HT")
                await closed(reader)
                return
    raise AssertionError("no first head was in time")


@pytest.mark.parametrize(
    "head",
    [
        b"GET /" + b"a" * 10_000 + b" HTTP/1.1\r\n\r\n",
        b"GET / HTTP/1.1\r\nX: " + b"a" * 10_000 + b"\r\n\r\n",
        b"GET / HTTP/1.1\r\n" + b"".join(b"X-%d: a\r\n" % number for number in range(1000)) + b"\r\n",
    ],
    ids=["line", "header", "headers"],
)
async def test_an_oversized_head_is_refused(head: bytes) -> None:
    async with listening(PATIENT) as listener, connected(listener) as (reader, writer):
        writer.write(head)
        async with asyncio.timeout(20):
            status = (await reader.readline()).split()[1]
        assert status in (b"400", b"414", b"431")


async def test_an_answer_that_nobody_reads_ends_the_connection() -> None:
    async with listening(replace(PATIENT, unread_s=0.4)) as listener, connected(listener) as (_, writer):
        cast(asyncio.Transport, writer.transport).pause_reading()
        await until(lambda: listener.open_connections == 1)
        writer.write(b"GET /large HTTP/1.1\r\nHost: x\r\n\r\n")
        await until(lambda: listener.open_connections == 0)


async def test_an_answer_over_tls_that_nobody_reads_ends_the_connection(tmp_path: Path) -> None:
    """It is out of aiohttp's hands at once, so that the connection counts as idle."""
    pki = Pki(tmp_path)
    limits = replace(PATIENT, idle_s=0.4)
    async with listening(limits, server_context(pki.pair("server"))) as listener:
        _, writer = await asyncio.open_connection("127.0.0.1", listener.port, ssl=pki.client())
        cast(asyncio.Transport, writer.transport).pause_reading()
        writer.write(b"GET /large HTTP/1.1\r\nHost: x\r\n\r\n")
        await until(lambda: listener.open_connections == 0)
        writer.transport.abort()


@pytest.mark.parametrize("scheme", ["http", "https"])
async def test_a_connection_whose_answers_are_read_stays_open(scheme: str, tmp_path: Path) -> None:
    pki = Pki(tmp_path)
    limits = replace(PATIENT, unread_s=0.2)
    tls = server_context(pki.pair("server")) if scheme == "https" else None
    async with listening(limits, tls) as listener:
        options = {"ssl": pki.client()} if tls is not None else {}
        reader, writer = await asyncio.open_connection("127.0.0.1", listener.port, **options)  # type: ignore[arg-type]
        for _ in range(4):
            assert await served(reader, writer)
            while await reader.readline() != b"\r\n":
                pass
            assert await reader.readexactly(2) == b"ok"
            await asyncio.sleep(0.4)
        writer.close()


async def test_a_large_answer_that_is_read_slowly_arrives() -> None:
    async with listening(replace(PATIENT, unread_s=5.0)) as listener, aiohttp.ClientSession() as session:
        size = 0
        async with session.get(f"http://127.0.0.1:{listener.port}/large") as response:
            async for piece in response.content.iter_chunked(1024 * 1024):
                size += len(piece)
        assert size == LARGE


async def test_a_handshake_that_does_not_end_is_given_up_and_counts_until_then(tmp_path: Path) -> None:
    tls = server_context(Pki(tmp_path).pair("server"))
    limits = replace(PATIENT, handshake_s=2.5, per_address=2)  # none is given up before both are seen
    async with listening(limits, tls) as listener, contextlib.AsyncExitStack() as stack:
        slow = [await stack.enter_async_context(connected(listener)) for _ in range(2)]
        await until(lambda: listener.open_connections == 2)
        async with connected(listener) as (reader, _):
            # The oldest has said nothing, and makes way.
            await closed(slow[0][0])
            assert listener.open_connections <= 2
            await closed(reader)
        await closed(slow[1][0])
        await until(lambda: listener.open_connections == 0)


async def test_the_end_of_the_server_ends_what_is_connected(tmp_path: Path) -> None:
    pki = Pki(tmp_path)
    for tls in (None, server_context(pki.pair("server"))):
        async with listening(PATIENT, tls) as listener:
            reader, writer = await asyncio.open_connection("127.0.0.1", listener.port)
            await until(lambda listener=listener: listener.open_connections == 1)  # type: ignore[misc]
        await closed(reader)
        writer.close()


async def test_an_application_does_not_start_where_its_address_is_taken() -> None:
    started = []

    async def start(_: web.Application) -> None:
        started.append(True)

    app = an_app()
    app.on_startup.append(start)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(OSError, match=rf"Address already in use.*127\.0\.0\.1', {port}"):
            async with serving(app, "127.0.0.1", port):
                pass
    assert not started


async def test_clients_are_refused_and_do_not_wait_until_the_application_has_started(unused_tcp_port: int) -> None:
    async def start(_: web.Application) -> None:
        with pytest.raises(ConnectionRefusedError):
            await asyncio.open_connection("127.0.0.1", unused_tcp_port)

    app = an_app()
    app.on_startup.append(start)
    async with serving(app, "127.0.0.1", unused_tcp_port) as listener, connected(listener) as streams:
        assert await served(*streams)
