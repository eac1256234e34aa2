"""The journal forgets nothing that was not acknowledged, over restarts and torn writes."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from hostagent.errors import JournalError
from hostagent.state import journal as journals
from hostagent.state.files import replace
from hostagent.state.journal import MOST_CARRIED_OUT, MOST_ENDED, Journal


def add(journal: Journal, cause: str, after: float = 1.0) -> None:
    journal.add("low-1", "host-a", 1000.0, 3.0, after, cause)


def test_a_new_journal_finds_what_the_old_one_wrote(tmp_path: Path) -> None:
    journal = Journal(tmp_path)
    add(journal, "a")
    add(journal, "b")
    journal.raise_epoch(4)
    journal.acknowledge(1)
    successor = Journal(tmp_path)
    assert [(c.sequence, c.cause) for c in successor.changes] == [(2, "b")]
    assert successor.epoch == 4
    add(successor, "c")
    assert successor.changes[-1].sequence == 3


def test_what_is_remembered_is_on_the_disk_with_the_name_of_its_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A power cut after the answer takes back no name that the directory has not on the disk."""
    written, sync = [], os.fsync

    def noted(file: int) -> None:
        sync(file)
        written.append(Path(f"/proc/self/fd/{file}").resolve().name)

    monkeypatch.setattr(os, "fsync", noted)
    journal = Journal(tmp_path)
    journal.raise_epoch(4)
    add(journal, "a")
    add(journal, "b")
    lines, directory = "core-changes.jsonl", tmp_path.name
    assert written == ["state.json.new", directory, lines, directory, lines]


def test_the_sequence_goes_on_after_everything_was_acknowledged(tmp_path: Path) -> None:
    journal = Journal(tmp_path)
    add(journal, "a")
    journal.acknowledge(1)
    successor = Journal(tmp_path)
    add(successor, "b")
    assert [c.sequence for c in successor.changes] == [2]


@pytest.mark.parametrize("cut", ['\n{"sequence": 2, "mach', ""])
def test_a_line_that_a_kill_cut_short_is_passed_over(tmp_path: Path, cut: str) -> None:
    journal = Journal(tmp_path)
    add(journal, "a")
    path = tmp_path / "core-changes.jsonl"
    path.write_text(path.read_text().rstrip("\n") + cut)
    successor = Journal(tmp_path)
    assert [c.cause for c in successor.changes] == ["a"]
    add(successor, "b")
    assert [c.cause for c in Journal(tmp_path).changes] == ["a", "b"]


#: Has the disk run full within a line, and then have room again.
FULL = """
import resource, sys
from pathlib import Path
from hostagent.errors import JournalError
from hostagent.state.journal import Journal

journal, file = Journal(Path(sys.argv[1])), Path(sys.argv[1]) / "core-changes.jsonl"
journal.add("low-1", "host-a", 1000.0, 3.0, 1.0, "a")
before, (_, most) = file.read_bytes(), resource.getrlimit(resource.RLIMIT_FSIZE)
resource.setrlimit(resource.RLIMIT_FSIZE, (len(before) + 20, most))
try:
    journal.add("low-1", "host-a", 1000.0, 3.0, 2.0, "b")
except JournalError as error:
    print(error)
resource.setrlimit(resource.RLIMIT_FSIZE, (most, most))
assert file.read_bytes() == before
journal.add("low-1", "host-a", 1000.0, 3.0, 2.0, "c")
"""


def test_a_disk_that_runs_full_within_a_line_leaves_no_part_of_it(tmp_path: Path) -> None:
    argv = [sys.executable, "-c", FULL, str(tmp_path)]
    ran = subprocess.run(argv, cwd=Path(__file__).parents[3], capture_output=True, text=True, check=True)
    assert "could not be written" in ran.stdout
    assert [(c.sequence, c.cause) for c in Journal(tmp_path).changes] == [(1, "a"), (2, "c")]


