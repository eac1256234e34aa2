"""The pure parts of the benchmark `spark`: its cases, what is kept of them, and what the runs are made into."""

from __future__ import annotations

from pathlib import Path

import pytest

from app_adapters.spark.policy import SELF, VM_LEVEL
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
from benchmarks.figures import BenchmarkFailed, document
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
    lines = table(document("spark", figures, "2026-01-01", "1")).splitlines()
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
