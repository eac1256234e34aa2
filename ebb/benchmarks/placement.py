"""`placement`: decisions over up to a hundred thousand hosts, a manager's start on a large store, reports over HTTP.

Needs no guests and no root. Hosts have 20 VMs each, and are made up (:mod:`ebb.benchmarks.placement_hosts`); the index,
the manager, its store and HTTP are the real ones.
"""

from __future__ import annotations

from ebb.benchmarks import placement_decisions, placement_manager
from ebb.benchmarks.figures import Figures
from ebb.benchmarks.passes import Pass


def run(how: Pass) -> Figures:
    """Raises BenchmarkFailed."""
    return {**placement_decisions.measure(how), **placement_manager.measure(how)}
