"""pyarrow a block at a time and Python line by line: the same rows, the same report, whatever is in the file."""

from __future__ import annotations

import sys
from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ebbtide.simulator.errors import TraceError
from ebbtide.simulator.inputs import columnwise, linewise, sources
from ebbtide.simulator.inputs.batches import Batch, Ragged
from ebbtide.simulator.inputs.formats.registry import ALL
from ebbtide.simulator.inputs.tables import Format
from ebbtide.simulator.inputs.traces import Trace
from tests.simulator import samples
from tests.simulator.test_fuzz import EXAMPLES, mutated

BOTH = [name for name, form in ALL.items() if isinstance(form, Format) and columnwise.suits(form)]


def reading(path: Path, name: str, fast: bool) -> tuple[list[Batch], dict[str, Any], str]:
    trace = Trace(path, name, fast=fast, max_malformed=1.0)
    try:
        return list(trace), trace.report.as_json(), ""
    except TraceError as error:
        return [], trace.report.as_json(), str(error)


def assert_same(path: Path, name: str) -> None:
    fast, fast_report, fast_error = reading(path, name, fast=True)
    slow, slow_report, slow_error = reading(path, name, fast=False)
    assert fast_error == slow_error
    assert fast_report == slow_report
    assert len(fast) == len(slow)
    for one, other in zip(fast, slow, strict=True):
        for field in fields(one):
            a, b = getattr(one, field.name), getattr(other, field.name)
            if isinstance(a, Ragged):
                assert a.offsets.tolist() == b.offsets.tolist()
                a, b = a.values, b.values
            assert a.dtype == b.dtype
            np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("name", BOTH)
def test_both_ways_agree_on_mutated_files(directory: Path, name: str) -> None:
    @EXAMPLES
    @given(mutated(samples.TEXTS[name] * 2))
    def run(data: bytes) -> None:
        assert_same(samples.put(directory, data), name)

    run()


@EXAMPLES
@given(st.lists(st.text("0123456789+-.eExX_ \tinfatyNAN٣", max_size=8), min_size=1, max_size=4))
def test_both_ways_agree_on_what_a_number_is(directory: Path, cells: list[str]) -> None:
    lines = "".join(f"{i},{cell}\n" for i, cell in enumerate(cells))
    assert_same(samples.put(directory, f"at_s,value\n{lines}".encode()), "series")


@EXAMPLES
@given(st.lists(st.floats(allow_nan=False, allow_infinity=False, max_value=1e20, min_value=-1e20), min_size=1))
def test_both_ways_read_the_same_float(directory: Path, values: list[float]) -> None:
    lines = "".join(f"{i},{value!r}\n" for i, value in enumerate(values))
    path = samples.put(directory, f"at_s,value\n{lines}".encode())
    assert_same(path, "series")
    (batch,) = Trace(path, "series")
    assert [row["value"] for row in batch.rows()] == values


def test_in_a_large_file_only_the_lines_around_a_fault_are_read_one_by_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines = [b"%d %d -1 5 1 -1 -1 1 -1 -1 1 1 1 1 1 1 -1 -1\n" % (i, i) for i in range(20_000)]
    lines[7_000] = lines[7_000].replace(b" 5 ", b" five ", 1)
    lines[12_345] = b"1 2 3\n"
    path = samples.put(tmp_path, b"; head\n" + b"".join(lines))
    single: list[int] = []
    parse = linewise.parse

    def counted(form: Any, layout: Any, chosen: Any, numbers: Any) -> Any:
        single.append(len(chosen))
        return parse(form, layout, chosen, numbers)

    trace = Trace(path, "swf")
    monkeypatch.setattr(linewise, "parse", counted)
    assert sum(len(batch) for batch in trace) == 19_998
    assert 0 < sum(single) <= 128
    assert [(f.line, f.field, f.problem) for f in trace.report.examples] == [
        (7_002, "run_time_s", "is 'five', not a number"),
        (12_347, "run_time_s", "is missing: the line has 3 of 18 fields"),
    ]
    assert_same(path, "swf")


def test_lines_that_end_in_the_middle_of_a_block_are_whole(tmp_path: Path) -> None:
    data = b"".join(b"%d,%d\n" % (i, i) for i in range(5000))
    path = samples.put(tmp_path, data + b"5000,5000")
    for size in (1, 100, 262_144, 262_145, 1 << 22):
        found = list(sources.blocks(path, block_bytes=size))
        assert b"".join(block.data for block in found) == data + b"5000,5000\n"
        assert all(block.data.endswith(b"\n") for block in found)
        line = 1
        for block in found:
            assert block.first_line == line
            line += len(block.lines())


def test_without_pyarrow_text_is_read_and_what_needs_it_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in [name for name in sys.modules if name.startswith(("pyarrow", "ebbtide.simulator"))]:
        monkeypatch.delitem(sys.modules, name)
    # As `import` answers for a package that is not installed.
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    from ebbtide.simulator.errors import TraceError as Missing
    from ebbtide.simulator.inputs import traces, writing

    batches = list(traces.Trace(samples.put(tmp_path, samples.SWF, "a.swf")))
    assert sum(len(batch) for batch in batches) == 3
    parquet = samples.put(tmp_path, samples.PARQUETS["vms-parquet"], "vms.parquet")
    zstd = samples.put(tmp_path, b"\x28\xb5\x2f\xfd", "a.zst")
    for path in (parquet, zstd):
        with pytest.raises(Missing, match=r"needs pyarrow: install ebbtide\[sim\]"):
            traces.Trace(path)
    with pytest.raises(Missing, match="needs pyarrow"):
        writing.write(tmp_path / "out.parquet", "jobs", batches)
