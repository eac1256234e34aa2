"""What every form of the hook answers alike: in a thread, under WSGI, on an event loop, with coroutines."""

from __future__ import annotations

import asyncio
import http.client
import json
import logging
import socket
import socketserver
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from decimal import Decimal
from pathlib import Path
from typing import Any, cast
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer

import pytest
import uvicorn
from fastapi import FastAPI

from app_adapters import asgi
from app_adapters.adapter import Adapter, Answer, Capabilities, Deadline, Promise, Refusal, Release, SizeRange
from app_adapters.aio import AsyncHookServer
from app_adapters.async_adapter import AsyncAdapter, AsyncAnswer, AsyncPromise
from app_adapters.errors import ApplicationError
from app_adapters.server import HookServer
from app_adapters.wsgi import hook_application
from tests.adapters.rest import Rest

TOKEN = "the-token"


class Scale(Adapter):
    """Gives 40 MiB when `go` is set; refuses below 20 MiB; is broken below 10."""

    def __init__(self) -> None:
        self.go = threading.Event()
        self.go.set()
        self.broken = ""

    def end(self) -> Any:
        """What the work returns, or how it ends."""
        if self.broken == "nothing":
            return None
        if self.broken == "exit":
            sys.exit(3)
        if self.broken == "fault":
            raise KeyError("pictures")
        released: Any = {"nan": float("nan"), "negative": -1.5, "decimal": Decimal("38.5")}.get(self.broken, 38.5)
        return Release({"memory_mib": released}, "a scale", "weighed")

    def capabilities(self) -> Capabilities:
        return Capabilities("scale", "1", {"memory_mib": SizeRange(100.0, 10.0, 200.0, 1.0)}, 1.0, True, ["ask"])

    def deflate(self, target: dict[str, float], mode: str, deadline: Deadline) -> Answer:
        if target["memory_mib"] < 10:
            raise KeyError("a fault of the adapter")
        if target["memory_mib"] < 15:
            raise ApplicationError("the application is away")
        if target["memory_mib"] < 20:
            return Refusal("too little", 7.0, {"memory_mib": 20.0})
        return Promise({"memory_mib": 40.0}, 1.0, lambda: self.work(deadline), "gladly")

    def work(self, deadline: Deadline) -> Release:
        while not self.go.wait(0.01) and not deadline.passed:
            pass
        return cast(Release, self.end())

    def reinflate(self, target: dict[str, float], deadline: Deadline) -> Answer:
        return Promise({}, 0.0, lambda: Release({"memory_mib": 0.0}, "nothing", "grown"))


class AsyncScale(AsyncAdapter):
    """The same, on the loop; its thread is remembered."""

    def __init__(self, scale: Scale) -> None:
        self.scale = scale
        self.threads: set[str] = set()

    async def capabilities(self) -> Capabilities:
        self.threads.add(threading.current_thread().name)
        return self.scale.capabilities()

    async def deflate(self, target: dict[str, float], mode: str, deadline: Deadline) -> AsyncAnswer:
        self.threads.add(threading.current_thread().name)
        answer = self.scale.deflate(target, mode, deadline)
        if isinstance(answer, Refusal):
            return answer

        async def work() -> Release:
            self.threads.add(threading.current_thread().name)
            while not self.scale.go.is_set() and not deadline.passed:
                await asyncio.sleep(0.01)
            return cast(Release, self.scale.end())

        return AsyncPromise(answer.promised, answer.expected_s, work, answer.reason)

    async def reinflate(self, target: dict[str, float], deadline: Deadline) -> AsyncAnswer:
        async def work() -> Release:
            return Release({"memory_mib": 0.0}, "nothing", "grown")

        return AsyncPromise({}, 0.0, work)


@dataclass
class Form:
    """A hook that is served somehow."""

    scale: Scale
    rest: Rest
    address: tuple[str, int]


class _Threaded(socketserver.ThreadingMixIn, WSGIServer):
    daemon_threads = True


class _Quiet(WSGIRequestHandler):
    def log_message(self, *args: object) -> None:
        pass


def _threaded(scale: Scale, token: str) -> tuple[tuple[str, int], Callable[[], None]]:
    server = HookServer(scale, port=0, token_file=token).start()
    return server.address, server.stop


