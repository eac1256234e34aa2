"""What the guest says unasked: that tasks wait for memory, and that somebody asks for more."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import select
import socket
import stat
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from app_adapters.errors import ApplicationError
from app_adapters.request_more import ask_for_more
from guestagent import notices, requests
from guestagent.notices import NOTICE_S, PressureTrigger
from tests.guestagent.harness import BOOT_ID, Bench, Host, bench


class Urgent(PressureTrigger):
    """The kernel's trigger, played by urgent data on a TCP connection: poll() reports both alike."""

    def __init__(self) -> None:
        with socket.create_server(("127.0.0.1", 0)) as listener:
            self.kernel = socket.create_connection(listener.getsockname())
            self.guest, _ = listener.accept()
        self.closed = False

    def fileno(self) -> int:
        return self.guest.fileno()

    def fire(self) -> None:
        self.kernel.send(b"!", socket.MSG_OOB)

    def settle(self) -> None:
        """What poll() does by itself with the kernel's trigger: the event is gone once it was seen."""
        self.guest.recv(1, socket.MSG_OOB)

    def close(self) -> None:
        self.closed = True
        self.guest.close()
        self.kernel.close()


@pytest.fixture
def trigger() -> Urgent:
    return Urgent()


@pytest.fixture(autouse=True)
def one_notice(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """A trigger that still stands after a second would be told again, which on a busy machine it does."""
    if request.function is not test_stalls_are_told_once_a_second_at_most:
        monkeypatch.setattr(notices, "NOTICE_S", 60.0)


@pytest.fixture
def guest(tmp_path: Path, trigger: Urgent) -> Iterator[Bench]:
    with bench(tmp_path, trigger=trigger) as made:
        yield made
    assert trigger.closed


@pytest.fixture
def host(guest: Bench) -> Host:
    host = guest.host()
    host.hello()
    return host


@pytest.fixture
def path(guest: Bench, host: Host) -> str:
    return str(guest.run_dir / "request.sock")


def test_a_stall_is_told_at_once_with_all_that_is_needed_to_judge_it(trigger: Urgent, host: Host) -> None:
    trigger.fire()
    notice = host.receive()
    trigger.settle()
    status = host.result("status")
    assert (notice["method"], "id" in notice) == ("pressure", False)
    fields = ("boot_id", "memory", "pressure", "major_faults", "swap_in_pages", "swap_out_pages")
    assert notice["params"] == {field: status[field] for field in fields}


@pytest.mark.slow
def test_stalls_are_told_once_a_second_at_most(trigger: Urgent, host: Host) -> None:
    began = time.monotonic()
    trigger.fire()  # and stays
    assert [host.receive()["method"] for _ in range(3)] == ["pressure"] * 3
    trigger.settle()
    assert time.monotonic() - began >= 2 * NOTICE_S - 0.1


def test_nothing_is_told_before_hello(guest: Bench, trigger: Urgent) -> None:
    host = guest.host()
    trigger.fire()
    assert host.error("status")[0] == -32002
    trigger.settle()
    assert host.hello()["boot_id"] == BOOT_ID


def test_a_trigger_that_breaks_is_given_up_and_all_else_goes_on(trigger: Urgent, host: Host) -> None:
    trigger.kernel.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
    trigger.kernel.close()  # a reset: POLLERR
    assert host.result("status")["boot_id"] == BOOT_ID
    deadline = time.monotonic() + 20
    while not trigger.closed:
        assert time.monotonic() < deadline
    assert host.result("status")["boot_id"] == BOOT_ID


def test_figures_that_cannot_be_read_are_not_made_up(guest: Bench, trigger: Urgent, host: Host) -> None:
    (guest.tree.procfs / "vmstat").unlink()
    trigger.fire()
    assert "vmstat" in host.error("status")[1]
    trigger.settle()


def test_the_trigger_is_set_in_the_words_of_the_kernel(tmp_path: Path) -> None:
    (tmp_path / "pressure").mkdir()
    file = tmp_path / "pressure/memory"
    file.touch()
    trigger = PressureTrigger(str(tmp_path))
    assert file.read_bytes() == b"some 150000 1000000\0"
    assert os.get_blocking(trigger.fileno()) is False
    trigger.close()


def test_a_kernel_without_pressure_stall_information_has_no_trigger(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        PressureTrigger(str(tmp_path))


def test_a_request_of_a_service_reaches_the_host(host: Host, path: str) -> None:
    ask_for_more(memory_mib=256, cpu_cores=0.5, reason="a batch job starts", path=path)
    assert host.receive() == {
        "jsonrpc": "2.0",
        "method": "request",
        "params": {"cpu_cores": 0.5, "memory_mib": 256.0, "reason": "a batch job starts"},
    }


def test_requests_are_passed_on_once_a_second_at_most(host: Host, path: str) -> None:
    assert NOTICE_S == 1.0
    ask_for_more(memory_mib=1, path=path)
    with pytest.raises(ApplicationError, match="less than 60 s ago"):
        ask_for_more(memory_mib=2, path=path)
    assert host.receive()["params"]["memory_mib"] == 1
    assert host.result("status")["boot_id"] == BOOT_ID, "nothing more was passed on"


def test_without_a_host_there_is_nobody_to_ask(guest: Bench) -> None:
    host = guest.host()
    with pytest.raises(ApplicationError, match="the host is not connected"):
        ask_for_more(memory_mib=1, path=str(guest.run_dir / "request.sock"))
    host.hello()
    ask_for_more(memory_mib=1, path=str(guest.run_dir / "request.sock"))
    assert host.receive()["method"] == "request"


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (b"rubbish", "not JSON"),
        (b"\xff", "not JSON"),
        (b"[]", "a request is a JSON object"),
        (b'{"jsonrpc": "2.0", "id": 1, "method": "hello"}', "no method hello"),
        (b'{"jsonrpc": "2.0", "id": 1, "method": "request"}', "memory_mib: or cpu_cores must be more than 0"),
        (b'{"jsonrpc": "2.0", "id": 1, "method": "request", "params": {"memory_mib": -1}}', "memory_mib: must be"),
        (b'{"jsonrpc": "2.0", "id": 1, "method": "request", "params": {"memory_mib": 1e10}}', "memory_mib: must be at"),
        (b'{"jsonrpc": "2.0", "id": 1, "method": "request", "params": {"cpu_cores": "2"}}', "cpu_cores: must be"),
        (b'{"jsonrpc": "2.0", "id": 1, "method": "request", "params": {"memory_mib": 1, "reason": 5}}', "reason: must"),
        (
            b'{"jsonrpc": "2.0", "id": 1, "method": "request", "params": {"memory_mib": 1, "reason": "a\\nb"}}',
            "reason: must be",
        ),
        (b'{"x": "' + b"x" * 5000, "not JSON"),
    ],
)
def test_a_bad_request_is_answered_with_what_is_wrong(host: Host, path: str, line: bytes, message: str) -> None:
    with socket.socket(socket.AF_UNIX) as connection:
        connection.settimeout(20)
        connection.connect(path)
        connection.sendall(line + b"\n")
        answer = json.loads(connection.makefile().readline())
    assert message in answer["error"]["message"]
    assert host.result("status")["boot_id"] == BOOT_ID, "the host heard nothing"


