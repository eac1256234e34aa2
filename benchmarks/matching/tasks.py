"""`tasks`: the same tasks and core changes on a real Slurm of four nodes, matched by us and as Slurm itself chooses.

On both sides tasks are sleeps that may be begun again, and who must make room when cores go is found by the same rule.
The core changes are a replay (one calm machine, one restless one, two in between), not deflations of guests.
"""

from __future__ import annotations

import asyncio
import logging
import statistics
import sys
import tempfile
import time
from collections import deque
from collections.abc import Collection
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final, Protocol

import structlog

from benchmarks.figures import Figure, Figures, ratios
from benchmarks.matching.slurm_cluster import USER, SlurmCluster
from benchmarks.matching.tasks_replay import Plan, cores_at, plan_of
from benchmarks.passes import Pass
from cluster_manager.store.store import Store
from cluster_manager.tasks.tasks import TaskService
from ebbtide.matcher.engines.settings import EngineSettings
from ebbtide.matcher.engines.slurm import Slurm
from ebbtide.matcher.match.rounds import LIVE_PREDICTION, Pool
from ebbtide.matcher.match.tasks import TaskPhase
from ebbtide.matcher.predict.predictor import Predictor
from ebbtide.messages.tasks import TaskRequest, TaskSpec

TASKS, WITHIN_S, LIMIT_S = 60, 60.0, 900.0
QUICK_TASKS, QUICK_WITHIN_S = 8, 6.0
PERIOD_S: Final = 0.25


@dataclass(frozen=True, slots=True)
class Result:
    """Of one side of one run."""

    preemptions: int
    #: Seconds from each task's submission to its end.
    completions_s: tuple[float, ...]


class Replay:
    """Cores and history by the plan, in place of what hosts report."""

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self._began = time.time()
        self._left = deque(plan.changes)
        self._predictor = Predictor(self._began + plan.changes[0].at, LIVE_PREDICTION)

    def changed(self) -> None:
        """It is looked up each time."""

    async def cores(self, names: Collection[str]) -> dict[str, int]:
        return cores_at(self._plan, time.time() - self._began)

    def pool(self) -> Pool:
        now = time.time()
        while self._left and self._began + self._left[0].at <= now:
            change = self._left.popleft()
            self._predictor.observe(replace(change, at=self._began + change.at))
        return Pool(self._predictor.copy(), frozenset(cores_at(self._plan, now - self._began)))

    def settle(self, predicted: float, completed: bool) -> None:
        """Completions are counted by the plan."""


class Side(Protocol):
    async def __call__(self, cluster: SlurmCluster, plan: Plan, replay: Replay, label: str) -> Result: ...


def run(how: Pass) -> Figures:
    """Both sides in turn, each run with another plan."""
    many, within_s = (QUICK_TASKS, QUICK_WITHIN_S) if how.quick else (TASKS, WITHIN_S)
    results: dict[str, list[Result]] = {"matched": [], "own": []}
    sides: dict[str, Side] = {"matched": matched, "own": own}
    # The service's log must not stand between what a command prints.
    structlog.configure(
        wrapper_class=structlog.make_filtering_bound_logger(logging.ERROR),
        logger_factory=structlog.PrintLoggerFactory(sys.stderr),
    )
    for number in range(how.runs):
        # The side that comes first in one run comes last in the next.
        for name in list(sides) if number % 2 == 0 else list(reversed(sides)):
            # A cluster for each: one side leaves nodes drained or mistrusted, which no node may become in the middle by
            # registering (docs/reference/tasks.md).
            with SlurmCluster(slurmd_timeout_s=600) as cluster:
                plan = plan_of(cluster.names, many, within_s, LIMIT_S, seed=number)
                result = asyncio.run(sides[name](cluster, plan, Replay(plan), f"{name}-{number}"))
            results[name].append(result)
            mean_s = statistics.mean(result.completions_s)
            how.report(f"run {number}, {name}: {result.preemptions} preemptions, mean completion {mean_s:.1f} s")
    return _figures(results, many)


def _settings(cluster: SlurmCluster, label: str) -> EngineSettings:
    return EngineSettings(
        engine="slurm", directory=cluster.tasks, slurm_conf=cluster.conf, user=USER, label=label, period_s=PERIOD_S
    )


def _figures(results: dict[str, list[Result]], many: int) -> Figures:
    of = f"{many} tasks on 4 Slurm nodes, replayed core changes"
    figures: Figures = {}
    means = {name: [statistics.mean(one.completions_s) for one in runs] for name, runs in results.items()}
    tails = {name: [_p90(one.completions_s) for one in runs] for name, runs in results.items()}
    for name, runs in results.items():
        figures[f"{name}_preemptions"] = Figure.over([one.preemptions for one in runs], "preemptions", of)
        figures[f"{name}_mean_completion_s"] = Figure.over(means[name], "s", of)
        figures[f"{name}_p90_completion_s"] = Figure.over(tails[name], "s", of)
    same = "Slurm's own choice in the same run"
    figures["mean_completion_ratio"] = Figure.over(ratios(means["matched"], means["own"]), "ratio", same)
    figures["p90_completion_ratio"] = Figure.over(ratios(tails["matched"], tails["own"]), "ratio", same)
    return figures


