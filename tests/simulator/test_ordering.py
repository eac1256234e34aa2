"""Order restored: a bounded buffer that says where it is not enough, and a sort that always is."""

from __future__ import annotations

from collections.abc import Iterator
from typing import IO

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ebbtide.simulator.errors import TraceError
from ebbtide.simulator.inputs import ordering
from ebbtide.simulator.inputs.batches import Batch, JobBatch, Ragged, SeriesBatch, hints, same, unknown
from ebbtide.simulator.inputs.report import Report
from ebbtide.simulator.inputs.tables import Rows


def parts(times: list[float], size: int) -> Iterator[Rows]:
    """Rows at these times, of values that tell where they stood."""
    for start in range(0, len(times), size):
        at_s = np.array(times[start : start + size], np.float64)
        places = np.arange(start, start + len(at_s))
        yield Rows(SeriesBatch(at_s=at_s, value=places.astype(np.float64)), places + 1)


def report() -> Report:
    return Report("f", "series", "series")


def rows(batches: Iterator[Batch]) -> list[tuple[float, float]]:
    return [(r["at_s"], r["value"]) for b in batches for r in b.rows()]


@settings(max_examples=100, deadline=None)
@given(st.lists(st.integers(0, 20).map(float)), st.integers(1, 7), st.integers(1, 9))
def test_a_sort_over_runs_is_a_stable_sort(times: list[float], size: int, run_rows: int) -> None:
    expected = sorted(((t, float(i)) for i, t in enumerate(times)), key=lambda row: row[0])
    assert rows(ordering.sort(parts(times, size), report(), run_rows)) == expected


@settings(max_examples=100, deadline=None)
@given(st.lists(st.integers(0, 20).map(float)), st.integers(1, 7), st.integers(1, 9))
def test_a_buffer_sorts_stably_or_names_the_line(times: list[float], size: int, buffer_rows: int) -> None:
    expected = sorted(((t, float(i)) for i, t in enumerate(times)), key=lambda row: row[0])
    found: list[tuple[float, float]] = []
    failed: TraceError | None = None
    try:
        for batch in ordering.buffered(parts(times, size), report(), buffer_rows):
            found += rows(iter([batch]))
    except TraceError as error:
        failed = error
    if failed is None:
        assert found == expected
        return
    assert failed.line is not None
    assert sum(t > times[failed.line - 1] for t in times[: failed.line - 1]) > buffer_rows
    assert failed.field == "at_s"
    assert "read it with the order 'sort'" in str(failed)
    assert found == sorted(found, key=lambda row: row[0])


def test_a_row_as_late_as_the_buffer_is_put_right_whatever_the_blocks() -> None:
    times = [float(t) for t in (1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12)]
    times.insert(12, 8.5)
    for size in range(1, 14):
        seen = report()
        assert [t for t, _ in rows(ordering.buffered(parts(times, size), seen, 4))] == sorted(times)
        assert seen.reordered == 1


def test_runs_are_gone_when_a_sort_is_left_in_the_middle(monkeypatch: pytest.MonkeyPatch) -> None:
    runs: list[IO[bytes]] = []
    spilled = ordering._spilled

    def kept(batch: Batch, seen: Report) -> IO[bytes]:
        runs.append(spilled(batch, seen))
        return runs[-1]

    monkeypatch.setattr(ordering, "_spilled", kept)
    batches = ordering.sort(parts([3, 2, 1, 0], 1), report(), 1)
    next(batches)
    assert not any(run.closed for run in runs)
    batches.close()  # type: ignore[attr-defined]
    assert len(runs) == 4
    assert all(run.closed for run in runs)


def test_jobs_of_many_tasks_count_by_their_tasks() -> None:
    tasks = Ragged.equal(np.array([1.0, 2.0, 3.0]), np.array([5.0, 1.0, 90_000.0]))
    jobs = JobBatch(
        id=same("j", 3),
        group=same("", 3),
        submit_s=np.array([2.0, 1.0, 0.0]),
        runtime_s=np.ones(3),
        cpu_cores=np.ones(3),
        memory_mib=unknown(3),
        priority=hints(3),
        requested_s=unknown(3),
        task_runtime_s=tasks,
    )
    given_on = list(ordering.sort(iter([Rows(jobs, np.arange(3))]), report(), 10))
    assert [b.keys.tolist() for b in given_on] == [[0], [1, 2]]
    first, second = given_on
    assert isinstance(first, JobBatch)
    assert isinstance(second, JobBatch)
    assert len(first.task_runtime_s.values) == 90_000
    assert [second.task_runtime_s.row(i).tolist() for i in (0, 1)] == [[2], [1] * 5]


@given(st.lists(st.lists(st.floats(0, 10), max_size=4), max_size=6), st.data())
def test_rows_of_lists_are_chosen_and_joined_like_lists(lists: list[list[float]], data: st.DataObject) -> None:
    def column(values: list[list[float]]) -> Ragged:
        flat = np.array([v for row in values for v in row], np.float64)
        return Ragged.of(flat, np.array([len(row) for row in values], np.int64))

    def plain(ragged: Ragged) -> list[list[float]]:
        return [ragged.row(i).tolist() for i in range(len(ragged))]

    index = data.draw(st.lists(st.integers(0, len(lists) - 1))) if lists else []
    assert plain(column(lists)[np.array(index, np.int64)]) == [lists[i] for i in index]
    assert plain(column(lists)[1:3]) == lists[1:3]
    assert plain(Ragged.joined([column(lists), column(lists[1:])[:2]])) == lists + lists[1:][:2]
