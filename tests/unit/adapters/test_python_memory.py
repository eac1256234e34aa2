"""What the adapter for Python services asks of the service, by figures that a test makes."""

from __future__ import annotations

import functools
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from app_adapters.adapter import Answer, Deadline, Promise, Refusal, Release
from app_adapters.processes import python_memory
from app_adapters.processes.process import own_proportional_mib
from app_adapters.processes.python_memory import PythonAdapter


class Process:
    """A process of `size_mib`; its `shrink` leaves `off_mib` more than it was asked for, `stuck_mib` in any case."""

    def __init__(self, size_mib: float = 200.0, off_mib: float = 0.0, stuck_mib: float = 0.0) -> None:
        self.size_mib, self.off_mib, self.stuck_mib = size_mib, off_mib, stuck_mib
        self.asked: list[float] = []
        self.grown: list[float] = []

    def shrink(self, target_mib: float) -> None:
        self.asked.append(target_mib)
        self.size_mib = min(self.size_mib, max(target_mib + self.off_mib, self.stuck_mib))

    def clear(self, mib: float) -> Callable[[], None]:
        def empty_table() -> None:
            self.size_mib -= mib

        return empty_table

    def adapter(self, shrinks: bool = True, maximum_mib: float = 256) -> PythonAdapter:
        shrink = self.shrink if shrinks else None
        return PythonAdapter(maximum_mib, 32, shrink, self.grown.append, resident_mib=lambda: self.size_mib)


@pytest.fixture(autouse=True)
def no_trim(monkeypatch: pytest.MonkeyPatch) -> None:
    """These sizes are made up, so there is nothing to trim."""
    monkeypatch.setattr(python_memory, "find_malloc_trim", lambda: None)


def work(answer: Answer) -> Release:
    assert isinstance(answer, Promise)
    return answer.work()


def test_shrink_is_asked_anew_for_what_it_left_over() -> None:
    process = Process(off_mib=15)
    release = work(process.adapter().deflate({"memory_mib": 100}, "ask", Deadline(60)))
    assert process.asked == [100, 85]
    assert (release.released, process.size_mib) == ({"memory_mib": 100.0}, 100)


def test_one_that_is_cold_is_kept_below_its_target() -> None:
    process = Process(size_mib=20)
    answer = process.adapter().deflate({"memory_mib": 100}, "ask", Deadline(60))
    assert isinstance(answer, Promise)
    assert answer.promised == {"memory_mib": 0.0}
    work(answer)
    assert process.asked == [100]


def test_it_may_grow_to_its_minimum_in_any_case() -> None:
    process = Process()
    work(process.adapter().reinflate({"memory_mib": 10}, Deadline(60)))
    assert process.grown == [32]


def test_it_is_not_asked_for_ever() -> None:
    process = Process(stuck_mib=150)
    release = work(process.adapter().deflate({"memory_mib": 100}, "ask", Deadline(60)))
    assert len(process.asked) == 2
    assert release.released == {"memory_mib": 50.0}
    assert "50 MiB over the target stay resident" in release.reason


def test_registered_caches_are_emptied_in_order_until_it_fits() -> None:
    process = Process(stuck_mib=150)
    adapter = process.adapter()
    emptied: list[str] = []
    for name, mib in (("first", 30.0), ("second", 30.0), ("third", 30.0)):
        clear = process.clear(mib)
        adapter.drops(functools.partial(emptied.append, name))
        adapter.drops(clear)
    work(adapter.deflate({"memory_mib": 100}, "ask", Deadline(60)))
    assert emptied == ["first", "second"]
    assert process.size_mib == 90


def test_what_empties_a_cache_can_be_registered_as_a_decorator() -> None:
    adapter = Process().adapter(shrinks=False)

    @functools.lru_cache
    def squared(number: int) -> int:
        return number * number

    @adapter.drops
    def forget() -> None:
        squared.cache_clear()

    squared(3)
    release = work(adapter.deflate({"memory_mib": 100}, "ask", Deadline(60)))
    assert squared.cache_info().currsize == 0
    assert "emptied " in release.reason
    assert "forget" in release.reason


def test_a_deadline_that_has_passed_ends_it() -> None:
    process = Process(off_mib=15)
    adapter = process.adapter()
    adapter.drops(process.clear(50))
    work(adapter.deflate({"memory_mib": 100}, "ask", Deadline(0)))
    assert process.asked == [100]
    assert process.size_mib == 115


