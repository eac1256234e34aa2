"""Which CPUs can go, and switching them, on a guest made of files."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from guestagent.cpus import Cpus, parse_cpu_list
from guestagent.errors import BadParams, GuestFailure
from tests.guestagent.harness import GuestTree


@pytest.fixture
def tree(tmp_path: Path) -> GuestTree:
    return GuestTree(tmp_path)


@pytest.fixture
def cpus(tree: GuestTree) -> Cpus:
    return Cpus(str(tree.sysfs), str(tree.procfs), tree.affinity)


@pytest.mark.parametrize(
    ("text", "expected"), [("0-3,7\n", [0, 1, 2, 3, 7]), ("0", [0]), ("", []), ("2,4-5", [2, 4, 5])]
)
def test_kernel_lists_are_read(text: str, expected: list[int]) -> None:
    assert parse_cpu_list(text) == expected


def test_idle_cpus_go_by_number_and_the_boot_cpu_never(cpus: Cpus) -> None:
    status = cpus.status()
    assert (status.present, status.online, status.unpluggable) == ([0, 1, 2, 3], [0, 1, 2, 3], [3, 2, 1])


def test_a_cpu_without_a_switch_is_on_line_and_not_offered(tree: GuestTree, cpus: Cpus) -> None:
    tree.write(tree.cpu_root / "online", "0-3\n")
    (tree.cpu_root / "cpu2/online").unlink()
    status = cpus.status()
    assert (status.online, cpus.status(brief=True).online) == ([0, 1, 2, 3], [0, 1, 2, 3])
    assert 2 not in status.unpluggable


def test_of_a_kernel_that_cannot_switch_cpus_those_on_line_stay(tree: GuestTree, cpus: Cpus) -> None:
    tree.write(tree.cpu_root / "online", "0-2\n")  # the fourth was never started: maxcpus=3
    for cpu in (1, 2, 3):
        (tree.cpu_root / f"cpu{cpu}/online").unlink()
    result = cpus.set_online([0])
    assert result.online == [0, 1, 2]
    assert [failure.cpu for failure in result.failed] == [2, 1]
    assert cpus.status().unpluggable == []


def test_what_a_switch_says_counts_for_its_cpu(tree: GuestTree, cpus: Cpus) -> None:
    tree.write(tree.cpu_root / "online", "0-3\n")
    tree.write(tree.cpu_root / "cpu3/online", "0\n")
    assert cpus.status().online == [0, 1, 2]


def test_the_most_idle_cpu_since_the_last_look_goes_first(tree: GuestTree, cpus: Cpus) -> None:
    cpus.status()
    tree.ticks({0: (0, 200), 1: (0, 200), 2: (90, 110), 3: (50, 150)})
    assert cpus.status().unpluggable == [1, 3, 2]
    tree.ticks({0: (0, 300), 1: (100, 200), 2: (90, 210), 3: (50, 250)})
    assert cpus.status().unpluggable == [3, 2, 1]


def test_a_cpu_with_a_pinned_task_is_not_offered(tree: GuestTree, cpus: Cpus) -> None:
    tree.task(100, "worker", "3")
    assert cpus.status().unpluggable == [2, 1]


def test_a_pinned_thread_of_an_unpinned_process_counts(tree: GuestTree, cpus: Cpus) -> None:
    tree.task(100, "server", "0-3", threads={101: "2"})
    assert cpus.status().unpluggable == [3, 1]


def test_of_two_cpus_that_a_task_may_use_only_one_is_offered(tree: GuestTree, cpus: Cpus) -> None:
    tree.task(100, "pair", "2-3")
    assert cpus.status().unpluggable == [3, 1]


def test_a_task_bound_to_a_cpu_that_is_off_line_pins_the_one_it_is_left_with(tree: GuestTree, cpus: Cpus) -> None:
    tree.write(tree.cpu_root / "cpu3/online", "0\n")
    tree.task(100, "pair", "2-3")
    assert cpus.status().unpluggable == [1]


def test_kernel_threads_and_zombies_pin_nothing(tree: GuestTree, cpus: Cpus) -> None:
    tree.task(20, "ksoftirqd/3", "3", ppid=2)
    tree.task(30, "gone", "2")
    path = tree.procfs / "30/task/30/status"
    path.write_text(path.read_text().replace("S (sleeping)", "Z (zombie)"))
    assert cpus.status().unpluggable == [3, 2, 1]


def test_of_threads_that_are_bound_alike_one_has_its_status_read(
    tree: GuestTree, cpus: Cpus, monkeypatch: pytest.MonkeyPatch
) -> None:
    read: list[str] = []
    status_of = cpus._task_status

    def counted(pid: str, tid: str) -> Any:
        read.append(tid)
        return status_of(pid, tid)

    monkeypatch.setattr(cpus, "_task_status", counted)
    tree.task(20, "kworker/2", "2", ppid=2)
    tree.task(100, "pool", "2", threads=dict.fromkeys(range(101, 140), "2"))
    assert cpus.status().unpluggable == [3, 1]
    assert len([tid for tid in read if tid != "20"]) == 1


def test_a_guest_that_forbids_the_question_is_asked_by_its_files(tree: GuestTree) -> None:
    def forbidden(tid: int) -> list[int]:
        raise PermissionError

    tree.task(100, "server", "0-3", threads={101: "2"})
    assert Cpus(str(tree.sysfs), str(tree.procfs), forbidden).status().unpluggable == [3, 1]


def test_a_task_that_ends_meanwhile_pins_nothing(tree: GuestTree) -> None:
    def ended(tid: int) -> list[int]:
        raise ProcessLookupError

    tree.task(100, "worker", "3")
    assert Cpus(str(tree.sysfs), str(tree.procfs), ended).status().unpluggable == [3, 2, 1]


def test_the_kernel_is_asked_about_the_tasks_that_there_are(tmp_path: Path) -> None:
    """The real call, for a real task: this one."""
    before = os.sched_getaffinity(0)
    last = max(before)
    tree = GuestTree(tmp_path, last + 1)
    tree.task(os.getpid(), "pytest", f"0-{last}")
    os.sched_setaffinity(0, {last})
    try:
        unpluggable = Cpus(str(tree.sysfs), str(tree.procfs)).status().unpluggable
    finally:
        os.sched_setaffinity(0, before)
    assert set(unpluggable) == set(range(1, last))


def test_a_map_is_applied_and_read_back(tree: GuestTree, cpus: Cpus) -> None:
    result = cpus.set_online([0, 2])
    assert (result.online, result.failed, tree.online()) == ([0, 2], [], [0, 2])
    result = cpus.set_online([3, 0])
    assert (result.online, result.failed, tree.online()) == ([0, 3], [], [0, 3])


def test_the_same_map_again_writes_nothing(tree: GuestTree, cpus: Cpus) -> None:
    cpus.set_online([0, 1])
    before = [path.stat().st_mtime_ns for path in tree.cpu_root.glob("cpu*/online")]
    assert cpus.set_online([1, 0]).failed == []
    assert [path.stat().st_mtime_ns for path in tree.cpu_root.glob("cpu*/online")] == before


@pytest.mark.parametrize(("online", "problem"), [([1, 2], "CPU 0"), ([], "CPU 0"), ([0, 9], "CPU 9 is not present")])
def test_an_impossible_map_names_the_field_and_changes_nothing(
    tree: GuestTree, cpus: Cpus, online: list[int], problem: str
) -> None:
    with pytest.raises(BadParams, match=f"online: {problem}"):
        cpus.set_online(online)
    assert tree.online() == [0, 1, 2, 3]


def test_a_cpu_that_a_task_is_pinned_to_stays(tree: GuestTree, cpus: Cpus) -> None:
    tree.task(100, "worker", "2")
    result = cpus.set_online([0])
    assert (result.online, tree.online()) == ([0, 2], [0, 2])
    assert [(failure.cpu, failure.reason) for failure in result.failed] == [(2, "task 100 (worker) is pinned to it")]


def test_a_cpu_that_a_cpuset_of_cgroup_v1_would_lose_for_good_stays(tree: GuestTree, cpus: Cpus) -> None:
    tree.cpuset("docker", "0-1,3")
    tree.cpuset("empty", "")
    assert cpus.status().unpluggable == [2]
    result = cpus.set_online([0])
    assert (result.online, tree.online()) == ([0, 1, 3], [0, 1, 3])
    reason = "a cpuset of cgroup v1 would lose it for good"
    assert [(failure.cpu, failure.reason) for failure in result.failed] == [(3, reason), (1, reason)]


def test_cpusets_that_remember_their_cpus_keep_none(tree: GuestTree, cpus: Cpus) -> None:
    tree.cpuset("docker", "0-3", "rw,cpuset,cpuset_v2_mode")
    assert cpus.status().unpluggable == [3, 2, 1]
    tree.cpuset("docker", "0-3", "rw,memory")
    assert cpus.set_online([0]).online == [0]


def test_the_last_cpu_of_a_bound_task_stays(tree: GuestTree, cpus: Cpus) -> None:
    tree.task(100, "pair", "2-3")
    assert cpus.set_online([0]).online == [0, 2]


def test_a_switch_that_fails_is_told_and_the_others_go_on(tree: GuestTree, cpus: Cpus) -> None:
    (tree.cpu_root / "cpu2/online").unlink()
    (tree.cpu_root / "cpu2/online").mkdir()
    result = cpus.set_online([0, 2])
    assert [failure.cpu for failure in result.failed] == [2]
    assert result.online == [0]


def test_unknown_is_an_error_and_not_zero(tmp_path: Path) -> None:
    with pytest.raises(GuestFailure, match="cannot read the CPUs"):
        Cpus(str(tmp_path), str(tmp_path)).status()


def test_a_brief_status_does_not_wait_for_cpus_that_are_going_off_line(tree: GuestTree, cpus: Cpus) -> None:
    """The host asks for one before each step of memory, and off-lining goes on beside that."""
    with cpus._lock:
        assert cpus.status(brief=True).online == [0, 1, 2, 3]
