"""The agent as its host sees it: one conversation over a port."""

from __future__ import annotations

import json
import os
import pty
import signal
import subprocess
import sys
import threading
import tty
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from app_adapters.adapter import Adapter, Answer, Capabilities, Deadline, MemoryRange, Promise, Release
from app_adapters.inelastic import InelasticAdapter
from app_adapters.server import HookServer
from tests.guestagent.harness import BOOT_ID, TOKEN, Bench, GuestTree, Host, bench


class Elastic(Adapter):
    """Gives all it is asked for, when `go` is set. `hang` holds up the next decision."""

    def __init__(self, size_mib: float, minimum_mib: float = 10.0, maximum_mib: float = 1000.0) -> None:
        self.size_mib, self.minimum_mib, self.maximum_mib = size_mib, minimum_mib, maximum_mib
        self.targets: list[tuple[str, float, str]] = []
        self.go = threading.Event()
        self.go.set()
        self.hang: threading.Event | None = None

    def capabilities(self) -> Capabilities:
        memory = MemoryRange(self.size_mib, self.minimum_mib, self.maximum_mib, 1.0)
        return Capabilities("elastic", "1", {"memory_mib": memory}, 0.5, True, ["ask", "force"])

    def deflate(self, target: dict[str, float], mode: str, deadline: Deadline) -> Answer:
        if self.hang is not None:
            self.hang.wait(20)
        return self._take("deflate", target["memory_mib"], mode, deadline)

    def reinflate(self, target: dict[str, float], deadline: Deadline) -> Answer:
        return self._take("reinflate", target["memory_mib"], "", deadline)

    def _take(self, direction: str, size_mib: float, mode: str, deadline: Deadline) -> Answer:
        self.targets.append((direction, size_mib, mode))
        amount_mib = max(self.size_mib - size_mib, 0.0)

        def work() -> Release:
            while not self.go.wait(0.01):
                if deadline.passed:
                    return Release({"memory_mib": 0.0}, "itself", "not in time", complete=False)
            self.size_mib = size_mib
            return Release({"memory_mib": amount_mib}, "itself", "done")

        return Promise({"memory_mib": amount_mib}, 0.5, work, "gladly")


@pytest.fixture
def guest(tmp_path: Path) -> Iterator[Bench]:
    with bench(tmp_path) as made:
        yield made


@pytest.fixture
def host(guest: Bench) -> Host:
    host = guest.host()
    host.hello()
    return host


Serve = Callable[[str, Adapter], None]


@pytest.fixture
def serve(guest: Bench) -> Iterator[Serve]:
    servers: list[HookServer] = []

    def start(name: str, adapter: Adapter) -> None:
        servers.append(HookServer(adapter, port=0, token_file=str(guest.run_dir / "token")).start())
        guest.register(name, servers[-1].address[1])

    yield start
    for server in servers:
        server.stop()


def deflate(host: Host, request_id: str = "r1", target_mib: float = 800, **more: Any) -> dict[str, Any]:
    params = {"deadline_s": 10, "mode": "ask", "target": {"memory_mib": target_mib}, "bound_mib": 1024, **more}
    return host.result("application.deflate", request_id=request_id, **params)


def finished(host: Host, request_id: str) -> dict[str, Any]:
    while (status := host.result("application.status", request_id=request_id))["state"] == "running":
        pass
    return status


def test_hello_carries_the_nonce_and_writes_the_token(guest: Bench) -> None:
    host = guest.host()
    result = host.hello("nonce-1")
    assert result.pop("agent")
    assert result == {
        "protocol": 1,
        "nonce": "nonce-1",
        "boot_id": BOOT_ID,
        "capabilities": ["cpu", "memory", "application"],
    }
    token = guest.run_dir / "token"
    assert token.read_text() == TOKEN
    assert (token.stat().st_mode & 0o777, guest.run_dir.stat().st_mode & 0o777) == (0o640, 0o755)
    host.hello("nonce-2", token="another")
    assert token.read_text() == "another"