def test_who_has_registered_nothing_or_is_at_its_minimum_refuses() -> None:
    answer = Process().adapter(shrinks=False).deflate({"memory_mib": 100}, "ask", Deadline(60))
    assert isinstance(answer, Refusal)
    assert answer.floor == {"memory_mib": 200.0}
    answer = Process(30).adapter().deflate({"memory_mib": 10}, "ask", Deadline(60))
    assert isinstance(answer, Refusal)
    assert "its minimum is 32 MiB" in answer.reason


def test_it_grows_to_its_maximum_at_most_and_its_minimum_bounds_a_target() -> None:
    process = Process()
    adapter = process.adapter()
    assert work(adapter.deflate({"memory_mib": 1}, "ask", Deadline(60))).released == {"memory_mib": 168.0}
    assert process.asked == [32]
    assert work(adapter.reinflate({"memory_mib": 1000}, Deadline(60))).released == {"memory_mib": 0.0}
    assert process.grown == [256]


def test_a_process_is_trimmed_while_it_is_to_be_small_and_no_longer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(python_memory, "KEEP_LOOK_S", 0.01)
    process, trimmed = Process(), threading.Event()

    def trim(pad: int) -> int:
        process.size_mib = min(process.size_mib, 100)
        trimmed.set()
        return 1

    monkeypatch.setattr(python_memory, "find_malloc_trim", lambda: trim)
    adapter = process.adapter()
    work(adapter.deflate({"memory_mib": 100}, "ask", Deadline(60)))
    work(adapter.deflate({"memory_mib": 90}, "ask", Deadline(60)))
    trimmed.clear()
    process.size_mib = 150
    assert trimmed.wait(30)
    work(adapter.reinflate({"memory_mib": 256}, Deadline(60)))
    trimming_ends()


def trimming_ends() -> None:
    end = time.monotonic() + 30
    while any(thread.name == "python-memory" for thread in threading.enumerate()):
        assert time.monotonic() < end, "the thread has not ended"
        time.sleep(0.01)


def test_a_maximum_that_is_told_rounded_is_reached(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(python_memory, "KEEP_LOOK_S", 0.01)
    monkeypatch.setattr(python_memory, "find_malloc_trim", lambda: lambda pad: 1)
    process = Process()
    adapter = process.adapter(maximum_mib=256.00049)
    work(adapter.deflate({"memory_mib": 100}, "ask", Deadline(60)))
    told_mib = adapter.capabilities().resources["memory_mib"].maximum
    work(adapter.reinflate({"memory_mib": told_mib}, Deadline(60)))
    assert process.grown == [told_mib]
    trimming_ends()


def test_where_the_c_library_cannot_trim_it_says_so() -> None:
    answer = Process().adapter().deflate({"memory_mib": 100}, "ask", Deadline(60))
    assert isinstance(answer, Promise)
    assert "cannot trim" in answer.reason
    assert work(answer).released == {"memory_mib": 100.0}


def test_a_kernel_that_does_not_tell_what_is_shared_tells_the_resident_size(tmp_path: Path) -> None:
    (tmp_path / "self").mkdir()
    (tmp_path / "self/status").write_text("Name:\tpython3\nVmRSS:\t  20480 kB\n")
    assert own_proportional_mib(str(tmp_path)) == 20.0
    (tmp_path / "self/smaps_rollup").write_text("55d6-7ffc ---p 0 00:00 0 [rollup]\nRss: 20480 kB\nPss: 15360 kB\n")
    assert own_proportional_mib(str(tmp_path)) == 15.0


def test_looks_that_take_long_come_rarely(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(python_memory, "KEEP_LOOK_S", 0.001)
    monkeypatch.setattr(python_memory, "find_malloc_trim", lambda: lambda pad: 1)
    waits: list[float] = []

    class Large(threading.Event):
        def wait(self, timeout: float | None = None) -> bool:
            waits.append(timeout or 0.0)
            return len(waits) == 3

    process = Process()
    adapter = process.adapter()
    slow = threading.Event()
    monkeypatch.setattr(adapter, "_resident_mib", lambda: slow.wait(0.02) or 10.0)
    adapter._keep(lambda pad: 1, Large())
    assert waits[0] == 0.001
    assert min(waits[1:]) >= 100 * 0.02
