"""`spark`: K-means, ALS and synchronous training on a real standalone cluster whose VMs are deflated (004 §6.2).

A worker's VM is a control group with a quota of the host's CPU; two of them, with 4 slots each, share the host with the
driver and the master. On a host of two cores those 8 slots have 1.6 cores together. Memory is not taken: what is
compared is how the CPU goes, and a host without swap could not throttle it without killing.

Three ways to take a share d of the VMs' CPU time, of both or of one, when a share c of the stages is done:

* VM-level: the quota falls by d, the slots stay;
* self: (1 - d) of the slots stay, the others are given up as the workers' adapter does it, and the quota falls as well;
* preemption: one of the two VMs is gone, and half of the cluster with it.

An undeflated run takes about ten minutes. Each invocation measures it first for a workload, and every time is relative
to that; what was measured is kept run by run, so that parts may be measured one at a time. What the policy says at that
moment is told from the VM-level run, once a case.
"""

from __future__ import annotations

import json
import statistics
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

from app_adapters.errors import ApplicationError
from app_adapters.spark.policy import SELF, VM_LEVEL, Deflation, Job, decide
from benchmarks.engines.spark_host import HOSTS, SLOTS, SparkHost, spark_host
from benchmarks.figures import BenchmarkFailed, Figure, Figures, origin_now
from benchmarks.passes import Pass

CORES = 0.8
PREEMPTION = "preemption"
WAYS = (VM_LEVEL, SELF, PREEMPTION)
LIMIT_S = 3600.0
LOOK_S = 0.5
#: Rows and rounds of a run of at least ten minutes, and of one that only shows that all works.
SIZES = {"kmeans": (600_000, 48), "als": (4_000_000, 45), "sgd": (800_000, 340)}
QUICK = {"kmeans": (8_000, 5), "als": (20_000, 4), "sgd": (16_000, 15)}
KEPT = "spark.jsonl"


@dataclass(frozen=True)
class Case:
    """What is deflated by how much, and when: both VMs or the first one, at a share of the stages."""

    workload: str
    share: float = 0.5
    at: float = 0.5
    everywhere: bool = True

    @property
    def name(self) -> str:
        return f"{self.workload}_{'' if self.everywhere else 'one_'}{self.share * 100:.0f}_at_{self.at * 100:.0f}"

    @property
    def hosts(self) -> tuple[str, ...]:
        return HOSTS if self.everywhere else HOSTS[:1]

    def vector(self) -> dict[str, Deflation]:
        """What is wanted, as the policy takes it."""
        lost = Deflation(self.share, slots_lost(self.share) / SLOTS, SLOTS)
        return {host: lost if host in self.hosts else Deflation(0.0, 0.0, SLOTS) for host in HOSTS}


@dataclass(frozen=True)
class Run:
    """A deflated run, and what the policy said at its moment.

    `rate` is the throughput from then on, relative to the undeflated run's from then on.
    """

    case: Case
    way: str
    seconds: float
    undeflated_s: float
    rate: float
    choice: str
    vm_time: float
    self_time: float
    #: See `figures.origin_now`.
    machine: Mapping[str, Any] = field(default_factory=dict)
    date: str = ""
    version: str = ""

    @property
    def time(self) -> float:
        """Relative to the undeflated run of the same invocation."""
        return self.seconds / self.undeflated_s


#: What is measured in one go, by name: the workloads of Fig. 6 and 7b, ALS earlier and later (Fig. 7a), one VM alone.
PARTS: Mapping[str, Sequence[tuple[Case, str]]] = {
    "kmeans": [*((Case("kmeans"), way) for way in WAYS), *((Case("kmeans", 0.25), way) for way in WAYS[:2])],
    "als": [(Case("als"), way) for way in WAYS],
    "sgd": [(Case("sgd"), way) for way in WAYS],
    "sweep": [(Case("als", at=at), way) for at in (0.25, 0.75) for way in WAYS[:2]],
    "one": [(Case("kmeans", everywhere=False), way) for way in WAYS[:2]],
}


def slots_lost(share: float) -> int:
    """Slots that a VM gives up."""
    return SLOTS - max(int(SLOTS * (1 - share) + 1e-6), 1)


