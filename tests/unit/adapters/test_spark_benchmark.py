"""The pure parts of the benchmark `spark`: its cases, what is kept of them, and what the runs are made into."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from app_adapters.spark.policy import SELF, VM_LEVEL
from benchmarks import runner
from benchmarks.engines import spark, spark_host
from benchmarks.engines.spark import (
    PARTS,
    PREEMPTION,
    WAYS,
    Case,
    Run,
    assemble,
    crossover,
    keep,
    kept,
    run,
    steps,
    table,
)
from benchmarks.figures import BenchmarkFailed, document, origin_now
from benchmarks.passes import Pass


def measured(case: Case, way: str, times: float, choice: str = VM_LEVEL) -> Run:
    return Run(case, way, 100 * times, 100.0, 0.5, choice, 1.5, 1.8)


def test_the_slots_and_the_vector_of_a_case() -> None:
    case = Case("als", 0.25, everywhere=False)
    assert case.name == "als_one_25_at_50"
    assert [(one.vm, one.own) for one in case.vector().values()] == [(0.25, 0.25), (0.0, 0.0)]
    assert [one.own for one in Case("als", 0.9).vector().values()] == [0.75, 0.75]


def test_the_figures_have_both_times_their_predictions_and_each_case_picked_once() -> None:
    first, second = Case("als"), Case("kmeans", everywhere=False)
    figures = assemble(
        [
            measured(first, VM_LEVEL, 1.5),
            measured(first, SELF, 2.0, SELF),  # what is said in a run that deflates itself does not count
            measured(first, PREEMPTION, 3.0),
            measured(second, VM_LEVEL, 1.2, SELF),
            measured(second, VM_LEVEL, 1.4, VM_LEVEL),
            measured(second, SELF, 1.1),
        ]
    )
    assert figures["als_undeflated_s"].value == 100
    assert [figures[f"als_50_at_50_{way}"].value for way in ("vm", "self", "preemption")] == [1.5, 2.0, 3.0]
    assert figures["kmeans_one_50_at_50_vm"].runs == (1.2, 1.4)
    assert figures["als_50_at_50_vm_rate"].value == 0.5
    assert figures["als_50_at_50_self_predicted"].value == 1.8
    names = ("policy", "always_vm", "always_self")
    assert [figures[f"{name}_right"].value for name in names] == [2, 1, 1]
    assert [figures[f"{name}_time"].value for name in (*names, "best")] == pytest.approx([1.3, 1.4, 1.55, 1.3])
    assert "als_crossover" not in figures
    lines = table(document("spark", figures, origin_now(), {})).splitlines()
    assert lines == [
        "case,way,measured,predicted",
        "als_50_at_50,vm,1.5,1.5",
        "als_50_at_50,self,2.0,1.8",
        "als_50_at_50,preemption,3.0,",
        "kmeans_one_50_at_50,vm,1.2999999999999998,1.5",
        "kmeans_one_50_at_50,self,1.1,1.8",
    ]


def test_the_crossover_is_between_the_points_around_it() -> None:
    assert crossover([(0.5, 0.3), (0.25, -0.1), (0.75, 0.1)]) == pytest.approx(0.3125)
    assert crossover([(0.25, 0.1), (0.5, 0.2)]) is None
    early = [measured(Case("als", at=at), way, t) for at, way, t in [(0.25, VM_LEVEL, 1.8), (0.25, SELF, 1.7)]]
    late = [measured(Case("als"), VM_LEVEL, 1.5), measured(Case("als"), SELF, 1.6)]
    assert assemble(early + late)["als_crossover"].value == pytest.approx(0.375)


def test_no_crossover_lies_between_points_of_two_invocations() -> None:
    """Their times are relative to two undeflated runs."""
    points = [(0.25, 1.6, 1.9), (0.5, 1.55, 1.6), (0.75, 1.4, 1.2)]
    runs = {
        at: [measured(Case("als", at=at), SELF, own), measured(Case("als", at=at), VM_LEVEL, vm)]
        for at, own, vm in points
    }
    half_way = [replace(one, undeflated_s=90.0) for one in runs[0.5]]
    assert assemble(runs[0.25] + half_way)["als_50_at_50_vm"].value == pytest.approx(160 / 90)
    assert "als_crossover" not in assemble(half_way + runs[0.75])
    assert assemble(half_way + runs[0.25] + runs[0.75])["als_crossover"].runs == (0.55,)


def test_what_was_measured_is_kept_and_not_measured_again(tmp_path: Path) -> None:
    path = tmp_path / "results" / "spark.jsonl"
    assert kept(path) == kept(None) == []
    runs = [measured(Case("sgd"), way, 1.5) for way in WAYS[:2]]
    keep(path, runs)
    assert kept(path) == runs
    assert steps(["sgd"], Pass(runs=1), runs) == [(Case("sgd"), PREEMPTION)]
    assert len(steps(["sgd"], Pass(runs=2), runs)) == 4
    assert len(steps(list(PARTS), Pass(runs=1), [])) == 17
    assert len(steps(list(PARTS), Pass(quick=True), [])) == 9


def test_an_unknown_part_is_named() -> None:
    with pytest.raises(BenchmarkFailed, match="no part nothing; there are kmeans, als, sgd, sweep, one"):
        run(Pass(parts=("nothing",)))


def test_where_and_when_a_run_was_measured_stays_with_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    old = {"machine": {"cpu": "old"}, "date": "2026-01-01T00:00:00+00:00", "version": "0.1"}
    now = {"machine": {"cpu": "new"}, "date": "2026-02-01T00:00:00+00:00", "version": "0.2"}
    monkeypatch.setattr(runner, "alone", lambda report: contextlib.nullcontext("nobody"))
    monkeypatch.setattr(spark, "origin_now", lambda: now)
    monkeypatch.setattr(runner, "origin_now", lambda: now)
    # Of a version that did not keep it.
    row = {name: value for name, value in asdict(measured(Case("sgd"), VM_LEVEL, 1.5)).items() if name not in old}
    (tmp_path / "spark.jsonl").write_text(json.dumps(row) + "\n")
    how = Pass(runs=1, output=tmp_path, parts=("sgd",))
    monkeypatch.setattr(spark, "steps", lambda *given: [])
    (tmp_path / "spark.json").write_text(json.dumps({**old, "figures": {}}))
    before = runner.write(runner.run("spark", how), tmp_path).read_text()
    assert {name: json.loads(before)[name] for name in old} == old
    assert runner.write(runner.run("spark", how), tmp_path).read_text() == before

    monkeypatch.setattr(spark, "steps", lambda *given: [(Case("sgd"), SELF)])
    monkeypatch.setattr(spark, "spark_host", lambda cores: contextlib.nullcontext())
    monkeypatch.setattr(spark.Runs, "undeflated", lambda *given: 100.0)
    monkeypatch.setattr(spark.Runs, "deflated", lambda *given: measured(Case("sgd"), SELF, 1.2))
    made = runner.run("spark", how)
    assert {name: made[name] for name in (*old, "since")} == {**now, "since": old["date"]}
    assert [one.version for one in kept(tmp_path / "spark.jsonl")] == ["0.1", "0.2"]
    assert "quick" not in made


def test_what_a_killed_benchmark_left_in_the_groups_ends_before_the_next_begins(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(spark_host, "CGROUPS", tmp_path)
    monkeypatch.setattr(Path, "rmdir", shutil.rmtree)
    found = SimpleNamespace(submodule_search_locations=["/nowhere"])
    monkeypatch.setattr("importlib.util.find_spec", lambda name: found)
    # As under a cgroup, whose name does not depend on who made it.
    monkeypatch.setattr(os, "getpid", lambda: 1)
    group = spark_host.SparkHost(tmp_path, 0.8)._group("localhost")
    group.mkdir()
    with subprocess.Popen(["sleep", "60"]) as left:
        (group / "cgroup.procs").write_text(f"{left.pid}\n")
        monkeypatch.setattr(os, "getpid", lambda: 2)
        host = spark_host.SparkHost(tmp_path, 0.8)
        host._master_command = ["true"]
        try:
            host.start()
            assert left.wait(10) == -signal.SIGKILL
            assert not (group / "cgroup.procs").exists()
        finally:
            left.kill()
            for process in host._processes:
                process.wait()
            host._log.close()
