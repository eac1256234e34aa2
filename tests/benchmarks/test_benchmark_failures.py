"""What is no figure: passes that are not to be quoted, benchmarks that fail, subjects that fell short or came late."""

from __future__ import annotations

import asyncio
import contextlib
import io
import json
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from typer.testing import CliRunner

from app_adapters.adapter import Promise, Release
from app_adapters.errors import ApplicationError
from benchmarks import runner
from benchmarks.__main__ import app
from benchmarks.caches import memcached, memcached_shrink
from benchmarks.caches.memcached_report import Row
from benchmarks.deflating import neighbours, speed, together
from benchmarks.engines import jvm
from benchmarks.figures import BenchmarkFailed, Figure
from benchmarks.host import bench_host
from benchmarks.passes import Killed, Pass
from benchmarks.placing.placement_agents import Agents, Round, Settings
from benchmarks.placing.placement_manager import RunningAgents
from benchmarks.watching import top
from ebbtide.deflation.bounds import Bound
from ebbtide.deflation.cascade.instructions import Outcome
from ebbtide.deflation.cascade.mechanisms import Mechanism
from ebbtide.deflation.resources import ResourceVector
from ebbtide.messages.common import Vector
from hostagent.errors import HypervisorError

# --- what is written, and where --------------------------------------------------------------------------------------