def test_hello_is_found_after_garbage(guest: Bench) -> None:
    host = guest.host()
    host.connection.sendall(b'\xff\x00{"jsonrpc": "2.0", "id": 7, "method": "sta')
    host.send(b"")
    host.send(b"x" * 70000)
    host.ask("hello", protocol=1, nonce="fresh", vm="vm1", token=TOKEN)
    while (answer := host.receive()).get("result", {}).get("nonce") != "fresh":
        assert answer["error"]["code"] in (-32700, -32600)


def test_nothing_goes_before_hello_and_a_wrong_protocol_is_no_hello(guest: Bench) -> None:
    host = guest.host()
    assert host.error("status") == (-32002, "hello first")
    assert host.error("hello", protocol=2, nonce="n", vm="v", token="t")[0] == -32001
    assert host.error("status")[0] == -32002


def test_answers_of_an_earlier_conversation_never_arrive(guest: Bench, serve: Serve) -> None:
    host = guest.host()
    host.hello()
    slow = Elastic(100)
    slow.hang = threading.Event()
    serve("slow", slow)
    host.ask("application.deflate", request_id="r", deadline_s=5, mode="ask", target={"memory_mib": 1}, bound_mib=9)
    host.hello("second")
    slow.hang.set()
    assert host.result("application.status", request_id="other")["request_id"] == "other"
    host.hello("third")


def test_status_tells_what_the_kernel_says(guest: Bench, host: Host, serve: Serve) -> None:
    serve("app", Elastic(120))
    assert host.result("status") == {
        "boot_id": BOOT_ID,
        "uptime_s": 12.5,
        "cpus": {"present": [0, 1, 2, 3], "online": [0, 1, 2, 3], "unpluggable": [3, 2, 1]},
        "memory": {
            "total_mib": 1024.0,
            "available_mib": 600.0,
            "reserve_mib": 51.2,
            "floor_mib": 475.2,
            "unpluggable_mib": 548.8,
        },
        "pressure": {
            "memory_some_avg10": 1.5,
            "memory_full_avg10": 0.25,
            "cpu_some_avg10": 1.5,
            "memory_some_total_us": 123456,
            "memory_full_total_us": 65432,
        },
        "major_faults": 17,
        "swap_in_pages": 5,
        "swap_out_pages": 6,
        "applications": [{"name": "app", "resident_mib": 120.0}],
    }


def test_a_brief_status_looks_at_no_task_and_asks_no_application(guest: Bench, host: Host, serve: Serve) -> None:
    serve("app", Elastic(120))
    full, brief = host.result("status"), host.result("status", brief=True)
    assert (brief["cpus"]["unpluggable"], brief["applications"]) == ([], [])
    full["cpus"]["unpluggable"], full["applications"] = [], []
    assert brief == full
    assert host.result("status", brief=False)["cpus"]["unpluggable"] == [3, 2, 1]


def test_cpus_are_set_and_read_back(guest: Bench, host: Host) -> None:
    assert host.result("cpus.set", online=[0, 1]) == {"online": [0, 1], "failed": []}
    assert guest.tree.online() == [0, 1]