def test_somebody_who_never_finishes_a_request_holds_nobody_up_for_long(host: Host, path: str) -> None:
    with socket.socket(socket.AF_UNIX) as slow:
        slow.connect(path)
        slow.sendall(b'{"jsonrpc"')
        ask_for_more(memory_mib=7, path=path, limit_s=20)
        assert host.receive()["params"]["memory_mib"] == 7


def test_the_socket_is_for_root_and_one_group_and_goes_with_the_agent(tmp_path: Path) -> None:
    passed_on: list[Any] = []
    made = requests.RequestSocket(str(tmp_path), os.getgid(), passed_on.append, dict)
    info = (tmp_path / "request.sock").stat()
    assert stat.S_ISSOCK(info.st_mode)
    assert (info.st_mode & 0o777, info.st_gid) == (0o660, os.getgid())
    made.close()
    assert list(tmp_path.iterdir()) == []


def test_a_socket_that_a_killed_agent_left_is_replaced(tmp_path: Path) -> None:
    for name in ("request.sock", "request.sock.new"):
        with socket.socket(socket.AF_UNIX) as left:
            left.bind(str(tmp_path / name))
    passed_on: list[Any] = []
    made = requests.RequestSocket(str(tmp_path), -1, passed_on.append, dict)
    requests.ask_for_more(str(tmp_path), 5, 0, "")
    made.close()
    assert [notice.memory_mib for notice in passed_on] == [5]


