"""Every reader against random, mutated and truncated files: an error that names file, line and field, or every line
counted; nothing else."""

from __future__ import annotations

import gzip
from pathlib import Path
from typing import Final

import pyarrow as pa
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ebbtide.simulator.errors import TraceError
from ebbtide.simulator.inputs.formats.registry import ALL
from ebbtide.simulator.inputs.parquet import ParquetFormat
from ebbtide.simulator.inputs.tables import Format
from ebbtide.simulator.inputs.traces import Trace
from tests.simulator import samples

#: What breaks parsers, beside chance.
TRICKS: Final = (
    b"", b"-1", b"nan", b"NaN", b"inf", b"1e999", b"-0", b"1e-999", b"0x10", b"1_0", b"+5", b".5", b"5.", b".", b"e5",
    "٣".encode(), "\u2028".encode(), b"\xff", b"\x00", b"\r", b"\n", b"\n\n", b" \n", b"\r\n", b"\t", b"\x0b", b"\x0c",
    b"\x1c", b'"', b'""', b'"a,b"', b",", b";", b" ", b"  ", b"#", b">24", b"null", b"{", b"}", b"[", b"[[", b"]",
    b'{"a":', b"9" * 400, b"9" * 5000, b"1e20", b"-1e20", b"1000000", b"2021-13-01", b"9999-12-31 23:59:59+00:00",
    b"0001-01-01", b"\xef\xbb\xbf", b"\xed\xa0\x80", b"\\ud800", b"true", b"1e5", b"999999999999999999999",
)  # fmt: skip
TEXT_FORMATS: Final = [name for name, form in ALL.items() if isinstance(form, Format)]
EXAMPLES: Final = settings(
    max_examples=40,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture, HealthCheck.data_too_large],
)


@st.composite
def mutated(draw: st.DrawFn, sample: bytes) -> bytes:
    """A good file with a few places overwritten, cut out, doubled or filled with what breaks parsers."""
    data = bytearray(sample)
    for _ in range(draw(st.integers(1, 4))):
        start = draw(st.integers(0, len(data)))
        end = min(len(data), start + draw(st.sampled_from([0, 0, 1, 2, 5, 40])))
        put = draw(st.one_of(st.sampled_from(TRICKS), st.binary(max_size=6), st.just(bytes(data[start:end]) * 2)))
        data[start:end] = put
    return bytes(data)


def check(path: Path, name: str | None, lines: int | None, max_malformed: float) -> TraceError | None:
    """Read a file; what a reader must hold whatever is in it."""
    trace = error = None
    try:
        trace = Trace(path, name, max_malformed=max_malformed, buffer_rows=2, run_rows=2)
        before_s = float("-inf")
        rows = 0
        for batch in trace:
            assert len(batch) > 0
            assert (batch.keys[1:] >= batch.keys[:-1]).all()
            assert batch.keys[0] >= before_s
            before_s = float(batch.keys[-1])
            rows += len(batch)
    except TraceError as caught:
        error = caught
    if error is not None:
        assert error.file == str(path)
        assert error.line is not None
        assert error.line >= 1
        assert error.field
        assert f"{path}, {error.place} {error.line}: {error.field} " in str(error)
        return error
    assert trace is not None
    report = trace.report
    assert report.lines == report.comments + report.read + report.malformed
    assert report.given == rows
    assert len(report.examples) == min(report.malformed, 10)
    assert all(f.line >= 1 and f.field and f.problem for f in report.examples)
    if lines is not None:
        assert report.lines == lines
    # Of events several lines make a row, and none may.
    if "google" not in report.format:
        assert report.read == report.given + sum(report.skipped.values())
    return None


def line_count(data: bytes) -> int:
    return data.count(b"\n") + (not data.endswith(b"\n") and bool(data))


@pytest.mark.parametrize("name", TEXT_FORMATS)
def test_mutated_lines_are_counted_or_named(directory: Path, name: str) -> None:
    @EXAMPLES
    @given(mutated(samples.TEXTS[name]), st.sampled_from([1.0, 0.01]))
    def run(data: bytes, max_malformed: float) -> None:
        check(samples.put(directory, data), name, line_count(data), max_malformed)

    run()