@pytest.mark.parametrize("garbage", [b'{"sequence": 2, "mach', b"\xff\xfe", b""])
def test_a_line_that_cannot_be_read_costs_none_of_those_behind_it(tmp_path: Path, garbage: bytes) -> None:
    journal = Journal(tmp_path)
    for cause in "abc":
        add(journal, cause)
    path = tmp_path / "core-changes.jsonl"
    first, _, third = path.read_bytes().splitlines()
    path.write_bytes(b"\n".join([first, garbage, third, b""]))
    successor = Journal(tmp_path)
    assert [c.cause for c in successor.changes] == ["a", "c"]
    add(successor, "d")
    assert [(c.sequence, c.cause) for c in Journal(tmp_path).changes] == [(1, "a"), (3, "c"), (4, "d")]


def test_a_change_that_is_repeated_after_a_kill_counts_once(tmp_path: Path) -> None:
    journal = Journal(tmp_path)
    add(journal, "a")
    add(Journal(tmp_path), "a")
    assert len(Journal(tmp_path).changes) == 1


def test_an_agent_that_lost_its_state_counts_on_above_what_the_manager_has(tmp_path: Path) -> None:
    journal = Journal(tmp_path)
    add(journal, "a")
    journal.acknowledge(40)
    assert [(c.sequence, c.cause) for c in journal.changes] == [(41, "a")]
    journal.acknowledge(41)
    assert not journal.changes


def test_of_machines_that_are_gone_only_the_latest_are_remembered(tmp_path: Path) -> None:
    journal = Journal(tmp_path)
    journal.add("runs", "host-a", 1000.0, 0.0, 2.0, "c")
    for number in range(journals.MOST_GONE + 50):
        journal.add(f"vm-{number}", "host-a", 1000.0, 2.0, 0.0, "d")
    journal.acknowledge(journal.changes[-1].sequence)
    last = json.loads((tmp_path / "state.json").read_text())["last"]
    assert len(last) == journals.MOST_GONE + 1
    assert list(last)[-1] == f"vm-{journals.MOST_GONE + 49}"
    successor = Journal(tmp_path)
    assert successor.last_cores("runs") == 2.0
    successor.add("vm-100", "host-a", 1000.0, 2.0, 0.0, "d")
    assert not successor.changes, "its last change is known still"


def test_without_a_manager_only_the_latest_changes_are_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(journals, "MOST_UNTOLD", 10)
    journal = Journal(tmp_path, told=False)
    for number in range(95):
        add(journal, f"cause-{number}", after=float(number))
        assert len(journal.changes) <= 20
    assert [change.sequence for change in journal.changes] == list(range(96 - len(journal.changes), 96))
    successor = Journal(tmp_path, told=False)
    assert successor.changes == journal.changes
    add(successor, "cause-94", after=94.0)
    add(successor, "more", after=0.0)
    assert successor.changes[-1].sequence == 96
    told = Journal(tmp_path)
    for number in range(30):
        add(told, f"told-{number}")
    assert len(told.changes) > 30, "a manager that is away loses none"


def test_changes_that_nobody_wants_are_kept_on_a_full_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(journals, "MOST_UNTOLD", 2)
    journal = Journal(tmp_path, told=False)
    full_disk(monkeypatch, "state.json")
    for number in range(6):
        add(journal, f"cause-{number}")
    assert len(journal.changes) == len(Journal(tmp_path).changes) == 6