def test_a_second_agent_leaves_the_socket_to_the_one_that_listens(tmp_path: Path) -> None:
    passed_on: list[Any] = []
    made = requests.RequestSocket(str(tmp_path), -1, passed_on.append, dict)
    with pytest.raises(OSError, match="another guest agent listens there"):
        requests.RequestSocket(str(tmp_path), -1, passed_on.append, dict)
    requests.ask_for_more(str(tmp_path), 5, 0, "")
    (tmp_path / "request.sock").unlink()
    after = requests.RequestSocket(str(tmp_path), -1, passed_on.append, dict)
    made.close()
    requests.ask_for_more(str(tmp_path), 6, 0, "")
    after.close()
    assert [notice.memory_mib for notice in passed_on] == [5, 6]
    assert list(tmp_path.iterdir()) == []


def test_a_second_agent_takes_the_socket_when_the_first_has_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(notices, "LISTEN_AGAIN_S", 0.0)
    (tmp_path / "run").mkdir()
    first = requests.RequestSocket(str(tmp_path / "run"), -1, lambda notice: None, dict)
    with bench(tmp_path) as guest:
        # It has the port already when the first leaves the socket.
        host = guest.host()
        host.hello()
        first.close()
        host.result("status")
        assert requests.ask_status(str(guest.run_dir))["vm"] == "vm1"


def test_a_guest_that_is_out_of_descriptors_for_a_moment_is_asked_through_the_same_socket_afterwards(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    usual = socket.socket.accept
    fails = iter([True, True])

    def accept(listener: socket.socket) -> Any:
        if next(fails, False):
            raise OSError(errno.ENFILE, os.strerror(errno.ENFILE))
        return usual(listener)

    monkeypatch.setattr(socket.socket, "accept", accept)
    passed_on: list[Any] = []
    made = requests.RequestSocket(str(tmp_path), -1, passed_on.append, dict)
    requests.ask_for_more(str(tmp_path), 5, 0, "")
    made.close()
    assert [notice.memory_mib for notice in passed_on] == [5]
    assert capsys.readouterr().err.count("Too many open files in system") == 1


def command(run_dir: Path, *options: str) -> subprocess.CompletedProcess[str]:
    argv = [sys.executable, "-m", "guestagent", "--run-dir", str(run_dir), "request", *options]
    return subprocess.run(argv, capture_output=True, text=True, check=False, timeout=60)


def test_the_command_asks_through_the_agent_that_runs(guest: Bench, host: Host) -> None:
    done = command(guest.run_dir, "--memory-mib", "64", "--reason", "a batch job starts")
    assert (done.returncode, done.stderr) == (0, "")
    assert host.receive()["params"] == {"cpu_cores": 0.0, "memory_mib": 64.0, "reason": "a batch job starts"}


def test_the_command_says_why_it_could_not_ask(guest: Bench, host: Host, tmp_path: Path) -> None:
    done = command(guest.run_dir)
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr == "ebb-guestagent: memory_mib: or cpu_cores must be more than 0\n"
    done = command(tmp_path, "--memory-mib", "64")
    assert done.returncode == 1
    assert "cannot be asked through" in done.stderr


def test_an_agent_that_cannot_listen_for_requests_serves_the_host_all_the_same(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run/request.sock").mkdir()  # in the way, and not to be replaced
    with bench(tmp_path) as guest:
        assert guest.host().hello()["boot_id"] == BOOT_ID


def test_urgent_data_is_what_poll_reports_for_a_trigger(trigger: Urgent) -> None:
    with contextlib.closing(trigger):
        poller = select.poll()
        poller.register(trigger.fileno(), PressureTrigger.EVENTS)
        assert poller.poll(0) == []
        trigger.fire()
        assert poller.poll(20_000) == [(trigger.fileno(), select.POLLPRI)]
