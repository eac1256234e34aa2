"""The benchmarks' files."""

from __future__ import annotations

import json
import statistics
from pathlib import Path
from typing import Any

from benchmarks.passes import Pass
from benchmarks.runner import run, write


def test_a_benchmark_writes_medians_of_at_least_five_runs_as_ratios(tmp_path: Path) -> None:
    path = write(run("policies"), tmp_path / "results")
    result = json.loads(path.read_text())
    assert path.name == "policies.json"
    assert set(result) == {"name", "machine", "date", "version", "beside", "figures"}
    _hold_to_the_form(result)
    assert all(len(figure["runs"]) >= 5 for figure in result["figures"].values())


def test_placement_measures_whole_placements_while_hosts_report_over_http() -> None:
    result = run("placement", Pass(runs=1, quick=True))
    _hold_to_the_form(result)
    assert {
        "reports_50_changed_per_s",
        "reported_decision_p99_ms",
        "reported_placement_p50_ms",
        "interval_placement_p50_ms",
    } <= set(result["figures"])


def test_decisions_are_measured_and_a_managers_start() -> None:
    result = run("decisions", Pass(runs=1, quick=True))
    _hold_to_the_form(result)
    assert {
        "decisions_1000_per_s", "decision_1000_p99_ms", "decision_1000_to_numpy", "growth_100_to_1000",
        "start_s", "recovery_s", "recovery_first_placement_s",
    } <= set(result["figures"])  # fmt: skip


def _hold_to_the_form(result: dict[str, Any]) -> None:
    for figure in result["figures"].values():
        assert set(figure) == {"value", "unit", "of", "runs"}
        assert figure["value"] == statistics.median(figure["runs"]) > 0
