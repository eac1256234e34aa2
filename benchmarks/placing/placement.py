"""`placement`: from a request to a placement's end, while hosts report. `decisions`: the index over up to a hundred
thousand hosts, and a manager's start on a large store.

Neither needs guests or root. Hosts have 20 VMs each, and are made up (`benchmarks.placing.placement_hosts`); the index,
the manager, its store and HTTP are the real ones.
"""

from __future__ import annotations

from benchmarks.figures import Figures
from benchmarks.passes import Pass
from benchmarks.placing import placement_decisions, placement_manager


def run(how: Pass) -> Figures:
    """Raises BenchmarkFailed."""
    return placement_manager.measure_reports(how)


def decisions(how: Pass) -> Figures:
    """Raises BenchmarkFailed."""
    return {**placement_decisions.measure(how), **placement_manager.measure_start(how)}
