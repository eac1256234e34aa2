"""A hook that ends while it is asked, silent clients, a log that fails, and deadlines while a request waits."""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import json
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from app_adapters import server as hook_server
from app_adapters.adapter import Answer, Deadline, Promise, Release
from app_adapters.aio import AsyncHookServer
from app_adapters.errors import ApplicationError
from app_adapters.hook import CONNECTIONS, REQUEST_TIMEOUT_S, Hook
from app_adapters.server import HookServer
from app_adapters.shared import Group
from tests.adapters.hook.test_hook_server import GOOD, TOKEN, Scripted
from tests.adapters.rest import Rest

TARGETS = "/deflation/v1/targets"
BEARER = f"Bearer {TOKEN}"


class Thoughtful(Scripted):
    """Decides when it may, and counts the work that begins."""

    def __init__(self) -> None:
        super().__init__()
        self.asked, self.decided, self.worked = threading.Event(), threading.Event(), threading.Event()

    def deflate(self, target: dict[str, float], mode: str, deadline: Deadline) -> Answer:
        self.asked.set()
        assert self.decided.wait(20)
        return Promise({"memory_mib": 40.0}, 1.0, self._counted)

    def _counted(self) -> Release:
        self.worked.set()
        return Release({"memory_mib": 1.0}, "a scale", "weighed")


@pytest.fixture
def token_file(tmp_path: Path) -> str:
    path = tmp_path / "token"
    path.write_text(TOKEN)
    return str(path)


def post(hook: Hook, path: str = TARGETS, **changes: Any) -> tuple[int, dict[str, Any]]:
    return hook.reply("POST", path, BEARER, json.dumps({**GOOD, **changes}).encode())


# --- the end ----------------------------------------------------------------------------------------------------------


def test_a_connection_that_is_open_when_the_server_stops_begins_nothing_and_ends(token_file: str) -> None:
    adapter = Thoughtful()
    adapter.decided.set()
    server = HookServer(adapter, port=0, token_file=token_file).start()
    connection = http.client.HTTPConnection(*server.address, timeout=20)
    headers = {"Authorization": BEARER}
    connection.request("GET", "/deflation/v1/capabilities", headers=headers)
    connection.getresponse().read()
    server.stop()
    connection.request("POST", TARGETS, json.dumps({**GOOD, "direction": "reinflate"}), headers)
    response = connection.getresponse()
    answer = json.loads(response.read())
    assert (response.status, answer["reason"], answer["retry_after_s"]) == (409, "the hook is ending", 1.0)
    assert response.getheader("Connection") == "close"
    connection.close()


def test_a_hook_that_was_stopped_begins_nothing_and_forgets_what_it_refused(token_file: str) -> None:
    adapter = Thoughtful()
    adapter.decided.set()
    hook = Hook(adapter, token_file)
    hook.stop()
    status, answer = post(hook)
    # No time for a deflation: after one the host forces it.
    assert (status, answer["reason"], answer["retry_after_s"]) == (409, "the hook is ending", None)
    assert hook.reply("GET", TARGETS + "/r1", BEARER, b"")[0] == 404
    assert not adapter.worked.is_set()


def test_a_decision_that_is_under_way_when_the_server_stops_begins_nothing(token_file: str) -> None:
    adapter, answers = Thoughtful(), list[tuple[int, dict[str, Any]]]()
    server = HookServer(adapter, port=0, token_file=token_file).start()
    asking = threading.Thread(target=lambda: answers.append(Rest(server.address, TOKEN).target("r1", "deflate", 60)))
    asking.start()
    assert adapter.asked.wait(20)
    server.stop()
    adapter.decided.set()
    asking.join(20)
    ((status, answer),) = answers
    assert (status, answer["reason"]) == (409, "the hook is ending")
    assert not adapter.worked.is_set()


