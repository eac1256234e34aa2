"""The hooks of a service's processes, as the one that leads asks them."""

from __future__ import annotations

import os
import socket
import tempfile
import threading
import time
from pathlib import Path
from typing import Any, ClassVar

import pytest

from app_adapters import shared
from app_adapters.adapter import Deadline, Promise, Refusal
from app_adapters.client import HookClient, NoAnswer, NotListening
from app_adapters.hook import CAPABILITIES, HEALTH
from app_adapters.messages import RefusalBody, TargetRequest
from app_adapters.operations import BUSY_RETRY_S, Operations
from app_adapters.processes.inelastic import InelasticAdapter
from app_adapters.server import HookServer
from app_adapters.shared import Group, SharedHookServer


def test_the_socket_of_a_process_that_does_not_listen_yet_stays_and_that_of_one_that_has_ended_goes() -> None:
    with tempfile.TemporaryDirectory(prefix="ebb") as short:
        token = Path(short, "token")
        token.write_text("t")
        group = Group(InelasticAdapter().components, f"{short}/d", str(token))
        server = HookServer(InelasticAdapter(), f"{short}/d/1.sock", str(token)).start()
        with socket.socket(socket.AF_UNIX) as starting, socket.socket(socket.AF_UNIX) as killed:
            starting.bind(f"{short}/d/2-starting.sock")
            # The number of the dead one is that of a process that lives.
            killed.bind(f"{short}/d/{os.getpid()}.sock")
            os.utime(f"{short}/d/{os.getpid()}.sock", (0, 0))
            group.capabilities()
            assert sorted(os.listdir(f"{short}/d")) == ["1.sock", "2-starting.sock"]
        server.stop()


def test_a_process_of_another_container_may_have_the_same_number() -> None:
    with tempfile.TemporaryDirectory(prefix="ebb") as short:
        path, token = f"{short}/hook.sock", f"{short}/token"
        theirs = HookServer(InelasticAdapter(), f"{path}.d/{os.getpid()}.sock", token).start()
        ours = SharedHookServer(InelasticAdapter(), path, token).start()
        try:
            assert len(os.listdir(f"{path}.d")) == 2
        finally:
            ours.stop()
            theirs.stop()


OFFER = {"name": "x", "version": "1", "expected_s": 0.1, "reversible": True, "modes": ["ask"]}
RUNNING = (200, {"state": "running"})
RELEASED = (200, {"state": "released", "released": {"memory_mib": 10.0}, "measured_by": "x", "reason": "done"})


def group_of(
    monkeypatch: pytest.MonkeyPatch, folder: Path, answers: dict[str, Any], progress: dict[str, list[Any]]
) -> Group:
    """Processes that answer a target so, and then tell of their progress so, the last for ever; an exception is no
    answer, and one without an answer to a target does not say what it has either."""
    sizes = {"current": 100.0, "minimum": 0.0, "maximum": 100.0, "step": 1.0}
    (folder / "token").write_text("t")
    (folder / "d").mkdir()
    for pid in answers:
        (folder / "d" / f"{pid}.sock").touch()

    def ask(client: HookClient, method: str, path: str, body: Any = None, limit_s: float | None = None) -> Any:
        pid = Path(client._path).stem
        told = progress.get(pid, [])
        if path == CAPABILITIES:
            offer = 200, {**OFFER, "resources": {"memory_mib": sizes}}
            reply = offer if answers[pid] else NoAnswer("hangs")
        elif method == "POST":
            reply = answers[pid]
        else:
            reply = told.pop(0) if len(told) > 1 else told[0]
        if isinstance(reply, Exception):
            raise reply
        return reply

    monkeypatch.setattr(HookClient, "ask", ask)
    return Group(("memory_mib",), f"{folder}/d", f"{folder}/token")


PROMISED = (202, {"promised": {"memory_mib": 10.0}, "expected_s": 0.1})


def gathered(
    monkeypatch: pytest.MonkeyPatch, folder: Path, progress: dict[str, list[Any]], deadline: Deadline
) -> tuple[dict[str, float], str, bool]:
    """What came free in processes that promise."""
    group = group_of(monkeypatch, folder, dict.fromkeys(progress, PROMISED), progress)
    answer = group.deflate({"memory_mib": 180.0}, "ask", deadline)
    assert isinstance(answer, Promise)
    release = answer.work()
    return release.released, release.reason, release.complete


