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
from pathlib import Path
from typing import Any

import pytest

from app_adapters.server import HookServer
from guestagent.memory import Memory
from tests.guestagent.elastic import Elastic, Serve
from tests.guestagent.harness import BOOT_ID, TOKEN, Bench, GuestTree, Host, bench


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


def test_a_token_that_cannot_be_written_is_no_reason_to_refuse_a_hello(
    guest: Bench, serve: Serve, capfd: pytest.CaptureFixture[str]
) -> None:
    host, token = guest.host(), guest.run_dir / "token"
    host.hello()
    serve("cache", Elastic(100))

    def asked() -> int:
        return len(host.result("application.capabilities")["adapters"])

    in_the_way = guest.run_dir / "token.new"
    in_the_way.mkdir()
    for nonce in ("n2", "n3"):
        assert host.hello(nonce, token="another")["nonce"] == nonce
        assert (asked(), token.read_text()) == (1, TOKEN), "hooks are asked with the token that they can read"
    assert capfd.readouterr().err.count("the token cannot be written") == 1
    in_the_way.rmdir()
    assert (asked(), token.read_text()) == (1, "another")


def test_an_agent_that_was_started_again_asks_hooks_with_the_token_that_it_cannot_write(tmp_path: Path) -> None:
    (tmp_path / "run" / "token.new").mkdir(parents=True)
    (tmp_path / "run" / "token").write_text(TOKEN)
    with bench(tmp_path) as guest:
        host, server = guest.host(), HookServer(Elastic(100), port=0, token_file=str(guest.run_dir / "token")).start()
        try:
            guest.register("cache", server.address[1])
            host.hello(token="another")
            assert len(host.result("application.capabilities")["adapters"]) == 1
        finally:
            server.stop()


def test_without_a_directory_for_its_files_an_agent_talks_to_its_host(tmp_path: Path) -> None:
    (tmp_path / "run").write_text("no directory")
    with bench(tmp_path) as guest:
        host = guest.host()
        host.hello()
        assert host.result("status")["boot_id"] == BOOT_ID


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


def test_why_a_hello_is_refused_is_logged_once(guest: Bench, capfd: pytest.CaptureFixture[str]) -> None:
    host = guest.host()
    for _ in range(2):
        host.error("hello", protocol=2, nonce="n", vm="v", token="t")
    said = 'event="hello of the host is refused: this agent speaks protocol 1, not 2"'
    assert capfd.readouterr().err.count(said) == 1
    host.hello()
    host.error("hello", protocol=2, nonce="n", vm="v", token="t")
    assert capfd.readouterr().err.count(said) == 1


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
            "free_mib": 1.0,
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
        "cold_blocked": "the guest has no cgroup2 at /sys/fs/cgroup",
        "notice": "",
    }


def test_a_brief_status_looks_at_no_task_and_asks_no_application(guest: Bench, host: Host, serve: Serve) -> None:
    serve("app", Elastic(120))
    full, brief = host.result("status"), host.result("status", brief=True)
    assert (brief["cpus"]["unpluggable"], brief["applications"]) == ([], [])
    full["cpus"]["unpluggable"], full["applications"] = [], []
    assert brief == full
    assert host.result("status", brief=False)["cpus"]["unpluggable"] == [3, 2, 1]


def test_a_question_waits_until_memory_is_given(guest: Bench, host: Host) -> None:
    guest.tree.meminfo(1024, 600)
    asked = host.ask("status", brief=True, until_total_mib=900, wait_s=5)
    assert host.result("status", brief=True)["memory"]["total_mib"] == 1024, "others are answered meanwhile"
    guest.tree.meminfo(896, 472)
    answer = host.receive()
    assert (answer["id"], answer["result"]["memory"]["total_mib"]) == (asked, 896)


def test_what_is_waited_for_is_what_is_told(guest: Bench, host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    """While a block of memory is taken away the kernel counts all of it again for a moment."""
    looks = iter([896.0])
    guest.tree.meminfo(1024, 600)
    monkeypatch.setattr(Memory, "total_mib", lambda memory: next(looks, memory.status().total_mib))
    asked = host.ask("status", brief=True, until_total_mib=900, wait_s=5)
    assert host.result("status", brief=True)["memory"]["total_mib"] == 1024
    guest.tree.meminfo(896, 472)
    answer = host.receive()
    assert (answer["id"], answer["result"]["memory"]["total_mib"]) == (asked, 896)


def test_a_question_waits_no_longer_than_it_says(guest: Bench, host: Host) -> None:
    guest.tree.meminfo(1024, 600)
    assert host.result("status", brief=True, until_total_mib=900, wait_s=0.1)["memory"]["total_mib"] == 1024
    assert host.result("application.status", request_id="r", until_released_mib=1, wait_s=0.1)["state"] == "unknown"


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
        ("status", {"wait_s": -1}, "wait_s"),
        ("status", {"wait_s": 1}, "until_total_mib"),
        ("application.status", {"request_id": "r", "wait_s": 1}, "until_released_mib"),
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
        ("application.reinflate", {"full_cores": -1}, "full_cores"),
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


def test_without_room_for_a_thread_it_says_so_and_lives(guest: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    host = guest.host()
    host.hello()

    class NoThread(threading.Thread):
        def start(self) -> None:
            raise RuntimeError("can't start new thread")

    with monkeypatch.context() as full:
        full.setattr("guestagent.agent.threading.Thread", NoThread)
        for _ in range(20):
            assert "no thread can be started" in host.error("status")[1]
    assert host.result("status")
