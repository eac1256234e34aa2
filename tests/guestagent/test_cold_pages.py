"""Cold pages of a guest made of files: which control groups are written to, and what is left alone."""

from __future__ import annotations

import os
import threading
from pathlib import Path
from typing import Any

import pytest

from guestagent.cold.pace import MIB
from guestagent.cold.pages import PAGE, ColdPages
from guestagent.errors import GuestFailure
from guestagent.memory import Memory
from guestagent.messages import ColdReclaimParams
from tests.guestagent.harness import Bench, GuestTree, Host

NO_CGROUP = "the guest has no cgroup2 at /sys/fs/cgroup"


class Slices:
    """A tree of control groups. What is written to `memory.reclaim` is reclaimed, as the kernel would."""

    def __init__(self, tree: GuestTree, monkeypatch: pytest.MonkeyPatch) -> None:
        self.tree, self.root = tree, tree.sysfs / "fs/cgroup"
        self.written: list[tuple[str, int]] = []
        #: What something else takes of a group while it is being reclaimed, bytes.
        self.also_unplugged = 0
        tree.write(self.root / "cgroup.controllers", "cpu memory\n")
        write = os.write

        def reclaim(fd: int, text: bytes) -> int:
            path = Path(f"/proc/self/fd/{fd}").readlink()
            if path.name == "memory.reclaim":
                self._reclaim(path.parent, int(text))
            return write(fd, text)

        monkeypatch.setattr(os, "write", reclaim)

    def _reclaim(self, group: Path, size: int) -> None:
        self.written.append((group.name, size))
        current = int((group / "memory.current").read_text())
        stolen = int((group / "memory.stat").read_text().split()[-1])
        self.tree.write(group / "memory.current", f"{current - size - self.also_unplugged}\n")
        self._tell(group, stolen + size // PAGE)

    def _tell(self, group: Path, stolen: int) -> None:
        self.tree.write(group / "memory.stat", f"file 0\npgscan {2 * stolen}\npgsteal {stolen}\n")

    def add(self, path: str, current_mib: int, low_mib: int | str = 0, min_mib: int = 0) -> None:
        group = self.root / path
        low = low_mib if isinstance(low_mib, str) else low_mib * MIB
        for name, value in (("current", current_mib * MIB), ("low", low), ("min", min_mib * MIB), ("reclaim", "")):
            self.tree.write(group / f"memory.{name}", f"{value}\n")
        self._tell(group, 1000)

    def taken_mib(self) -> dict[str, float]:
        return {group: sum(size for name, size in self.written if name == group) / MIB for group, _ in self.written}


@pytest.fixture
def tree(tmp_path: Path) -> GuestTree:
    return GuestTree(tmp_path)


@pytest.fixture
def slices(tree: GuestTree, monkeypatch: pytest.MonkeyPatch) -> Slices:
    # Rests take no time.
    monkeypatch.setattr(threading.Event, "wait", lambda event, seconds=None: event.is_set())
    return Slices(tree, monkeypatch)


def pages(tree: GuestTree) -> ColdPages:
    return ColdPages(Memory(str(tree.procfs)), str(tree.sysfs))


def test_only_the_slices_of_system_and_users_are_reclaimed_and_only_what_is_wanted(
    tree: GuestTree, slices: Slices
) -> None:
    for name in ("system.slice", "user.slice", "machine.slice", "init.scope"):
        slices.add(name, 400)
    answer = pages(tree).reclaim(ColdReclaimParams(300, 10))
    assert (answer.freed_mib, answer.done) == (300, False)
    assert set(slices.taken_mib()) <= {"system.slice", "user.slice"}
    assert sum(slices.taken_mib().values()) == 300
    for other in ("machine.slice", "init.scope"):
        assert (slices.root / other / "memory.reclaim").read_text() == "\n"


def test_what_unplugging_drops_at_the_same_time_is_not_counted(tree: GuestTree, slices: Slices) -> None:
    slices.add("system.slice", 400)
    slices.also_unplugged = 8 * MIB
    assert pages(tree).reclaim(ColdReclaimParams(100, 10)).freed_mib == 100
    assert slices.taken_mib() == {"system.slice": 100}


def test_what_the_guest_protects_anywhere_in_a_slice_stays(tree: GuestTree, slices: Slices) -> None:
    slices.add("system.slice", 400, low_mib=50)
    slices.add("system.slice/database.service", 200, low_mib=150)
    slices.add("system.slice/web.service", 100, min_mib=120)
    slices.add("user.slice", 300, low_mib="max")
    answer = pages(tree).reclaim(ColdReclaimParams(1000, 10))
    assert answer.done
    assert answer.reason == "the rest of the guest's memory is in use or protected"
    # 150 of the database, and all 100 of the web: its minimum is more than it has.
    assert slices.taken_mib() == {"system.slice": pytest.approx(150, abs=1.01)}


@pytest.mark.parametrize(
    ("missing", "why"),
    [
        ("cgroup.controllers", NO_CGROUP),
        ("system.slice/memory.current", "the guest has no system.slice or user.slice with the memory controller"),
        ("system.slice/memory.reclaim", "the guest's kernel has no memory.reclaim (since Linux 5.19)"),
        ("psi", "the guest's kernel has no pressure stall information, by which it is paced"),
    ],
)
def test_a_guest_that_cannot_says_why_and_nothing_is_done(
    tree: GuestTree, slices: Slices, missing: str, why: str
) -> None:
    slices.add("system.slice", 400)
    assert pages(tree).blocked() == ""
    (tree.procfs / "pressure/memory" if missing == "psi" else slices.root / missing).unlink()
    assert pages(tree).blocked() == why
    with pytest.raises(GuestFailure, match="unsupported: "):
        pages(tree).reclaim(ColdReclaimParams(100, 1))
    assert slices.written == []


def test_the_multi_generational_lru_is_switched_on_once(tree: GuestTree, slices: Slices) -> None:
    slices.add("system.slice", 400)
    switch = tree.sysfs / "kernel/mm/lru_gen/enabled"
    tree.write(switch, "0x0000\n")
    made = pages(tree)
    made.reclaim(ColdReclaimParams(1, 1))
    assert switch.read_text() == "y"
    tree.write(switch, "0x0000\n")
    made.reclaim(ColdReclaimParams(1, 1))
    assert switch.read_text() == "0x0000\n", "who switches it off is heard"


def test_a_request_that_is_called_off_does_no_more_and_the_next_one_may_begin(
    tree: GuestTree, slices: Slices, monkeypatch: pytest.MonkeyPatch
) -> None:
    slices.add("system.slice", 400)
    made = pages(tree)
    rests = []

    def rest(instruction: Any) -> float:
        rests.append(instruction)
        with pytest.raises(GuestFailure, match="already"):
            made.reclaim(ColdReclaimParams(10, 1))
        made.ask_to_stop()
        return 0.0

    monkeypatch.setattr(made, "_rest", rest)
    answer = made.reclaim(ColdReclaimParams(300, 10))
    assert (answer.done, answer.reason) == (True, "called off")
    assert len(rests) == len(slices.written) == 1
    assert made.stop().reason == "called off"


def test_the_host_asks_through_the_agent(guest: Bench, host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    assert host.error("cold.reclaim", memory_mib=100, deadline_s=1) == (-32000, f"unsupported: {NO_CGROUP}")
    assert host.error("cold.reclaim", memory_mib=-1, deadline_s=1)[0] == -32602
    slices = Slices(guest.tree, monkeypatch)
    slices.add("system.slice", 400)
    assert host.result("status", brief=True)["cold_blocked"] == ""
    assert host.result("cold.reclaim", memory_mib=20, deadline_s=5) == {"freed_mib": 20.0, "done": False, "reason": ""}
    assert host.result("cold.stop")["freed_mib"] == 0


@pytest.mark.parametrize("overtakes", ["cold.stop", "hello"])
def test_what_calls_a_reclaim_off_counts_also_before_its_thread_runs(
    guest: Bench, host: Host, monkeypatch: pytest.MonkeyPatch, overtakes: str
) -> None:
    slices = Slices(guest.tree, monkeypatch)
    slices.add("system.slice", 400)
    cold = guest.agent._cold
    came, go, blocked, ended = threading.Event(), threading.Event(), cold.blocked, threading.Event()
    run = cold._run

    def slowly() -> str:
        came.set()
        assert go.wait(20)
        return blocked()

    def watched(*arguments: Any) -> Any:
        try:
            return run(*arguments)
        finally:
            ended.set()

    monkeypatch.setattr(cold, "blocked", slowly)
    monkeypatch.setattr(cold, "_run", watched)
    host.ask("cold.reclaim", memory_mib=100, deadline_s=5)
    assert came.wait(20)
    if overtakes == "hello":
        host.hello()
    else:
        assert host.result("cold.stop")["reason"] == "called off"
    go.set()
    assert ended.wait(20)
    assert slices.written == []
    # One that comes in afterwards is none of that.
    if overtakes == "cold.stop":
        assert host.receive()["result"]["reason"] == "called off"
    assert host.result("cold.reclaim", memory_mib=20, deadline_s=5)["freed_mib"] == 20
