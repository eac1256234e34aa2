"""Metrics as they are written: declared ones only, in base units, as promtool likes them."""

from __future__ import annotations

import asyncio
import subprocess
import sys

import pytest

from ebbtide.deflation.resources import ResourceVector
from ebbtide.rest.metrics.sheet import COMMON, MIB, Metric, Sheet, amounts, counter, gauge
from ebbtide.rest.metrics.stalls import LoopWatch
from ebbtide.rest.metrics.totals import Distribution
from tests.promtool import check_metrics

AGE = gauge("thing_age_seconds", "How old a thing is.", "name")
CALLS = counter("thing_calls", "Calls of a thing.")
SIZE = amounts("ebbtide_thing_size", "What a thing has", ("name",))
TIME = Metric("ebbtide_thing_duration_seconds", "histogram", "How long a thing takes.", ("name",))
ALL = (AGE, CALLS, *SIZE, TIME)


def test_values_are_written_as_prometheus_reads_them() -> None:
    sheet, spread = Sheet(ALL), Distribution((0.5, 2.0))
    for value in (0.5, 0.6, 3.0):
        spread.add(value)
    sheet.put(AGE, 1.5, 'a "b"\n')
    sheet.put(AGE, None, "unknown")
    sheet.put(CALLS, 3)
    sheet.put_amounts(SIZE, ResourceVector(cpu_cores=1.5, memory_mib=2.0), ResourceVector(), "a")
    sheet.put_spread(TIME, spread, "a")
    sheet.put_common(LoopWatch())
    # What is counted later is not on this sheet.
    spread.add(1.0)
    text = sheet.text()
    check_metrics(text)
    lines = text.decode().splitlines()
    for line in (
        'ebbtide_thing_age_seconds{name="a \\"b\\"\\n"} 1.5',
        "ebbtide_thing_calls_total 3.0",
        'ebbtide_thing_size_cpu_cores{name="a"} 1.5',
        'ebbtide_thing_size_memory_bytes{name="a"} 2.097152e+06',
        'ebbtide_thing_duration_seconds_bucket{le="0.5",name="a"} 1.0',
        'ebbtide_thing_duration_seconds_bucket{le="2.0",name="a"} 2.0',
        'ebbtide_thing_duration_seconds_bucket{le="+Inf",name="a"} 3.0',
        'ebbtide_thing_duration_seconds_sum{name="a"} 4.1',
        "# TYPE ebbtide_thing_calls_total counter",
        "ebbtide_loop_stalls_total 0.0",
    ):
        assert line in lines, text.decode()
    assert "unknown" not in text.decode()
    # Not declared by this thing: neither disk nor network.
    assert "bytes_per_second" not in text.decode()
    assert any(line.startswith("process_cpu_seconds_total ") for line in lines)


def test_nothing_left_of_a_bandwidth_is_zero_where_it_is_declared_and_left_out_where_it_is_not() -> None:
    sheet = Sheet(SIZE)
    sheet.put_amounts(SIZE, ResourceVector(network_mib_s=1.0), ResourceVector(disk_mib_s=100.0), "a")
    sheet.put_amounts(SIZE, ResourceVector(), ResourceVector(), "b")
    found = sheet.values()
    assert found[SIZE.cpu.name] == {("a",): 0.0, ("b",): 0.0}
    assert found[SIZE.disk.name] == {("a",): 0.0}
    assert found[SIZE.network.name] == {("a",): MIB}


def test_what_was_not_declared_cannot_be_written() -> None:
    with pytest.raises(KeyError):
        Sheet((AGE,)).put(CALLS, 1)


@pytest.mark.parametrize("name", ["ebbtide_thing_calls", "ebbtide_thing_age_milliseconds"])
def test_promtool_tells_of_a_name_that_breaks_the_conventions(name: str) -> None:
    wrong = Metric(name, "gauge" if "age" in name else "counter", "Wrong.")
    sheet = Sheet((wrong,))
    sheet.put(wrong, 1.0)
    # prometheus_client itself mends a counter without _total.
    text = sheet.text().replace(b"ebbtide_thing_calls_total", b"ebbtide_thing_calls")
    with pytest.raises(AssertionError):
        check_metrics(text)


async def test_a_loop_that_is_held_up_is_late() -> None:
    watch = LoopWatch()
    watch.late(-0.001)
    watch.late(0.1)
    watch.late(0.3)
    assert (watch.stalls, watch.lag.count) == (1, 3)
    async with watch.watching():
        assert len([task for task in asyncio.all_tasks() if task.get_name() == "watch of the event loop"]) == 1
    assert not [task for task in asyncio.all_tasks() if task.get_name() == "watch of the event loop"]


def test_what_nobody_looks_at_imports_no_prometheus_client() -> None:
    code = "import sys, hostagent.api.app, cluster_manager.api.app; print('prometheus_client' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout == "False\n"


def test_every_name_is_declared_once_for_each_daemon() -> None:
    from cluster_manager.api import metric_families as of_manager
    from hostagent.api import metric_families as of_agent

    for families in (of_manager, of_agent):
        metrics = [*COMMON, *families.declared()]
        assert len({metric.name for metric in metrics}) == len(metrics)
        for metric in metrics:
            assert metric.name.startswith("ebbtide_")
            assert metric.name.endswith("_total") == (metric.kind == "counter")
            assert metric.help.endswith(".")
            assert set(metric.labels) <= set(families.LABELS), metric
        used = {label for metric in metrics for label in metric.labels} | {"le"}
        assert used == set(families.LABELS)
