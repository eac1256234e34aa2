"""Errors as a user meets them: file, line, field and what is wrong, or a count."""

from __future__ import annotations

import gzip
import random
from pathlib import Path

import pytest

from ebbtide.simulator.errors import TraceError
from ebbtide.simulator.inputs import documents, sources
from ebbtide.simulator.inputs.formats import azure
from ebbtide.simulator.inputs.report import Fault
from ebbtide.simulator.inputs.traces import Trace
from tests.simulator import samples


def failure(path: Path, name: str | None = None, **rest: float) -> TraceError:
    with pytest.raises(TraceError) as caught:
        list(Trace(path, name, **rest))  # type: ignore[arg-type]
    return caught.value


@pytest.mark.parametrize(
    ("name", "old", "new", "line", "field", "problem"),
    [
        ("swf", b" 143967 ", b" 14396x ", 7, "run_time_s", "is '14396x', not a number"),
        ("swf", b" 179350 ", b" -5 ", 7, "submit_s", "is -5, below 0"),
        ("swf", b"  1024   16 ", b"  1024   1.5 ", 5, "requested_processors", "is 1.5, no whole number"),
        ("azure-vmtable", b"1539300", b"-1", 2, "vmdeleted", "is -1, below 0"),
        ("azure-vmtable", b"300,1200", b"1200,300", 4, "vmdeleted", "is before vmcreated"),
        ("azure-vmtable", b"Interactive,8", b"Other,8", 4, "vmcategory", "is 'Other', none of Delay-insensitive"),
        ("azure-vmtable", b">24", b">25", 3, "vmcorecount", "is '>25', not a number"),
        ("azure-vmtable", b",14\n", b",14,1\n", 4, "vmmemory", "is followed by 1 fields too many"),
        ("azure-vmtable", b"vm+A/4=", b"", 4, "vmid", "is empty"),
        ("azure-vmtable", b"vm+A/4=", b"\xff", 4, "vmid", "is '\\ufffd', not UTF-8"),
        ("azure-vmtable", b"vm+A/4=", b'"vm', 4, "vmid", "or a later field has broken quotes"),
        ("google-2011-tasks", b"3418315,0,,0,user,0,2", b"3418315,0,,9,user,0,2", 6, "event", "is 9, above 8"),
        ("google-2019-tasks", b'"collection_id": "7"', b'"collection_id": [7]', 3, "collection_id", "is a list"),
        ("google-2019-tasks", b'{"time": "602', b'{"time" "602', 3, "time", "or a later field is no JSON"),
        ("hawk-tr", b"7.5 2", b"7.5 3", 1, "tasks", "is 3, but 2 durations follow"),
        ("hawk-tr", b"10 3 2  1 2 3", b"10 3 2  1 -2 3", 3, "task_s", "has a number below 0"),
        ("carbon-intensity", b"2021-01-01 02:00:00", b"2021-02-30 02:00:00", 4, "time", "not a time such as"),
        ("carbon-intensity", b"2021-01-01 02:00:00", b"9999-12-31 23:00:00-02:00", 4, "time", "not a time such as"),
        ("alibaba-batch-tasks", b"M1,1,j_1", b"M1,2000000,j_1", 1, "instance_num", "is 2000000, above 1000000"),
        ("spot-availability", b"3, 3, 16", b'3, "x", 16', 3, "data", "is 'x', not a number of instances"),
        ("spot-availability", b"300", b"0", 1, "metadata.gap_seconds", "is '0', not a number above 0"),
        ("vms", b"c,t,3,3", b"c,t,3,2", 4, "departs_s", "is before arrives_s"),
        ("jobs", b"5;15", b"5;;15", 2, "task_runtime_s", "has an empty place between its numbers"),
    ],
)
def test_a_fault_is_named(
    tmp_path: Path, name: str, old: bytes, new: bytes, line: int, field: str, problem: str
) -> None:
    sample = samples.TEXTS[name]
    assert sample.count(old) >= 1
    path = samples.put(tmp_path, sample.replace(old, new, 1))
    error = failure(path, name)
    assert (error.file, error.line, error.field) == (str(path), line, field)
    assert problem in error.problem


def test_too_many_malformed_lines_are_fatal_and_a_few_are_reported(tmp_path: Path) -> None:
    good = [b"%d,1\n" % i for i in range(400)]
    good[10] = b"x,1\n"
    good[20] = b"20,y\n"
    path = samples.put(tmp_path, b"at_s,value\n" + b"".join(good))
    trace = Trace(path)
    assert sum(len(batch) for batch in trace) == 398
    assert trace.report.examples == [
        Fault(12, "at_s", "is 'x', not a number"),
        Fault(22, "value", "is 'y', not a number"),
    ]
    error = failure(path, max_malformed=0.004)
    assert (error.line, error.field) == (12, "at_s")
    assert "2 of 400 lines are malformed (0.50%, allowed are 0.40%)" in str(error)