def full_disk(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """No file of this name can be written any more."""

    def refuse(path: Path, text: str) -> None:
        if path.name == name:
            raise OSError("No space left on device")
        replace(path, text)

    monkeypatch.setattr(journals, "_replace", refuse)


def test_an_epoch_that_cannot_be_written_is_not_remembered_by_halves(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    journal = Journal(tmp_path)
    with monkeypatch.context() as disk:
        full_disk(disk, "state.json")
        with pytest.raises(JournalError, match="epoch could not be written"):
            journal.raise_epoch(4)
        assert journal.epoch == 0
    journal.raise_epoch(4)
    assert Journal(tmp_path).epoch == 4, "it is written when it can be"


def test_a_full_disk_keeps_no_agent_from_starting_after_a_kill(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    journal = Journal(tmp_path)
    add(journal, "a")
    path = tmp_path / "core-changes.jsonl"
    path.write_text(path.read_text() + '{"sequence": 2, "mach')
    with monkeypatch.context() as disk:
        full_disk(disk, "core-changes.jsonl")
        journal = Journal(tmp_path)
        assert [c.cause for c in journal.changes] == ["a"]
        with pytest.raises(JournalError):
            add(journal, "b")
    add(journal, "c")
    assert [(c.sequence, c.cause) for c in Journal(tmp_path).changes] == [(1, "a"), (2, "c")]


def test_a_line_that_a_disk_neither_takes_nor_lets_go_of_costs_none_behind_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As where it fails, or turns read-only, in the middle of a write."""
    journal = Journal(tmp_path)
    add(journal, "a")

    def fails(path: Path, text: str) -> None:
        path.write_text(path.read_text() + text[:20])
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    with monkeypatch.context() as disk:
        disk.setattr(journals, "_append", fails)
        with pytest.raises(JournalError):
            add(journal, "b")
    add(journal, "c")
    add(journal, "d")
    assert [(c.sequence, c.cause) for c in Journal(tmp_path).changes] == [(1, "a"), (2, "c"), (3, "d")]


def test_a_line_that_was_cut_off_again_costs_no_new_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A disk that has got a little room has none for a second copy of them all."""
    journal = Journal(tmp_path)
    add(journal, "a")

    def full(fd: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as disk:
        disk.setattr(os, "fsync", full)
        with pytest.raises(JournalError):
            add(journal, "b")
    full_disk(monkeypatch, "core-changes.jsonl")
    add(journal, "c")
    assert [(c.sequence, c.cause) for c in Journal(tmp_path).changes] == [(1, "a"), (2, "c")]


@pytest.mark.parametrize("full", ["state.json", "core-changes.jsonl"])
def test_no_change_is_lost_to_a_full_disk_while_they_are_numbered_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, full: str
) -> None:
    journal = Journal(tmp_path)
    add(journal, "a")
    with monkeypatch.context() as disk:
        full_disk(disk, full)
        with pytest.raises(JournalError):
            journal.acknowledge(40)
    journal.acknowledge(40)
    add(journal, "b")
    assert [(c.sequence, c.cause) for c in journal.changes] == [(41, "a"), (42, "b")]
    assert [(c.sequence, c.cause) for c in Journal(tmp_path).changes] == [(41, "a"), (42, "b")]


def test_a_request_about_many_vms_has_no_other_forgotten(tmp_path: Path) -> None:
    journal = Journal(tmp_path)
    journal.add_failed("stop-1")
    for _ in range(2 * MOST_ENDED):
        journal.add_failed("reclaim-1")
    assert Journal(tmp_path).failed == ["stop-1", "reclaim-1"]


def test_what_an_earlier_version_kept_among_deletions_has_failed(tmp_path: Path) -> None:
    journal = Journal(tmp_path)
    journal.add_deleted("one")
    journal.add_failed("other")
    again = Journal(tmp_path)
    assert [again.has_failed(kind, "one") for kind in ("stop", "delete")] == [True, False]
    assert [again.has_failed(kind, "other") for kind in ("stop", "delete")] == [True, True]


def test_what_is_written_anew_is_for_its_owner_whatever_the_umask(tmp_path: Path) -> None:
    before = os.umask(0o022)
    try:
        journal = Journal(tmp_path)
        journal.forget_epoch()
    finally:
        os.umask(before)
    assert (tmp_path / "state.json").stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize(
    "text", ["", '{"epoch": 3', '{"sequence": 2}', "[]", '{"epoch": 1, "sequence": 2, "mode": ["later", "", null]}']
)
def test_a_state_that_cannot_be_read_is_named_with_the_way_on(tmp_path: Path, text: str) -> None:
    (tmp_path / "state.json").write_text(text)
    with pytest.raises(JournalError, match=r"state\.json cannot be read .*: move it away, "):
        Journal(tmp_path)
    assert (tmp_path / "state.json").read_text() == text


def test_the_latest_ends_of_stops_and_deletions_are_remembered_once_each(tmp_path: Path) -> None:
    journal = Journal(tmp_path)
    for number in range(MOST_CARRIED_OUT + 2):
        journal.carried_out.append(f"r-{number}")
    journal.add_carried_out("last")
    journal.add_carried_out("last")
    again = Journal(tmp_path).carried_out
    assert (len(again), again[0], again[-2:]) == (MOST_CARRIED_OUT, "r-3", [f"r-{MOST_CARRIED_OUT + 1}", "last"])
