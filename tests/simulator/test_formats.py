"""Every format by a few made-up lines: what each field becomes, and what is no row."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet
import pytest

from ebbtide.simulator.errors import InvalidParameter, TraceError
from ebbtide.simulator.inputs.formats.registry import ALL
from ebbtide.simulator.inputs.traces import Trace
from tests.simulator import samples

NAN = pytest.approx(math.nan, nan_ok=True)


def rows_of(tmp_path: Path, name: str, **options: float | str) -> tuple[list[dict[str, Any]], Trace]:
    trace = Trace(samples.put(tmp_path, samples.ALL[name]), name, options=options)
    return [row for batch in trace for row in batch.rows()], trace


def column(rows: list[dict[str, Any]], name: str) -> list[Any]:
    return [row[name] for row in rows]


def test_there_is_a_sample_of_every_format() -> None:
    assert set(samples.ALL) == set(ALL)


@pytest.mark.parametrize("name", samples.ALL)
def test_a_format_is_recognised_by_its_content_and_reads_its_sample(tmp_path: Path, name: str) -> None:
    trace = Trace(samples.put(tmp_path, samples.ALL[name]))
    assert trace.form.name == name
    rows = sum(len(batch) for batch in trace)
    report = trace.report
    assert rows == report.given > 0
    assert report.malformed == 0
    assert report.lines == report.read + report.comments


def test_swf_takes_requested_processors_where_none_were_allocated(tmp_path: Path) -> None:
    rows, trace = rows_of(tmp_path, "swf")
    assert column(rows, "id") == ["1", "2", "4"]
    assert column(rows, "submit_s") == [0, 8, 179350]
    assert column(rows, "runtime_s") == [31405, 31039, 143967]
    assert column(rows, "cpu_cores") == [30, 16, 2]
    assert column(rows, "requested_s") == [37980, NAN, 144000]
    assert column(rows, "memory_mib") == [NAN, 16, 4]
    assert column(rows, "group") == ["user 1", "user 2", "user 3"]
    assert trace.report.skipped == {"no runtime": 1}


def test_a_vmtable_says_who_was_there_at_the_end_and_how_large_open_buckets_are(tmp_path: Path) -> None:
    rows, trace = rows_of(tmp_path, "azure-vmtable")
    assert column(rows, "arrives_s") == [0, 0, 300, 2188800]
    assert column(rows, "departs_s") == [NAN, 1539300, 1200, 2195100]
    assert column(rows, "cpu_cores") == [1, 1, 8, 30]
    assert column(rows, "memory_mib") == [1.75 * 1024, 768, 14 * 1024, 70 * 1024]
    assert column(rows, "priority") == [1, 2, 2, 0]
    assert column(rows, "utilisation") == pytest.approx([0.0342, 0.0618, 1, 0.025])
    assert column(rows, "group") == ["dep1", "dep1", "dep3", "dep2"]
    assert trace.report.reordered == 1


def test_a_vmtable_may_have_a_header(tmp_path: Path) -> None:
    header = b"vmid,subscriptionid,deploymentid,vmcreated,vmdeleted,maxcpu,avgcpu,p95maxcpu,vmcategory,"
    for names in (b"vmcorecount,vmmemory\n", b"vmcorecountbucket,vmmemorybucket\n"):
        trace = Trace(samples.put(tmp_path, header + names + samples.VMTABLE))
        assert sum(len(batch) for batch in trace) == 4
        assert (trace.report.comments, trace.report.malformed) == (1, 0)


def test_the_end_of_a_vmtable_is_an_option(tmp_path: Path) -> None:
    rows, _ = rows_of(tmp_path, "azure-vmtable", end_s=1_000_000)
    assert column(rows, "departs_s") == [NAN, NAN, 1200, NAN]


def test_a_run_of_google_2011_ends_with_finish_and_begins_with_its_own_submit(tmp_path: Path) -> None:
    rows, trace = rows_of(tmp_path, "google-2011-tasks", machine_cores=16, machine_memory_mib=1000)
    assert column(rows, "id") == ["3418314/1", "3418315/0"]
    assert column(rows, "submit_s") == [0, 131]
    assert column(rows, "runtime_s") == [90, 50]
    assert column(rows, "cpu_cores") == [1, 4]
    assert column(rows, "memory_mib") == [50, 100]
    assert column(rows, "priority") == [1, 1]
    assert trace.report.skipped == {"evicted": 1, "no beginning or no end": 1}


def test_events_in_any_order_of_lines_are_the_same_tasks(tmp_path: Path) -> None:
    """Each of 200 is submitted and begins at one instant, some are evicted and come again, and it ends."""
    lines = []
    for job in range(200):
        begins = [1000 + 7 * job] * 2 if job % 3 else [1000 + 7 * job] * 2 + [1100 + 7 * job] + [1200 + 7 * job] * 2
        codes = [0, 1] if job % 3 else [0, 1, 2, 0, 1]
        for at_s, code in zip((*begins, 2000 + 9 * job), (*codes, 4), strict=True):
            lines.append(f"{at_s}000000,,{job},0,,{code},user,0,9,0.5,0.5,0,0\n".encode())
    rows, trace = rows_of_lines(tmp_path, sorted(lines, key=lambda line: int(line.split(b",")[0])))
    assert (len(rows), trace.report.skipped) == (200, {"evicted": 67})
    put_right = trace.report.reordered
    np.random.default_rng(1).shuffle(lines)
    for run_rows in (1 << 19, 50):
        shuffled, trace = rows_of_lines(tmp_path, lines, run_rows=run_rows)
        assert [str(row) for row in shuffled] == [str(row) for row in rows]
        assert trace.report.reordered > put_right
        assert trace.report.skipped == {"evicted": 67}


def rows_of_lines(tmp_path: Path, lines: list[bytes], **how: Any) -> tuple[list[dict[str, Any]], Trace]:
    trace = Trace(samples.put(tmp_path, b"".join(lines)), "google-2011-tasks", **how)
    return [row for batch in trace for row in batch.rows()], trace


def test_a_task_that_is_submitted_again_without_an_end_is_counted(tmp_path: Path) -> None:
    event = b"600000000,,7,0,,0,user,0,0,0.5,0.5,0,0\n"
    trace = Trace(samples.put(tmp_path, event + event), "google-2011-tasks")
    assert list(trace) == []
    assert trace.report.skipped == {"submitted again without an end": 1, "not ended": 1}


def test_machines_of_google_2011_go_and_come_back(tmp_path: Path) -> None:
    rows, _ = rows_of(tmp_path, "google-2011-machines", machine_cores=32)
    assert column(rows, "machine") == ["5", "6", "5", "5"]
    assert column(rows, "cpu_cores") == [16, 16, 0, 16]
    assert column(rows, "at_s") == [0, 0, 833749, 839400]


def test_events_of_google_2019_may_be_numbers_or_names_and_alloc_sets_are_no_tasks(tmp_path: Path) -> None:
    rows, trace = rows_of(tmp_path, "google-2019-tasks")
    assert [(r["id"], r["submit_s"], r["runtime_s"], r["cpu_cores"], r["priority"]) for r in rows] == [
        ("9/3", 0, 60, 0.25, 2)
    ]
    assert trace.report.skipped == {"event of an alloc set": 1}
    rows, _ = rows_of(tmp_path, "google-2019-tasks-csv")
    assert [(r["id"], r["runtime_s"], r["priority"]) for r in rows] == [("9/3", 60, 1)]
    rows, _ = rows_of(tmp_path, "google-2019-machines", machine_cores=10)
    assert [(r["at_s"], r["cpu_cores"]) for r in rows] == [(0, 5), (60, 0), (100, 10)]


def test_a_borg_window_is_sorted(tmp_path: Path) -> None:
    rows, trace = rows_of(tmp_path, "borg-window")
    assert column(rows, "id") == ["404670", "256988", "217315"]
    assert trace.report.reordered == 1


def test_pods_of_openb_have_the_priority_of_their_qos(tmp_path: Path) -> None:
    rows, _ = rows_of(tmp_path, "alibaba-openb-pods")
    assert column(rows, "id") == ["p0", "p2", "p1"]
    assert column(rows, "priority") == [2, 0, 1]
    assert column(rows, "departs_s") == [NAN, 60, 427062]
    assert column(rows, "cpu_cores") == [12, 0.5, 6]


def test_dlrm_instances_without_a_creation_were_there_before(tmp_path: Path) -> None:
    rows, _ = rows_of(tmp_path, "alibaba-dlrm")
    assert [(r["arrives_s"], r["departs_s"]) for r in rows] == [(0, NAN), (1435629, 1435760)]
    assert column(rows, "memory_mib") == [120 * 1024, 320 * 1024]
    assert column(rows, "priority") == [2, 2]


def test_batch_tasks_have_as_many_tasks_as_instances(tmp_path: Path) -> None:
    rows, trace = rows_of(tmp_path, "alibaba-batch-tasks")
    assert column(rows, "id") == ["j_1/M1", "j_1/R2_1"]
    assert column(rows, "task_runtime_s") == [[11], [10, 10, 10]]
    assert column(rows, "cpu_cores") == [1, 0.5]
    assert trace.report.skipped == {"not ended": 2}
    rows, trace = rows_of(tmp_path, "alibaba-sample-tasks")
    assert column(rows, "task_runtime_s") == [[268.0] * 9, [10]]
    assert trace.report.skipped == {"no runtime": 1}


def test_a_job_of_hawk_keeps_its_stated_mean(tmp_path: Path) -> None:
    rows, _ = rows_of(tmp_path, "hawk-tr")
    assert column(rows, "runtime_s") == [10, 3.5, 2]
    assert column(rows, "task_runtime_s") == [[8, 12], [3.5], [1, 2, 3]]


def test_series_name_their_unit_and_calendar_times_their_origin(tmp_path: Path) -> None:
    rows, trace = rows_of(tmp_path, "carbon-intensity")
    assert [(r["at_s"], r["value"]) for r in rows] == [(0, 235.72), (7200, 249.08)]
    assert (trace.report.unit, trace.report.origin) == ("gCO2/kWh", "2021-01-01T00:00:00+00:00")
    assert trace.report.skipped == {"no value": 1}
    rows, _ = rows_of(tmp_path, "carbon-intensity", intensity="lifecycle")
    assert column(rows, "value") == [314.54, 300, 329.55]
    rows, _ = rows_of(tmp_path, "generation")
    assert [(r["at_s"], r["value"]) for r in rows] == [(0, 11167), (1800, 10590)]
    rows, _ = rows_of(tmp_path, "generation", sources="Biomass+Solar")
    assert column(rows, "value") == [2824, 2916]


def test_spot_series_and_nodes(tmp_path: Path) -> None:
    rows, _ = rows_of(tmp_path, "spot-availability")
    assert [(r["at_s"], r["value"]) for r in rows] == [(0, 0), (300, 3), (600, 3), (900, 16), (1200, 0)]
    rows, _ = rows_of(tmp_path, "spot-nodes", node_cores=4)
    assert [(r["machine"], r["at_s"], r["cpu_cores"]) for r in rows] == [
        ("node1", 480, 4),
        ("node2", 540, 4),
        ("node1", 600, 0),
    ]
    rows, _ = rows_of(tmp_path, "spot-polls")
    assert [(r["at_s"], r["value"]) for r in rows] == [(0, 80), (60, 70), (120, 78)]


def test_opendc_times_are_milliseconds_of_the_epoch(tmp_path: Path) -> None:
    rows, trace = rows_of(tmp_path, "opendc-tasks")
    assert [(r["id"], r["submit_s"], r["runtime_s"], r["memory_mib"]) for r in rows] == [
        ("7", 0, 1194, 100000),
        ("9", 1, 0.5, NAN),
    ]
    assert trace.report.origin == "2022-09-30T22:00:00+00:00"
    assert trace.report.skipped == {"no runtime": 1}


@pytest.mark.parametrize("kind", [pa.int64(), pa.timestamp("ms", "UTC")], ids=str)
def test_opendc_times_are_numbers_or_timestamps(tmp_path: Path, kind: Any) -> None:
    at = pa.array([1664575200000, 1664575201500], pa.int64()).cast(kind)
    table = pa.table({"id": [1, 2], "submission_time": at, "duration": [1, 1], "cpu_count": [1, 1]})
    pa.parquet.write_table(table, tmp_path / "t.parquet")
    trace = Trace(tmp_path / "t.parquet")
    assert [row["submit_s"] for batch in trace for row in batch.rows()] == [0, 1.5]
    assert trace.report.origin == "2022-09-30T22:00:00+00:00"


def test_opendc_instants_beyond_the_calendar_are_malformed(tmp_path: Path) -> None:
    table = pa.table({"id": [1], "submission_time": [2**62], "duration": [1], "cpu_count": [1]})
    pa.parquet.write_table(table, tmp_path / "t.parquet")
    with pytest.raises(TraceError, match=r"row 1: submission_time is 4\.61168601843e"):
        list(Trace(tmp_path / "t.parquet"))


def test_gaia_says_hours_unless_told_otherwise(tmp_path: Path) -> None:
    rows, _ = rows_of(tmp_path, "gaia")
    assert column(rows, "runtime_s") == [2700, pytest.approx(68700), 21600]
    rows, _ = rows_of(tmp_path, "gaia", time_unit="s")
    assert column(rows, "submit_s") == [0, 0.5, 2]


@pytest.mark.parametrize(
    ("name", "options", "field"),
    [
        ("gaia", {"time_unit": "d"}, "time_unit"),
        ("gaia", {"unit": "h"}, "unit"),
        ("azure-derived", {"censored": "x"}, "censored"),
        ("azure-vmtable", {"end_s": "soon"}, "end_s"),
        ("azure-vmtable", {"end_s": -1}, "end_s"),
        ("azure-vmtable", {"end_s": "inf"}, "end_s"),
        ("carbon-intensity", {"intensity": "x"}, "intensity"),
        ("generation", {"sources": "Wind Onshore+Coal"}, "sources"),
    ],
)
def test_a_wrong_option_is_named(tmp_path: Path, name: str, options: dict[str, float | str], field: str) -> None:
    with pytest.raises(InvalidParameter) as caught:
        rows_of(tmp_path, name, **options)
    assert caught.value.field == field


def test_an_unknown_format_is_named() -> None:
    with pytest.raises(InvalidParameter, match="'swff' is unknown; there are vms"):
        Trace(Path("x"), "swff")


def test_times_can_count_from_the_first_row(tmp_path: Path) -> None:
    path = samples.put(tmp_path, samples.ALL["borg-window"])
    (batch,) = Trace(path, from_first=True)
    assert batch.keys.tolist() == [0, 111600, 433800]