@pytest.mark.parametrize(
    ("method", "params", "field"),
    [
        ("hello", {"protocol": True, "nonce": "n", "vm": "v", "token": "t"}, "protocol"),
        ("hello", {"protocol": 1, "nonce": "", "vm": "v", "token": "t"}, "nonce"),
        ("hello", {"protocol": 1, "nonce": "n", "vm": 5, "token": "t"}, "vm"),
        ("hello", {"protocol": 1, "nonce": "n", "vm": "v", "token": "a\nb"}, "token"),
        ("status", {"brief": 1}, "brief"),
        ("cpus.set", {}, "online"),
        ("cpus.set", {"online": [1]}, "online"),
        ("cpus.set", {"online": [0, 0]}, "online"),
        ("cpus.set", {"online": [0, "1"]}, "online"),
        ("cpus.set", {"online": [0, True]}, "online"),
        ("cpus.set", {"online": [0, 10**30]}, "online"),
        ("application.status", {}, "request_id"),
        ("application.deflate", {"request_id": None}, "request_id"),
        ("application.deflate", {"deadline_s": -1}, "deadline_s"),
        ("application.deflate", {"deadline_s": "5"}, "deadline_s"),
        ("application.deflate", {"mode": "beg"}, "mode"),
        ("application.deflate", {"target": 5}, "target"),
        ("application.deflate", {"target": {"memory_mib": -1}}, "target.memory_mib"),
        ("application.deflate", {"target": {"memory_mib": 10**400}}, "target.memory_mib"),
        ("application.deflate", {"target": {"memory": 1}}, "target.memory"),
        ("application.deflate", {"bound_mib": None}, "bound_mib"),
        ("application.reinflate", {"bound_mib": -5}, "bound_mib"),
    ],
)
def test_bad_parameters_name_the_field_and_change_nothing(
    guest: Bench, host: Host, method: str, params: dict[str, Any], field: str
) -> None:
    if method.startswith("application.") and method != "application.status":
        good = {"request_id": "r", "deadline_s": 5, "mode": "ask", "target": {"memory_mib": 500}, "bound_mib": 1024}
        params = {**good, **params}
    code, message = host.error(method, **params)
    assert (code, message.split(":")[0]) == (-32602, field)
    assert guest.tree.online() == [0, 1, 2, 3]
    assert (guest.run_dir / "token").read_text() == TOKEN


@pytest.mark.parametrize(
    ("line", "code"),
    [
        (b"nonsense", -32700),
        (b'{"jsonrpc":"2.0","id":1,"method":"status","params":{"x":NaN}}', -32700),
        (b"[" * 60000, -32700),
        (b"\xff\xfe", -32700),
        (b"[]", -32600),
        (b'{"id":1,"method":"status"}', -32600),
        (b'{"jsonrpc":"2.0","id":1}', -32600),
        (b'{"jsonrpc":"2.0","id":{},"method":"status"}', -32600),
        (b'{"jsonrpc":"2.0","id":1,"method":"status","params":[1]}', -32602),
        (b'{"jsonrpc":"2.0","id":1,"method":"reboot"}', -32601),
        (b"x" * 65536, -32600),
    ],
)
def test_what_is_no_request_gets_an_error_and_the_agent_goes_on(host: Host, line: bytes, code: int) -> None:
    host.send(line)
    assert host.receive()["error"]["code"] == code
    assert host.result("status")["boot_id"] == BOOT_ID


def test_a_notification_gets_no_answer(host: Host) -> None:
    host.send(b'{"jsonrpc":"2.0","method":"cpus.set","params":{"online":[0]}}')
    assert host.result("status")["cpus"]["online"] == [0, 1, 2, 3]


def test_without_adapters_the_answer_is_none(host: Host) -> None:
    assert deflate(host)["state"] == "none"
    assert host.result("application.capabilities") == {"adapters": []}
    assert host.result("application.status", request_id="r1")["state"] == "failed"
    assert host.result("application.status", request_id="never")["state"] == "unknown"


def test_a_deflation_reaches_the_application_with_its_part_and_comes_back_measured(host: Host, serve: Serve) -> None:
    app = Elastic(300)
    serve("app", app)
    # 1024 - (1024 - 800) - (424 used - 300 of the application) - 51.2 reserve = 624.8: no need to shrink.
    answer = deflate(host, "easy", 800)
    assert (answer["state"], answer["promised"], app.targets[-1]) == (
        "promised",
        {"memory_mib": 0},
        ("deflate", 624.8, "ask"),
    )
    finished(host, "easy")
    app.size_mib = 300
    answer = deflate(host, "hard", 400, mode="force")
    assert answer == {
        "request_id": "hard",
        "state": "promised",
        "promised": {"memory_mib": pytest.approx(300 - 224.8)},
        "expected_s": 0.5,
        "reason": "app: gladly",
        "retry_after_s": None,
    }
    assert app.targets[-1] == ("deflate", 224.8, "force")
    status = finished(host, "hard")
    assert (status["state"], status["measured_by"]) == ("released", "itself")
    assert status["released"]["memory_mib"] == pytest.approx(300 - 224.8)


