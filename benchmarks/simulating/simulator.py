"""`simulator`: events per second and peak memory of the job engine from 10^4 to 1.4x10^7 jobs, and with 100,000 nodes.

Beside it, in the same run, the same simulation in plain Python over heapq; both must find the same. Each run is a
process of its own on one core; times are its CPU time, without that of making the jobs. Needs no guests and no root.
"""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
import tempfile
from itertools import pairwise
from typing import Any, Final

from benchmarks.figures import BenchmarkFailed, Figure, Figures, ratios
from benchmarks.passes import Pass
from benchmarks.simulating.simulator_run import CORES, MACHINES, YEAR_JOBS

SIZES: Final = (10_000, 100_000, 1_000_000, YEAR_JOBS)
#: Sizes at which the plain loop runs as well.
BESIDE: Final = (100_000, 1_000_000)
NODES: Final = 100_000
NODES_JOBS: Final = 3_000_000
_LIMIT_S: Final = 1800.0

Run = dict[str, Any]


def run(how: Pass) -> Figures:
    """Raises BenchmarkFailed."""
    sizes = SIZES[:2] if how.quick else SIZES
    beside = [size for size in BESIDE if size in sizes]
    nodes, nodes_jobs = (1000, 100_000) if how.quick else (NODES, NODES_JOBS)
    ours: dict[int, list[Run]] = {size: [] for size in sizes}
    plain: dict[int, list[Run]] = {size: [] for size in beside}
    large: list[Run] = []
    cold: list[float] = []
    warm: list[float] = []
    for number in range(how.runs):
        with tempfile.TemporaryDirectory() as directory:
            cold.append(_process("simulate", 10, 2, number, directory)["first_s"])
            warm.append(_process("simulate", 10, 2, number, directory)["first_s"])
            how.report(f"run {number + 1}: compiled in {cold[-1]:.1f} s, loaded in {warm[-1]:.2f} s")
            for size in sizes:
                ours[size].append(_process("simulate", size, MACHINES, number, directory))
                how.report(f"run {number + 1}: {size} jobs: {_told(ours[size][-1])}")
                if size in plain:
                    plain[size].append(_process("plain", size, MACHINES, number, directory))
                    how.report(f"run {number + 1}: {size} jobs, plain loop: {_told(plain[size][-1])}")
                    _compare(ours[size][-1], plain[size][-1])
            large.append(_process("simulate", nodes_jobs, nodes, number, directory))
            how.report(f"run {number + 1}: {nodes_jobs} jobs on {nodes} nodes: {_told(large[-1])}")
    figures: Figures = {
        "compile_s": Figure.over(cold, "s", "CPU time of the first run of a process with nothing in numba's cache"),
        "load_s": Figure.over(warm, "s", "CPU time of the first run of a process with the loop in numba's cache"),
    }
    for size, runs in ours.items():
        where = f"{size} jobs on {MACHINES} machines of {CORES} cores, best fit; CPU time without making the jobs"
        figures |= _speed(f"jobs_{size}", runs, where)
    for size, runs in plain.items():
        figures[f"plain_{size}_to_simulator"] = Figure.over(
            ratios([r["seconds"] for r in runs], [r["seconds"] for r in ours[size]]),
            "ratio",
            f"the plain loop over heapq to the simulator, the same {size} jobs; CPU time without making them",
        )
    for few, many in pairwise(sizes):
        figures[f"growth_{few}_to_{many}"] = Figure.over(
            ratios([_per_event(r) for r in ours[many]], [_per_event(r) for r in ours[few]]),
            "ratio",
            f"time per event with {many} jobs to that with {few}; linear growth would be 1",
        )
    where = f"{nodes_jobs} jobs on {nodes} machines of {CORES} cores, best fit; CPU time without making the jobs"
    return figures | _speed(f"nodes_{nodes}", large, where)


def _speed(key: str, runs: list[Run], where: str) -> Figures:
    return {
        f"{key}_events_per_s": Figure.over([r["events"] / r["seconds"] for r in runs], "1/s", where),
        f"{key}_s": Figure.over([r["seconds"] for r in runs], "s", where),
        f"{key}_wall_s": Figure.over([r["wall_s"] for r in runs], "s", f"by the clock, with making the jobs: {where}"),
        f"{key}_inputs_s": Figure.over([r["inputs_s"] for r in runs], "s", f"making the jobs of {key}"),
        f"{key}_peak_mib": Figure.over([r["peak_mib"] for r in runs], "MiB", f"the whole process: {where}"),
        f"{key}_above_idle_mib": Figure.over(
            [r["peak_mib"] - r["before_mib"] for r in runs], "MiB", f"above the process before this run: {where}"
        ),
        f"{key}_utilisation": Figure.over([r["utilisation"] for r in runs], "ratio", f"cores used to cores: {where}"),
    }


def _per_event(found: Run) -> float:
    return float(found["seconds"] / found["events"])


def _told(found: Run) -> str:
    return f"{found['events'] / found['seconds']:,.0f} events/s, {found['peak_mib']:.0f} MiB"


def _compare(ours: Run, plain: Run) -> None:
    for name in ("jobs", "events", "most_waiting", "wait_s", "completion_s", "core_s", "ended_s"):
        if not math.isclose(ours[name], plain[name], rel_tol=1e-9, abs_tol=1e-3):
            raise BenchmarkFailed(f"the simulator and the plain loop differ: {name} is {ours[name]} and {plain[name]}")


def _process(how: str, jobs: int, machines: int, seed: int, cache: str) -> Run:
    command = [sys.executable, "-m", "benchmarks.simulating.simulator_run", how, str(jobs), str(machines), str(seed)]
    environment = os.environ | {"NUMBA_CACHE_DIR": cache}
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=_LIMIT_S, env=environment)
    except subprocess.CalledProcessError as error:
        raise BenchmarkFailed(f"{' '.join(command[2:])} failed: {error.stderr.strip()[-500:]}") from error
    except subprocess.TimeoutExpired as error:
        raise BenchmarkFailed(f"{' '.join(command[2:])} took longer than {_LIMIT_S:g} s") from error
    found: Run = json.loads(done.stdout)
    return found