def test_a_wrong_file_is_given_up_early(tmp_path: Path) -> None:
    path = samples.put(tmp_path, b"at_s,value\n" + b"1,x\n" * 3_000_000)
    seen: list[int] = []
    with pytest.raises(TraceError):
        list(Trace(path, "series", progress=lambda done, size: seen.append(done)))
    assert seen[-1] < path.stat().st_size / 2


def test_a_header_without_a_field_is_named(tmp_path: Path) -> None:
    error = failure(samples.put(tmp_path, b"at_s,values\n0,1\n"), "series")
    assert (error.line, error.field, error.problem) == (1, "value", "is missing from the header")
    error = failure(samples.put(tmp_path, b"at_s,value,at_s\n0,1,0\n"), "series")
    assert (error.line, error.field, error.problem) == (1, "at_s", "stands twice in the header")
    error = failure(samples.put(tmp_path, b"Datetime (UTC),x\n2021-01-01,1\n"), "carbon-intensity")
    assert (error.line, error.field) == (1, "direct")


@pytest.mark.parametrize(
    ("row", "field", "problem"),
    [
        (b"a,g,0,100,4 cores,1024,low,0.5\n", "cpu_cores", "is '4 cores', not a number"),
        (b"a,g,100,0,4,1024,low,0.5\n", "departs_s", "is before arrives_s"),
    ],
)
def test_a_file_whose_header_is_right_and_whose_lines_are_not_is_told_of_its_lines(
    tmp_path: Path, row: bytes, field: str, problem: str
) -> None:
    header = b"id,group,arrives_s,departs_s,cpu_cores,memory_mib,priority,utilisation\n"
    error = failure(samples.put(tmp_path, header + row * 2))
    assert (error.line, error.field) == (2, field)
    assert problem in error.problem


def test_a_file_with_a_header_that_its_format_could_do_without_is_told_of_its_lines(tmp_path: Path) -> None:
    columns = azure.VMTABLE.columns
    header = ",".join(column.name for column in columns).encode()
    row = b",".join([b"x"] * len(columns))
    error = failure(samples.put(tmp_path, b"\n".join([header, row, row, b""])))
    assert error.line == 2
    assert error.field in [column.name for column in columns]


def test_columns_may_stand_in_any_order_among_others(tmp_path: Path) -> None:
    (batch,) = Trace(samples.put(tmp_path, b"note,value,at_s\nx,2,0\n,3,5\n"))
    assert list(batch.rows()) == [{"at_s": 0, "value": 2}, {"at_s": 5, "value": 3}]


def test_what_is_no_file_is_said(tmp_path: Path) -> None:
    assert "does not exist" in str(failure(tmp_path / "none"))
    assert "is no regular file" in str(failure(tmp_path, "swf"))
    assert "the file has no lines" in str(failure(samples.put(tmp_path, b"")))
    assert "has no line of the format swf" in str(failure(samples.put(tmp_path, b"; only\n\n"), "swf"))
    assert "format is none that is known" in str(failure(samples.put(tmp_path, b"hello\nworld\n")))


def test_a_cut_gzip_says_where(tmp_path: Path) -> None:
    lines = b"".join(b"%d,%d\n" % (i, random.Random(i).randrange(10**6)) for i in range(200_000))
    path = samples.put(tmp_path, gzip.compress(b"at_s,value\n" + lines)[:-50_000])
    error = failure(path, "series")
    assert error.field == "compression"
    assert error.line is not None
    assert 100_000 < error.line < 200_000


def test_a_line_without_end_and_a_document_without_end_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sources, "LINE_BYTES", 1 << 19)
    path = samples.put(tmp_path, b"at_s,value\n0,1\n" + b"9" * (1 << 20))
    error = failure(path, "series")
    assert (error.line, error.field) == (3, "line")
    monkeypatch.setattr(documents, "MOST_BYTES", 1 << 19)
    path = samples.put(tmp_path, b'{"metadata": {"gap_seconds": 1}, "data": [' + b"1," * (1 << 20) + b"1]}")
    assert "one document of more than" in str(failure(path, "spot-availability"))


def test_what_an_error_shows_of_a_file_is_short_and_harmless(tmp_path: Path) -> None:
    error = failure(samples.put(tmp_path, b"at_s,value\n0,\x1b[31m" + b"x" * 1000 + b"\n"), "series")
    assert "\x1b" not in str(error)
    assert len(str(error)) < 300 + len(str(tmp_path))
