"""A notice of preemption inside the guest: the file that programs poll, and drop-in programs."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

from app_adapters.adapter import Adapter, Answer, Capabilities, Deadline
from app_adapters.errors import ApplicationError
from app_adapters.server import HookServer
from guestagent import applications, preemption
from guestagent.people import write_to_terminals
from guestagent.preemption import PROGRAMS, read_programs
from tests.adapters.proc import ended, state
from tests.guestagent.harness import Bench, Host, bench
from tests.waiting import until_sync

NOTICE = {"request_id": "p-1", "seconds_left": 20.0, "kind": "stop", "reason": "shortfall"}


def program(guest: Bench, name: str, script: str, mode: int = 0o755) -> Path:
    path = guest.preempt_dir / name
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(mode)
    return path


def until_ended(host: Host, **params: object) -> dict[str, int]:
    def ended() -> dict[str, int] | None:
        told: dict[str, int] = host.result("preemption", **params)
        return None if told["running"] else told

    found: dict[str, int] = until_sync(ended, "no program runs")
    return found


def test_a_program_is_told_kind_seconds_and_reason_and_runs_once(guest: Bench, host: Host, tmp_path: Path) -> None:
    record = tmp_path / "record"
    program(guest, "10-save", f'echo "$@" >> {record}')
    assert until_ended(host, **NOTICE) == {"programs": 1, "running": 0}
    assert until_ended(host, **{**NOTICE, "seconds_left": 12.0}) == {"programs": 1, "running": 0}
    assert record.read_text() == "stop 20 shortfall\n"


def test_what_a_program_saves_can_be_read_by_others_whatever_the_agents_mask(
    guest: Bench, host: Host, tmp_path: Path
) -> None:
    record = tmp_path / "record"
    program(guest, "10-save", f"umask > {record}")
    before = os.umask(0o077)
    try:
        assert until_ended(host, **NOTICE) == {"programs": 1, "running": 0}
    finally:
        os.umask(before)
    assert record.read_text() == "0022\n"


@pytest.mark.parametrize("may_write", [True, False])
def test_a_program_is_no_more_spared_by_the_kernel_than_what_it_is_to_save(
    guest: Bench, host: Host, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, may_write: bool
) -> None:
    own, record = Path("/proc/self/oom_score_adj"), tmp_path / "record"
    program(guest, "10-save", f"cat {own} > {record}")
    if not may_write:
        start = tuple(word.replace("/proc/self", "/proc/none") for word in preemption.START)
        monkeypatch.setattr(preemption, "START", start)
    before = own.read_text()
    own.write_text("1")  # any but 0: -900 is for root alone
    try:
        assert until_ended(host, **NOTICE) == {"programs": 1, "running": 0}
    finally:
        own.write_text(before)
    assert record.read_text() == ("0\n" if may_write else "1\n")


def test_programs_that_poll_find_the_notice_in_a_file(guest: Bench, host: Host) -> None:
    path = guest.run_dir / "preemption.json"
    assert not path.exists()
    assert host.result("preemption", **NOTICE) == {"programs": 0, "running": 0}
    told = json.loads(path.read_text())
    assert (told["kind"], told["reason"], told["seconds_left"]) == ("stop", "shortfall", 20.0)
    assert told["until"] == pytest.approx(time.time() + 20.0, abs=15.0)
    assert path.stat().st_mode & 0o777 == 0o644


@pytest.mark.parametrize("starts", ["", "timeout 300 "], ids=["in its group", "in another group"])
def test_what_runs_at_the_deadline_is_killed_with_what_it_started(
    guest: Bench, host: Host, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, starts: str
) -> None:
    pids, ahead_s = tmp_path / "pids", 0.0
    clock = SimpleNamespace(time=time.time, sleep=time.sleep, monotonic=lambda: time.monotonic() + ahead_s)
    monkeypatch.setattr(preemption, "time", clock)
    program(guest, "slow", f"{starts}sleep 300 & echo $$ $! > {pids}; wait")
    assert host.result("preemption", **{**NOTICE, "seconds_left": 200.0}) == {"programs": 1, "running": 1}
    until_sync(lambda: pids.exists() and len(pids.read_text().split()) == 2)
    ahead_s = 200.0  # the deadline is here, with both of them running
    assert until_ended(host, **NOTICE) == {"programs": 1, "running": 0}
    until_sync(lambda: all(map(ended, map(int, pids.read_text().split()))), "they have ended", 5)


def test_the_number_of_a_program_that_has_ended_is_nobodys_until_its_group_has_been_killed(
    guest: Bench, host: Host, tmp_path: Path
) -> None:
    """Root kills the group of each program at the deadline: a user could have brought another's process there."""
    pid, gate = tmp_path / "pid", tmp_path / "gate"
    os.mkfifo(gate)
    program(guest, "1-short", f"echo $$ > {pid}")
    program(guest, "2-long", f"read line < {gate}")
    while host.result("preemption", **NOTICE) != {"programs": 2, "running": 1}:
        time.sleep(0.05)
    short = int(pid.read_text())
    assert state(short) == psutil.STATUS_ZOMBIE
    gate.write_text("go on\n")
    assert until_ended(host, **NOTICE) == {"programs": 2, "running": 0}
    until_sync(lambda: not psutil.pid_exists(short), "its end is taken note of", 5)