def test_the_same_request_again_starts_nothing_and_another_under_its_id_is_refused(host: Host, serve: Serve) -> None:
    app = Elastic(300)
    serve("app", app)
    first = deflate(host, "same", 400)
    assert deflate(host, "same", 400) == first
    host.hello("later")
    assert deflate(host, "same", 400) == first
    assert len(app.targets) == 1
    params = {"deadline_s": 10, "mode": "ask", "target": {"memory_mib": 300}, "bound_mib": 1024}
    code, message = host.error("application.deflate", request_id="same", **params)
    assert (code, message.split(":")[0]) == (-32602, "request_id")


def test_a_newer_attempt_takes_the_place_of_one_that_runs(host: Host, serve: Serve) -> None:
    app = Elastic(300)
    serve("app", app)
    app.go.clear()
    request_id = "a" * 80
    assert deflate(host, request_id, 400)["state"] == "promised"
    assert host.result("application.status", request_id=request_id)["state"] == "running"
    assert deflate(host, request_id + "#2", 450)["state"] == "promised"
    older = finished(host, request_id)
    assert older["state"] == "failed"
    assert older["reason"].startswith(f"app: called off for {request_id}#2: not in time")
    app.go.set()
    assert finished(host, request_id + "#2")["state"] == "released"
    assert app.size_mib == pytest.approx(274.8)


def test_a_refusing_application_is_a_refusal_with_its_reason(host: Host, serve: Serve) -> None:
    serve("rigid", InelasticAdapter("rigid", "the buffers are pinned"))
    answer = deflate(host)
    assert (answer["state"], answer["promised"]) == ("refused", {})
    assert "rigid: the buffers are pinned" in answer["reason"]
    assert host.result("application.status", request_id="r1")["state"] == "failed"


def test_of_several_applications_each_gives_by_its_size_and_a_refusal_hides_none(host: Host, serve: Serve) -> None:
    large, small = Elastic(200), Elastic(100)
    serve("large", large)
    serve("small", small)
    serve("rigid", InelasticAdapter("rigid", "never"))
    answer = deflate(host, target_mib=400)
    assert large.targets[0][1] == pytest.approx(224.8 * 2 / 3, abs=0.01)
    assert small.targets[0][1] == pytest.approx(224.8 / 3, abs=0.01)
    assert answer["promised"]["memory_mib"] == pytest.approx(300 - 224.8, abs=0.01)
    assert "rigid: never" in answer["reason"]
    status = finished(host, "r1")
    assert status["state"] == "released"
    assert status["released"]["memory_mib"] == pytest.approx(300 - 224.8, abs=0.01)


def test_a_hung_hook_is_refused_in_the_end_and_holds_up_no_status(host: Host, serve: Serve) -> None:
    app = Elastic(300)
    app.hang = threading.Event()
    serve("hung", app)
    asked = host.ask(
        "application.deflate", request_id="h", deadline_s=9, mode="ask", target={"memory_mib": 400}, bound_mib=1024
    )
    status_id = host.ask("status")
    first, second = host.receive(), host.receive()
    app.hang.set()
    assert (first["id"], second["id"]) == (status_id, asked)
    assert second["result"]["state"] == "refused"
    assert "hung: no answer within" in second["result"]["reason"]


def test_a_wrong_token_at_the_hook_is_a_refusal_that_says_so(guest: Bench, host: Host, tmp_path: Path) -> None:
    (tmp_path / "other").write_text("another")
    server = HookServer(Elastic(300), port=0, token_file=str(tmp_path / "other")).start()
    guest.register("app", server.address[1])
    answer = deflate(host)
    server.stop()
    assert answer["state"] == "refused"
    assert "401" in answer["reason"]


def test_an_application_that_is_gone_is_refused_or_failed(guest: Bench, host: Host, serve: Serve) -> None:
    server = HookServer(Elastic(300), port=0, token_file=str(guest.run_dir / "token")).start()
    guest.register("app", server.address[1])
    assert deflate(host, "before", 400)["state"] == "promised"
    server.stop()
    assert host.result("application.status", request_id="before")["state"] == "failed"
    answer = deflate(host, "after", 400)
    assert answer["state"] == "refused"
    assert "cannot be reached" in answer["reason"]