def run(how: Pass) -> Figures:
    """Raises BenchmarkFailed where there is no Spark, it does not do its work, or a part is unknown."""
    parts = how.parts or tuple(PARTS)
    if not set(parts) <= set(PARTS):
        raise BenchmarkFailed(f"there is no part {', '.join(set(parts) - set(PARTS))}; there are {', '.join(PARTS)}")
    path = place(how)
    found = kept(path)
    todo = steps(parts, how, found)
    if not todo:
        return assemble(found)
    with spark_host(CORES) as bench:
        runs = Runs(bench, how)
        for workload in dict.fromkeys(case.workload for case, _ in todo):
            undeflated_s = runs.undeflated(workload)
            for case, way in todo:
                if case.workload == workload:
                    found.append(replace(runs.deflated(case, way, undeflated_s), **origin_now()))
                    how.report(f"{case.name} {way}: {found[-1].time:.2f} times as long")
                    keep(path, found)
    return assemble(found)


def steps(parts: Sequence[str], how: Pass, found: Iterable[Run]) -> list[tuple[Case, str]]:
    """What has still to be measured; of a quick pass each workload's first case."""
    if how.quick:
        return [(case, way) for part in parts for case, way in PARTS[part] if case == Case(case.workload)]
    done = Counter((one.case, one.way) for one in found)
    return [step for part in parts for step in PARTS[part] for _ in range(how.runs - done[step])]


class Runs:
    """All runs on one cluster."""

    def __init__(self, bench: SparkHost, how: Pass) -> None:
        self._bench = bench
        self._sizes = QUICK if how.quick else SIZES
        self._report = how.report
        self._stages: dict[str, int] = {}

    def undeflated(self, workload: str) -> float:
        """Seconds of a run that nothing is taken from; it also tells how many stages there are."""
        self._begin(workload)
        seconds = self._bench.done()
        stages = self._bench.rest.stages(self._bench.cluster().applications[0])
        self._stages[workload] = sum(stage.status == "COMPLETE" for stage in stages)
        self._bench.end()
        self._report(f"{workload} undeflated: {seconds:.1f} s, {self._stages[workload]} stages")
        return seconds

    def deflated(self, case: Case, way: str, undeflated_s: float) -> Run:
        """One run that is deflated on its way."""
        self._begin(case.workload)
        job, at_s = reached(self._bench, case.at), time.monotonic()
        if way == PREEMPTION:
            self._bench.preempt(HOSTS[0])
        else:
            if way == SELF:
                self._bench.give_up(case.hosts, slots_lost(case.share))
            for host in case.hosts:
                self._bench.throttle(host, case.share)
        seconds = self._bench.done()
        after_s = time.monotonic() - at_s
        self._bench.end()
        rate = max(undeflated_s - (seconds - after_s), 0.0) / after_s
        told = decide(case.vector(), [job])
        return Run(case, way, seconds, undeflated_s, rate, told.choice, told.vm_time, told.self_time)

    def _begin(self, workload: str) -> None:
        self._bench.fresh()
        self._bench.begin(workload, *self._sizes[workload], self._stages.get(workload, 0))


def reached(bench: SparkHost, progress: float) -> Job:
    """Wait until such a share of the stages is done; what Spark says then. Raises BenchmarkFailed."""
    end = time.monotonic() + LIMIT_S
    while time.monotonic() < end:
        try:
            jobs = bench.rest.jobs(bench.rest.cluster())
        except ApplicationError:
            jobs = []  # its driver is not there yet
        if jobs and jobs[0].progress >= progress:
            return jobs[0]
        time.sleep(LOOK_S)
    raise BenchmarkFailed(f"the application had not done {progress:.0%} after {LIMIT_S:g} s")


def place(how: Pass) -> Path | None:
    """Where runs are kept, if they are."""
    return None if how.quick or how.output is None else how.output / KEPT


def kept(path: Path | None) -> list[Run]:
    """The runs that were kept in a file; none where there is no such file."""
    if path is None or not path.exists():
        return []
    # What earlier versions kept does not say where and when; the file of the figures beside it does.
    beside = path.with_suffix(".json")
    said = json.loads(beside.read_text()) if beside.exists() else {}
    origin = {key: said[key] for key in ("machine", "date", "version") if key in said}
    rows = map(json.loads, path.read_text().splitlines())
    return [Run(**{**origin, **row, "case": Case(**row["case"])}) for row in rows]


def origin(how: Pass) -> dict[str, Any]:
    """Of the latest run that is kept, with the date of the first one."""
    runs = sorted(kept(place(how)), key=lambda one: one.date)
    if not runs or not runs[-1].date:
        return origin_now()
    found = {"machine": runs[-1].machine, "date": runs[-1].date, "version": runs[-1].version}
    return found | ({"since": runs[0].date} if runs[0].date < runs[-1].date else {})


def keep(path: Path | None, runs: Iterable[Run]) -> None:
    """Replace what is kept."""
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("".join(json.dumps(asdict(one)) + "\n" for one in runs))


