"""The benchmarks' files."""

from __future__ import annotations

import json
import statistics
from pathlib import Path

from ebb import benchmarks


def test_a_benchmark_writes_medians_of_at_least_five_runs_as_ratios(tmp_path: Path) -> None:
    path = benchmarks.write(benchmarks.run("policies"), tmp_path / "results")
    result = json.loads(path.read_text())
    assert path.name == "policies.json"
    assert set(result) == {"name", "machine", "date", "version", "figures"}
    for figure in result["figures"].values():
        assert set(figure) == {"value", "unit", "of", "runs"}
        assert len(figure["runs"]) >= 5
        assert figure["value"] == statistics.median(figure["runs"]) > 0
