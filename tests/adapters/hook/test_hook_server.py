"""The hook as a client on loopback sees it."""

from __future__ import annotations

import asyncio
import inspect
import json
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from decimal import Decimal
from fractions import Fraction
from pathlib import Path
from typing import Any, cast

import pytest

from app_adapters.adapter import Adapter, Answer, Capabilities, Deadline, Promise, Refusal, Release, SizeRange
from app_adapters.aio import AsyncHookServer
from app_adapters.errors import ApplicationError
from app_adapters.hook import Hook
from app_adapters.operations import attempt
from app_adapters.server import HookServer
from app_adapters.wsgi import hook_application
from ebbtide.deflation.cascade import asking
from ebbtide.deflation.cascade.asking import mode_of_asking
from ebbtide.deflation.cascade.instructions import Mode
from tests.adapters.rest import Rest

TOKEN = "right-token"


class Scripted(Adapter):
    """Answers as it is told; its work waits for `go`."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, float]] = []
        self.go = threading.Event()
        self.go.set()
        self.refusal: Refusal | None = None
        self.error: Exception | None = None
        self.deadlines: list[Deadline] = []
        self.stubborn = False

    def capabilities(self) -> Capabilities:
        if self.error is not None:
            raise self.error
        return Capabilities("scripted", "1", {"memory_mib": SizeRange(100.0, 10.0, 200.0, 1.0)}, 1.0, True, ["ask"])

    def deflate(self, target: dict[str, float], mode: str, deadline: Deadline) -> Answer:
        self.calls.append((mode, target["memory_mib"]))
        self.deadlines.append(deadline)
        return self.refusal or Promise({"memory_mib": 40.0}, 1.0, self._work, "gladly")

    def reinflate(self, target: dict[str, float], deadline: Deadline) -> Answer:
        self.calls.append(("reinflate", target["memory_mib"]))
        return Promise({}, 0.0, lambda: Release({"memory_mib": 0.0}, "nothing", "grown"))

    def _work(self) -> Release:
        while not self.go.wait(0.01) and (self.stubborn or not self.deadlines[-1].passed):
            pass
        if self.error is not None:
            raise self.error
        return Release({"memory_mib": 38.5}, "a scale", "weighed")


@pytest.fixture
def adapter() -> Scripted:
    return Scripted()


@pytest.fixture
def token_file(tmp_path: Path) -> Path:
    path = tmp_path / "token"
    path.write_text(TOKEN + "\n")
    return path


@pytest.fixture
def server(adapter: Scripted, token_file: Path) -> Iterator[HookServer]:
    server = HookServer(adapter, port=0, token_file=str(token_file)).start()
    yield server
    server.stop()


@pytest.fixture
def rest(server: HookServer) -> Rest:
    return Rest(server.address, TOKEN)


def test_capabilities_are_the_adapters(rest: Rest) -> None:
    assert rest.capabilities() == {
        "name": "scripted",
        "version": "1",
        "resources": {"memory_mib": {"current": 100.0, "minimum": 10.0, "maximum": 200.0, "step": 1.0}},
        "expected_s": 1.0,
        "reversible": True,
        "modes": ["ask"],
    }


def test_the_status_is_what_it_has_now(rest: Rest, adapter: Scripted) -> None:
    assert rest.send("GET", "/deflation/v1/status") == (200, {"sizes": {"memory_mib": 100.0}})
    adapter.error = ApplicationError("gone")
    assert rest.send("GET", "/deflation/v1/status") == (503, {"error": "gone"})


def test_a_promise_is_worked_off_and_its_measured_release_told(rest: Rest, adapter: Scripted) -> None:
    adapter.go.clear()
    status, answer = rest.target("r1", "deflate", 60, mode="force")
    assert (status, answer["state"], answer["promised"]) == (202, "promised", {"memory_mib": 40.0})
    assert rest.send("GET", "/deflation/v1/targets/r1")[1]["state"] == "running"
    adapter.go.set()
    done = rest.finished("r1")
    assert (done["state"], done["released"], done["measured_by"]) == ("released", {"memory_mib": 38.5}, "a scale")
    assert done["reason"].startswith("weighed; took ")
    assert adapter.calls == [("force", 60.0)]


def test_a_refusal_is_409_with_reason_and_floor(rest: Rest, adapter: Scripted) -> None:
    adapter.refusal = Refusal("busy season", 30.0, {"memory_mib": 90.0})
    status, answer = rest.target("r1", "deflate", 60)
    assert status == 409
    assert answer == {
        "request_id": "r1",
        "state": "refused",
        "reason": "busy season",
        "retry_after_s": 30.0,
        "floor": {"memory_mib": 90.0},
    }
    assert rest.finished("r1")["state"] == "failed"


def test_the_same_request_again_gets_the_same_answer_and_starts_nothing(rest: Rest, adapter: Scripted) -> None:
    first = rest.target("r1", "deflate", 60)
    rest.finished("r1")
    assert rest.target("r1", "deflate", 60) == first
    assert len(adapter.calls) == 1


def test_many_at_once_under_one_id_start_one_operation(rest: Rest, adapter: Scripted) -> None:
    answers: list[tuple[int, dict[str, Any]]] = []
    threads = [threading.Thread(target=lambda: answers.append(rest.target("r1", "deflate", 60))) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(answers) == 8
    assert all(answer == answers[0] for answer in answers)
    assert len(adapter.calls) == 1


def test_a_newer_attempt_calls_the_older_one_off(rest: Rest, adapter: Scripted) -> None:
    adapter.go.clear()
    assert rest.target("r1", "deflate", 60)[0] == 202
    assert rest.target("r1#2", "deflate", 50)[0] == 202
    older = rest.finished("r1")
    assert older["reason"].startswith("called off for r1#2: ")
    assert rest.send("GET", "/deflation/v1/targets/r1%232")[1]["state"] == "running"
    adapter.go.set()
    assert rest.finished("r1%232")["state"] == "released"
    assert adapter.calls == [("ask", 60.0), ("ask", 50.0)]


def test_an_attempt_of_whoever_came_after_calls_off_that_of_whoever_has_ended(rest: Rest, adapter: Scripted) -> None:
    adapter.go.clear()
    for number, attempt_id in enumerate(("r1#fe01.2", "r1#ab23.1", "r1")):
        assert rest.target(attempt_id, "deflate", 60 - number)[0] == 202
    assert rest.finished("r1%23fe01.2")["reason"].startswith("called off for r1#ab23.1: ")
    assert rest.finished("r1%23ab23.1")["reason"].startswith("called off for r1: ")
    adapter.go.set()
    assert rest.finished("r1")["state"] == "released"


def test_an_older_attempt_that_comes_late_is_refused(rest: Rest, adapter: Scripted) -> None:
    assert rest.target("r1#10", "deflate", 60)[0] == 202
    rest.finished("r1%2310")
    for late in ("r1#9", "r1", "r1#1"):
        status, answer = rest.target(late, "deflate", 50)
        assert (status, answer["reason"]) == (409, "r1#10 is a newer attempt")
    assert len(adapter.calls) == 1


def test_an_attempt_that_does_not_stop_is_not_run_over(
    rest: Rest, adapter: Scripted, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("app_adapters.operations.CALL_OFF_LIMIT_S", 0.1)
    adapter.go.clear()
    adapter.stubborn = True
    rest.target("r1", "deflate", 60)
    status, answer = rest.target("r1#2", "deflate", 50)
    assert (status, answer["reason"]) == (409, "r1 is still being called off")
    adapter.go.set()
    rest.finished("r1")
    assert rest.target("r1#2", "deflate", 50)[0] == 202


def test_another_request_does_not_call_off_what_runs(rest: Rest, adapter: Scripted) -> None:
    adapter.go.clear()
    rest.target("r1", "deflate", 60)
    for other in ("r2", "r2#2", "r1x#2"):
        status, answer = rest.target(other, "deflate", 50)
        assert (status, answer["reason"]) == (409, "another operation is under way")
    assert rest.send("GET", "/deflation/v1/targets/r1")[1]["state"] == "running"


@pytest.mark.parametrize(
    ("request_id", "expected"),
    [
        ("r", ("r", "", 1)),
        ("r#2", ("r", "", 2)),
        ("r#1#3", ("r#1", "", 3)),
        ("r#a1b2.3", ("r", "a1b2", 3)),
        ("r#a.b.3", ("r", "a.b", 3)),
        ("r.2", ("r.2", "", 1)),
        ("r#", ("r#", "", 1)),
        ("#2", ("#2", "", 1)),
        ("r#x", ("r#x", "", 1)),
        ("r#\u0662", ("r#\u0662", "", 1)),
        ("r#" + "9" * 5000, ("r#" + "9" * 5000, "", 1)),
    ],
)
def test_the_number_of_an_attempt_is_part_of_the_id(request_id: str, expected: tuple[str, str, int]) -> None:
    assert attempt(request_id) == expected


def test_another_body_under_the_same_id_is_a_conflict(rest: Rest, adapter: Scripted) -> None:
    rest.target("r1", "deflate", 60)
    status, answer = rest.target("r1", "deflate", 50)
    assert (status, answer["state"]) == (409, "conflict")
    assert "request_id" in answer["error"]
    assert len(adapter.calls) == 1


def test_one_operation_at_a_time_and_the_second_may_come_again_unforced(rest: Rest, adapter: Scripted) -> None:
    adapter.go.clear()
    rest.target("r1", "deflate", 60)
    status, answer = rest.target("r2", "deflate", 50)
    assert (status, answer["state"]) == (409, "refused")
    assert mode_of_asking(2.0, Mode.ASK, asking.Refusal(0.0, answer["retry_after_s"])) is Mode.ASK
    adapter.go.set()
    rest.finished("r1")
    while rest.target("r2", "deflate", 50)[0] != 202:
        pass
    assert rest.finished("r2")["state"] == "released"


def test_a_reinflation_that_finds_another_at_work_may_come_again(
    rest: Rest, adapter: Scripted, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("app_adapters.operations.CALL_OFF_LIMIT_S", 0.1)
    adapter.go.clear()
    adapter.stubborn = True
    rest.target("r1", "deflate", 60)
    status, answer = rest.target("r2", "reinflate", 200)
    assert (status, answer["retry_after_s"]) == (409, 1.0), "the guest agent tells it again only then"
    adapter.go.set()


def test_work_sees_its_deadline(rest: Rest, adapter: Scripted) -> None:
    adapter.go.clear()
    rest.target("r1", "deflate", 60, deadline_s=0.05)
    assert rest.finished("r1")["state"] == "released"
    assert adapter.deadlines[0].passed


def test_stopping_cancels_what_runs(adapter: Scripted, token_file: Path) -> None:
    server = HookServer(adapter, port=0, token_file=str(token_file)).start()
    adapter.go.clear()
    assert Rest(server.address, TOKEN).target("r1", "deflate", 60)[0] == 202
    server.stop()
    assert adapter.deadlines[0].passed


@pytest.mark.parametrize("error", [ApplicationError("the application is away"), KeyError("pid")])
def test_work_that_breaks_is_failed_with_its_reason(rest: Rest, adapter: Scripted, error: Exception) -> None:
    adapter.go.clear()
    rest.target("r1", "deflate", 60)
    adapter.error = error
    adapter.go.set()
    done = rest.finished("r1")
    assert (done["state"], done["released"]) == ("failed", {})
    assert str(error) in done["reason"]


def test_an_application_that_cannot_be_asked_is_503(rest: Rest, adapter: Scripted) -> None:
    adapter.error = ApplicationError("no such process")
    status, body = rest.send("GET", "/deflation/v1/capabilities")
    assert (status, body) == (503, {"error": "no such process"})


@pytest.mark.parametrize("token", [None, "", "wrong", TOKEN + "x", TOKEN[:-1], "é"])
def test_a_wrong_token_is_401_and_changes_nothing(server: HookServer, adapter: Scripted, token: str | None) -> None:
    rest = Rest(server.address, token.encode().decode("latin-1") if token else token)
    assert rest.target("r1", "deflate", 60)[0] == 401
    assert rest.send("GET", "/deflation/v1/capabilities")[0] == 401
    assert rest.send("GET", "/deflation/v1/targets/r1")[0] == 401
    assert rest.send("GET", "/healthz")[0] == 200
    assert adapter.calls == []


def test_a_new_token_counts_at_once_and_no_token_lets_nobody_in(server: HookServer, token_file: Path) -> None:
    old, new = Rest(server.address, TOKEN), Rest(server.address, "new-token")
    token_file.write_text("new-token")
    assert old.send("GET", "/deflation/v1/capabilities")[0] == 401
    assert new.send("GET", "/deflation/v1/capabilities")[0] == 200
    token_file.write_text("")
    assert Rest(server.address, "").send("GET", "/deflation/v1/capabilities")[0] == 401
    token_file.unlink()
    assert new.send("GET", "/deflation/v1/capabilities")[0] == 401


GOOD = {
    "request_id": "r1",
    "deadline_s": 5,
    "mode": "ask",
    "direction": "deflate",
    "target": {"memory_mib": 60},
    "reason": "",
}


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"request_id": ""}, "request_id"),
        ({"request_id": 5}, "request_id"),
        ({"request_id": "a\n"}, "request_id"),
        ({"deadline_s": 0}, "deadline_s"),
        ({"deadline_s": "5"}, "deadline_s"),
        ({"deadline_s": True}, "deadline_s"),
        ({"deadline_s": 1e9}, "deadline_s"),
        ({"mode": "beg"}, "mode"),
        ({"direction": "sideways"}, "direction"),
        ({"target": 60}, "target"),
        ({"target": {}}, "target"),
        ({"target": {"memory_mib": 60, "cpu_cores": 1}}, "target.cpu_cores"),
        ({"target": {"memory_mib": 60, "disk_mib_s": 1}}, "target"),
        ({"target": {"cpu_cores": "many"}}, "target.cpu_cores"),
        ({"target": {"memory_mib": -1}}, "target.memory_mib"),
        ({"target": {"memory_mib": 10**400}}, "target.memory_mib"),
        ({"reason": None}, "reason"),
    ],
)
def test_a_bad_body_is_400_and_names_the_field(
    rest: Rest, adapter: Scripted, change: dict[str, Any], field: str
) -> None:
    status, answer = rest.send("POST", "/deflation/v1/targets", json.dumps({**GOOD, **change}).encode())
    assert (status, answer["error"].split(":")[0]) == (400, field)
    assert adapter.calls == []


@pytest.mark.parametrize("body", [b"", b"{", b"[]", b"\xff", b"[" * 60000, b'{"deadline_s": NaN}'])
def test_what_is_no_json_object_is_400(rest: Rest, body: bytes) -> None:
    status, answer = rest.send("POST", "/deflation/v1/targets", body)
    assert (status, answer["error"].split(":")[0]) == (400, "body")


def test_a_long_body_is_413_and_one_without_a_length_411(rest: Rest) -> None:
    assert rest.send("POST", "/deflation/v1/targets", b" " * 65537)[0] == 413
    assert rest.send("POST", "/deflation/v1/targets", b"", {"Transfer-Encoding": "chunked"})[0] == 411
    assert rest.send("POST", "/deflation/v1/targets", None, {"Content-Length": "-1"})[0] == 411
    assert rest.send("POST", "/deflation/v1/targets", None, {"Content-Length": "0" * 20 + "209715200"})[0] == 413
    assert rest.send("POST", "/deflation/v1/targets", b" " * 65536)[0] == 400


def test_a_thread_that_cannot_be_started_costs_one_connection_and_no_more(
    rest: Rest, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", refuse)
        for _ in range(40):
            with pytest.raises(OSError):  # noqa: PT011 - the connection is closed
                rest.capabilities()
    assert rest.capabilities()["name"] == "scripted"


def test_a_server_that_never_served_can_be_stopped(adapter: Scripted, token_file: Path) -> None:
    HookServer(adapter, port=0, token_file=str(token_file)).stop()


def test_unknown_paths_requests_and_methods(rest: Rest) -> None:
    assert rest.send("GET", "/deflation/v1/targets/none")[0] == 404
    assert rest.send("GET", "/deflation/v2/capabilities")[0] == 404
    assert rest.send("POST", "/deflation/v1/capabilities")[0] == 405
    assert rest.send("GET", "/deflation/v1/targets")[0] == 405


def test_only_loopback_is_listened_on(adapter: Scripted) -> None:
    for host in ("0.0.0.0", "::", "192.0.2.1", "example.org", "127.0.0.1.example.org", ""):
        with pytest.raises(ValueError, match="not on loopback"):
            HookServer(adapter, host=host, port=0)


def test_a_port_is_listened_on_by_choice_only(adapter: Scripted) -> None:
    for path, port in (("", None), ("/run/x.sock", 0)):
        for server in (HookServer, AsyncHookServer):
            with pytest.raises(ValueError, match="path: must be that of a Unix socket"):
                server(adapter, path, port=port)


class Answering(Scripted):
    """Answers with whatever it is given."""

    def __init__(self, answer: Any, offer: Any = None) -> None:
        super().__init__()
        self.answer, self.offer = answer, offer

    def capabilities(self) -> Capabilities:
        return cast(Capabilities, super().capabilities() if self.offer is None else self.offer)

    def deflate(self, target: dict[str, float], mode: str, deadline: Deadline) -> Answer:
        return cast(Answer, self.answer)


def work() -> Release:
    return Release({}, "", "")


NAN: Any = float("nan")


@pytest.mark.parametrize(
    ("answer", "error"),
    [
        (None, "deflate: NoneType was returned, and neither a Promise nor a Refusal"),
        (Promise({"memory_mib": NAN}, 1, work), "promised.memory_mib: nan is no finite number >= 0"),
        (Promise({"memory_mib": -1}, 1, work), "promised.memory_mib: -1 is no finite number >= 0"),
        (
            Promise({"memory_mib": cast(Any, Decimal("NaN"))}, 1, work),
            "promised.memory_mib: Decimal('NaN') is no finite",
        ),
        (Promise({"memory_mib": cast(Any, "9")}, 1, work), "promised.memory_mib: '9' is no finite number >= 0"),
        (Promise({"memory_mib": True}, 1, work), "promised.memory_mib: True is no finite number >= 0"),
        (Promise({"disk_mib_s": 1}, 1, work), "promised.disk_mib_s: there is memory_mib and cpu_cores only"),
        (Promise(cast(Any, 40), 1, work), "promised: 40 is no dictionary of figures by component"),
        (Promise({}, float("inf"), work), "expected_s: inf is no finite number >= 0"),
        (Promise({}, 1, cast(Any, work())), "work: Release("),
        (Refusal("no", -1), "retry_after_s: -1 is no finite number >= 0"),
        (Refusal("no", None, {"memory_mib": NAN}), "floor.memory_mib: nan is no finite number >= 0"),
    ],
)
def test_an_answer_that_is_none_is_a_fault_that_names_the_field_and_starts_nothing(
    token_file: Path, answer: Any, error: str
) -> None:
    hook = Hook(Answering(answer), str(token_file))
    body = json.dumps(GOOD).encode()
    status, told = hook.reply("POST", "/deflation/v1/targets", f"Bearer {TOKEN}", body)
    assert (status, error in told["error"]) == (500, True), told
    assert hook.reply("GET", "/deflation/v1/targets/r1", f"Bearer {TOKEN}", b"")[0] == 404


@pytest.mark.parametrize(
    ("resources", "error"),
    [
        ({"memory_mib": SizeRange(NAN, 1, 1, 1)}, "resources.memory_mib.current: nan"),
        ({"memory_mib": SizeRange(1, -1, 1, 1)}, "resources.memory_mib.minimum: -1"),
        ({"memory_mib": {"current": 1}}, "resources.memory_mib: dict was returned, and no SizeRange"),
        (["memory_mib"], "resources: ['memory_mib'] is no dictionary"),
    ],
)
def test_wrong_capabilities_are_a_fault_that_names_the_field(token_file: Path, resources: Any, error: str) -> None:
    hook = Hook(Answering(None, Capabilities("x", "1", resources, 1, True, ["ask"])), str(token_file))
    status, told = hook.reply("GET", "/deflation/v1/capabilities", f"Bearer {TOKEN}", b"")
    assert (status, error in told["error"]) == (500, True), told


def test_decimals_and_fractions_become_numbers(token_file: Path) -> None:
    figures: list[Any] = [Decimal("100.5"), 1, Fraction(401, 2), 1]
    sizes = SizeRange(*figures)
    offer = Capabilities("x", "1", {"memory_mib": sizes}, 1, True, ["ask"])
    hook = Hook(Answering(Promise({"memory_mib": cast(Any, Decimal("40.25"))}, 1, work), offer), str(token_file))
    told = hook.reply("GET", "/deflation/v1/capabilities", f"Bearer {TOKEN}", b"")[1]
    assert json.loads(json.dumps(told))["resources"]["memory_mib"]["current"] == 100.5
    told = hook.reply("POST", "/deflation/v1/targets", f"Bearer {TOKEN}", json.dumps(GOOD).encode())[1]
    assert told["promised"] == {"memory_mib": 40.25}


def test_a_fault_is_seen_on_standard_error_without_any_setting_up(tmp_path: Path) -> None:
    (tmp_path / "token").write_text(TOKEN)
    code = (
        "import sys; from app_adapters.hook import Hook\n"
        "from app_adapters.processes.inelastic import InelasticAdapter\n"
        "hook = Hook(InelasticAdapter(resident_mib=lambda: 1 / 0), sys.argv[1])\n"
        f"print(hook.reply('GET', '/deflation/v1/capabilities', 'Bearer {TOKEN}', b'')[0].value)"
    )
    ran = subprocess.run([sys.executable, "-c", code, str(tmp_path / "token")], capture_output=True, text=True)
    assert ran.stdout == "500\n"
    assert "a fault of the adapter\nTraceback" in ran.stderr
    assert "ZeroDivisionError" in ran.stderr


@pytest.mark.parametrize("make", [HookServer, AsyncHookServer])
def test_the_token_is_that_of_the_guest_agent_where_none_is_named(make: Callable[..., Any], tmp_path: Path) -> None:
    default = inspect.signature(make).parameters["token_file"].default
    assert default == "/run/ebbtide/token" == inspect.signature(hook_application).parameters["token_file"].default


def test_without_a_token_file_the_401_says_so(adapter: Scripted, tmp_path: Path) -> None:
    hook = Hook(adapter, str(tmp_path / "none"))
    status, told = hook.reply("GET", "/deflation/v1/capabilities", "Bearer x", b"")
    assert (status, str(tmp_path / "none") in told["error"]) == (401, True)


@pytest.mark.parametrize("kind", ["path", "port"])
async def test_what_another_hook_listens_on_is_not_taken_from_it(
    adapter: Scripted, token_file: Path, kind: str
) -> None:
    with tempfile.TemporaryDirectory(prefix="ebb") as short:
        path = f"{short}/hook.sock"
        token = str(token_file)
        first = HookServer(adapter, path, token) if kind == "path" else HookServer(adapter, token_file=token, port=0)
        first.start()
        try:
            where = {"path": path} if kind == "path" else {"port": first.address[1]}
            match = "is taken by another hook.* SharedHookServer" if kind == "path" else "is taken by another"
            with pytest.raises(OSError, match=match):
                HookServer(adapter, token_file=token, **where)
            with pytest.raises(OSError, match=match):
                await AsyncHookServer(adapter, token_file=token, **where).start()
            address = path if kind == "path" else first.address
            assert (await asyncio.to_thread(Rest(address, TOKEN).capabilities))["name"] == "scripted"
        finally:
            await asyncio.to_thread(first.stop)


def test_a_socket_that_nobody_listens_on_any_more_is_replaced(adapter: Scripted, token_file: Path) -> None:
    with tempfile.TemporaryDirectory(prefix="ebb") as short:
        with socket.socket(socket.AF_UNIX) as old:
            old.bind(f"{short}/hook.sock")
        server = HookServer(adapter, f"{short}/hook.sock", str(token_file)).start()
        assert Rest(f"{short}/hook.sock", TOKEN).capabilities()["name"] == "scripted"
        server.stop()


async def test_on_a_socket_there_is_no_port_to_tell(adapter: Scripted, token_file: Path) -> None:
    with tempfile.TemporaryDirectory(prefix="ebb") as short:
        server = HookServer(adapter, f"{short}/hook.sock", str(token_file))
        with pytest.raises(ValueError, match=r"unix:.*/hook\.sock, and not on a port"):
            _ = server.address
        server.stop()
        with pytest.raises(ValueError, match="not on a port"):
            _ = AsyncHookServer(adapter, f"{short}/hook.sock", str(token_file)).address


def test_a_socket_may_be_named_without_a_directory(
    adapter: Scripted, token_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with tempfile.TemporaryDirectory(prefix="ebb") as short:
        monkeypatch.chdir(short)
        server = HookServer(adapter, "hook.sock", str(token_file)).start()
        assert Rest(f"{short}/hook.sock", TOKEN).capabilities()["name"] == "scripted"
        server.stop()
        monkeypatch.undo()


def test_work_for_which_no_thread_can_be_started_does_not_seem_to_run(
    adapter: Scripted, token_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    hook, body = Hook(adapter, str(token_file)), json.dumps(GOOD).encode()
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", refuse)
        status, told = hook.reply("POST", "/deflation/v1/targets", f"Bearer {TOKEN}", body)
    assert (status, told["reason"]) == (409, "no thread can be started")
    assert hook.reply("GET", "/deflation/v1/targets/r1", f"Bearer {TOKEN}", b"")[0] == 404
    assert hook.reply("POST", "/deflation/v1/targets", f"Bearer {TOKEN}", body)[0] == 202
    hook.stop()


def test_a_reinflation_calls_off_the_deflation_that_runs(rest: Rest, adapter: Scripted) -> None:
    adapter.go.clear()
    rest.target("r1", "deflate", 60)
    status, answer = rest.target("grow", "reinflate", 100)
    assert (status, answer["state"]) == (202, "promised")
    taken = rest.send("GET", "/deflation/v1/targets/r1")[1]
    assert adapter.deadlines[0].passed
    assert taken["reason"].startswith("called off for grow")
    assert adapter.calls[-1] == ("reinflate", 100.0)