def test_an_agent_that_was_started_again_does_not_run_the_programs_again(tmp_path: Path) -> None:
    record = tmp_path / "record"
    for life in ("first", "second"):
        (tmp_path / life).mkdir()
        with bench(tmp_path / life) as guest:
            program(guest, "save", f"echo told >> {record}")
            if life == "second":
                guest.run_dir.mkdir(exist_ok=True)
                earlier = tmp_path / "first" / "run" / "preemption.json"
                (guest.run_dir / "preemption.json").write_text(earlier.read_text())
            host = guest.host()
            host.hello()
            until_ended(host, **NOTICE)
    assert record.read_text() == "told\n"


def test_an_agent_that_ended_while_it_started_programs_goes_on_with_the_rest_once_it_is_started_again(
    tmp_path: Path,
) -> None:
    seen, record = tmp_path / "seen", tmp_path / "record"
    (tmp_path / "second" / "run").mkdir(parents=True)
    with bench(tmp_path) as guest:
        program(guest, "1", f"echo 1 >> {record}")
        program(guest, "2", f"cat {guest.run_dir}/preemption.json > {seen}")
        host = guest.host()
        host.hello()
        until_ended(host, **NOTICE)
        until_sync(lambda: len(guest.told_people) == 1)
    # As the second program found it, or earlier; the whole file is there at any time.
    on_the_way = json.loads(seen.read_text())
    rows = [row for row in on_the_way["programs"] if row[0].endswith("/1")]
    assert len(rows) == 1, "written after each"
    with bench(tmp_path / "second") as again:
        program(again, "1", f"echo 1 again >> {record}")
        program(again, "2", f"echo 2 >> {record}")
        rows[0][0] = str(again.preempt_dir / "1")
        earlier = {**on_the_way, "programs": rows, "spread": False}
        (again.run_dir / "preemption.json").write_text(json.dumps(earlier))
        host = again.host()
        host.hello()
        assert until_ended(host, **NOTICE) == {"programs": 2, "running": 0}
        until_sync(lambda: len(again.told_people) == 1)
        assert json.loads((again.run_dir / "preemption.json").read_text())["spread"] is True
    assert record.read_text() == "1\n2\n"


