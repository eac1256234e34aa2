"""One run: a pool, its jobs, a scheme; what came of it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from ebbtide.matcher.match.matching import THRESHOLD
from ebbtide.simulator.errors import InvalidParameter
from ebbtide.simulator.inputs.batches import CapacityBatch, Floats
from ebbtide.simulator.jobs.engine import Engine
from ebbtide.simulator.jobs.results import Results
from ebbtide.simulator.jobs.rows import JobRowsTable
from ebbtide.simulator.matching import oracle
from ebbtide.simulator.matching.acquiring import AcquiredMachines, Acquisition
from ebbtide.simulator.matching.arrays import NUMBER, Matching
from ebbtide.simulator.matching.futures import Foreseen, kept
from ebbtide.simulator.matching.pools import Pool
from ebbtide.simulator.matching.schemes import engine_policy, engine_settings, named
from ebbtide.simulator.matching.workload import Workload, jobs

#: Lost work is told by windows of so many seconds, of which the worst are this share.
WINDOW_S: Final = 300.0
WORST: Final = 0.05
#: Between two checkpoints of an interruptible job, which cost nothing (Agarwal et al. 2023 §B.3).
SAVES_EVERY_S: Final = 60.0
#: Jobs by whether they are interruptible.
KINDS: Final = (("interruptible", True), ("uninterruptible", False))
#: Seconds of the pool's changes before the first job: a day's window is full by then.
WARM_UP_S = 1.25 * 86_400.0


@dataclass(frozen=True, slots=True)
class Order:
    """What becomes of tasks that must make room: a rule of its own, whatever the scheme.

    :param kills: which goes first (`matcher.policies.victims`): the ``oldest`` (YARN, Agarwal et al. 2023 §4.1), the
        ``newest`` (a manager), or the one that loses the least work (``least-lost``).
    :param requeue: where it waits then: at the ``tail`` of the queue (YARN), where its ``submission`` puts it (a
        manager: behind who came before it and waits still), or at the ``head``, ahead of all.
    """

    kills: str = "newest"
    requeue: str = "submission"


#: A manager's.
LIVE_ORDER: Final = Order()


@dataclass(frozen=True, slots=True)
class Run:
    """What a scheme made of the jobs.

    Rows of ``completion_s`` are jobs that are measured (`Workload.measured`) and done, in the order of submission.
    """

    completion_s: Floats
    #: What became of each job (`JobRowsTable`).
    jobs: Mapping[str, Any]
    results: Results
    #: Of tasks that were started, by decile: how many, the mean prediction, the share that completed.
    calibration: tuple[Floats, Floats, Floats] | None
    brier: float
    span_s: float
    #: Of each job, completion time / its longest task: how many times as long as on machines that never shrink.
    slowdown: Floats
    #: Of the work lost to kills, what went in the worst twentieth of all five minutes; NaN: none was lost.
    lost_at_worst: float = float("nan")
    #: What an acquirer did; None: there was none.
    acquired: AcquiredMachines | None = None
    #: Every so-manieth job was interruptible; 0: none.
    interruptible: int = 0

    @property
    def not_done(self) -> tuple[str, ...]:
        """What is to be said of jobs that are not done; none is refused, as nobody knows the largest machine."""
        return self.results.not_done(0)

    @property
    def metrics(self) -> dict[str, float]:
        """Figures by name."""
        acquired = {} if self.acquired is None else self.acquired.metrics
        kinds = {}
        if self.interruptible:
            saves = self.jobs["job"] % self.interruptible == 0
            kinds = {
                f"{name}_jct_geometric_mean_s": _mean(self.completion_s[saves == is_one]) for name, is_one in KINDS
            }
        return {
            # Of the cores that were there while it was measured; of an acquirer's, also while they left.
            "utilisation": self.results.utilisation,
            **acquired,
            **kinds,
            "slowdown_geometric_mean": _mean(self.slowdown),
            # Means are of jobs that are done alone.
            "jobs_done": float(self.results.jobs_done),
            "jobs_left": float(self.results.jobs_left),
            "slowed_4_share": _of(np.mean, self.slowdown > 4.0),
            "jct_mean_s": _of(np.mean, self.completion_s),
            "jct_p90_s": _of(lambda values: np.percentile(values, 90), self.completion_s),
            # Of two schemes with the same jobs its ratio is the geometric mean of nJCT.
            "jct_geometric_mean_s": _mean(self.completion_s),
            "waste": self.results.waste,
            "kills_per_task": self.results.kills / self.results.tasks,
            "wait_mean_s": self.results.measures["task_wait_mean_s"],
            "brier": self.brier,
            "lost_at_worst": self.lost_at_worst,
            "span_s": self.span_s,
        }


def run(
    pool: Pool,
    workload: Workload,
    scheme: str,
    seed: int,
    progress: Callable[[float], None] | None = None,
    validate: bool = False,
    compile: bool = True,
    acquisition: Acquisition | None = None,
    order: Order = LIVE_ORDER,
    threshold: float = THRESHOLD,
    interruptible: int = 0,
    others: Sequence[Pool] = (),
) -> Run:
    """Run it to the end.

    :param others: the same VMs by other draws, of which schemes know that know the VMs to come.

    :param interruptible: every so-manieth job is, beginning with the first: it saves its work every minute; 0: none.
    :param threshold: of P_c, in schemes by heartbeat.
    :param acquisition: the pool's machines are servers, of which an acquirer holds some; None: all are ours.
    :raises InvalidParameter: no such scheme, or a load that the pool's changes are too short for.
    """
    start_s = float(pool.at_s[0]) + WARM_UP_S
    chosen = named(scheme)
    if interruptible and chosen.checkpoint_every_s > 0:
        raise InvalidParameter("interruptible", f"must be 0 with {scheme}, in which all jobs make checkpoints")
    saving = {"checkpoint_every_s": SAVES_EVERY_S, "checkpointed": interruptible} if interruptible else {}
    foreseen = None
    if chosen.known:
        if not others or acquisition is not None:
            raise InvalidParameter("policy", f"{scheme} needs other_draws, and no acquirer")
        shares = kept(others, float(pool.at_s[0]), pool.until_s, chosen.predicting.horizon_s, compile)
        foreseen = Foreseen(shares, float(pool.at_s[0]), chosen.known)
    acquired = None
    changes: Iterable[CapacityBatch] = [pool.batch()]
    held_share = 1.0
    if acquisition is not None:
        if chosen.nodes in oracle.KINDS:
            raise InvalidParameter(
                "policy", f"must not be {scheme} with an acquirer: it does not know which will be held"
            )
        acquired = AcquiredMachines(pool, acquisition, seed, start_s)
        changes, held_share = acquired.batches(), acquisition.held_share(pool, start_s)
    batch, until_s = jobs(workload, pool, start_s, seed, held_share)
    from_s, to_s = workload.measured(start_s, until_s)
    told = JobRowsTable()
    attempts: list[Floats] = []
    engine = Engine(
        told.named([batch]),
        None,
        changes,
        policy=engine_policy(chosen, pool, threshold, foreseen),
        settings=engine_settings(
            chosen, kills=order.kills, requeue=order.requeue, validate=validate, from_s=from_s, to_s=to_s, **saving
        ),
        seed=seed,
        done=told.take,
        attempts=attempts.append,
        compile=compile,
    )
    if acquired is not None:
        acquired.state = lambda: engine.state
    # The engine names machines in the order in which they first change; the oracle goes by the pool's numbers.
    found = engine.run(progress)
    rows = told.columns()
    within = (rows["submitted_s"] >= from_s) & (rows["submitted_s"] < to_s)
    rows = {name: values[within] for name, values in rows.items()}
    state = engine.policy_state
    calibration, brier = None, float("nan")
    if isinstance(state, Matching) and state.outcomes.sum() > 0:
        counts = np.maximum(state.outcomes, 1.0)
        calibration = (state.outcomes, state.predicted / counts, state.observed / counts)
        brier = float(state.numbers[NUMBER.squares] / state.outcomes.sum())
    completion_s = rows["ended_s"] - rows["submitted_s"]
    tasks = batch.task_runtime_s
    slowdown = completion_s / np.maximum.reduceat(tasks.values, tasks.offsets[:-1])[rows["job"]]
    worst = lost_at_worst(np.concatenate(attempts), batch.cpu_cores) if attempts else float("nan")
    span_s = until_s - start_s
    return Run(completion_s, rows, found, calibration, brier, span_s, slowdown, worst, acquired, interruptible)


def _mean(values: Floats) -> float:
    """The geometric one; NaN of none."""
    return _of(lambda some: np.exp(np.log(np.maximum(some, 1e-9)).mean()), values)


def _of(figure: Callable[[Any], Any], values: Any) -> float:
    """A figure of values; NaN of none."""
    return float(figure(values)) if len(values) else float("nan")


def lost_at_worst(attempts: Floats, job_cores: Floats) -> float:
    """Of the core-seconds that killed attempts had run, the share that was lost in the worst windows.

    All windows count in which attempts ended, and those between them. What shrinks of many machines at once take lies
    in few windows; chance shrinks of one machine and another lie anywhere.

    :param attempts: rows of `ATTEMPT_COLUMNS`.
    :param job_cores: of a task of each job.
    """
    number, began_s, ended_s, completed = (attempts[:, column] for column in (0, 3, 4, 5))
    window = ((ended_s - ended_s.min()) / WINDOW_S).astype(np.int64)
    lost = np.bincount(window, (ended_s - began_s) * job_cores[number.astype(np.int64)] * (completed == 0.0))
    if not lost.sum() > 0.0:
        return float("nan")
    count = max(round(WORST * len(lost)), 1)
    return float(np.sort(lost)[-count:].sum() / lost.sum())