def test_a_reinflation_gives_the_application_its_part_again(host: Host, serve: Serve) -> None:
    app = Elastic(100, maximum_mib=350)
    serve("app", app)
    answer = host.result(
        "application.reinflate", request_id="back", deadline_s=5, target={"memory_mib": 1024}, bound_mib=1024
    )
    assert answer == {"request_id": "back", "state": "promised", "reason": "app: gladly"}
    assert app.targets == [("reinflate", 350.0, "")]
    assert finished(host, "back")["released"] == {"memory_mib": 0.0}


def test_a_target_without_memory_asks_nobody(host: Host, serve: Serve) -> None:
    app = Elastic(100)
    serve("app", app)
    answer = deflate(host, target={"cpu_cores": 1.5})
    assert (answer["state"], app.targets) == ("refused", [])


def test_a_restarted_agent_still_tells_how_a_request_ended(
    guest: Bench, host: Host, serve: Serve, tmp_path: Path
) -> None:
    serve("app", Elastic(300))
    deflate(host, "r1", 400)
    finished(host, "r1")
    guest.agent._applications._records.clear()
    status = host.result("application.status", request_id="r1")
    assert (status["state"], status["measured_by"]) == ("released", "itself")
    assert deflate(host, "r1", 400)["reason"] == "app: is at it already"


def test_the_host_may_go_and_come_back(guest: Bench, host: Host) -> None:
    host.close()
    again = guest.host()
    assert again.error("status")[0] == -32002
    again.hello("again")
    assert again.result("status")["boot_id"] == BOOT_ID


def test_the_command_serves_a_character_device_and_ends_on_sigterm(tmp_path: Path) -> None:
    tree = GuestTree(tmp_path)
    master, slave = pty.openpty()
    tty.setraw(slave)
    command = [sys.executable, "-m", "guestagent", "--port", os.ttyname(slave), "--run-dir", str(tmp_path / "run")]
    command += ["--adapters-dir", str(tmp_path / "none"), "--sysfs", str(tree.sysfs), "--procfs", str(tree.procfs)]
    agent = subprocess.Popen([*command, "--reserve-mib", "100"], stderr=subprocess.PIPE)
    try:
        with os.fdopen(master, "r+b", buffering=0) as port:
            port.write(b"\x00garbage\n")
            for id_, (method, params) in enumerate(
                [("hello", {"protocol": 1, "nonce": "n", "vm": "v", "token": "t"}), ("status", {})]
            ):
                request = {"jsonrpc": "2.0", "id": id_, "method": method, "params": params}
                port.write(json.dumps(request).encode() + b"\n")
            text = b""
            while b'"id":1,' not in text or not text.endswith(b"\n"):
                text += port.read(4096)
            answers = [json.loads(line) for line in text.splitlines()]
            assert [answer["id"] for answer in answers][-2:] == [0, 1]
            assert answers[-1]["result"]["memory"]["reserve_mib"] == 100
            agent.send_signal(signal.SIGTERM)
            _, errors = agent.communicate(timeout=20)
            assert agent.returncode == 0
            assert b"stopped" in errors
    finally:
        agent.kill()
        agent.wait()
        os.close(slave)


def test_the_command_waits_for_a_port_that_is_not_there_and_says_so(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "guestagent", "--port", str(tmp_path / "absent"), "--run-dir", str(tmp_path)]
    agent = subprocess.Popen(command, stderr=subprocess.PIPE)
    assert agent.stderr is not None
    try:
        while b"does not exist" not in (said := agent.stderr.readline()):
            assert said
        agent.send_signal(signal.SIGTERM)
        assert agent.wait(timeout=20) == 0
    finally:
        agent.kill()
        agent.communicate()


def test_help_has_examples() -> None:
    done = subprocess.run([sys.executable, "-m", "guestagent", "--help"], capture_output=True, text=True, check=True)
    assert "examples:" in done.stdout
