"""`tasks-simulated`: the scenario of the benchmark `tasks` in simulation, the same tasks and core changes, by schemes.

Schemes and what they do are the simulator's; times are stretched to the paper's scale, so that each is what its name
says.
"""

from __future__ import annotations

import statistics
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from benchmarks.figures import Figure, Figures, ratios
from benchmarks.matching.tasks_replay import MACHINES, SCALE, TASKS, WITHIN_S, Plan, p90, plan_for
from benchmarks.passes import Pass
from ebbtide.simulator.inputs.batches import (
    EstimatedJobBatch,
    Ragged,
    hints,
    same,
    texts,
    unknown,
)
from ebbtide.simulator.jobs.engine import Engine
from ebbtide.simulator.jobs.rows import JobRowsTable
from ebbtide.simulator.matching.pools import Pool
from ebbtide.simulator.matching.running import LIVE_ORDER
from ebbtide.simulator.matching.schemes import SCHEMES, Scheme, engine_policy, engine_settings

#: `own` is the first of the nodes, by their names, that has room, which is not how Slurm chooses by default; `spread`
#: the least loaded one, as Slurm's `LLN` there; `idle` that with the most idle cores, as `LLN` where lost cores count
#: as in use; `sized-live` is what the real run does, `live` the same by a manager's default prediction,
#: `oracle-no-kill` knows what will come.
SHOWN: Final = {
    "own": Scheme("first-fit"),
    "spread": SCHEMES["capacity-least-loaded"],
    "idle": SCHEMES["capacity-worst-fit"],
    **{name: SCHEMES[name] for name in ("capacity-random", "sized-live", "live", "oracle-no-kill")},
}


@dataclass(frozen=True, slots=True)
class Simulated:
    """Of one scheme and one plan; seconds at the benchmark's scale."""

    completions_s: tuple[float, ...]
    kills: int
    lost_core_s: float


def run(how: Pass) -> Figures:
    """Each scheme on each plan."""
    of = f"{TASKS} tasks on {MACHINES} simulated machines, replayed core changes"
    figures: Figures = {}
    rows: dict[str, dict[str, list[float]]] = {}
    for name, scheme in SHOWN.items():
        found = [simulate(plan_for(number, TASKS, WITHIN_S), scheme, number + 1) for number in range(how.runs)]
        rows[name] = {
            "preemptions": [float(one.kills) for one in found],
            "lost_core_s": [one.lost_core_s for one in found],
            "mean_completion_s": [statistics.mean(one.completions_s) for one in found],
            "p90_completion_s": [p90(one.completions_s) for one in found],
        }
        for key, values in rows[name].items():
            unit = {"preemptions": "preemptions", "lost_core_s": "core-seconds"}.get(key, "s")
            figures[f"{name}_{key}"] = Figure.over(values, unit, of)
            if name != "own" and all(rows["own"][key]):
                both = ratios(values, rows["own"][key])
                figures[f"{name}_{key.removesuffix('_s')}_ratio"] = Figure.over(both, "ratio", "first fit, same run")
        how.report(f"{name}: mean completion {statistics.mean(rows[name]['mean_completion_s']):.1f} s")
    return figures


def simulate(plan: Plan, scheme: Scheme, seed: int = 1) -> Simulated:
    """At the paper's scale, so that a scheme is what its name says."""
    names = {name: number for number, name in enumerate(dict.fromkeys(change.machine for change in plan.changes))}
    at_s = np.array([change.at * SCALE for change in plan.changes])
    machine = np.array([names[change.machine] for change in plan.changes], np.int64)
    cores = np.array([int(change.cores_after) for change in plan.changes], np.int64)
    pool = Pool(machine, at_s, cores, len(names), float(at_s[-1]), 0.0)
    tasks = plan.arrivals
    runtimes = np.array([task.duration_s * SCALE for task in tasks])
    each = np.ones(len(tasks), np.int64)
    batch = EstimatedJobBatch(
        id=texts(task.name for task in tasks),
        group=same("", len(tasks)),
        submit_s=np.array([task.at_s * SCALE for task in tasks]),
        cpu_cores=np.array([float(task.cores) for task in tasks]),
        memory_mib=unknown(len(tasks)),
        priority=hints(len(tasks)),
        runtime_s=unknown(len(tasks)),
        requested_s=unknown(len(tasks)),
        task_runtime_s=Ragged.of(runtimes, each),
        task_estimate_s=Ragged.of(runtimes, each),
    )
    told = JobRowsTable()
    engine = Engine(
        told.named([batch]),
        None,
        [pool.batch()],
        policy=engine_policy(scheme, pool),
        settings=engine_settings(scheme, kills=LIVE_ORDER.kills, requeue=LIVE_ORDER.requeue),
        seed=seed,
        done=told.take,
        # So few events are over before a loop is compiled.
        compile=False,
    )
    results = engine.run()
    rows: dict[str, Any] = told.columns()
    completions = (rows["ended_s"] - rows["submitted_s"]) / SCALE
    return Simulated(tuple(completions.tolist()), results.kills, results.lost_core_s / SCALE)
