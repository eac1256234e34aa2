"""The pure parts of the benchmarks: figures, the recorder, the fake libvirt, CPU settings, the swap file's checks."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import statistics
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import psutil
import pytest
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from benchmarks.__main__ import app
from benchmarks.caches import memcached
from benchmarks.deflating import burst, cpu, latency, levels, neighbours, side_by_side, throughput, together
from benchmarks.deflating.steady_arrivals import A_DAY, BATCHES, HOST_GIB, arrivals
from benchmarks.figures import BenchmarkFailed, Figure, document, origin_now, ratios
from benchmarks.host import swapfile
from benchmarks.host.bench_host import run_async, terminable
from benchmarks.host.recorder import (
    CallCounter,
    Recorder,
    RecordingHypervisor,
    StallMonitor,
    Step,
    outside,
    record_guest,
    spent,
)
from benchmarks.host.slow_libvirt import Moving, Slowness
from benchmarks.passes import Pass
from benchmarks.runner import ALL
from benchmarks.simulating import peers, simulator_run
from ebbtide.deflation.bounds import Bound
from ebbtide.deflation.cascade.instructions import Outcome
from ebbtide.deflation.ledger import Layer, LedgerEntry
from ebbtide.deflation.resources import ResourceVector
from ebbtide.simulator.inputs.batches import JobBatch
from ebbtide.simulator.inputs.traces import Trace


def step(name: str, began_s: float = 0.0, seconds: float = 0.0, *arguments: Any) -> Step:
    return Step(name, arguments, began_s, seconds)


# --- figures ---------------------------------------------------------------------------------------------------------


@given(st.lists(st.floats(0.001, 1e6), min_size=1, max_size=9))
def test_a_figure_is_the_median_of_its_runs(runs: list[float]) -> None:
    figure = Figure.over(runs, "s", "nothing")
    assert figure.value == statistics.median(figure.runs)
    assert len(figure.runs) == len(runs)
    assert figure.value == pytest.approx(statistics.median(runs), abs=1e-6)


def test_a_figure_without_runs_is_an_error() -> None:
    with pytest.raises(ValueError, match="no runs"):
        Figure.over([], "s", "nothing")


def test_a_ratio_is_taken_within_each_run() -> None:
    assert ratios([2.0, 30.0, 4.0], [1.0, 10.0, 8.0]) == [2.0, 3.0, 0.5]
    with pytest.raises(ValueError, match="zip"):
        ratios([1.0, 2.0], [1.0])


def test_a_document_has_the_keys_that_docs_and_readers_count_on() -> None:
    found = document("cascade", {"x": Figure.over([3.0, 1.0, 2.0], "ratio", "y")}, origin_now(), {"mean_cores": 0.1})
    assert set(found) == {"name", "machine", "date", "version", "beside", "figures"}
    assert set(found["machine"]) == {"cpu", "cpus", "memory_mib", "kernel", "python"}
    assert found["figures"] == {"x": {"value": 2.0, "unit": "ratio", "of": "y", "runs": [3.0, 1.0, 2.0]}}
    json.dumps(found)


def test_the_number_of_runs_reaches_the_benchmark_and_its_file(tmp_path: Path) -> None:
    done = CliRunner().invoke(app, ["policies", "--runs", "6", "--output", str(tmp_path), "--json"])
    assert done.exit_code == 0
    (figure,) = json.loads((tmp_path / "policies.json").read_text())["figures"].values()
    assert len(figure["runs"]) == 6


def test_every_benchmark_can_be_run_by_name() -> None:
    hosts = {"policies", "cascade", "cpu", "burst", "throughput", "latency", "levels", "cold", "idle", "steady"}
    adapters = {"memcached", "jvm", "spark", "together"}
    managers = {"placement", "decisions", "metrics-manager", "history", "history-cost", "page", "top"}
    hosts |= {"metrics-agent"}
    assert set(ALL) == hosts | adapters | managers | {"matcher", "simulator", "tasks", "tasks-simulated"}


def test_answers_without_other_work_are_those_of_own_cpu_time_the_quota_and_requests_before() -> None:
    # Due at 0, 1 and 5 s; of the first one's answer 3 s were other work's, of the second one's 2 s the quota's.
    rows = [[0.0, 3.5, 0.5, 3.0, 0.0], [1.0, 5.0, 0.5, 2.0, 2.0], [5.0, 1.5, 0.5, 0.0, 0.0]]
    assert burst.without_others(rows) == [0.5, 2.5, 0.5]
    # One that has to wait for those before it does so however late the machine was.
    assert burst.without_others([[0.0, 9.0, 2.0, 0.0, 0.0], [1.0, 9.0, 1.0, 0.0, 0.0]]) == [2.0, 2.0]


def test_a_day_of_arrivals_is_the_traces_in_proportion() -> None:
    day = arrivals(3, 86.4, 1280.0, 2.0)
    assert day == arrivals(3, 86.4, 1280.0, 2.0) != arrivals(4, 86.4, 1280.0, 2.0)
    assert len({one.at_s for one in day}) == A_DAY
    assert [one.at_s for one in day] == sorted(one.at_s for one in day)
    seen = {(gib * 1280 / HOST_GIB, round(max(stays_s / 1000, 2.0), 9)) for _, gib, stays_s in BATCHES}
    assert {(one.memory_mib, round(one.stays_s, 9)) for one in day} <= seen


# --- recorder --------------------------------------------------------------------------------------------------------


async def test_calls_of_a_hypervisor_are_recorded_with_their_arguments_and_seconds() -> None:
    class Real:
        name = "real"

        async def set_quota(self, domain: str, cores: float | None) -> str:
            await asyncio.sleep(0)
            return f"{domain} {cores}"

        async def read(self, domain: str) -> None:
            raise RuntimeError("gone")

        def on_lifecycle(self) -> str:
            return "not a call of the port that takes time"

    times = iter([1.0, 3.5, 10.0, 10.25])
    recorder = Recorder(clock=lambda: next(times))
    hypervisor = RecordingHypervisor(Real(), recorder)
    assert await hypervisor.set_quota("ebb-h.vm", cores=0.5) == "ebb-h.vm 0.5"
    with pytest.raises(RuntimeError):
        await hypervisor.read("ebb-h.vm")
    assert hypervisor.on_lifecycle().startswith("not")
    assert recorder.take() == [Step("set_quota", (0.5,), 1.0, 2.5), Step("read", (), 10.0, 0.25)]
    assert recorder.take() == []


async def test_calls_of_a_guest_are_recorded_and_still_answered() -> None:
    async def call(method: str, params: Any, answer: type, limit_s: float, breaks: bool) -> str:
        return f"{method} {limit_s} {breaks}"

    link, recorder = SimpleNamespace(call=call), Recorder()
    record_guest(link, recorder)
    assert await link.call("cpus.set", {"online": [0]}, dict, 5.0, breaks=False) == "cpus.set 5.0 False"
    (found,) = recorder.take()
    assert (found.name, found.arguments) == ("cpus.set", ({"online": [0]},))


def test_the_time_of_a_deflation_is_split_among_its_calls_and_the_rest() -> None:
    steps = [
        step("write_intent", 0.0, 0.5),
        step("status", 0.5, 1.0),
        step("read", 1.5, 0.25),
        step("application.deflate", 2.0, 1.0),
        step("set_plugged", 3.0, 4.0),
        step("cpus.set", 7.0, 1.0),
        step("prepare_start", 8.0, 0.25),
    ]
    assert spent(steps, 10.0) == {
        "intents": 0.5,
        "readings": 1.25,
        "application": 1.0,
        "devices": 5.0,
        "other calls": 0.25,
        "rest": 2.0,
    }


def test_calls_that_overlap_leave_the_rest_of_the_time_in_which_there_was_none() -> None:
    steps = [
        step("application.status", 1.0, 4.0),
        step("set_plugged", 2.0, 1.0),
        step("status", 4.0, 2.0),
        step("set_balloon", 8.0, 1.0),
    ]
    assert spent(steps, 10.0) == {"application": 4.0, "devices": 2.0, "readings": 2.0, "rest": 4.0}


def test_time_outside_calls_that_move_the_vm_is_told_alone_and_with_other_calls_beside_these() -> None:
    steps = [
        step("status", 0.5, 0.5),
        step("application.deflate", 1.0, 2.0),
        step("read", 2.5, 1.0),
        step("write_intent", 2.75, 0.5),
        step("set_plugged", 4.0, 4.0),
        step("status", 8.0, 1.0, {"until_total_mib": 700.0}),
    ]
    # Nothing at all in 0-0.5, 3.5-4 and 9-10; only readings in 0.5-1 and 3-3.5; a reading beside a move in 2.5-3.
    assert outside(steps, 10.0) == (3.0, 3.5)
    assert outside([], 2.0) == (2.0, 2.0)


@pytest.mark.parametrize("name", ["cold.reclaim", "set_vcpus", "set_guest_cpus", "cpus.set", "set_plugged"])
def test_a_guest_gives_memory_or_cpus_by_any_call_that_moves_its_vm(name: str) -> None:
    assert outside([step(name, 1.0, 8.0)], 10.0) == (2.0, 2.0)


def test_calls_of_libvirt_are_counted_and_names_are_not() -> None:
    class Domain:
        def name(self) -> str:
            return "low"

        def XMLDesc(self) -> str:
            return "<domain/>"

    class Connection:
        def lookupByName(self, name: str) -> Domain:
            return Domain()

        def listAllDomains(self) -> list[Domain]:
            return [Domain(), Domain()]

    calls = CallCounter()
    connection = calls.wrap(Connection())
    assert connection.lookupByName("low").XMLDesc() == "<domain/>"
    assert [domain.name() for domain in connection.listAllDomains()] == ["low", "low"]
    connection.listAllDomains()[0].XMLDesc()
    assert calls.calls == {"lookupByName": 1, "XMLDesc": 2, "listAllDomains": 2}
    calls.clear()
    assert not calls.calls


async def test_a_stall_of_the_loop_is_seen() -> None:
    import time

    async with StallMonitor() as monitor:
        await asyncio.sleep(0.02)
        time.sleep(0.2)  # noqa: ASYNC251 - this is the stall
        await asyncio.sleep(0.02)
    assert monitor.longest_s > 0.15


# --- the fake libvirt ------------------------------------------------------------------------------------------------


def test_a_size_of_the_fake_gets_there_in_as_many_looks_as_it_is_told() -> None:
    moving = Moving(512.0, 512.0)
    moving.ask(128.0, 3)
    assert [moving.look() for _ in range(5)] == [384.0, 256.0, 128.0, 128.0, 128.0]


def test_the_real_agent_deflates_vms_over_the_fake_with_as_many_calls_as_are_wanted() -> None:
    few = asyncio.run(side_by_side._deflate(3, Slowness(0.0, 1))).calls
    assert few <= 100, "no reading costs more calls than it must"
    more = side_by_side.looks_for(few + 10)
    assert more > 1
    # What else is read while a size moves is a look at it, too, so that no two runs are quite the same.
    assert asyncio.run(side_by_side._deflate(1, Slowness(0.0, more))).calls > few


# --- CPU -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("share", cpu.SHARES)
@pytest.mark.parametrize("nominal", [1.0, 2.0, 4.0])
def test_every_way_to_deflate_the_cpu_leaves_the_same_cores(share: float, nominal: float) -> None:
    settings = {way: cpu.setting(way, nominal, share) for way in cpu.WAYS}
    for found in settings.values():
        assert found.cores == pytest.approx(nominal * (1 - share))
    assert settings["quota"].online == cpu.VCPUS
    assert settings["off-lining"].quota == nominal / cpu.VCPUS
    assert settings["both"].online <= settings["off-lining"].online


def test_a_run_measures_equal_settings_once_and_the_next_one_in_the_other_order() -> None:
    ways = {(way, share): cpu.setting(way, 2.0, share) for way in cpu.WAYS for share in cpu.SHARES}
    assert ways["off-lining", 0.75] == ways["both", 0.75]
    first = cpu.in_turn(ways.values(), 0)
    assert len(first) == len(set(first)) == len(ways) - 1
    assert cpu.in_turn(ways.values(), 1) == first[::-1]


# --- being ended -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("ended_by", [signal.SIGTERM, signal.SIGHUP])
def test_a_benchmark_that_is_ended_cleans_up_while_its_agent_still_works(ended_by: signal.Signals) -> None:
    found = []

    async def agent() -> None:
        await asyncio.Event().wait()

    async def work() -> None:
        working = asyncio.create_task(agent(), name="agent")
        try:
            asyncio.get_running_loop().call_soon(os.kill, os.getpid(), ended_by)
            await asyncio.Event().wait()
        finally:
            await asyncio.sleep(0)
            found.append(working.cancelling())

    numbers = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
    # Whoever started the tests may have it ignored, and then so does a benchmark.
    before = signal.signal(signal.SIGHUP, lambda number, frame: None)
    handlers = [signal.getsignal(number) for number in numbers]
    with pytest.raises(KeyboardInterrupt), terminable(), contextlib.suppress(TimeoutError):
        run_async(asyncio.wait_for(work(), 20))
    assert found == [0]
    assert [signal.getsignal(number) for number in numbers] == handlers
    signal.signal(signal.SIGHUP, before)


# --- latency ---------------------------------------------------------------------------------------------------------


def outcome(asked_mib: float, taken_mib: float, seconds: float) -> Outcome:
    before, target = Bound(2, None, 1024.0, 1024.0), ResourceVector(cpu_cores=2, memory_mib=2048 - asked_mib)
    after = Bound(2, None, 1024.0, 1024.0 - taken_mib)
    entry = LedgerEntry(Layer.APPLICATION, "memory_mib", asked_mib, asked_mib, 0.0, seconds, "")
    return Outcome(before, after, target, (entry,), ResourceVector(), seconds, "")


def test_latencies_are_compared_only_where_both_got_there() -> None:
    found = {
        latency.Case(0.1, True): [outcome(200, 200, 2.0), outcome(200, 200, 4.0)],
        latency.Case(0.1, False): [outcome(200, 200, 6.0), outcome(200, 200, 8.0)],
        latency.Case(0.5, True): [outcome(1000, 1000, 5.0), outcome(1000, 1000, 5.0)],
        latency.Case(0.5, False): [outcome(1000, 1000, 9.0), outcome(1000, 250, 1.0)],
    }
    alone = [outcome(1000, 1000, 4.0), outcome(1000, 500, 4.0)]
    application = [outcome(1000, 0, 2.5), outcome(1000, 0, 2.0)]
    after = [outcome(1000, 1000, 5.0), outcome(1000, 1000, 2.5)]
    moved_mib = {latency.ALONE: [10.0, 10.0], latency.AFTER: [600.0, 800.0], "with_application_50": [700.0, 900.0]}
    figures = latency.figures(latency.Found(found, alone, application, after, moved_mib), "here")
    assert figures["without_to_with_10"].runs == (3.0, 2.0)
    assert "without_to_with_50" not in figures
    assert figures["without_application_50_reached"].runs == (1.0, 0.25)
    assert figures["with_application_50_s"].value == 5.0
    assert figures["with_application_50_to_virtio_mem"].runs == (0.8, 1.6)
    assert figures["virtio_mem_reached"].runs == (1.0, 0.5)
    assert figures["application_alone_s"].runs == (2.5, 2.0)
    assert figures["with_application_50_to_slower_alone"].runs == (1.0, 2.0)
    assert figures["with_application_50_moved_mib"].runs == (700.0, 900.0)
    assert figures["virtio_mem_after_application_s"].runs == (5.0, 2.5)


def test_what_the_cascade_is_held_against_finds_the_guest_as_it_does() -> None:
    pair = [latency.Case(0.5, True, apart=True), latency.Case(0.5, True)]
    without = latency.Case(0.5, False)
    for quick in (True, False):
        for number in range(2):
            order = latency.cases(quick, number)
            anew = [
                case for before, case in zip([None, *order], order, strict=False) if latency.begins_anew(before, case)
            ]
            first, second = (order.index(case) for case in (pair if number == 0 else pair[::-1]))
            # The first of the two after an unmeasured deflation of that share, the other after the first one.
            assert second == first + 1
            assert order[first] in anew
            assert order[second] not in anew
            # So does the one without the application.
            assert without in anew or order[order.index(without) - 1] in pair


def test_latencies_are_compared_under_the_same_cap_and_neither_is_always_first() -> None:
    named = [case.name for case in latency.cases(quick=False)]
    assert len(set(named)) == len(named)
    assert named[-1] == "without_application_50_500_reads"
    compared = [case for case in latency.cases(quick=False) if not case.apart]
    assert {case.asked for case in compared[::2]} == {True, False}
    for quick in (True, False):
        assert latency.cases(quick, 1) == latency.cases(quick, 0)[::-1]
        assert latency.cases(quick, 2) == latency.cases(quick, 0)


# --- levels ----------------------------------------------------------------------------------------------------------


def test_hits_of_both_levels_are_compared_with_the_hypervisors_of_the_same_run_each_by_its_own_full_size() -> None:
    found = {
        ("guest", 0.5): [levels.Found(1000.0, {0: 900.0}, 0.75, 0), levels.Found(1000.0, {0: 1000.0}, 0.5, 1)],
        ("hypervisor", 0.5): [levels.Found(1000.0, {0: 500.0, 50: 50.0}, 1.0, 0)] * 2,
        ("both", 0.5): [levels.Found(500.0, {0: 400.0, 50: 100.0}, 1.0, 0)] * 2,
    }
    made = levels.figures(found)
    assert made["guest_50_of_full"].runs == (0.9, 1.0)
    assert made["guest_50_reached"].runs == (0.75, 0.5)
    assert made["guest_50_killed"].runs == (0.0, 1.0)
    assert "guest_50_50_reads_of_full" not in made
    assert made["hypervisor_50_50_reads_of_full"].value == 0.05
    assert made["both_to_hypervisor_50"].runs == (1.6, 1.6)
    assert made["both_to_hypervisor_50_50_reads"].runs == (4.0, 4.0)


async def test_a_load_that_stands_still_at_full_size_is_no_figure(monkeypatch: pytest.MonkeyPatch) -> None:
    async def in_guest(guest: Any, script: str) -> str:
        return "1.0 80 80\n1.0 80 80\n" if levels.COUNTS in script else "oom_kill 0\n"

    monkeypatch.setattr(levels, "in_guest", in_guest)
    with pytest.raises(BenchmarkFailed, match="stands still at full size"):
        await levels._once(SimpleNamespace(), None, Path(), "guest", 0.5, 1.0)  # type: ignore[arg-type]


def test_hits_are_not_compared_with_none() -> None:
    found = {
        ("hypervisor", 0.5): [levels.Found(1000.0, {0: 500.0, 50: 0.0}, 1.0, 0)],
        ("both", 0.5): [levels.Found(1000.0, {0: 400.0, 50: 100.0}, 1.0, 0)],
    }
    made = levels.figures(found)
    assert "both_to_hypervisor_50" in made
    assert "both_to_hypervisor_50_50_reads" not in made


# --- throughput ------------------------------------------------------------------------------------------------------


def test_what_deflation_gives_is_told_beside_the_same_two_vms_undeflated() -> None:
    row = {"cache": (100.0, 0.0), "batch": (0.0, 40.0), "undeflated": (60.0, 28.0), "deflated": (90.0, 20.0)}
    made = throughput.figures([row], "batch", ", deflated")
    assert made["total"].value == 1.4
    assert made["total_undeflated"].value == 1.3
    assert made["total_to_undeflated"].value == pytest.approx(1.4 / 1.3, abs=1e-6)
    assert made["batch_deflated_together"].value == 0.5


async def test_loads_whose_windows_may_lie_apart_are_no_figure(monkeypatch: pytest.MonkeyPatch) -> None:
    times = iter([0.0, 30.0, 100.0, 135.0])

    async def in_guest(guest: Any, script: str) -> str:
        return "5.0"

    monkeypatch.setattr(throughput, "in_guest", in_guest)
    monkeypatch.setattr("benchmarks.deflating.throughput.time", SimpleNamespace(monotonic=lambda: next(times)))
    guest: Any = None
    assert await throughput._rate(guest, "", 10.0) == 5.0
    with pytest.raises(BenchmarkFailed, match="took up to 9"):
        await throughput._rate(guest, "", 10.0)


# --- neighbours ------------------------------------------------------------------------------------------------------


def test_what_two_guests_need_of_the_cores_stands_beside_their_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "cpu_count", lambda: 2)
    turns = neighbours.Turns(
        alone=[neighbours.Deflated(4.0, 4.0)],
        both=[neighbours.Deflated(6.0, 10.0)],
        busy=[neighbours.Deflated(8.0, 4.0)],
        apart_alone=[neighbours.Deflated(5.0, 5.0)],
        apart_both=[neighbours.Deflated(6.0, 10.0)],
        dropped=2,
    )
    figures = neighbours.figures(turns)
    assert figures["two_vms_to_one"].value == 1.5
    assert figures["two_vms_least_to_one"].value == 1.25
    assert figures["busy_to_quiet"].value == 2.0
    assert figures["busy_guests_cores"].value == 0.5
    assert figures["two_vms_apart_to_one"].value == 1.2
    assert figures["two_vms_runs_dropped"].value == 2


def test_guests_on_cores_of_their_own_are_kept_there_with_all_threads_and_no_longer_than_that() -> None:
    cores = os.sched_getaffinity(0)
    program = (
        "import threading, time; threading.Thread(target=time.sleep, args=(60,)).start(); print(flush=True); input()"
    )
    with contextlib.ExitStack() as stack:
        running = []
        for _ in range(2):
            popen = subprocess.Popen([sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
            stack.callback(popen.wait)
            stack.callback(popen.kill)
            assert popen.stdout is not None
            popen.stdout.readline()
            running.append(psutil.Process(popen.pid))
        with neighbours.apart_on_cores(running):
            kept = [{frozenset(os.sched_getaffinity(each.id)) for each in process.threads()} for process in running]
        assert [len(sets) for sets in kept] == [1, 1]
        assert sorted(len(next(iter(sets))) for sets in kept) == [1, 1]
        assert kept[0] != kept[1]
        assert all(os.sched_getaffinity(each.id) == cores for process in running for each in process.threads())
    with (
        pytest.raises(BenchmarkFailed, match="need as many cores"),
        neighbours.apart_on_cores([psutil.Process()] * 999),
    ):
        pass


def test_busy_loops_end_with_what_they_were_beside() -> None:
    before = {child.pid for child in psutil.Process().children()}
    with neighbours.busy_loops(2):
        begun = {child.pid for child in psutil.Process().children()} - before
    assert len(begun) == 2
    assert not {child.pid for child in psutil.Process().children()} & begun


# --- swap ------------------------------------------------------------------------------------------------------------


def test_swap_that_the_host_has_is_used_as_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    swaps = tmp_path / "swaps"
    swaps.write_text("Filename Type Size Used Priority\n/dev/sda2 partition 4194304 0 -2\n")
    monkeypatch.setattr(swapfile, "PROC_SWAPS", swaps)
    with swapfile.swap(tmp_path / "ours", 1024, print) as present_mib:
        assert present_mib == 4096
        assert not (tmp_path / "ours").exists()


def test_our_swap_is_found_by_its_real_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to("real")
    (tmp_path / "swaps").write_text(f"Filename\n{tmp_path}/real/ours file 1024 0 -2\n")
    monkeypatch.setattr(swapfile, "PROC_SWAPS", tmp_path / "swaps")
    said: list[str] = []

    def run(argv: list[str], **named: Any) -> subprocess.CompletedProcess[str]:
        said.append(argv[0])
        return subprocess.CompletedProcess(argv, 0, "", "")

    monkeypatch.setattr(subprocess, "run", run)
    swapfile.bring_back(tmp_path / "link/ours")
    swapfile.clear(tmp_path / "link/ours")
    assert said == ["swapoff", "swapon", "swapoff"]


@pytest.mark.parametrize("benchmark", [latency, levels, memcached, together])
def test_what_has_to_read_swap_back_is_not_measured_with_the_hosts_own(
    benchmark: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def measure(*arguments: Any) -> None:
        raise AssertionError("it is measured")

    swaps = tmp_path / "swaps"
    swaps.write_text("Filename Type Size Used Priority\n/dev/sda2 partition 4194304 0 -2\n")
    monkeypatch.setattr(swapfile, "PROC_SWAPS", swaps)
    ground = SimpleNamespace(lab=SimpleNamespace(directory=tmp_path / "lab"))
    monkeypatch.setattr(benchmark, "bench", lambda capacity, report: contextlib.nullcontext(ground), raising=False)
    monkeypatch.setattr(latency, "room_mib", lambda most: most)
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    monkeypatch.setattr(benchmark, "group", measure, raising=False)

    monkeypatch.setattr(benchmark, "_measure", measure, raising=False)
    with pytest.raises(BenchmarkFailed, match="4096 MiB of swap of its own"):
        benchmark.run(Pass(quick=True))


def test_a_host_that_cannot_have_swap_is_measured_without(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    swaps = tmp_path / "swaps"
    said: list[str] = []
    swaps.write_text("Filename Type Size Used Priority\n")
    monkeypatch.setattr(swapfile, "PROC_SWAPS", swaps)
    with swapfile.swap(tmp_path / "ours", 10**9, said.append) as present_mib:
        assert present_mib == 0
    assert "no swap could be made" in said[0]
    assert not (tmp_path / "ours").exists()


def test_the_wait_of_a_guest_that_answers_when_it_has_given_memory_is_the_devices() -> None:
    waits = step("status", 0.0, 2.0, {"brief": True, "until_total_mib": 900.0, "wait_s": 1.0})
    found = spent([waits, step("status", 2.0, 0.5, {"brief": True})], 3.0)
    assert found == {"devices": 2.0, "readings": 0.5, "rest": 0.5}


def test_a_peer_reads_the_same_jobs_as_we_do(tmp_path: Path) -> None:
    log = tmp_path / "log.swf"
    log.write_text(peers.swf(500, 1))
    jobs = [batch for batch in Trace(log) if isinstance(batch, JobBatch)]
    assert sum(len(batch.submit_s) for batch in jobs) == 500
    runtime_s, cores = (np.concatenate([getattr(b, name) for b in jobs]) for name in ("runtime_s", "cpu_cores"))
    assert np.all(runtime_s >= 1), "AccaSim counts whole seconds"
    assert np.all(runtime_s == np.floor(runtime_s))
    assert set(cores) == set(simulator_run.JOB_CORES)


def test_where_no_peer_is_installed_there_is_no_figure_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert peers.measure(Pass(report=said.append)) == {}
    assert "AccaSim is not installed" in said[0]
