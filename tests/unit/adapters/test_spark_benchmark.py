"""The pure part of the benchmark `spark`: what the trials are made into."""

from __future__ import annotations

import pytest

from app_adapters.spark.curves import Curve, Curves
from app_adapters.spark.policy import SELF, VM_LEVEL, Decision
from benchmarks.engines.spark import Case, Trial, assemble, slots_left, table
from benchmarks.figures import document


def told(choice: str) -> Decision:
    return Decision(choice, 1.5, 1.8, "")


def test_the_slots_and_the_vector_of_a_case() -> None:
    assert [slots_left(share) for share in (0.0, 0.25, 0.5, 0.9)] == [4, 3, 2, 1]
    case = Case("als", 0.25, False)
    assert case.name == "als_one_25"
    assert [(one.vm, one.own) for one in case.vector().values()] == [(0.25, 0.25), (0.0, 0.0)]


def test_the_figures_have_both_times_their_predictions_and_the_picks() -> None:
    first, second = Case("als", 0.5, True), Case("als", 0.25, True)
    trials = [
        Trial(first, VM_LEVEL, 1.5, told(VM_LEVEL), told(SELF)),
        Trial(first, SELF, 2.0, told(VM_LEVEL), told(VM_LEVEL)),
        Trial(first, "preemption", 3.0, told(VM_LEVEL), told(VM_LEVEL)),
        Trial(second, VM_LEVEL, 1.20, told(VM_LEVEL), told(VM_LEVEL)),
        Trial(second, SELF, 1.18, told(VM_LEVEL), told(SELF)),
    ]
    curves = {"als": Curves(Curve(((0.5, 0.6),)))}
    figures = assemble(trials, {"als": [10.0, 12.0]}, curves, [3.0], {"als": [8.0, 9.0]})
    assert figures["als_undeflated_s"].value == 11
    assert figures["als_throughput_vm_50"].value == 0.6
    assert (figures["als_all_50_vm"].value, figures["als_all_50_self"].value) == (1.5, 2.0)
    assert figures["als_all_50_preemption"].value == 3.0
    assert figures["als_all_50_policy"].runs == (1.5, 1.5)
    assert figures["als_all_50_self_predicted"].value == 1.8
    assert figures["policy_right"].value == pytest.approx(0.5)
    assert figures["policy_right_or_alike"].value == 1.0
    assert figures["equations_alone_right"].value == pytest.approx(0.5)
    assert figures["equations_alone_picked_self"].value == pytest.approx(0.5)
    assert figures["restart_s"].value == 3.0
    assert figures["als_restart_s"].value == 8.5
    lines = table(document("spark", figures, "2026-01-01", "1")).splitlines()
    assert lines[:3] == [
        "case,way,measured,predicted,policy",
        "als_all_50,vm,1.5,1.5,1.5",
        "als_all_50,self,2.0,1.8,1.5",
    ]
    assert len(lines) == 6