def _wsgi(scale: Scale, token: str) -> tuple[tuple[str, int], Callable[[], None]]:
    hook = hook_application(scale, token)
    server = _Threaded(("127.0.0.1", 0), _Quiet)
    server.set_app(hook)
    thread = threading.Thread(target=server.serve_forever, args=(0.02,))
    thread.start()

    def stop() -> None:
        server.shutdown()
        thread.join()
        server.server_close()
        hook.stop()

    return ("127.0.0.1", server.server_address[1]), stop


def _asyncio(adapter: Adapter | AsyncAdapter, token: str) -> tuple[tuple[str, int], Callable[[], None]]:
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, name="the-loop")
    thread.start()
    server = AsyncHookServer(adapter, port=0, token_file=token)
    asyncio.run_coroutine_threadsafe(server.start(), loop).result(20)

    def stop() -> None:
        asyncio.run_coroutine_threadsafe(server.stop(), loop).result(20)
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()

    return server.address, stop


def _asgi(
    adapter: Adapter | AsyncAdapter, token: str, root_path: str = ""
) -> tuple[tuple[str, int], Callable[[], None]]:
    listening = socket.create_server(("127.0.0.1", 0))
    app: Any = asgi.hook_application(adapter, token)
    if root_path:
        hook, app = app, FastAPI()
        app.mount("/deflation", hook)
    server = uvicorn.Server(uvicorn.Config(app, log_level="warning", root_path=root_path))
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listening]}, name="the-loop")
    thread.start()

    def stop() -> None:
        server.should_exit = True
        thread.join()

    return listening.getsockname()[:2], stop


FORMS = ("thread", "wsgi", "asyncio", "coroutines", "asgi", "asgi coroutines")


@pytest.fixture(params=FORMS)
def form(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Form]:
    (tmp_path / "token").write_text(TOKEN)
    token, scale = str(tmp_path / "token"), Scale()
    start = {
        "thread": lambda: _threaded(scale, token),
        "wsgi": lambda: _wsgi(scale, token),
        "asyncio": lambda: _asyncio(scale, token),
        "coroutines": lambda: _asyncio(AsyncScale(scale), token),
        "asgi": lambda: _asgi(scale, token),
        "asgi coroutines": lambda: _asgi(AsyncScale(scale), token),
    }
    address, stop = start[request.param]()
    yield Form(scale, Rest(address, TOKEN), address)
    scale.go.set()
    stop()


def test_a_promise_is_worked_off_and_told(form: Form) -> None:
    form.scale.go.clear()
    assert form.rest.capabilities()["resources"]["memory_mib"]["current"] == 100.0
    assert form.rest.send("GET", "/deflation/v1/status") == (200, {"sizes": {"memory_mib": 100.0}})
    status, answer = form.rest.target("r1", "deflate", 60)
    assert (status, answer["state"], answer["promised"]) == (202, "promised", {"memory_mib": 40.0})
    assert form.rest.send("GET", "/deflation/v1/targets/r1")[1]["state"] == "running"
    assert form.rest.capabilities()["name"] == "scale"  # also while work runs
    assert form.rest.target("r2", "deflate", 60)[1]["reason"] == "another operation is under way"
    form.scale.go.set()
    done = form.rest.finished("r1")
    assert (done["state"], done["released"], done["measured_by"]) == ("released", {"memory_mib": 38.5}, "a scale")
    assert form.rest.target("r1", "deflate", 60) == (202, answer)
    assert form.rest.target("up", "reinflate", 90)[0] == 202
    assert form.rest.finished("up")["released"] == {"memory_mib": 0.0}


def test_under_a_root_path_the_hook_is_where_its_drop_in_says(tmp_path: Path) -> None:
    """A proxy takes the root path away, and the guest agent asks past it."""
    (tmp_path / "token").write_text(TOKEN)
    address, stop = _asgi(Scale(), str(tmp_path / "token"), root_path="/api")
    try:
        rest = Rest(address, TOKEN)
        assert rest.capabilities()["name"] == "scale"
        assert rest.target("r1", "deflate", 60)[0] == 202
        assert rest.finished("r1")["state"] == "released"
    finally:
        stop()


