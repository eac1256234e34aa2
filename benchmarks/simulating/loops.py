"""The first run of a policy, and scheduling that knows of machine intervals, each in its own process.

`python -m benchmarks.simulating.loops first POLICY` and `... intervals POLICY DAYS`. Seconds are CPU time.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable
from typing import Any, Final

from benchmarks.simulating.simulator_run import CORES, jobs, peak_kib
from ebbtide.simulator.intervals import model as intervals
from ebbtide.simulator.jobs.engine import Engine, Machines
from ebbtide.simulator.jobs.results import Results

#: Machines of the thesis on intervals (Wijayawardana 2025), and its jobs.
CASE: Final = {"machines": 1000, "durations": "zipf", "exponent": 1.5, "load": 0.8}


def first(policy: str) -> dict[str, Any]:
    """The first run of a process, over next to nothing."""
    began = time.process_time()
    if policy == "intervals":
        run_intervals("ias", 0.01, machines=4)
    else:
        _engine(policy).run()
    return {"seconds": time.process_time() - began, "peak_mib": peak_kib() / 1024}


def _engine(policy: str) -> Engine:
    machines = Machines(2, CORES)
    if policy == "waiting":
        from ebbtide.simulator.waiting.policy import Options, elastic
        from ebbtide.simulator.waiting.policy import policy as waiting

        return Engine(jobs(10, 2, 1), machines, policy=waiting(Options(), machines), elastic=elastic(machines))
    if policy == "live":
        from ebbtide.simulator.matching.policy import policy as matcher
        from ebbtide.simulator.matching.schemes import named

        scheme = named(policy)
        return Engine(jobs(10, 2, 1), machines, policy=matcher(scheme.predicting, scheme.matching))
    return Engine(jobs(10, 2, 1), machines, policy=policy)


def run_intervals(policy: str, days: float, **settings: Any) -> dict[str, Any]:
    """A run of the model `intervals`; its events are counted by the engine."""
    found: list[Results] = []
    case = intervals.MODEL.settings(CASE | {"policy": policy, "aggressiveness": 0.1, "days": days} | settings)
    module: Any = intervals
    inner: Callable[..., dict[str, float]] = module._figures

    def figures(results: Results, *rest: Any) -> dict[str, float]:
        found.append(results)
        return inner(results, *rest)

    began = time.process_time()
    # Not by unittest.mock: asyncio comes with it, and would count as the simulator's memory.
    module._figures = figures
    try:
        intervals.simulate(case, 1, lambda share: None)
    finally:
        module._figures = inner
    return {"seconds": time.process_time() - began, "events": found[0].events, "jobs": found[0].jobs_done}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("how", choices=("first", "intervals"))
    parser.add_argument("policy")
    parser.add_argument("days", type=float, nargs="?", default=1.0)
    given = parser.parse_args()
    if given.how == "first":
        found = first(given.policy)
    else:
        # Compiled, or loaded, before it counts.
        run_intervals(given.policy, 0.01, machines=4)
        found = run_intervals(given.policy, given.days)
    json.dump(found, sys.stdout)


if __name__ == "__main__":
    main()
