"""`spark`: K-means and ALS on a real standalone cluster whose VMs are deflated half way (004 §6.2, Fig. 6).

A worker's VM is a control group with a quota of the host's CPU; two of them, with 4 slots each, share the host with the
driver and the master. On a host of two cores those 8 slots have 1.6 cores together. Memory is not taken: what is
compared is how the CPU goes, and a host without swap could not throttle it without killing.

Four ways to take a share d of the VMs' CPU time, of all of them or of one:

* VM-level: the quota falls by d, the slots stay;
* self: the worker is drained and comes back with (1 - d) of its slots, and the quota falls as well;
* policy: whichever of the two `app_adapters.spark.policy` picks from what the REST API says at that moment;
* preemption: one of the two workers is killed, and half of the cluster with it.

Every time is relative to the median of the undeflated runs. A pick is right if it is the way that was faster in the
same pass. The utility curves, and what restarting all executors costs a job, are measured first, in the same run.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from app_adapters.errors import ApplicationError
from app_adapters.spark.curves import Curve, Curves
from app_adapters.spark.policy import SELF, VM_LEVEL, Decision, Deflation, Job, decide
from benchmarks.engines.spark_host import HOSTS, SLOTS, SparkHost, spark_host
from benchmarks.figures import BenchmarkFailed, Figure, Figures
from benchmarks.host.bench_host import only
from benchmarks.passes import Pass

CORES = 0.8
SHARES = (0.25, 0.5)
SCALES = {"kmeans": 0.35, "als": 0.4}
QUICK_SCALE = 0.3
HALF = 0.5
GRACE_S = 3.0
LIMIT_S = 240.0
RESTARTS = 2
LOOK_S = 0.2
#: Two times that differ by less are the same on a machine like this.
ALIKE = 0.05


@dataclass(frozen=True)
class Case:
    """What is deflated: all VMs or the first one."""

    workload: str
    share: float
    everywhere: bool

    @property
    def name(self) -> str:
        return f"{self.workload}_{'all' if self.everywhere else 'one'}_{self.share * 100:.0f}"

    @property
    def hosts(self) -> tuple[str, ...]:
        return HOSTS if self.everywhere else HOSTS[:1]

    def vector(self) -> dict[str, Deflation]:
        own = 1 - slots_left(self.share) / SLOTS
        lost, kept = Deflation(self.share, own, SLOTS), Deflation(0.0, 0.0, SLOTS)
        return {host: lost if host in self.hosts else kept for host in HOSTS}


@dataclass(frozen=True)
class Trial:
    """One run of a case: its seconds relative to undeflated, and what the policy said, with curves and without."""

    case: Case
    way: str
    time: float
    tuned: Decision
    plain: Decision


def slots_left(share: float) -> int:
    """Slots that a worker keeps."""
    return max(int(SLOTS * (1 - share) + 1e-6), 1)


def run(how: Pass) -> Figures:
    """Raises BenchmarkFailed where there is no Spark, or it does not do its work."""
    with only("spark"), spark_host(CORES) as bench:
        return Runs(bench, how).figures()


class Runs:
    """All runs on one cluster."""

    def __init__(self, bench: SparkHost, how: Pass) -> None:
        self._bench = bench
        self._how = how
        self._stages: dict[str, int] = {}
        self._curves: dict[str, Curves] = {}
        #: Until executors have all their slots again, and what a restart of all costs each workload.
        self._restarts_s: list[float] = []
        self._costs_s: dict[str, list[float]] = {}

    def figures(self) -> Figures:
        shares = SHARES[1:] if self._how.quick else SHARES
        everywhere = (True,) if self._how.quick else (True, False)
        cases = [Case(name, share, every) for name in SCALES for share in shares for every in everywhere]
        for workload in SCALES:
            self._calibrate(workload)
        undeflated: dict[str, list[float]] = {name: [] for name in SCALES}
        runs: list[tuple[Case, str, float, Decision, Decision]] = []
        for number in range(self._how.runs):
            for workload in SCALES:
                undeflated[workload].append(self._undeflated(workload))
            for case in cases:
                for way in (VM_LEVEL, SELF):
                    runs.append((case, way, *self._deflated(case, way)))
                    self._how.report(f"{number + 1}/{self._how.runs} {case.name} {way}: {runs[-1][2]:.1f} s")
                if case.share == max(SHARES) and not case.everywhere:
                    runs.append((case, "preemption", *self._deflated(case, "preemption")))
        normal_s = {name: statistics.median(seconds) for name, seconds in undeflated.items()}
        trials = [Trial(case, way, s / normal_s[case.workload], *told) for case, way, s, *told in runs]
        return assemble(trials, undeflated, self._curves, self._restarts_s, self._costs_s)

    def _calibrate(self, workload: str) -> None:
        """Stages, the throughput that throttled VMs and fewer slots leave, and how long a restart takes."""
        self._undeflated(workload)  # with a cold driver
        normal_s = 0.0 if self._how.quick else self._undeflated(workload)
        vm: list[tuple[float, float]] = []
        own: list[tuple[float, float]] = []
        for share in () if self._how.quick else SHARES:
            throttled_s = self._undeflated(workload, share)
            fewer_s = self._undeflated(workload, share, slots_left(share))
            vm.append((share, min(normal_s / throttled_s, vm[-1][1] if vm else 1.0)))
            own.append((share, min(normal_s / fewer_s, own[-1][1] if own else 1.0)))
            self._how.report(
                f"{workload} at {share:.0%}: throughput {vm[-1][1]:.2f} throttled, {own[-1][1]:.2f} by slots"
            )
        self._curves[workload] = Curves(Curve(tuple(vm)), Curve(tuple(own)))
        costs_s = self._costs_s[workload] = []
        for _ in range(0 if self._how.quick else RESTARTS):
            costs_s.append(self._restarted(workload, normal_s))
            self._how.report(f"{workload}: restarting all executors half way costs {costs_s[-1]:.1f} s")

    def _restarted(self, workload: str, normal_s: float) -> float:
        """Seconds that a job loses where all executors are restarted half way and nothing is throttled.

        What Eq. 2 says of lost work is left out: that is told for each job.
        """
        self._bench.fresh()
        self._begin(workload)
        (job, *_) = half_way(self._bench)
        self._give_up(Case(workload, 0.0, True))
        seconds = self._bench.done()
        self._bench.end()
        return max(seconds - normal_s * (1 + job.recomputed * job.progress), 0.0)

    def _undeflated(self, workload: str, share: float = 0.0, slots: int = SLOTS) -> float:
        self._bench.fresh(dict.fromkeys(HOSTS, slots))
        for host in HOSTS:
            self._bench.throttle(host, share)
        self._begin(workload)
        seconds = self._bench.done()
        self._stages[workload] = completed(self._bench)
        self._bench.end()
        self._how.report(f"{workload}, {share:.0%} from the start, {slots} slots a VM: {seconds:.1f} s")
        return seconds

    def _begin(self, workload: str) -> None:
        scale = SCALES[workload] * (QUICK_SCALE if self._how.quick else 1.0)
        self._bench.begin(workload, scale, self._stages.get(workload, 0))

    def _deflated(self, case: Case, way: str) -> tuple[float, Decision, Decision]:
        self._bench.fresh()
        self._begin(case.workload)
        jobs = half_way(self._bench)
        costs_s = self._costs_s[case.workload]
        restart_s = statistics.median(costs_s) if costs_s else 0.0
        tuned = decide(case.vector(), jobs, self._curves[case.workload], restart_s)
        plain = decide(case.vector(), [replace(job, waves=1.0) for job in jobs])
        if way == "preemption":
            self._bench.resize({host: 0 if host in case.hosts else SLOTS for host in HOSTS})
        elif way == SELF:
            self._give_up(case)
        if way != "preemption":
            for host in case.hosts:
                self._bench.throttle(host, case.share)
        seconds = self._bench.done()
        self._bench.end()
        return seconds, tuned, plain

    def _give_up(self, case: Case) -> None:
        """As the worker's adapter does it: no new tasks, a moment for those that run, a Worker with fewer slots."""
        for host in case.hosts:
            self._bench.rest.decommission(host)
        end = time.monotonic() + GRACE_S
        while time.monotonic() < end and any(self._bench.rest.active_tasks(host) for host in case.hosts):
            time.sleep(LOOK_S)
        began = time.monotonic()
        wanted = {host: slots_left(case.share) if host in case.hosts else SLOTS for host in HOSTS}
        self._bench.resize({host: 0 if host in case.hosts else SLOTS for host in HOSTS})
        self._bench.resize(wanted)
        while self._bench.executors() < sum(wanted.values()) and time.monotonic() < began + LIMIT_S:
            time.sleep(LOOK_S)
        self._restarts_s.append(time.monotonic() - began)