def test_a_notice_is_taken_where_no_thread_can_be_started(
    guest: Bench, host: Host, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    record, start = tmp_path / "record", threading.Thread.start

    def fails(thread: threading.Thread) -> None:
        if thread.name in ("preemption-programs", "preemption-hooks"):
            raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", fails)
    program(guest, "save", f"echo told >> {record}")
    assert until_ended(host, **NOTICE) == {"programs": 1, "running": 0}
    assert record.read_text() == "told\n"
    until_sync(lambda: len(guest.told_people) == 1)


def test_a_notice_that_cannot_be_written_down_is_carried_out_all_the_same(tmp_path: Path) -> None:
    record = tmp_path / "record"
    (tmp_path / "run").write_text("no directory")
    with bench(tmp_path) as guest:
        program(guest, "10-save", f'echo "$@" >> {record}')
        host = guest.host()
        host.hello()
        for _ in range(2):
            assert until_ended(host, **NOTICE) == {"programs": 1, "running": 0}
        assert host.result("status", brief=True)["notice"] == "p-1", "its host may know nothing of it"
        assert host.result("preemption.withdrawn", request_id="another", reason="") == {"known": False}
        assert host.result("preemption.withdrawn", request_id="p-1", reason="it runs on") == {"known": True}
        assert host.result("preemption.withdrawn", request_id="p-1", reason="it runs on") == {"known": False}
        assert host.result("status", brief=True)["notice"] == ""
        until_sync(lambda: record.read_text() == "stop 20 shortfall\nwithdrawn 30 it runs on\n")
        until_sync(lambda: len(guest.told_people) == 2)


@pytest.mark.parametrize("ends", ["by itself", "at the deadline"])
def test_programs_go_on_while_the_agent_is_started_again_and_are_counted(tmp_path: Path, ends: str) -> None:
    gate, pid = tmp_path / "gate", tmp_path / "pid"
    os.mkfifo(gate)
    (tmp_path / "first").mkdir()
    (tmp_path / "second" / "run").mkdir(parents=True)
    with bench(tmp_path / "first") as guest:
        # As a child of somebody else: the agent of the second life is another process.
        program(guest, "save", f"echo $$ > {pid}; read line < {gate}")
        host = guest.host()
        host.hello()
        assert host.result("preemption", **NOTICE) == {"programs": 1, "running": 1}
        until_sync(lambda: pid.exists() and pid.read_text() != "")
        written = json.loads((guest.run_dir / "preemption.json").read_text())
        assert [row[1] for row in written["programs"]] == [int(pid.read_text())]
        with bench(tmp_path / "second") as again:
            (again.run_dir / "preemption.json").write_text(json.dumps(written))
            host = again.host()
            host.hello()
            seconds_left = 20.0 if ends == "by itself" else 1.0
            assert host.result("preemption", **{**NOTICE, "seconds_left": seconds_left}) == {
                "programs": 1,
                "running": 1,
            }
            if ends == "by itself":
                gate.write_text("go on\n")
            assert until_ended(host, **NOTICE) == {"programs": 1, "running": 0}


def test_only_executable_files_of_root_that_none_else_may_write_are_run(guest: Bench) -> None:
    good = program(guest, "good", "true")
    writable, plain = program(guest, "writable", "true", 0o777), program(guest, "plain", "true", 0o644)
    link = guest.preempt_dir / "link"
    link.symlink_to(good)
    found, problems = read_programs(str(guest.preempt_dir), os.getuid())
    assert found == [str(good)]
    assert [problem.split(":")[0] for problem in problems] == [str(link), str(plain), str(writable)]
    assert read_programs(str(guest.preempt_dir), os.getuid() + 1)[0] == [], "of another owner"
    guest.preempt_dir.chmod(0o777)
    assert read_programs(str(guest.preempt_dir), os.getuid())[0] == []
    assert read_programs(str(guest.preempt_dir / "none"), os.getuid()) == ([], [])


def test_there_is_a_limit_to_how_many_are_run(guest: Bench) -> None:
    for number in range(PROGRAMS + 1):
        program(guest, f"{number:02}", "true")
    found, (problem,) = read_programs(str(guest.preempt_dir), os.getuid())
    assert len(found) == PROGRAMS
    assert problem.endswith("16 programs are the most")


@pytest.mark.parametrize(
    ("field", "value"), [("kind", "explode"), ("seconds_left", -1), ("reason", 5), ("request_id", None)]
)
def test_a_notice_that_is_none_changes_nothing(guest: Bench, host: Host, field: str, value: object) -> None:
    code, said = host.error("preemption", **{**NOTICE, field: value})
    assert code == -32602
    assert said.startswith(field)
    assert not (guest.run_dir / "preemption.json").exists()


# --- those who are told besides ---------------------------------------------------------------------------------------


def test_people_and_applications_are_told_once_and_of_the_end(guest: Bench, host: Host, tmp_path: Path) -> None:
    adapter = Told()
    server = HookServer(adapter, str(tmp_path / "hook.sock"), str(guest.run_dir / "token")).start()
    try:
        guest.register_url("told", f"unix:{tmp_path / 'hook.sock'}")
        for seconds in (20.0, 19.0):
            host.result("preemption", **{**NOTICE, "kind": "suspend", "seconds_left": seconds})
        adapter.until([(20.0, "suspend", "shortfall")])
        assert host.result("preemption.withdrawn", request_id="p-1", reason="it runs on") == {"known": True}
        adapter.until([(20.0, "suspend", "shortfall"), (None, "withdrawn", "it runs on")])
    finally:
        server.stop()
    until_sync(lambda: len(guest.told_people) == 2)
    assert guest.told_people == [
        "This machine is preempted: it is suspended in 20 s (shortfall).",
        "This machine is not preempted any more (it runs on).",
    ]


def test_an_application_that_did_not_hear_of_a_notice_is_told_again_until_it_does(
    guest: Bench, host: Host, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(applications, "NOTICE_AGAIN_S", (0.05, 0.1))
    adapter = Told(fails=3)
    server = HookServer(adapter, str(tmp_path / "hook.sock"), str(guest.run_dir / "token")).start()
    try:
        guest.register_url("told", f"unix:{tmp_path / 'hook.sock'}")
        host.result("preemption", **NOTICE)
        until_sync(lambda: len(adapter.notices) == 1)
        ((seconds_left, kind, _),) = adapter.notices
        assert kind == "stop"
        assert seconds_left is not None
        assert seconds_left < 20, "what is left by then"
        assert adapter.fails == 0
    finally:
        server.stop()


def test_a_notice_that_is_over_is_told_to_nobody_any_more(
    guest: Bench, host: Host, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(applications, "NOTICE_AGAIN_S", (0.05, 0.05))
    path = tmp_path / "hook.sock"
    guest.register_url("late", f"unix:{path}")
    host.result("preemption", **NOTICE)
    assert host.result("preemption.withdrawn", request_id="p-1", reason="it runs on") == {"known": True}
    adapter = Told()
    server = HookServer(adapter, str(path), str(guest.run_dir / "token")).start()
    try:
        adapter.until([(None, "withdrawn", "it runs on")])
        # Each telling has a thread for each hook, which ends when the application has heard it or need not any more.
        until_sync(lambda: not any(thread.name == "hook-late" for thread in threading.enumerate()))
        adapter.until([(None, "withdrawn", "it runs on")])
    finally:
        server.stop()


def test_telling_again_ends_with_the_seconds_of_the_notice(
    guest: Bench, host: Host, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(applications, "NOTICE_AGAIN_S", (0.05, 0.05))
    guest.register_url("gone", f"unix:{tmp_path / 'none.sock'}")
    host.result("preemption", **{**NOTICE, "seconds_left": 1.0})
    until_sync(lambda: not any(thread.name == "hook-gone" for thread in threading.enumerate()))


class Told(Adapter):
    """An application that takes note of what it is told, once it can be told."""

    def __init__(self, fails: int = 0) -> None:
        self.fails = fails
        self.notices: list[tuple[float | None, str, str]] = []

    def capabilities(self) -> Capabilities:
        raise ApplicationError("asked for nothing here")

    def deflate(self, target: dict[str, float], mode: str, deadline: Deadline) -> Answer:
        raise ApplicationError("asked for nothing here")

    def reinflate(self, target: dict[str, float], deadline: Deadline) -> Answer:
        raise ApplicationError("asked for nothing here")

    def preemption(self, seconds_left: float | None, kind: str, reason: str) -> None:
        if self.fails:
            self.fails -= 1
            raise ApplicationError("cannot be told now")
        self.notices.append((seconds_left, kind, reason))

    def until(self, notices: list[tuple[float | None, str, str]]) -> None:
        until_sync(lambda: self.notices == notices)


def test_a_notice_that_is_over_leaves_no_file_and_programs_hear_of_it(guest: Bench, host: Host, tmp_path: Path) -> None:
    record = tmp_path / "record"
    program(guest, "10-save", f'echo "$@" >> {record}')
    until_ended(host, **NOTICE)
    assert host.result("preemption.withdrawn", request_id="another", reason="") == {"known": False}
    assert (guest.run_dir / "preemption.json").exists()
    assert host.result("preemption.withdrawn", request_id="p-1", reason="it runs on") == {"known": True}
    assert not (guest.run_dir / "preemption.json").exists()
    until_sync(lambda: record.read_text() == "stop 20 shortfall\nwithdrawn 30 it runs on\n")
    assert host.result("preemption.withdrawn", request_id="p-1", reason="it runs on") == {"known": False}
    # The next notice is one of its own.
    assert until_ended(host, **{**NOTICE, "request_id": "p-2"}) == {"programs": 1, "running": 0}


def test_an_application_without_the_method_is_told_in_vain_and_nothing_else_suffers(
    guest: Bench, host: Host, tmp_path: Path
) -> None:
    guest.register_url("gone", f"unix:{tmp_path / 'none.sock'}")
    assert host.result("preemption", **NOTICE) == {"programs": 0, "running": 0}
    assert host.result("status", brief=True)["boot_id"]


def test_the_status_command_tells_of_a_notice_and_its_exit_status(guest: Bench, host: Host, tmp_path: Path) -> None:
    quiet = status(guest.run_dir)
    assert (quiet.returncode, quiet.stderr) == (0, "")
    assert quiet.stdout.startswith("VM vm1, its host connected; CPUs on line: [0, 1, 2, 3]; memory: 1024.0 MiB")
    assert quiet.stdout.endswith("not preempted\n")
    host.result("preemption", **{**NOTICE, "kind": "delete"})
    told = status(guest.run_dir)
    assert told.returncode == 3
    assert re.search(r"preempted: delete in (20\.0|1\d\.\d) s \(reason shortfall\)\n$", told.stdout)
    found = json.loads(status(guest.run_dir, "--json").stdout)
    assert found["preemption"]["kind"] == "delete"
    assert 0 < found["preemption"]["seconds_left"] <= 20
    host.result("preemption.withdrawn", request_id="p-1", reason="it runs on")
    assert json.loads(status(guest.run_dir, "--json").stdout)["preemption"] is None
    nobody = status(tmp_path)
    assert (nobody.returncode, nobody.stdout) == (1, "")
    assert "cannot be asked through" in nobody.stderr


def status(run_dir: Path, *options: str) -> subprocess.CompletedProcess[str]:
    argv = [sys.executable, "-m", "guestagent", "--run-dir", str(run_dir), "status", *options]
    return subprocess.run(argv, capture_output=True, text=True, check=False, timeout=60)


def test_terminals_whose_users_take_messages_are_written_to(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ours, theirs = os.openpty()
    try:
        directory, number = os.path.split(os.ttyname(theirs))
        with monkeypatch.context() as only:
            only.setattr(os, "listdir", lambda _: [number, "ptmx"])
            os.fchmod(theirs, 0o600)
            assert write_to_terminals("one", directory) == 0
            os.fchmod(theirs, 0o620)
            assert write_to_terminals("two", directory) == 1
        assert os.read(ours, 100).strip() == b"two"
        assert write_to_terminals("three", str(tmp_path / "none")) == 0
        (tmp_path / "7").write_text("")
        assert write_to_terminals("four", str(tmp_path)) == 0, "no terminal"
    finally:
        os.close(ours)
        os.close(theirs)
