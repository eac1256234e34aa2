"""A child that a service forked, and that outlives it, keeps nobody from the place where the service had its hook."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from app_adapters.aio import AsyncHookServer
from app_adapters.asgi import hook_application
from app_adapters.client import HookClient, NoAnswer
from app_adapters.hook import CAPABILITIES, HEALTH
from app_adapters.processes.inelastic import InelasticAdapter
from app_adapters.server import HookServer
from app_adapters.shared import SharedHookServer
from tests.adapters.hook.test_hook_claims import asked

ROOT = Path(__file__).resolve().parents[3]
#: Serves in one form, forks a child that lives until standard input ends, says where it serves, and is killed.
SERVICE = """
import asyncio, os, signal, sys
from app_adapters.processes.inelastic import InelasticAdapter

form, path, token = sys.argv[1:]
place = {"port": 0} if form.endswith("port") else {"path": path}

def forks(where, in_child=lambda: None):
    ended, end = os.pipe()
    if not os.fork():
        in_child()
        os.write(end, b".")
        os.close(1)
        sys.stdin.read()
        os._exit(0)
    os.read(ended, 1)
    print(where, flush=True)
    signal.pause()

if form == "shared":
    from app_adapters.client import HookClient, NoAnswer
    from app_adapters.shared import SharedHookServer
    hook = SharedHookServer(InelasticAdapter(), path, token).start()
    while True:
        try:
            HookClient(hook.url).ask("GET", "/healthz")
            break
        except NoAnswer:
            pass
    forks(hook.url)
elif form.startswith("daemon"):
    from app_adapters.server import HookServer
    hook = HookServer(InelasticAdapter(), token_file=token, **place)
    if not os.fork():
        print(hook.start().url, flush=True)
        sys.stdin.read()
    os._exit(0)
elif form.startswith("thread"):
    from app_adapters.server import HookServer
    hook = HookServer(InelasticAdapter(), token_file=token, **place).start()
    forks(hook.url, hook.stop if form == "thread that stops" else lambda: None)
elif form.startswith("loop"):
    from app_adapters.aio import AsyncHookServer
    async def serve():
        async with AsyncHookServer(InelasticAdapter(), token_file=token, **place) as hook:
            forks(hook.url)
    asyncio.run(serve())
else:
    from app_adapters.asgi import hook_application
    from tests.adapters.hook.test_hook_claims import asked
    if form == "asgi without a directory":
        os.chmod(os.path.dirname(path), 0o777)
    hook = hook_application(InelasticAdapter(), token)
    assert asyncio.run(asked(hook, server=("127.0.0.1", 47002)))[0] == 200
    forks("there")
"""


@pytest.fixture
def path(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    for name in ("RUNTIME_DIRECTORY", "XDG_RUNTIME_DIR"):
        monkeypatch.delenv(name, raising=False)
    with tempfile.TemporaryDirectory(prefix="ebb") as short:
        Path(short, "token").write_text("t")
        yield f"{short}/hook.sock"


def serving(form: str, path: str) -> tuple[subprocess.Popen[str], str]:
    process = subprocess.Popen(
        [sys.executable, "-c", SERVICE, form, path, f"{Path(path).parent}/token"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        cwd=ROOT,
    )
    assert process.stdout is not None
    return process, process.stdout.readline().strip()


@pytest.fixture
def orphaned(request: pytest.FixtureRequest, path: str) -> Iterator[str]:
    """Where a service served that was killed, and whose child lives."""
    process, where = serving(request.param, path)
    assert process.stdin is not None
    assert process.stdout is not None
    with process.stdin, process.stdout:
        process.kill()
        process.wait(20)
        yield where


@pytest.mark.parametrize("orphaned", ["shared"], indirect=True)
def test_another_process_leads_where_a_child_of_the_one_before_lives(orphaned: str, path: str) -> None:
    hook = SharedHookServer(InelasticAdapter(), path, f"{Path(path).parent}/token").start()
    try:
        client, end, never = HookClient(orphaned, "t"), time.monotonic() + 30, threading.Event()
        while True:
            try:
                assert client.ask("GET", CAPABILITIES)[0] == 200
                break
            except NoAnswer:
                assert time.monotonic() < end, "nobody leads"
                never.wait(0.02)
        # The killed one's own socket is no process that does not answer.
        assert client.ask("POST", "/deflation/v1/preemptions", NOTICE)[0] == 200
    finally:
        hook.stop()


NOTICE = {"request_id": "p", "seconds_left": 20.0, "kind": "stop", "reason": "a try"}


def place_of(url: str) -> dict[str, str | int]:
    return {"path": url[5:]} if url.startswith("unix:") else {"port": int(url.rpartition(":")[2])}


@pytest.mark.parametrize("orphaned", ["thread", "thread on a port"], indirect=True)
def test_a_service_with_threads_starts_again_where_a_child_of_it_lives(orphaned: str) -> None:
    hook = HookServer(InelasticAdapter(), **place_of(orphaned)).start()  # type: ignore[arg-type]
    assert HookClient(hook.url).ask("GET", HEALTH)[0] == 200
    hook.stop()


@pytest.mark.parametrize("orphaned", ["loop", "loop on a port"], indirect=True)
async def test_a_service_with_a_loop_starts_again_where_a_child_of_it_lives(orphaned: str) -> None:
    async with AsyncHookServer(InelasticAdapter(), **place_of(orphaned)) as hook:  # type: ignore[arg-type]
        assert (await asyncio.to_thread(HookClient(hook.url).ask, "GET", HEALTH))[0] == 200


@pytest.mark.parametrize("orphaned", ["asgi", "asgi without a directory"], indirect=True)
async def test_under_asgi_an_address_is_free_where_only_a_child_of_who_had_it_lives(orphaned: str, path: str) -> None:
    assert orphaned == "there"
    hook = hook_application(InelasticAdapter(), f"{Path(path).parent}/token")
    status, answer = await asked(hook, server=("127.0.0.1", 47002))
    assert status == 200, answer
    await hook.stop()


@pytest.mark.parametrize("place", ["path", "port"])
def test_a_child_that_was_forked_before_the_hook_was_started_may_be_the_one_that_serves(path: str, place: str) -> None:
    process, url = serving("daemon on a port" if place == "port" else "daemon", path)
    assert process.stdin is not None
    assert process.stdout is not None
    with process.stdin, process.stdout:
        process.wait(20)
        assert HookClient(url).ask("GET", HEALTH)[0] == 200


def test_a_child_that_stops_its_copy_of_the_hook_leaves_the_parents_alone(path: str) -> None:
    process, url = serving("thread that stops", path)
    assert process.stdin is not None
    assert process.stdout is not None
    with process.stdin, process.stdout:
        try:
            assert HookClient(url).ask("GET", HEALTH)[0] == 200
        finally:
            process.kill()
            process.wait(20)
