"""A notice of preemption inside the guest: the file that programs poll, and drop-in programs."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path

import pytest

from guestagent.preemption import PROGRAMS, read_programs
from tests.guestagent.harness import Bench, Host, bench

NOTICE = {"request_id": "p-1", "seconds_left": 20.0, "kind": "stop", "reason": "shortfall"}


def program(guest: Bench, name: str, script: str, mode: int = 0o755) -> Path:
    path = guest.preempt_dir / name
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(mode)
    return path


def until_ended(host: Host, **params: object) -> dict[str, int]:
    for _ in range(400):
        told: dict[str, int] = host.result("preemption", **params)
        if not told["running"]:
            return told
        time.sleep(0.05)
    raise AssertionError("a program runs for ever")


def test_a_program_is_told_kind_seconds_and_reason_and_runs_once(guest: Bench, host: Host, tmp_path: Path) -> None:
    record = tmp_path / "record"
    program(guest, "10-save", f'echo "$@" >> {record}')
    assert until_ended(host, **NOTICE) == {"programs": 1, "running": 0}
    assert until_ended(host, **{**NOTICE, "seconds_left": 12.0}) == {"programs": 1, "running": 0}
    assert record.read_text() == "stop 20 shortfall\n"


def test_programs_that_poll_find_the_notice_in_a_file(guest: Bench, host: Host) -> None:
    path = guest.run_dir / "preemption.json"
    assert not path.exists()
    assert host.result("preemption", **NOTICE) == {"programs": 0, "running": 0}
    told = json.loads(path.read_text())
    assert (told["kind"], told["reason"], told["seconds_left"]) == ("stop", "shortfall", 20.0)
    assert told["until"] == pytest.approx(time.time() + 20.0, abs=15.0)
    assert path.stat().st_mode & 0o777 == 0o644


def test_what_runs_at_the_deadline_is_killed_with_what_it_started(guest: Bench, host: Host, tmp_path: Path) -> None:
    pids = tmp_path / "pids"
    program(guest, "slow", f"sleep 300 & echo $$ $! > {pids}; wait")
    assert until_ended(host, **{**NOTICE, "seconds_left": 1.0}) == {"programs": 1, "running": 0}
    for pid in map(int, pids.read_text().split()):
        for _ in range(100):
            if _has_ended(pid):
                break
            time.sleep(0.05)
        assert _has_ended(pid)


def _has_ended(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except OSError:
        return True


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
