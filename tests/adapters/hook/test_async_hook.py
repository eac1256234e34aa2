"""The hook on an event loop: what only this form can get wrong."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from app_adapters import aio, async_adapter
from app_adapters.adapter import Capabilities, Deadline, Release
from app_adapters.aio import AsyncHookServer
from app_adapters.async_adapter import AsyncAnswer, AsyncPromise
from app_adapters.hook import CONNECTIONS
from tests.adapters.hook.test_hook_forms import AsyncScale, Scale

TOKEN = "t"


class Slow(Scale):
    """Blocks its caller as long as `go` is not set, also for its capabilities."""

    def __init__(self) -> None:
        super().__init__()
        self.entered = threading.Semaphore(0)

    def capabilities(self) -> Capabilities:
        self.entered.release()
        self.go.wait(60)
        return super().capabilities()


class Stuck(AsyncScale):
    """Its work looks at no deadline; what became of it is remembered."""

    cancelled = False

    async def deflate(self, target: dict[str, float], mode: str, deadline: Deadline) -> AsyncAnswer:
        async def work() -> Release:
            try:
                await asyncio.sleep(3600)
            except asyncio.CancelledError:
                self.cancelled = True
                raise
            raise AssertionError("nobody wakes it")

        return AsyncPromise({"memory_mib": 40.0}, 1.0, work)


@pytest.fixture
def token(tmp_path: Path) -> str:
    (tmp_path / "token").write_text(TOKEN)
    return str(tmp_path / "token")


@pytest.fixture
async def server(token: str) -> AsyncIterator[AsyncHookServer]:
    async with AsyncHookServer(Scale(), port=0, token_file=token) as server:
        yield server


def request(method: str, path: str, body: bytes = b"", headers: str = "") -> bytes:
    head = f"{method} {path} HTTP/1.1\r\nHost: h\r\nAuthorization: Bearer {TOKEN}\r\nContent-Length: {len(body)}\r\n"
    return f"{head}{headers}\r\n".encode() + body


async def answer(reader: asyncio.StreamReader) -> tuple[int, dict[str, str]]:
    head = (await reader.readuntil(b"\r\n\r\n")).decode()
    lines = [line.partition(": ") for line in head.splitlines()[1:] if line]
    length = next(int(value) for name, _, value in lines if name == "Content-Length")
    return int(head.split()[1]), json.loads(await reader.readexactly(length))


async def say(server: AsyncHookServer, text: bytes) -> tuple[int, dict[str, str]]:
    reader, writer = await asyncio.open_connection(*server.address)
    try:
        writer.write(text)
        return await asyncio.wait_for(answer(reader), 30)
    finally:
        writer.close()


def target(request_id: str, deadline_s: float = 60) -> bytes:
    body = {"request_id": request_id, "deadline_s": deadline_s, "mode": "ask", "direction": "deflate"}
    return request("POST", "/deflation/v1/targets", json.dumps({**body, "target": {"memory_mib": 60}}).encode())


async def test_a_connection_serves_one_request_after_another(server: AsyncHookServer) -> None:
    reader, writer = await asyncio.open_connection(*server.address)
    for _ in range(3):
        writer.write(request("GET", "/deflation/v1/capabilities"))
        assert (await answer(reader))[0] == 200
    writer.write(request("GET", "/healthz", headers="Connection: close\r\n"))
    assert (await answer(reader))[0] == 200
    assert await reader.read() == b""
    writer.close()


@pytest.mark.parametrize(
    ("text", "status"),
    [
        (b"GARBAGE\r\n\r\n", 400),
        (b"GET /healthz HTTP/2\r\n\r\n", 400),
        (b"GET http://elsewhere/ HTTP/1.1\r\n\r\n", 400),
        (b"GET /healthz HTTP/1.1\r\nno colon\r\n\r\n", 400),
        (b"GET /healthz HTTP/1.1\r\nA : b\r\n\r\n", 400),
        (request("GET", "/healthz", headers="Content-Length: 5\r\n"), 400),
        (b"GET /healthz HTTP/1.1\r\nContent-Length: x\r\n\r\n", 411),
        (b"POST /deflation/v1/targets HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n", 411),
        (b"POST /deflation/v1/targets HTTP/1.1\r\nContent-Length: 65537\r\n\r\n", 413),
        (b"POST /deflation/v1/targets HTTP/1.1\r\nContent-Length: " + b"0" * 20 + b"209715200\r\n\r\n", 413),
        (b"GET /" + b"x" * 20000 + b" HTTP/1.1\r\n\r\n", 431),
        (b"GET / HTTP/1.1\r\n" + b"X: y\r\n" * 5000 + b"\r\n", 431),
    ],
)
async def test_what_is_no_request_is_answered_and_hung_up(server: AsyncHookServer, text: bytes, status: int) -> None:
    reader, writer = await asyncio.open_connection(*server.address)
    writer.write(text)
    found, body = await asyncio.wait_for(answer(reader), 30)
    assert (found, "error" in body) == (status, True)
    writer.close()
    assert (await say(server, request("GET", "/healthz")))[0] == 200


async def test_a_client_that_drips_is_hung_up_in_the_end(
    server: AsyncHookServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(aio, "REQUEST_TIMEOUT_S", 0.3)
    reader, writer = await asyncio.open_connection(*server.address)
    end = time.monotonic() + 30
    while not reader.at_eof():
        assert time.monotonic() < end
        writer.write(b"G")
        try:
            await asyncio.wait_for(reader.read(1), 0.05)
        except TimeoutError:
            continue
        except ConnectionError:
            break
    writer.close()


async def test_more_connections_than_there_are_places_are_hung_up_and_those_that_go_make_room(
    server: AsyncHookServer,
) -> None:
    held = [await asyncio.open_connection(*server.address) for _ in range(CONNECTIONS)]
    reader, writer = await asyncio.open_connection(*server.address)
    assert await asyncio.wait_for(reader.read(), 30) == b""
    writer.close()
    for _, other in held:
        other.close()
    async with asyncio.timeout(30):
        while True:
            try:
                assert (await say(server, request("GET", "/healthz")))[0] == 200
                break
            except (asyncio.IncompleteReadError, ConnectionError):
                await asyncio.sleep(0.01)


async def test_a_blocking_adapter_blocks_neither_the_loop_nor_the_hook(token: str) -> None:
    slow = Slow()
    slow.go.clear()
    async with AsyncHookServer(slow, port=0, token_file=token) as server:
        asked = [
            asyncio.create_task(say(server, request("GET", "/deflation/v1/capabilities"))) for _ in range(aio.CALLS)
        ]
        async with asyncio.timeout(30):
            for _ in range(aio.CALLS):
                while not slow.entered.acquire(blocking=False):
                    await asyncio.sleep(0.01)
        assert (await say(server, request("GET", "/deflation/v1/capabilities")))[0] == 503
        assert not any(task.done() for task in asked)
        slow.go.set()
        assert {status for status, _ in await asyncio.gather(*asked)} == {200}
        assert (await say(server, request("GET", "/deflation/v1/capabilities")))[0] == 200


async def test_coroutines_run_on_the_services_own_loop(token: str) -> None:
    adapter = AsyncScale(Scale())
    async with AsyncHookServer(adapter, port=0, token_file=token) as server:
        assert (await say(server, target("r1")))[0] == 202
        async with asyncio.timeout(30):
            while (await say(server, request("GET", "/deflation/v1/targets/r1")))[1]["state"] == "running":
                await asyncio.sleep(0.01)
    assert adapter.threads == {"MainThread"}


async def test_work_that_looks_at_no_deadline_is_cancelled(token: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(async_adapter, "GRACE_S", 0.1)
    adapter = Stuck(Scale())
    async with AsyncHookServer(adapter, port=0, token_file=token) as server:
        assert (await say(server, target("r1", 0.1)))[0] == 202
        async with asyncio.timeout(30):
            while (status := (await say(server, request("GET", "/deflation/v1/targets/r1")))[1])["state"] == "running":
                await asyncio.sleep(0.01)
    assert status["state"] == "failed"
    assert "the deadline passed, and the work was cancelled" in status["reason"]
    assert adapter.cancelled


async def test_stopping_ends_what_runs(token: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(async_adapter, "GRACE_S", 0.1)
    adapter = Stuck(Scale())
    server = await AsyncHookServer(adapter, port=0, token_file=token).start()
    assert (await say(server, target("r1")))[0] == 202
    await asyncio.wait_for(server.stop(), 30)
    await asyncio.sleep(0)
    assert adapter.cancelled
    with pytest.raises(ConnectionError):
        await say(server, request("GET", "/healthz"))


async def test_a_loop_that_is_busy_is_a_503_and_not_a_hook_that_hangs(
    token: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(async_adapter, "DECISION_LIMIT_S", 0.05)

    class Absent(AsyncScale):
        async def capabilities(self) -> Capabilities:
            await asyncio.sleep(3600)
            raise AssertionError("nobody wakes it")

    async with AsyncHookServer(Absent(Scale()), port=0, token_file=token) as server:
        status, body = await say(server, request("GET", "/deflation/v1/capabilities"))
    assert status == 503
    assert "event loop did not answer" in body["error"]


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.0.2.1", "example.org", ""])
def test_only_loopback_is_listened_on(host: str) -> None:
    with pytest.raises(ValueError, match="not on loopback"):
        AsyncHookServer(Scale(), host=host, port=0)
