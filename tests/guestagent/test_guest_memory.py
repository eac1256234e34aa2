"""What the guest says of its memory, and how a size of the VM becomes sizes of applications."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from guestagent.budgets import Share, application_budget_mib, guest_target_mib, split
from guestagent.errors import GuestFailure
from guestagent.memory import Memory, spare_this_process
from guestagent.messages import MemoryStatus, Paging, Pressure
from tests.guestagent.harness import GuestTree


def test_the_floor_is_what_is_used_and_the_reserve(tmp_path: Path) -> None:
    tree = GuestTree(tmp_path)
    status = Memory(str(tree.procfs)).status()
    assert status == MemoryStatus(1024.0, 600.0, 51.2, 475.2, 548.8, 1.0)
    assert Memory(str(tree.procfs), reserve_mib=100).status().unpluggable_mib == 500


def test_a_small_guest_keeps_48_mib_and_a_full_one_offers_nothing(tmp_path: Path) -> None:
    tree = GuestTree(tmp_path)
    tree.meminfo(512, 40)
    status = Memory(str(tree.procfs)).status()
    assert (status.reserve_mib, status.unpluggable_mib) == (48.0, 0.0)


def test_pressure_is_read_and_null_where_the_kernel_has_none(tmp_path: Path) -> None:
    tree = GuestTree(tmp_path)
    memory = Memory(str(tree.procfs))
    assert memory.pressure() == Pressure(1.5, 0.25, 1.5, 123456, 65432)
    (tree.procfs / "pressure/memory").unlink()
    assert memory.pressure() is None


def test_paging_is_counted_and_swap_is_null_where_the_kernel_has_none(tmp_path: Path) -> None:
    tree = GuestTree(tmp_path)
    memory = Memory(str(tree.procfs))
    assert memory.paging() == Paging(17, 5, 6)
    tree.write(tree.procfs / "vmstat", "pgmajfault 18\n")
    assert memory.paging() == Paging(18, None, None)


def test_without_figures_there_is_an_error_and_no_zero(tmp_path: Path) -> None:
    tree = GuestTree(tmp_path)
    memory = Memory(str(tree.procfs))
    tree.write(tree.procfs / "meminfo", "MemTotal: 1024 kB\n")
    tree.write(tree.procfs / "vmstat", "pgfault 1\n")
    with pytest.raises(GuestFailure, match="MemAvailable"):
        memory.status()
    with pytest.raises(GuestFailure, match="pgmajfault"):
        memory.paging()


def test_an_application_at_its_budget_brings_the_floor_to_the_target() -> None:
    now = MemoryStatus(total_mib=970, available_mib=500, reserve_mib=50, floor_mib=520, unpluggable_mib=450, free_mib=9)
    budget = application_budget_mib(now, 400, guest_target_mib(now.total_mib, bound_mib=1024, target_mib=700))
    # Total falls to 646; others hold 70, the reserve is 50.
    assert budget == pytest.approx(646 - 70 - 50)
    available = now.available_mib + (400 - budget)
    assert now.total_mib - available + now.reserve_mib == pytest.approx(646)


def test_a_target_below_what_others_hold_leaves_nothing_but_not_less() -> None:
    now = MemoryStatus(970, 500, 50, 520, 450, 9)
    assert application_budget_mib(now, 400, guest_target_mib(now.total_mib, 1024, 64)) == 0.0


@pytest.mark.parametrize(
    ("target_mib", "budget_mib"),
    [
        (3072, 4000 + 472),  # all that is in use has room, and 472 more
        (2600, 4000),
        (1850, 4000 * 0.7),  # what is in use has to fall to 0.7
        (100, 0),
    ],
)
def test_sizes_that_count_memory_twice_have_nothing_to_give_while_all_in_use_has_room(
    target_mib: float, budget_mib: float
) -> None:
    now = MemoryStatus(4096, 1596, 100, 2600, 1496, 9)
    assert application_budget_mib(now, 4000, target_mib) == pytest.approx(budget_mib)


def test_a_split_is_in_proportion_to_the_resident_sizes() -> None:
    assert split(300, [Share(400, 0, 500), Share(200, 0, 500)]) == pytest.approx([200, 100])


def test_what_a_minimum_keeps_the_others_give() -> None:
    assert split(300, [Share(400, 250, 500), Share(200, 0, 500)]) == pytest.approx([250, 50])


def test_what_a_maximum_leaves_the_others_get() -> None:
    assert split(900, [Share(400, 0, 450), Share(200, 0, 500)]) == pytest.approx([450, 450])


sizes = st.floats(0, 1e5)
shares = st.lists(st.tuples(sizes, sizes, sizes).map(lambda t: Share(t[0], min(t[1:]), max(t[1:]))), max_size=6)


@given(sizes, shares)
def test_a_split_keeps_every_bound_and_the_sum_where_the_bounds_allow_it(total: float, parts: list[Share]) -> None:
    result = split(total, parts)
    assert len(result) == len(parts)
    for size, part in zip(result, parts, strict=True):
        assert part.minimum_mib - 1e-6 <= size <= part.maximum_mib + 1e-6
    lowest, highest = sum(part.minimum_mib for part in parts), sum(part.maximum_mib for part in parts)
    assert sum(result) == pytest.approx(min(max(total, lowest), highest), rel=1e-6, abs=1e-3)


@given(sizes, sizes, shares)
def test_a_larger_total_never_makes_a_part_smaller(total: float, more: float, parts: list[Share]) -> None:
    for small, large in zip(split(total, parts), split(total + more, parts), strict=True):
        assert small <= large + max(1e-6, 1e-9 * large)


class Libc:
    def __init__(self, answer: int) -> None:
        self.answer = answer
        self.flags: list[int] = []

    def mlockall(self, flags: int) -> int:
        self.flags.append(flags)
        return self.answer


def test_the_agent_is_among_the_last_that_the_kernel_kills_and_its_pages_stay(tmp_path: Path) -> None:
    (tmp_path / "self").mkdir()
    (tmp_path / "self" / "oom_score_adj").write_text("0")
    libc = Libc(0)
    assert spare_this_process(str(tmp_path), libc) == []
    assert (tmp_path / "self" / "oom_score_adj").read_text() == "-900"
    assert libc.flags == [7], "now and later, but only what is touched"


def test_an_agent_that_may_not_spare_itself_says_so_and_goes_on(tmp_path: Path) -> None:
    problems = spare_this_process(str(tmp_path / "none"), Libc(-1))
    assert problems == ["oom_score_adj: No such file or directory", "mlockall: refused"]


def test_a_real_agent_locks_what_it_touches_or_says_why_not() -> None:
    program = (
        "from guestagent.memory import spare_this_process as s; print(s()); print(open('/proc/self/status').read())"
    )
    done = subprocess.run([sys.executable, "-S", "-c", program], capture_output=True, text=True, check=True)
    locked_kib = int(done.stdout.partition("VmLck:")[2].split()[0])
    assert locked_kib > 1000 or "mlockall: refused" in done.stdout
