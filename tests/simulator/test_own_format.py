"""The own csv and Parquet: what goes out comes back, to the last bit."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ebbtide.simulator.errors import TraceError
from ebbtide.simulator.inputs.batches import KINDS, TEXTS, Batch, Ragged
from ebbtide.simulator.inputs.traces import Trace
from ebbtide.simulator.inputs.writing import write
from tests.simulator import samples

SETTINGS = settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
FLOATS = st.floats(0, 1e20, allow_nan=False)
#: Without line breaks, which csv cannot hold, and without surrogates, which no file can.
WORDS = st.text(st.characters(exclude_characters="\n\r", exclude_categories=["Cs"]), min_size=1, max_size=6)


@st.composite
def batches(draw: st.DrawFn, kind: str) -> Batch:
    count = draw(st.integers(1, 5))

    def several(values: st.SearchStrategy[float], size: int = count) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
        return np.array(draw(st.lists(values, min_size=size, max_size=size)), np.float64)

    columns: dict[str, Any] = {}
    for field in fields(KINDS[kind]):
        name = field.name
        if name in TEXTS:
            word = st.one_of(WORDS, st.just("")) if name == "group" else WORDS
            texts = np.empty(count, object)
            texts[:] = draw(st.lists(word, min_size=count, max_size=count))
            columns[name] = texts
        elif name == "priority":
            columns[name] = several(st.integers(0, 2).map(float)).astype(np.int8)
        elif name == "task_runtime_s":
            lengths = several(st.integers(1, 3).map(float)).astype(np.int64)
            columns[name] = Ragged.of(several(FLOATS, int(lengths.sum())), lengths)
        elif name == KINDS[kind].KEY:
            columns[name] = np.sort(several(FLOATS))
        elif name == "utilisation":
            columns[name] = several(st.one_of(st.floats(0, 1), st.just(np.nan)))
        elif name in ("memory_mib", "requested_s"):
            columns[name] = several(st.one_of(FLOATS, st.just(np.nan)))
        elif name == "departs_s":
            columns[name] = np.where(several(st.booleans().map(float)) > 0, np.nan, 1e20)
        else:
            columns[name] = several(FLOATS)
    if kind == "jobs":
        columns["runtime_s"] = columns["task_runtime_s"].means()
    return KINDS[kind](**columns)


@pytest.mark.parametrize("suffix", [".csv", ".parquet"])
@pytest.mark.parametrize("kind", KINDS)
def test_what_is_written_is_read_again(directory: Path, kind: str, suffix: str) -> None:
    @SETTINGS
    @given(st.lists(batches(kind), min_size=1, max_size=2))
    def run(parts: list[Batch]) -> None:
        last_s = float(parts[0].keys[-1])
        parts = [parts[0], *(part.shifted(0.0) for part in parts[1:] if part.keys[0] >= last_s)]
        path = directory / f"{kind}{suffix}"
        assert write(path, kind, parts) == sum(len(part) for part in parts)
        trace = Trace(path)
        assert trace.kind == kind
        found = KINDS[kind].joined(list(trace))
        wanted = KINDS[kind].joined(parts)
        for field in fields(wanted):
            a, b = getattr(found, field.name), getattr(wanted, field.name)
            if isinstance(a, Ragged):
                assert a.lengths.tolist() == b.lengths.tolist()
                a, b = a.values, b.values
            assert a.dtype == b.dtype
            np.testing.assert_array_equal(a, b)

    run()


@pytest.mark.parametrize("name", [*samples.TEXTS])
def test_every_format_becomes_the_own_one(tmp_path: Path, name: str) -> None:
    path = samples.put(tmp_path, samples.TEXTS[name])
    kind = Trace(path, name).kind
    write(tmp_path / "a.csv", kind, Trace(path, name))
    write(tmp_path / "a.parquet", kind, Trace(path, name))
    write(tmp_path / "b.csv", kind, Trace(tmp_path / "a.parquet"))
    assert (tmp_path / "a.csv").read_bytes() == (tmp_path / "b.csv").read_bytes()


def test_a_line_break_in_a_text_is_refused_by_csv_and_the_file_before_is_left(tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    good = samples.TEXTS["capacity"]
    (batch,) = Trace(samples.put(tmp_path, good))
    write(path, "capacity", [batch])
    before = path.read_bytes()
    names = batch.machine.copy()  # type: ignore[attr-defined]
    names[1] = "a\nb"
    broken = type(batch)(**{f.name: getattr(batch, f.name) for f in fields(batch)} | {"machine": names})
    with pytest.raises(TraceError, match=r"machine has a line break in 'a\\nb': write Parquet instead"):
        write(path, "capacity", [batch, broken])
    assert path.read_bytes() == before
    assert {p.name for p in tmp_path.iterdir()} == {"a.csv", "trace"}
    write(tmp_path / "a.parquet", "capacity", [broken])
    (again,) = Trace(tmp_path / "a.parquet")
    assert list(again.machine) == list(names)  # type: ignore[attr-defined]


def test_where_it_cannot_be_written_is_said(tmp_path: Path) -> None:
    for path, problem in (
        (tmp_path / "a.txt", "must end in .csv or .parquet"),
        (tmp_path / "none" / "a.csv", "cannot be written"),
        (tmp_path / "none" / "a.parquet", "cannot be written"),
    ):
        with pytest.raises(TraceError, match=problem):
            write(path, "series", [])


@pytest.mark.parametrize("kind", ["csv", "parquet"])
@pytest.mark.parametrize(("runtime_s", "bad"), [(9, True), (10, False), (15, False), (20.6, False), (22, True)])
def test_a_runtime_that_contradicts_those_of_the_tasks_is_malformed(
    tmp_path: Path, kind: str, runtime_s: float, bad: bool
) -> None:
    runtime_s -= 0.5 if bad and runtime_s < 10 else 0.0
    rows = [("a", 0.0, 60.0, 1.0, [60.0]), ("b", 1.0, runtime_s, 1.0, [10.0, 20.0])]
    names = ("id", "submit_s", "runtime_s", "cpu_cores", "task_runtime_s")
    if kind == "csv":
        lines = [",".join([*map(str, row[:4]), ";".join(map(str, row[4]))]) for row in rows]
        path = samples.put(tmp_path, "\n".join([",".join(names), *lines, ""]).encode())
    else:
        path = tmp_path / "jobs.parquet"
        pq.write_table(pa.table(dict(zip(names, map(list, zip(*rows, strict=True)), strict=True))), path)
    trace = Trace(path, max_malformed=1)
    assert sum(len(batch) for batch in trace) == (1 if bad else 2)
    assert [(one.field, one.problem) for one in trace.report.examples] == [
        ("runtime_s", "is not between the least and the largest of task_runtime_s")
    ] * bad
