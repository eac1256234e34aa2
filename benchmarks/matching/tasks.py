"""`tasks`: the same tasks and core changes on real Slurm clusters, matched by us and as Slurm itself chooses.

Slurm chooses twice: by its default, of neighbouring nodes with room the fewest idle cores that suffice and in them the
node that fits best (`own`), and the least loaded node (`spread`). On all sides tasks are sleeps that may be begun
again, who must make room when cores go is found by the same function, and a task that was broken off is submitted anew
and keeps its place in the line. The core changes are a replay, not deflations of guests. All figures come from the logs
of the slurmctlds, which are kept.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import json
import logging
import lzma
import multiprocessing
import os
import signal
import statistics
import sys
import tempfile
import time
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import Future, ProcessPoolExecutor, as_completed
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Final, Protocol

import structlog

from benchmarks.figures import Figure, Figures, ratios
from benchmarks.matching.slurm_cluster import USER, SlurmCluster
from benchmarks.matching.tasks_log import completed_at, excerpt, lost_core_s, read, settle, waits
from benchmarks.matching.tasks_replay import (
    CORES,
    LIMIT_S,
    MACHINES,
    PREDICTION,
    TASKS,
    WITHIN_S,
    Plan,
    cores_at,
    p90,
    plan_for,
)
from benchmarks.passes import Pass
from cluster_manager.store.store import Store
from cluster_manager.tasks.tasks import TaskService
from ebbtide.matcher.engines.settings import EngineSettings
from ebbtide.matcher.engines.slurm import Slurm
from ebbtide.matcher.match.rounds import Pool
from ebbtide.matcher.match.tasks import TaskPhase
from ebbtide.matcher.policies.victims import NEWEST, choose_victims
from ebbtide.matcher.predict.predictor import Predictor
from ebbtide.messages.tasks import TaskRequest, TaskSpec

QUICK_TASKS, QUICK_WITHIN_S = 8, 10.0
#: So many runs go on at the same time; all sides of a run always do, so that they have the same machine.
AT_ONCE: Final = 5
PERIOD_S: Final = 1.0
#: What the matched side is held against.
BASES: Final = {
    "own": "Slurm's own choice in the same run",
    "spread": "Slurm's choice of the least loaded node, with the same tasks and core changes",
}
#: prctl(2).
_PR_SET_PDEATHSIG: Final = 1
_FORK: Final = multiprocessing.get_context("fork")
#: Clusters come up one after another: so many daemons at once do not find free ports.
_COMING_UP: Final = _FORK.Lock()
#: Set, and sent to each worker, where all are to end.
_ENDED: Final = _FORK.Event()
_END: Final = signal.SIGUSR1
#: What no job's priority is below, for jobs that keep their place in the line.
_FIRST: Final = 4_000_000_000


@dataclass(frozen=True, slots=True)
class Result:
    """Of one side of one run, by the log of its slurmctld."""

    preemptions: int
    lost_core_s: float
    #: Seconds from the moment at which each task was to come to its end.
    completions_s: tuple[float, ...]
    #: Seconds that each start waited though there was room.
    waited_s: tuple[float, ...]


class Replay:
    """Cores and history by the plan, in place of what hosts report."""

    #: None is moved, none stands still.
    closing: Mapping[str, str] = MappingProxyType({})
    paused = frozenset[str]()

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self.began = time.time()
        self._left = deque(plan.changes)
        self._predictor = Predictor(self.began + plan.changes[0].at, PREDICTION)

    def changed(self) -> None:
        """It is looked up each time."""

    async def cores(self, names: Collection[str]) -> dict[str, int]:
        return cores_at(self._plan, time.time() - self.began)

    def pool(self) -> Pool:
        now = time.time()
        while self._left and self.began + self._left[0].at <= now:
            change = self._left.popleft()
            self._predictor.observe(replace(change, at=self.began + change.at))
        return Pool(self._predictor.copy(), frozenset(cores_at(self._plan, now - self.began)))

    def settle(self, predicted: float, completed: bool) -> None:
        """Completions are counted by the log."""


class Side(Protocol):
    async def __call__(self, cluster: SlurmCluster, plan: Plan, replay: Replay, label: str) -> None: ...


def run(how: Pass) -> Figures:
    """All sides, with another plan in each run."""
    many, within_s = (QUICK_TASKS, QUICK_WITHIN_S) if how.quick else (TASKS, WITHIN_S)
    kept: dict[str, list[str]] = {name: [] for name in SIDES}
    with _workers() as processes:
        # The sides of a run begin one after the other, so they run beside each other.
        running: dict[Future[str], tuple[int, str]] = {
            processes.submit(one_side, name, number, many, within_s): (number, name)
            for number in range(how.runs)
            for name in (*list(SIDES)[number % len(SIDES) :], *list(SIDES)[: number % len(SIDES)])
        }
        # What is written first cannot be lost with what fails later.
        for future in as_completed(running):
            if how.output is not None:
                keep(how.output, running[future][1], running[future][0], future.result())
        for future, (number, name) in running.items():
            text = future.result()
            kept[name].append(text)
            result = result_of(text, plan_for(number, many, within_s))
            how.report(
                f"run {number}, {name}: {result.preemptions} preemptions, {result.lost_core_s:.0f} core-seconds lost, "
                f"mean completion {statistics.mean(result.completions_s):.1f} s"
            )
    return figures_of(kept, many, within_s)


@contextlib.contextmanager
def _workers() -> Iterator[ProcessPoolExecutor]:
    """Processes for sides; whatever ends this early ends them, with their clusters removed, and begins no other."""
    _ENDED.clear()
    with ProcessPoolExecutor(len(SIDES) * AT_ONCE, _FORK, initializer=_apart) as processes:
        try:
            yield processes
        except BaseException:
            _ENDED.set()
            for worker in multiprocessing.active_children():
                if worker.pid is not None:
                    os.kill(worker.pid, _END)
            processes.shutdown(cancel_futures=True)
            raise


def _apart() -> None:
    """A worker is ended by its parent only, not by Ctrl-C as well, and never in the middle of its cluster's end.

    Where the parent is killed it ends at once; its cluster bears the benchmark's mark, and goes with the next one.
    """
    os.setpgid(0, 0)
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    signal.signal(_END, signal.SIG_IGN)


@contextlib.contextmanager
def _endable() -> Iterator[None]:
    signal.signal(_END, lambda number, frame: signal.raise_signal(signal.SIGINT))
    try:
        _check_not_ended()
        yield
    finally:
        signal.signal(_END, signal.SIG_IGN)


def _check_not_ended() -> None:
    if _ENDED.is_set():
        raise KeyboardInterrupt


def one_side(name: str, number: int, many: int, within_s: float) -> str:
    """Run it in this process; what is kept of it. Raises KeyboardInterrupt where it is ended."""
    # The service's log must not stand between what a command prints.
    structlog.configure(
        wrapper_class=structlog.make_filtering_bound_logger(logging.ERROR),
        logger_factory=structlog.PrintLoggerFactory(sys.stderr),
    )
    # A long SlurmdTimeout: no node may come to be mistrusted in the middle by registering (docs/reference/tasks.md).
    with contextlib.ExitStack() as stack:
        with _COMING_UP:
            _check_not_ended()
            cluster = stack.enter_context(
                SlurmCluster(MACHINES, CORES, slurmd_timeout_s=600, telling=True, least_loaded=name == "spread")
            )
        plan = plan_for(number, many, within_s)
        replay = Replay(plan)
        with _endable():
            asyncio.run(SIDES[name](cluster, plan, replay, name))
        log, sched, jobs = (
            (cluster.directory / file).read_text(errors="replace")
            for file in ("slurmctld.log", "sched.log", "jobs.txt")
        )
        head = json.dumps({"side": name, "seed": number, "began": replay.began})
        return f"# {head}\n" + excerpt(log, jobs, sched)


def keep(directory: Path, name: str, number: int, text: str) -> Path:
    """Write what is kept of one side of one run."""
    path = directory / "tasks" / f"{number:02}-{name}.log.xz"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(lzma.compress(text.encode(), preset=9))
    return path


def result_of(text: str, plan: Plan) -> Result:
    """What the log says of a run."""
    began = float(json.loads(text.partition("\n")[0].removeprefix("# "))["began"])
    log = read(text, CORES)
    settle(log, {arrival.name: arrival.duration_s for arrival in plan.arrivals})
    ended = completed_at(log)
    return Result(
        sum(job.killed for job in log.started),
        lost_core_s(log),
        tuple(ended[arrival.name] - began - arrival.at_s for arrival in plan.arrivals),
        tuple(wait.seconds for wait in waits(log)),
    )


def figures_of(kept: Mapping[str, Sequence[str]], many: int = TASKS, within_s: float = WITHIN_S) -> Figures:
    """What the logs of all runs say.

    :param kept: by side, in the order of the runs.
    """
    of = f"{many} tasks on {MACHINES} Slurm nodes, replayed core changes"
    results = {
        name: [result_of(text, plan_for(number, many, within_s)) for number, text in enumerate(texts)]
        for name, texts in kept.items()
    }
    figures: Figures = {}
    values: dict[tuple[str, str], Callable[[Result], float]] = {
        ("preemptions", "preemptions"): lambda one: float(one.preemptions),
        ("lost_core_s", "core-seconds"): lambda one: one.lost_core_s,
        ("mean_completion_s", "s"): lambda one: statistics.mean(one.completions_s),
        ("p90_completion_s", "s"): lambda one: p90(one.completions_s),
        ("mean_wait_with_room_s", "s"): lambda one: statistics.mean(one.waited_s),
        ("longest_wait_with_room_s", "s"): lambda one: max(one.waited_s),
    }
    for (key, unit), value in values.items():
        rows = {name: [value(one) for one in runs] for name, runs in results.items()}
        for name, row in rows.items():
            figures[f"{name}_{key}"] = Figure.over(row, unit, of)
        if "wait_with_room" in key:
            continue
        for base, words in BASES.items():
            if all(rows[base]):
                name = f"{key.removesuffix('_s')}_ratio" + ("" if base == "own" else f"_to_{base}")
                figures[name] = Figure.over(ratios(rows["matched"], rows[base]), "ratio", words)
    return figures


def _settings(cluster: SlurmCluster, label: str) -> EngineSettings:
    return EngineSettings(
        engine="slurm", directory=cluster.tasks, slurm_conf=cluster.conf, user=USER, label=label, period_s=PERIOD_S
    )


async def matched(cluster: SlurmCluster, plan: Plan, replay: Replay, label: str) -> None:
    """By the tasks' service, as in the manager."""
    settings = _settings(cluster, label)
    with tempfile.TemporaryDirectory(prefix="ebb-tasks-") as directory:
        store = Store(Path(directory) / "store.sqlite", time.time)
        await store.open()
        service = TaskService(store, replay, Slurm(settings), settings, lambda: None, time.time)
        await service.recall()
        service.start()
        try:
            for arrival in plan.arrivals:
                await asyncio.sleep(max(replay.began + arrival.at_s - time.time(), 0.0))
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