def assemble(runs: Sequence[Run]) -> Figures:
    """For each case the measured and the predicted times; what the policy picked, beside always the same way."""
    figures: Figures = {}
    for workload in dict.fromkeys(one.case.workload for one in runs):
        seconds = dict.fromkeys(one.undeflated_s for one in runs if one.case.workload == workload)
        figures[f"{workload}_undeflated_s"] = Figure.over(seconds, "s", f"{SLOTS} slots in each of {len(HOSTS)} VMs")
    medians: dict[Case, dict[str, float]] = {}
    said: dict[Case, Run] = {}
    for case in dict.fromkeys(one.case for one in runs):
        deflated = "both VMs deflated" if case.everywhere else "one of two VMs deflated"
        for way in WAYS:
            what = "one of two VMs gone" if way == PREEMPTION else deflated
            of = f"the undeflated {case.workload} of the same invocation; {what} at {case.at:.0%} of the stages"
            found = [one for one in runs if (one.case, one.way) == (case, way)]
            if found:
                key = f"{case.name}_{way.removesuffix('-level')}"
                figures[key] = Figure.over((one.time for one in found), "ratio", of)
                medians.setdefault(case, {})[way] = figures[key].value
                figures[f"{key}_rate"] = Figure.over(
                    (one.rate for one in found), "ratio", "throughput of the undeflated run from there on"
                )
                if way == VM_LEVEL:
                    said[case] = found[0]
        if case in said:
            for key, value in (("vm", said[case].vm_time), ("self", said[case].self_time)):
                by = "predicted from the REST API at that moment"
                figures[f"{case.name}_{key}_predicted"] = Figure.over([value], "ratio", by)
    both = {case: ways for case, ways in medians.items() if case in said and SELF in ways}
    picks: Mapping[str, Callable[[Case], str]] = {
        "policy": lambda case: said[case].choice,
        "always_vm": lambda case: VM_LEVEL,
        "always_self": lambda case: SELF,
        "best": lambda case: min((VM_LEVEL, SELF), key=lambda way: both[case][way]),
    }
    for name, pick in picks.items() if both else ():
        right = [float(pick(case) == picks["best"](case)) for case in both]
        times = [both[case][pick(case)] for case in both]
        if name != "best":
            figures[f"{name}_right"] = Figure.over([sum(right)], "picks", f"{len(both)} cases, each counted once")
        figures[f"{name}_time"] = Figure.over(
            [statistics.mean(times)], "ratio", f"undeflated; mean of {len(both)} cases"
        )
    for workload in dict.fromkeys(case.workload for case in both):
        if crossing_at := crossings(workload, runs):
            of = "share of the stages at which self and VM-level take as long, between two measured in one invocation"
            figures[f"{workload}_crossover"] = Figure.over(crossing_at, "ratio", of)
    return figures


def crossings(workload: str, runs: Sequence[Run]) -> list[float]:
    """The crossover of each invocation that has one; no line goes through two, whose undeflated runs differ."""
    found = []
    mine = [one for one in runs if one.case == Case(workload, at=one.case.at)]
    for undeflated_s in dict.fromkeys(one.undeflated_s for one in mine):
        times: dict[float, dict[str, list[float]]] = {}
        for one in mine:
            if one.undeflated_s == undeflated_s:
                times.setdefault(one.case.at, {}).setdefault(one.way, []).append(one.time)
        crossing = crossover(
            (at, statistics.median(ways[SELF]) - statistics.median(ways[VM_LEVEL]))
            for at, ways in times.items()
            if SELF in ways and VM_LEVEL in ways
        )
        if crossing is not None:
            found.append(crossing)
    return found


def crossover(differences: Iterable[tuple[float, float]]) -> float | None:
    """Where a line through points first is zero; None where it never changes its sign."""
    points = sorted(differences)
    for (low, before), (high, after) in pairwise(points):
        if before * after <= 0 and before != after:
            return low + (high - low) * before / (before - after)
    return None


def table(result: Mapping[str, Any]) -> str:
    """Measured beside predicted times as CSV, from what the benchmark's file holds."""
    figures = result["figures"]
    lines = ["case,way,measured,predicted"]
    for key in figures:
        case, _, way = key.rpartition("_")
        if way in ("vm", "self", PREEMPTION) and f"{key}_rate" in figures:
            predicted = figures.get(f"{key}_predicted", {}).get("value", "")
            lines.append(f"{case},{way},{figures[key]['value']},{predicted}")
    return "\n".join(lines) + "\n"