@pytest.mark.parametrize("words", [["--quick"], ["--runs", "4"]])
def test_what_is_not_to_be_quoted_does_not_go_where_quoted_files_are(
    words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    done = CliRunner().invoke(app, ["policies", *words])
    assert done.exit_code == 2
    assert "needs --output" in " ".join(done.output.split())
    assert not list(tmp_path.iterdir())
    assert CliRunner().invoke(app, ["policies", *words, "--output", "tried"]).exit_code == 0
    assert json.loads((tmp_path / "tried/policies.json").read_text())["quick"] is True


@pytest.mark.parametrize("error", [BenchmarkFailed("no"), ApplicationError("no"), HypervisorError("no"), OSError("no")])
def test_one_benchmark_that_fails_does_not_end_the_others_and_is_named_at_the_end(
    error: Exception, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def failing(how: Pass) -> dict[str, Figure]:
        raise error

    def measuring(how: Pass) -> dict[str, Figure]:
        return {"x": Figure.over([1.0], "s", "y")}

    made = {"cascade": failing, "cpu": measuring, "idle": failing}
    monkeypatch.setattr("benchmarks.__main__.ALL", made)
    monkeypatch.setattr(runner, "ALL", made)
    done = CliRunner().invoke(app, ["--output", str(tmp_path)])
    assert done.exit_code == 1
    assert "cascade: no" in done.output
    assert "failed: cascade, idle" in done.output
    assert [path.name for path in tmp_path.iterdir()] == ["cpu.json"]


# --- begun again -----------------------------------------------------------------------------------------------------


def dying(times: int) -> Callable[..., None]:
    left = iter(range(times))

    def measure(*given: Any) -> None:
        if next(left, None) is not None:
            raise Killed("gone")

    return measure


@pytest.fixture
def root(monkeypatch: pytest.MonkeyPatch) -> None:
    """As root on a machine with swap, of which nothing is used."""
    monkeypatch.setattr("os.geteuid", lambda: 0)
    for module in (jvm, together, memcached):
        for name in ("group", "memory_group"):
            monkeypatch.setattr(module, name, lambda *given: contextlib.nullcontext(), raising=False)
        monkeypatch.setattr(module, "swap", lambda *given, **named: contextlib.nullcontext(10**6))
    monkeypatch.setattr(jvm, "compile_mix", lambda directory: None)


@pytest.mark.usefixtures("root")
def test_what_was_begun_again_since_the_kernel_had_killed_it_is_told_by_a_figure(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    window, dies = jvm.Window(1.0, 1.0, 1.0, 1.0, 1.0), dying(2)
    windows = {(follows, share): window for follows in (True, False) for share in (1.0, *jvm.SHARES)}
    monkeypatch.setattr(jvm, "_run", lambda *given: dies() or windows)
    assert jvm.run(Pass(runs=2))["begun_again"].runs == (2.0, 0.0)

    hits, answers, pair = dying(1), dying(2), together.Pair(1.0, 1.0)
    monkeypatch.setattr(together, "_memcached", lambda *given: hits() or pair)
    monkeypatch.setattr(together, "_jvm", lambda *given: answers() or together.Service(window, window, 0.5))
    monkeypatch.setattr(together, "_compile", lambda *given: pair)
    figures = together.run(Pass(runs=2))
    assert [figures[f"{name}_begun_again"].runs for name in ("memcached", "jvm")] == [(1.0, 0.0), (2.0, 0.0)]

    arm = dying(1)

    def measure(inside: Any, case: memcached.Case, share: float, arm_name: str, number: int, how: Pass) -> list[Any]:
        arm()
        return [Row(case.name, arm_name, share, number, 1.0, 1.0, 1.0, 1.0, hits_s=1.0, cap=cap) for cap in case.caps]

    monkeypatch.setattr(memcached, "_measure", measure)
    monkeypatch.setattr(memcached, "shrink_latency", lambda quick: {"seconds": 1.0})
    assert memcached.run(Pass(runs=2, quick=True))["begun_again"].runs == (1.0, 0.0)


# --- what fell short -------------------------------------------------------------------------------------------------


@pytest.fixture
def short(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A VM whose every change of size falls short."""

    async def finish(agent: Any, operation: Any) -> Any:
        shortfall = Vector(memory_mib=100.0)
        return SimpleNamespace(vms=[SimpleNamespace(shortfall=shortfall, sentence="100 MiB are missing")])

    async def target(name: str, command: Any) -> None:
        pass

    monkeypatch.setattr(bench_host, "finish", finish)
    intent = SimpleNamespace(generation=1)
    return SimpleNamespace(sizes=SimpleNamespace(target=target), vm=SimpleNamespace(name="low", intent=intent))


async def test_a_size_that_was_not_reached_fails_unless_who_asks_looks_at_it(short: Any) -> None:
    size = ResourceVector(1, 512)
    with pytest.raises(BenchmarkFailed, match="low did not get to its size: 100 MiB are missing"):
        await bench_host.resize(short, short.vm, size)
    assert (await bench_host.resize(short, short.vm, size, may_fall_short=True)).sentence == "100 MiB are missing"


async def test_a_vm_that_does_not_get_back_ends_what_is_measured_on_it(
    short: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def nothing(*given: Any) -> None:
        pass

    monkeypatch.setattr(neighbours, "fill", nothing)
    monkeypatch.setattr(neighbours, "SETTLE_S", 0.0)
    monkeypatch.setattr(neighbours, "qemu_pid", lambda domain: None)
    short.vm.domain = "low"
    with pytest.raises(BenchmarkFailed, match="low did not get to its size"):
        await neighbours._deflate(None, short, [short.vm], Pass())  # type: ignore[arg-type]


async def test_a_means_that_falls_short_has_no_speed(monkeypatch: pytest.MonkeyPatch) -> None:
    async def in_guest(*given: Any) -> str:
        return ""

    class Driver:
        async def take(self, size: ResourceVector, means: Any) -> Outcome:
            before, after = Bound(2, None, 1536.0, 0.0), Bound(2, None, 1472.0, 0.0)
            return Outcome(before, after, size, (), ResourceVector(memory_mib=448.0), 1.0, "448 MiB are missing")

    monkeypatch.setattr(speed, "in_guest", in_guest)
    with pytest.raises(BenchmarkFailed, match="balloon fell short: 448 MiB are missing"):
        await speed._once(Driver(), None, Mechanism.BALLOON)  # type: ignore[arg-type]


def test_a_shrink_that_stays_incomplete_is_no_latency(monkeypatch: pytest.MonkeyPatch) -> None:
    server = SimpleNamespace(port=1, status_mib=lambda field: 100.0)
    client = SimpleNamespace(store=lambda keys: None, run=lambda keys: None, close=lambda: None)
    answer = Promise({}, 1.0, lambda: Release({}, "slabs", "no page came free", complete=False))
    adapter = SimpleNamespace(deflate=lambda *given: answer)

    def during(port: int, count: int, work: Callable[[], None]) -> tuple[list[int], int]:
        work()
        return [1], 0

    monkeypatch.setattr(memcached_shrink, "server", lambda *given: contextlib.nullcontext(server))
    monkeypatch.setattr(memcached_shrink, "Client", lambda *given: client)
    monkeypatch.setattr(memcached_shrink, "MemcachedAdapter", lambda *given, **named: adapter)
    monkeypatch.setattr(memcached_shrink, "_during", during)
    monkeypatch.setattr(time, "sleep", lambda seconds: None)
    with pytest.raises(BenchmarkFailed, match="was not shrunk: no page came free"):
        memcached_shrink.shrink_latency(quick=True)


# --- what came late --------------------------------------------------------------------------------------------------


def agents(answered: int) -> RunningAgents:
    result = json.dumps({"answered": answered, "refused": 0, "seconds": 10.0}).encode()
    output = io.BytesIO(b'{"port": 1}\n' + result + b"\n")
    process: Any = SimpleNamespace(stdin=io.BytesIO(), stdout=output)
    return RunningAgents(process, 100)


def test_hosts_that_report_less_often_than_is_said_are_no_measurement() -> None:
    for answered, every_s in ((475, 2.0), (1, 0.0)):
        many = agents(answered)
        many.begin(1, 10.0, 0.1, every_s)
        assert many.result()["answered"] == answered
    few = agents(474)
    few.begin(1, 10.0, 0.1, 2.0)
    with pytest.raises(BenchmarkFailed, match="only 474 of 500 reports came in time"):
        few.result()


async def test_a_connection_that_is_lost_counts_as_refused() -> None:
    async def hang_up(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.close()

    async with await asyncio.start_server(hang_up, "127.0.0.1", 0) as server:
        port = server.sockets[0].getsockname()[1]
        found = await Agents(Settings(hosts=4, connections=2, key="k"), 1).round(Round(port, 0.0, 0.0))
    assert (found["answered"], found["refused"]) == (0, 2)


def test_the_manager_without_top_is_measured_over_the_time_that_it_took(monkeypatch: pytest.MonkeyPatch) -> None:
    times, spent = iter([0.0, 40.0]), iter([1.0, 5.0])
    monkeypatch.setattr(time, "perf_counter", lambda: next(times))
    manager: Any = SimpleNamespace(port=1, cpu_s=lambda: next(spent))
    reporting: Any = SimpleNamespace(begin=lambda *given: None, result=lambda: {})
    assert top._alone(manager, reporting, 20.0) == {"manager_alone_cpu": 10.0}
