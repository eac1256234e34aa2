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
from benchmarks.simulating import peers
from benchmarks.simulating.simulator_run import CORES, MACHINES, YEAR_JOBS

SIZES: Final = (10_000, 100_000, 1_000_000, YEAR_JOBS)
#: Sizes at which the plain loop runs as well.
BESIDE: Final = (100_000, 1_000_000)
NODES: Final = 100_000
NODES_JOBS: Final = 3_000_000
#: Policies whose loops are compiled and loaded; days of a thousand machines that are switched off and on.
LOOPS: Final = ("best-fit", "intervals", "waiting", "live")
DAYS: Final = 30.0
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
    loops = LOOPS[:1] if how.quick else LOOPS
    cold: dict[str, list[Run]] = {name: [] for name in loops}
    warm: dict[str, list[Run]] = {name: [] for name in loops}
    switched: dict[str, list[float]] = {"first-fit": [], "ias": []}
    for number in range(how.runs):
        with tempfile.TemporaryDirectory() as directory:
            for name in loops:
                cold[name].append(_loop("first", name, directory=directory))
                warm[name].append(_loop("first", name, directory=directory))
                compiled_s, loaded_s = cold[name][-1]["seconds"], warm[name][-1]["seconds"]
                how.report(f"run {number + 1}: {name} compiled in {compiled_s:.1f} s, loaded in {loaded_s:.2f} s")
            for name in switched:
                if not how.quick:
                    switched[name].append(_per_event(_loop("intervals", name, str(DAYS), directory=directory)))
                    how.report(f"run {number + 1}: {name}: {1e6 * switched[name][-1]:.2f} us an event")
            for size in sizes:
                ours[size].append(_process("simulate", size, MACHINES, number, directory))
                how.report(f"run {number + 1}: {size} jobs: {_told(ours[size][-1])}")
                if size in plain:
                    plain[size].append(_process("plain", size, MACHINES, number, directory))
                    how.report(f"run {number + 1}: {size} jobs, plain loop: {_told(plain[size][-1])}")
                    _compare(ours[size][-1], plain[size][-1])
            large.append(_process("simulate", nodes_jobs, nodes, number, directory))
            how.report(f"run {number + 1}: {nodes_jobs} jobs on {nodes} nodes: {_told(large[-1])}")
    figures = _started(cold, warm)
    if not how.quick:
        figures["ias_to_first_fit"] = Figure.over(
            ratios(switched["ias"], switched["first-fit"]),
            "ratio",
            f"CPU time an event, IAS (A = .1) to first fit; {DAYS:g} days of 1000 machines, Zipf 1.5, load .8",
        )
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
    return figures | _speed(f"nodes_{nodes}", large, where) | peers.measure(how)


def _started(cold: dict[str, list[Run]], warm: dict[str, list[Run]]) -> Figures:
    figures: Figures = {}
    for name, runs in cold.items():
        which = f"CPU time of the first run of a process, policy {name}"
        key = name.replace("-", "_")
        figures |= {
            f"compile_{key}_s": Figure.over([r["seconds"] for r in runs], "s", f"{which}, with nothing compiled yet"),
            f"load_{key}_s": Figure.over([r["seconds"] for r in warm[name]], "s", f"{which}, its loop compiled before"),
            f"load_{key}_peak_mib": Figure.over(
                [r["peak_mib"] for r in warm[name]], "MiB", "the whole process of that"
            ),
        }
    return figures


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
    return _found(["benchmarks.simulating.simulator_run", how, str(jobs), str(machines), str(seed)], cache)


def _loop(*words: str, directory: str) -> Run:
    return _found(["benchmarks.simulating.loops", *words], directory)


def _found(words: list[str], cache: str) -> Run:
    command = [sys.executable, "-m", *words]
    environment = os.environ | {"NUMBA_CACHE_DIR": cache}
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=_LIMIT_S, env=environment)
    except subprocess.CalledProcessError as error:
        raise BenchmarkFailed(f"{' '.join(command[2:])} failed: {error.stderr.strip()[-500:]}") from error
    except subprocess.TimeoutExpired as error:
        raise BenchmarkFailed(f"{' '.join(command[2:])} took longer than {_LIMIT_S:g} s") from error
    found: Run = json.loads(done.stdout)
    return found