def completed(bench: SparkHost) -> int:
    """Stages that the application has completed."""
    return sum(stage.status == "COMPLETE" for stage in bench.rest.stages(bench.cluster().applications[0]))


def half_way(bench: SparkHost) -> list[Job]:
    """Wait until half of the stages are done; what Spark says then. Raises BenchmarkFailed."""
    end = time.monotonic() + LIMIT_S
    while time.monotonic() < end:
        try:
            jobs = bench.rest.jobs(bench.rest.cluster())
        except ApplicationError:
            jobs = []  # its driver is not there yet
        if jobs and jobs[0].progress >= HALF:
            return jobs
        time.sleep(LOOK_S)
    raise BenchmarkFailed(f"the application was not half done after {LIMIT_S:g} s")


def assemble(
    trials: Sequence[Trial],
    undeflated: Mapping[str, Sequence[float]],
    curves: Mapping[str, Curves],
    restarts_s: Sequence[float],
    costs_s: Mapping[str, Sequence[float]],
) -> Figures:
    """The table: for each case and way the measured time, what was predicted, and how often the pick was right."""
    figures: Figures = {}
    for workload, seconds in undeflated.items():
        figures[f"{workload}_undeflated_s"] = Figure.over(seconds, "s", f"{SLOTS} slots in each of {len(HOSTS)} VMs")
        for name, curve in (("vm", curves[workload].vm), ("self", curves[workload].self_deflated)):
            for share, throughput in curve.points:
                key = f"{workload}_throughput_{name}_{share * 100:.0f}"
                figures[key] = Figure.over([throughput], "ratio", "the undeflated run before it; one calibration")
    if restarts_s:
        figures["restart_s"] = Figure.over(restarts_s, "s", "a worker's end until executors have all their slots again")
    for workload, lost_s in costs_s.items():
        if lost_s:
            of = "what restarting all executors half way costs it, nothing throttled"
            figures[f"{workload}_restart_s"] = Figure.over(lost_s, "s", of)
    for case in dict.fromkeys(trial.case for trial in trials):
        of = f"the median undeflated {case.workload}; {'all VMs' if case.everywhere else 'one of two VMs'} deflated"
        found = [trial for trial in trials if trial.case == case]
        for way in dict.fromkeys(trial.way for trial in found):
            key = f"{case.name}_{way.replace('-level', '')}"
            figures[key] = Figure.over((t.time for t in found if t.way == way), "ratio", of)
        by = "predicted from the REST API half way, with the curves of this run"
        figures[f"{case.name}_vm_predicted"] = Figure.over((t.tuned.vm_time for t in found), "ratio", by)
        figures[f"{case.name}_self_predicted"] = Figure.over((t.tuned.self_time for t in found), "ratio", by)
        figures[f"{case.name}_policy"] = Figure.over((time for time, _, _ in picks(found, True)), "ratio", of)
    for name, tuned in (("policy", True), ("equations_alone", False)):
        every = [pick for case in dict.fromkeys(t.case for t in trials) for pick in picks(_of(trials, case), tuned)]
        right = [float(mine <= other) for mine, other, _ in every]
        near = [float(mine <= other * (1 + ALIKE)) for mine, other, _ in every]
        figures[f"{name}_right"] = Figure.over([statistics.mean(right)], "ratio", f"{len(every)} picks, all cases")
        words = f"picks that were at most {ALIKE:.0%} slower than the other way"
        figures[f"{name}_right_or_alike"] = Figure.over([statistics.mean(near)], "ratio", words)
        figures[f"{name}_picked_self"] = Figure.over([statistics.mean(own for *_, own in every)], "ratio", "all picks")
    return figures