async def own(cluster: SlurmCluster, plan: Plan, replay: Replay, label: str) -> None:
    """Slurm chooses; whom a shrink hits is ended and submitted anew, and begins where Slurm thinks best."""
    slurm = _OwnChoice(cluster, plan, label)
    arrivals = deque(plan.arrivals)
    async with asyncio.timeout(LIMIT_S + WITHIN_S):
        while len(slurm.ended) < len(plan.arrivals):
            while arrivals and replay.began + arrivals[0].at_s <= time.time():
                await slurm.submit(arrivals.popleft().name)
            await slurm.follow(await replay.cores(cluster.names))
            # As the service does, for the next task or the next look.
            until = replay.began + arrivals[0].at_s - time.time() if arrivals else PERIOD_S
            await asyncio.sleep(min(max(until, 0.0), PERIOD_S))


class _OwnChoice:
    """Plain jobs, and the same rule for shrinks."""

    def __init__(self, cluster: SlurmCluster, plan: Plan, label: str) -> None:
        self._cluster = cluster
        self._label = label
        self._tasks = {arrival.name: (number, arrival) for number, arrival in enumerate(plan.arrivals)}
        self._cores: dict[str, int] = dict.fromkeys(cluster.names, CORES)
        self.ended: set[str] = set()
        #: Jobs that were ended to make room.
        self._gone: set[str] = set()

    async def submit(self, name: str) -> None:
        """Also anew: the earlier a task came, the earlier it gets its turn."""
        number, arrival = self._tasks[name]
        await self._run(
            "sbatch", "--no-requeue", f"--job-name={self._label}.{name}", f"--uid={USER}", "--output=/dev/null",
            f"--cpus-per-task={arrival.cores}", f"--gres=vcore:{arrival.cores}", f"--chdir={self._cluster.runs}",
            f"--priority={_FIRST - number}", f"--wrap=sleep {arrival.duration_s:g}",
        )  # fmt: skip

    async def follow(self, cores: dict[str, int]) -> None:
        """Tell Slurm of the cores that there are now, and make room where there are too few."""
        for machine, number in cores.items():
            if self._cores.get(machine) != number:
                await self._run("scontrol", "update", f"NodeName={machine}", f"Gres=vcore:{number}")
        self._cores = cores
        rows = await self._run("squeue", "--noheader", "--states=all", "--format=%A|%j|%T|%N|%C|%S")
        running: dict[str, list[tuple[str, int, str, int]]] = {}
        for row in rows.splitlines():
            job, name, state, node, cpus, started = row.split("|")
            task = name.removeprefix(f"{self._label}.")
            if state == "RUNNING" and job not in self._gone:
                running.setdefault(node, []).append((started, int(job), task, int(cpus)))
            elif state == "COMPLETED":
                self.ended.add(task)
        for node, jobs in running.items():
            jobs.sort()
            held = [cpus for _, _, _, cpus in jobs]
            goes, none = [1] * len(jobs), [0.0] * len(jobs)
            choose_victims(held, none, none, goes, len(jobs), sum(held) - cores[node], 0, NEWEST)
            for (_, number, task, _), gone in reversed(list(zip(jobs, goes, strict=True))):
                if gone:
                    self._gone.add(str(number))
                    await self._run("scancel", str(number))
                    await self.submit(task)

    async def _run(self, *argv: str) -> str:
        return await asyncio.to_thread(self._cluster.command, *argv)


SIDES: Final[dict[str, Side]] = {"matched": matched, "own": own, "spread": own}