def test_a_newer_attempt_calls_the_older_one_off(form: Form) -> None:
    form.scale.go.clear()
    assert form.rest.target("r1", "deflate", 60)[0] == 202
    assert form.rest.target("r1#2", "deflate", 50)[0] == 202
    assert form.rest.finished("r1")["reason"].startswith("called off for r1#2: ")


def test_refusals_faults_and_bad_requests(form: Form) -> None:
    status, answer = form.rest.target("r1", "deflate", 17)
    assert (status, answer["reason"], answer["retry_after_s"]) == (409, "too little", 7.0)
    assert form.rest.target("r2", "deflate", 12)[1]["reason"] == "the application is away"
    assert form.rest.target("r3", "deflate", 5) == (500, {"error": "KeyError: 'a fault of the adapter'"})
    assert form.rest.target("r1", "deflate", 60)[1]["state"] == "conflict"
    assert form.rest.target("r4", "deflate", -1)[0] == 400
    assert form.rest.send("POST", "/deflation/v1/targets", b"{")[0] == 400
    assert form.rest.send("GET", "/deflation/v1/targets/unknown")[0] == 404
    assert form.rest.send("GET", "/deflation/v2/capabilities")[0] == 404
    assert form.rest.send("DELETE", "/deflation/v1/targets/r1")[0] == 405
    assert form.rest.send("POST", "/deflation/v1/capabilities")[0] == 405
    assert form.rest.send("POST", "/deflation/v1/targets", b" " * 65537)[0] == 413
    assert form.rest.send("GET", "/healthz")[0] == 200


def test_a_post_without_a_length_is_411(form: Form) -> None:
    connection = http.client.HTTPConnection(*form.address, timeout=20)
    connection.putrequest("POST", "/deflation/v1/targets")
    connection.putheader("Authorization", f"Bearer {TOKEN}")
    connection.endheaders()
    assert connection.getresponse().status == 411
    connection.close()


def test_an_id_with_odd_characters_comes_through(form: Form) -> None:
    assert form.rest.target("a/b#1 é%", "deflate", 60)[0] == 202
    assert form.rest.finished("a%2Fb%231%20%C3%A9%25")["request_id"] == "a/b#1 é%"


@pytest.mark.parametrize("token", [None, "wrong", TOKEN + "x"])
def test_without_the_token_nothing_is_told(form: Form, token: str | None) -> None:
    rest = Rest(form.address, token)
    assert rest.target("r1", "deflate", 60)[0] == 401
    assert rest.send("GET", "/deflation/v1/capabilities")[0] == 401
    assert rest.send("GET", "/healthz")[0] == 200


def test_many_at_once_under_one_id_start_one_operation(form: Form) -> None:
    answers: list[str] = []
    threads = [
        threading.Thread(target=lambda: answers.append(json.dumps(form.rest.target("r1", "deflate", 60))))
        for _ in range(6)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(answers) == 6
    assert set(answers) == {answers[0]}


@pytest.mark.parametrize(
    ("broken", "reason"),
    [
        ("nothing", "work: NoneType was returned, and no Release"),
        ("exit", "SystemExit: 3"),
        ("fault", "the work ended by KeyError: 'pictures'"),
        ("nan", "released.memory_mib: nan is no finite number >= 0"),
        ("negative", "released.memory_mib: -1.5 is no finite number >= 0"),
    ],
)
def test_work_that_ends_wrongly_is_failed_with_its_reason_and_logged(
    form: Form, broken: str, reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    form.scale.broken = broken
    assert form.rest.target("r1", "deflate", 60)[0] == 202
    ended = form.rest.finished("r1")
    assert (ended["state"], ended["released"]) == ("failed", {})
    assert reason in ended["reason"]
    form.scale.broken = ""
    assert form.rest.target("r2", "deflate", 60)[0] == 202  # and it goes on
    assert form.rest.finished("r2")["state"] == "released"
    (record,) = [one for one in caplog.records if one.levelno >= logging.ERROR]
    assert (record.name, record.getMessage()) == ("app_adapters", "r1: the adapter's work failed")
    assert record.exc_info is not None


def test_a_decimal_is_taken(form: Form) -> None:
    form.scale.broken = "decimal"
    assert form.rest.target("r1", "deflate", 60)[0] == 202
    assert form.rest.finished("r1")["released"] == {"memory_mib": 38.5}