def table(result: Mapping[str, Any]) -> str:
    """Measured beside predicted times as CSV, from what the benchmark's file holds."""
    figures = result["figures"]
    lines = ["case,way,measured,predicted,policy"]
    for key in figures:
        case, _, way = key.rpartition("_")
        if way in ("vm", "self", "preemption") and f"{case}_policy" in figures:
            predicted = figures.get(f"{key}_predicted", {}).get("value", "")
            lines.append(f"{case},{way},{figures[key]['value']},{predicted},{figures[f'{case}_policy']['value']}")
    return "\n".join(lines) + "\n"


def picks(trials: Sequence[Trial], tuned: bool) -> Iterable[tuple[float, float, float]]:
    """For each decision of one case: the time of the way that was picked, that of the other, and 1 for self.

    Both are from the same pass: the n-th run of each way.
    """
    vm = [trial for trial in trials if trial.way == VM_LEVEL]
    own = [trial for trial in trials if trial.way == SELF]
    for throttled, smaller in zip(vm, own, strict=True):
        for trial in (throttled, smaller):
            decision = trial.tuned if tuned else trial.plain
            if decision.choice == SELF:
                yield smaller.time, throttled.time, 1.0
            else:
                yield throttled.time, smaller.time, 0.0


def _of(trials: Sequence[Trial], case: Case) -> list[Trial]:
    return [trial for trial in trials if trial.case == case]