def _p90(values: Collection[float]) -> float:
    return sorted(values)[int(0.9 * (len(values) - 1))]


async def matched(cluster: SlurmCluster, plan: Plan, replay: Replay, label: str) -> Result:
    """By the tasks' service, as in the manager."""
    settings = _settings(cluster, label)
    with tempfile.TemporaryDirectory(prefix="ebb-tasks-") as directory:
        store = Store(Path(directory) / "store.sqlite", time.time)
        await store.open()
        service = TaskService(store, replay, Slurm(settings), settings, lambda: None, time.time)
        await service.recall()
        service.start()
        try:
            began = asyncio.get_running_loop().time()
            for arrival in plan.arrivals:
                await _sleep_until(began + arrival.at_s)
                spec = TaskSpec(
                    name=arrival.name,
                    command=("sleep", f"{arrival.duration_s:g}"),
                    cores=arrival.cores,
                    duration_s=arrival.duration_s,
                    restartable=True,
                    max_attempts=100,
                )
                await service.submit(TaskRequest(request_id=arrival.name, task=spec), "benchmark")
            async with asyncio.timeout(LIMIT_S):
                while service.unfinished:  # noqa: ASYNC110 - what ends are processes of Slurm
                    await asyncio.sleep(PERIOD_S)
            tasks = [await service.task(arrival.name) for arrival in plan.arrivals]
        finally:
            await service.stop()
            await store.close()
    for task in tasks:
        if task.phase is not TaskPhase.DONE or task.ended_at is None:
            raise RuntimeError(f"{task.name}: {task.sentence}")
    return Result(
        sum(task.preemptions for task in tasks),
        tuple((task.ended_at or 0.0) - task.submitted_at for task in tasks),
    )


async def own(cluster: SlurmCluster, plan: Plan, replay: Replay, label: str) -> Result:
    """Slurm chooses; whom a shrink hits is requeued, and begins where Slurm thinks best."""
    slurm = _OwnChoice(cluster, label)
    began = asyncio.get_running_loop().time()
    arrivals = list(plan.arrivals)
    async with asyncio.timeout(LIMIT_S + WITHIN_S):
        while arrivals or len(slurm.ended) < len(plan.arrivals):
            while arrivals and arrivals[0].at_s <= asyncio.get_running_loop().time() - began:
                arrival = arrivals.pop(0)
                await slurm.submit(arrival.name, arrival.cores, arrival.duration_s)
            await slurm.follow(await replay.cores(cluster.names))
            await asyncio.sleep(PERIOD_S)
    return Result(slurm.preemptions, tuple(slurm.ended.values()))


class _OwnChoice:
    """Plain jobs, and the same rule for shrinks."""

    def __init__(self, cluster: SlurmCluster, label: str) -> None:
        self._cluster = cluster
        self._label = label
        self._cores: dict[str, int] = {}
        self._submitted: dict[str, float] = {}
        self.ended: dict[str, float] = {}
        self.preemptions = 0

    async def submit(self, name: str, cores: int, duration_s: float) -> None:
        self._submitted[name] = time.time()
        await self._run(
            "sbatch", "--requeue", f"--job-name={self._label}.{name}", f"--uid={USER}", "--output=/dev/null",
            f"--cpus-per-task={cores}", f"--gres=vcore:{cores}", f"--chdir={self._cluster.runs}",
            f"--wrap=sleep {duration_s:g}",
        )  # fmt: skip

    async def follow(self, cores: dict[str, int]) -> None:
        """Tell Slurm of the cores that there are now, and make room where there are too few."""
        for machine, number in cores.items():
            if self._cores.get(machine) != number:
                await self._run("scontrol", "update", f"NodeName={machine}", f"Gres=vcore:{number}")
        self._cores = cores
        rows = await self._run("squeue", "--noheader", "--states=all", "--format=%A|%j|%T|%N|%C|%S")
        running: dict[str, list[tuple[str, str, int]]] = {}
        for row in rows.splitlines():
            number_, name, state, node, cpus, started = row.split("|")
            if not name.startswith(f"{self._label}."):
                continue
            if state == "RUNNING":
                running.setdefault(node, []).append((started, number_, int(cpus)))
            elif state == "COMPLETED":
                task = name.removeprefix(f"{self._label}.")
                self.ended.setdefault(task, time.time() - self._submitted[task])
        for node, jobs in running.items():
            over = sum(held for _, _, held in jobs) - cores[node]
            for _, number_, held in sorted(jobs, reverse=True):
                if over <= 0:
                    break
                over -= held
                self.preemptions += 1
                await self._run("scontrol", "requeue", number_)

    async def _run(self, *argv: str) -> str:
        return await asyncio.to_thread(self._cluster.command, *argv)


async def _sleep_until(at: float) -> None:
    await asyncio.sleep(max(at - asyncio.get_running_loop().time(), 0.0))