def test_a_process_that_goes_in_the_middle_of_its_part_is_not_waited_for(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    progress: dict[str, list[Any]] = {"a": [RUNNING, NotListening("it has ended")], "b": [RUNNING, RUNNING, RELEASED]}
    deadline = Deadline(10.0)
    found = gathered(monkeypatch, tmp_path, progress, deadline)
    assert found == ({"memory_mib": 10.0}, "a: has gone; b: done", False)
    assert not deadline.passed


def test_a_process_that_does_not_answer_for_a_moment_is_asked_again_for_what_came_free(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    progress: dict[str, list[Any]] = {"a": [NoAnswer("busy"), RUNNING, NoAnswer("busy"), RELEASED], "b": [RELEASED]}
    found = gathered(monkeypatch, tmp_path, progress, Deadline(10.0))
    assert found == ({"memory_mib": 20.0}, "a: done; b: done", True)


def test_a_process_that_never_answers_is_waited_for_until_the_deadline(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    found = gathered(monkeypatch, tmp_path, {"a": [NoAnswer("hangs")], "b": [RELEASED]}, Deadline(0.5))
    assert found == ({"memory_mib": 10.0}, "a: has not ended; b: done", False)


def refused(retry_after_s: float | None) -> tuple[int, dict[str, Any]]:
    return 409, {"reason": "no", "retry_after_s": retry_after_s, "floor": {}}


@pytest.mark.parametrize(
    ("other", "retry_after_s"),
    [
        (NoAnswer("hangs"), BUSY_RETRY_S),
        (NotListening("it starts"), BUSY_RETRY_S),
        ((500, {"error": "a fault"}), BUSY_RETRY_S),
        ((503, {"error": "too many calls"}), BUSY_RETRY_S),
        (None, BUSY_RETRY_S),
        (refused(7.0), 7.0),
        (refused(None), None),
    ],
)
def test_a_reinflation_is_refused_for_good_only_where_all_processes_do(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, other: Any, retry_after_s: float | None
) -> None:
    group = group_of(monkeypatch, tmp_path, {"1": refused(None), str(os.getpid()): other}, {})
    request = TargetRequest("r", 30.0, "ask", "reinflate", {"memory_mib": 200.0}, "")
    answer = Operations(group, lambda _: None).submit(request)
    assert isinstance(answer, RefusalBody)
    assert answer.retry_after_s == retry_after_s
    refusal = group.deflate({"memory_mib": 150.0}, "ask", Deadline(30.0))
    assert isinstance(refusal, Refusal)
    assert refusal.retry_after_s == (7.0 if retry_after_s == 7.0 else None), "a time forces the next deflation"


def test_a_reinflation_that_did_not_reach_a_process_has_failed_and_is_told_again(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    group = group_of(monkeypatch, tmp_path, {"a": PROMISED, "b": None}, {"a": [RELEASED]})
    answer = group.reinflate({"memory_mib": 200.0}, Deadline(30.0))
    assert isinstance(answer, Promise)
    assert answer.reason == "b: does not answer"
    assert not answer.work().complete


def test_a_reinflation_is_complete_though_the_socket_of_a_process_that_was_killed_is_there(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    lives = str(os.getpid())
    group = group_of(monkeypatch, tmp_path, {"a": PROMISED, lives: PROMISED}, {"a": [RELEASED]})
    known = HookClient.ask

    def ask(client: HookClient, *args: Any) -> Any:
        if Path(client._path).stem == lives:
            raise NotListening("its number is another process's")
        return known(client, *args)

    monkeypatch.setattr(HookClient, "ask", ask)
    os.utime(tmp_path / "d" / f"{lives}.sock", (0, 0))
    answer = group.reinflate({"memory_mib": 200.0}, Deadline(30.0))
    assert isinstance(answer, Promise)
    assert answer.reason == ""
    assert answer.work().complete


@pytest.mark.parametrize(("age_s", "part_mib"), [(shared.OFFER_AGE_S, 220 / 3), (-1.0, 320 / 3)])
def test_what_a_process_has_that_falls_silent_before_the_target_comes_is_not_split_among_the_others(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, age_s: float, part_mib: float
) -> None:
    monkeypatch.setattr(shared, "OFFER_AGE_S", age_s)
    answers: dict[str, Any] = dict.fromkeys("abcd", PROMISED)
    group = group_of(monkeypatch, tmp_path, answers, {})
    known = HookClient.ask
    asked: dict[str, float] = {}

    def ask(client: HookClient, method: str, path: str, body: Any = None, limit_s: float | None = None) -> Any:
        if method == "POST":
            asked[Path(client._path).stem] = body["target"]["memory_mib"]
        return known(client, method, path, body, limit_s)

    monkeypatch.setattr(HookClient, "ask", ask)
    assert group.capabilities().resources["memory_mib"].current == 400.0
    answers["d"] = None
    answer = group.deflate({"memory_mib": 320.0}, "ask", Deadline(20.0))
    assert asked == dict.fromkeys("abc", pytest.approx(part_mib, abs=0.001))
    assert "d: does not answer" in answer.reason


def test_what_takes_long_is_looked_at_more_and_more_rarely(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    class Quick(Deadline):
        waits: ClassVar[list[float]] = []

        def wait(self, seconds: float) -> bool:
            self.waits.append(seconds)
            return False

    gathered(monkeypatch, tmp_path, {"a": [RUNNING] * 30 + [RELEASED]}, Quick(60.0))
    assert Quick.waits[0] == 0.05
    assert Quick.waits[-1] == 0.5
    assert Quick.waits == sorted(Quick.waits)
    assert sum(Quick.waits[:10]) < 2.5, "what ends soon is seen soon"


def test_the_process_that_leads_next_serves_once_the_socket_of_the_one_before_is_closed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(shared, "AGAIN_S", 0.01)
    with tempfile.TemporaryDirectory(prefix="ebb") as short:
        token, never = Path(short, "token"), threading.Event()
        token.write_text("t")
        before = socket.socket(socket.AF_UNIX)
        before.settimeout(30)
        before.bind(f"{short}/hook.sock")
        before.listen()
        server = SharedHookServer(InelasticAdapter(), f"{short}/hook.sock", str(token)).start()
        try:
            # It has the lock, looks whether somebody listens, and finds the one before.
            before.accept()[0].close()
            before.close()
            hook, end = HookClient(server.url), time.monotonic() + 10
            while True:
                try:
                    assert hook.ask("GET", HEALTH)[1]["status"] == "ok"
                    break
                except NoAnswer:
                    assert time.monotonic() < end, "nobody leads"
                    never.wait(0.01)
        finally:
            before.close()
            server.stop()