@pytest.mark.parametrize("name", [*samples.TEXTS])
def test_random_bytes_are_named(directory: Path, name: str) -> None:
    @settings(EXAMPLES, max_examples=15)
    @given(st.binary(max_size=200))
    def run(data: bytes) -> None:
        path = samples.put(directory, data)
        check(path, name, None, 1.0)
        check(path, name, None, 0.01)

    run()


@EXAMPLES
@given(st.one_of(st.binary(max_size=200), st.sampled_from(list(samples.ALL.values())).flatmap(mutated)))
def test_a_file_of_unknown_content_is_recognised_or_refused(directory: Path, data: bytes) -> None:
    check(samples.put(directory, data), None, None, 0.5)


@EXAMPLES
@given(mutated(samples.TEXTS["spot-availability"]), st.sampled_from([1.0, 0.01]))
def test_a_mutated_document_is_counted_by_element_or_named(directory: Path, data: bytes, max_malformed: float) -> None:
    check(samples.put(directory, data), "spot-availability", None, max_malformed)


@pytest.mark.parametrize("name", samples.PARQUETS)
def test_mutated_parquet_names_a_row(directory: Path, name: str) -> None:
    @settings(EXAMPLES, max_examples=25)
    @given(mutated(samples.PARQUETS[name]), st.integers(0, len(samples.PARQUETS[name])))
    def run(data: bytes, cut: int) -> None:
        check(samples.put(directory, data), name, None, 1.0)
        path = samples.put(directory, samples.PARQUETS[name][:cut])
        error = check(path, name, None, 1.0)
        assert error is not None or cut == len(samples.PARQUETS[name])

    run()


@pytest.mark.parametrize("name", samples.PARQUETS)
def test_parquet_with_other_types_or_values_names_a_row(directory: Path, name: str) -> None:
    form = ALL[name]
    assert isinstance(form, ParquetFormat)
    numbers = st.one_of(st.none(), st.floats(), st.sampled_from([-1.0, 0.0, 1.0, 1e300]))
    arrays = st.one_of(
        st.lists(numbers, min_size=3, max_size=3).map(lambda v: pa.array(v, pa.float64())),
        st.lists(st.one_of(st.none(), st.integers(-(2**63), 2**63 - 1)), min_size=3, max_size=3).map(
            lambda v: pa.array(v, pa.int64())
        ),
        st.lists(st.one_of(st.none(), st.text(max_size=4), st.just("low")), min_size=3, max_size=3).map(
            lambda v: pa.array(v, pa.string())
        ),
        st.lists(st.one_of(st.none(), st.lists(numbers, max_size=3)), min_size=3, max_size=3).map(
            lambda v: pa.array(v, pa.list_(pa.float64()))
        ),
        st.just(pa.array([True, None, False])),
        st.just(pa.array([1, 2, None], pa.timestamp("ns"))),
        st.just(pa.array([b"a", None, b"\xff"], pa.binary())),
        st.just(pa.nulls(3)),
    )

    @settings(EXAMPLES, max_examples=25)
    @given(st.fixed_dictionaries({column.name: arrays for column in form.columns}), st.sampled_from([1.0, 0.01]))
    def run(columns: dict[str, pa.Array], max_malformed: float) -> None:
        path = directory / "table.parquet"
        pa.parquet.write_table(pa.table(columns), path)
        error = check(path, name, 3, max_malformed)
        assert error is None or error.place == "row"

    run()


@pytest.mark.parametrize("name", ["swf", "azure-vmtable", "spot-availability", "google-2019-tasks"])
@pytest.mark.parametrize("compression", ["gzip", "zstd"])
def test_a_compressed_file_that_is_cut_or_damaged_is_named(directory: Path, name: str, compression: str) -> None:
    sample = samples.TEXTS[name] * (1 if name == "spot-availability" else 50)
    if compression == "gzip":
        packed = gzip.compress(sample, mtime=0)
    else:
        packed = pa.Codec("zstd").compress(sample, asbytes=True)

    @settings(EXAMPLES, max_examples=25)
    @given(st.integers(0, len(packed) - 1), mutated(packed))
    def run(cut: int, damaged: bytes) -> None:
        error = check(samples.put(directory, packed[:cut]), name, None, 1.0)
        # With less than its first bytes there is nothing that says it was compressed.
        assert (error is not None and error.field == "compression") or cut < 10
        check(samples.put(directory, damaged), name, None, 1.0)

    run()