async def test_a_decision_under_way_in_a_service_with_asyncio_begins_nothing_once_it_has_stopped(
    token_file: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    adapter, ended = Thoughtful(), threading.Event()
    reply = Hook.reply

    def noted(hook: Hook, *request: Any) -> Any:
        try:
            return reply(hook, *request)
        finally:
            ended.set()

    monkeypatch.setattr(Hook, "reply", noted)
    server = await AsyncHookServer(adapter, port=0, token_file=token_file).start()
    rest = Rest(server.address, TOKEN)

    def ask() -> None:
        with contextlib.suppress(OSError, http.client.HTTPException):  # the connection ends with the server
            rest.target("r1", "deflate", 60)

    asking = asyncio.create_task(asyncio.to_thread(ask))
    assert await asyncio.to_thread(adapter.asked.wait, 20)
    await server.stop()
    adapter.decided.set()
    assert await asyncio.to_thread(ended.wait, 20)
    await asking
    assert not adapter.worked.is_set()


# --- deadlines --------------------------------------------------------------------------------------------------------


def test_the_deadline_goes_on_while_an_older_attempt_is_waited_for(token_file: str) -> None:
    adapter = Scripted()
    adapter.go.clear()
    hook = Hook(adapter, token_file)
    assert post(hook)[0] == 202
    adapter.stubborn = True
    threading.Timer(0.4, adapter.go.set).start()
    began = time.monotonic()
    status, _ = post(hook, request_id="r1#2", deadline_s=30)
    waited_s = time.monotonic() - began
    assert status == 202
    assert adapter.deadlines[1].remaining_s <= 30 - waited_s + 0.1
    hook.stop()


# --- logs that fail ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("word", ["within", "promised", "released", "preemption"])
def test_a_log_that_fails_costs_no_answer_and_no_work(token_file: str, word: str) -> None:
    def log(sentence: str) -> None:
        if word in sentence:
            raise OSError("no space left")

    hook = Hook(Scripted(), token_file, log)
    assert post(hook)[0] == 202
    end = time.monotonic() + 20
    while hook.reply("GET", TARGETS + "/r1", BEARER, b"")[1]["state"] == "running":
        assert time.monotonic() < end
    assert hook.reply("GET", TARGETS + "/r1", BEARER, b"")[1]["state"] == "released"
    assert hook.reply("POST", "/deflation/v1/preemptions", BEARER, notice())[0] == 200
    hook.stop()


def test_an_adapter_whose_standard_error_nobody_reads_answers_all_the_same(tmp_path: Path, token_file: str) -> None:
    path = tmp_path / "hook.sock"
    argv = [sys.executable, "-m", "app_adapters", "inelastic", "--reason", "never", "--listen", str(path)]
    process = subprocess.Popen([*argv, "--token-file", token_file], stderr=subprocess.PIPE)
    assert process.stderr is not None
    try:
        assert process.stderr.readline().startswith(b"ebb-adapter: inelastic on")
        process.stderr.close()
        for number in range(3):
            status, answer = Rest(str(path), TOKEN).target(f"r{number}", "deflate", 60)
            assert (status, answer["state"]) == (409, "refused")
    finally:
        process.terminate()
        process.wait(20)


# --- preemption -------------------------------------------------------------------------------------------------------


def notice(**changes: Any) -> bytes:
    return json.dumps({"request_id": "p1", "seconds_left": 20, "kind": "stop", "reason": "minimum", **changes}).encode()


@pytest.mark.parametrize(
    ("error", "status"), [(ApplicationError("busy"), 503), (ValueError("broken"), 500), (SystemExit(1), 500)]
)
def test_a_notice_at_which_the_adapter_failed_is_told_when_it_comes_again(
    token_file: str, error: BaseException, status: int
) -> None:
    told: list[str] = []
    errors = [error]

    class Forgetful(Scripted):
        def preemption(self, seconds_left: float | None, kind: str, reason: str) -> None:
            if errors:
                raise errors.pop()
            told.append(kind)

    hook = Hook(Forgetful(), token_file)
    answers = [hook.reply("POST", "/deflation/v1/preemptions", BEARER, notice())[0] for _ in range(3)]
    assert (answers, told) == ([status, 200, 200], ["stop"])


def test_a_notice_that_fails_after_its_end_was_told_leaves_that_told(token_file: str) -> None:
    told: list[str] = []
    asked, go = threading.Event(), threading.Event()

    class Slow(Scripted):
        def preemption(self, seconds_left: float | None, kind: str, reason: str) -> None:
            told.append(kind)
            if kind == "stop":
                asked.set()
                assert go.wait(20)
                raise ApplicationError("too late")

    hook = Hook(Slow(), token_file)
    tell: Callable[[bytes], int] = lambda body: hook.reply("POST", "/deflation/v1/preemptions", BEARER, body)[0]  # noqa: E731
    first = threading.Thread(target=tell, args=(notice(),))
    first.start()
    assert asked.wait(20)
    over = notice(seconds_left=None, kind="withdrawn")
    assert tell(over) == 200
    go.set()
    first.join(20)
    assert tell(over) == 200
    assert told == ["stop", "withdrawn"]


def test_a_notice_that_one_of_several_processes_did_not_hear_is_told_again_to_that_one_only(token_file: str) -> None:
    class Member(Scripted):
        def __init__(self, fails: int) -> None:
            super().__init__()
            self.fails, self.told = fails, list[str]()

        def preemption(self, seconds_left: float | None, kind: str, reason: str) -> None:
            if self.fails:
                self.fails -= 1
                raise ApplicationError("busy")
            self.told.append(kind)

    members = [Member(0), Member(1)]
    with tempfile.TemporaryDirectory(prefix="ebb") as short:
        servers = [HookServer(one, f"{short}/d/{n}.sock", token_file).start() for n, one in enumerate(members)]
        whole = Hook(Group(("memory_mib",), f"{short}/d", token_file), token_file)
        for body in (notice(), notice(seconds_left=12), notice(seconds_left=None, kind="withdrawn"), notice()):
            whole.reply("POST", "/deflation/v1/preemptions", BEARER, body)
        for server in servers:
            server.stop()
    assert [one.told for one in members] == [["stop", "withdrawn", "stop"]] * 2


def test_silent_clients_do_not_keep_the_hook_from_others_for_ever(
    token_file: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert hook_server._Handler.timeout == REQUEST_TIMEOUT_S
    monkeypatch.setattr(hook_server._Handler, "timeout", 0.3)
    server = HookServer(Scripted(), port=0, token_file=token_file).start()
    rest = Rest(server.address, TOKEN)
    silent = [socket.create_connection(server.address) for _ in range(CONNECTIONS)]
    end = time.monotonic() + 30
    while True:
        with contextlib.suppress(OSError, http.client.HTTPException):
            assert rest.send("GET", "/healthz")[0] == 200
            break
        assert time.monotonic() < end, "they hold all places"
        time.sleep(0.05)
    for connection in silent:
        connection.close()
    server.stop()
