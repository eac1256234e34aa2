"""What slurmctld's log says of a run of the benchmark `tasks`: when each job could begin, when it did, what it lost.

Pure. Of the log only the lines that count are kept (`excerpt`), as they are; behind them stands what Slurm's own list
of jobs says of each: number, name, state, CPUs.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from itertools import pairwise
from typing import Final

_AT: Final = re.compile(r"^\[(\S+)\] (.*)$")
_SUBMITTED: Final = re.compile(r"_slurm_rpc_submit_batch_job: JobId=(\d+) InitPrio=(\d+)")
_RELEASED: Final = re.compile(r"release hold on JobId=(\d+)")
_REQUIRED: Final = re.compile(r"setting req_nodes to (\S+) for JobId=(\d+)")
_STARTED: Final = re.compile(r"(?:Allocate JobId=(\d+) NodeList=(\S+)|Started JobId=(\d+) in \S+ on (\S+))")
_DONE: Final = re.compile(r"_job_complete: JobId=(\d+) done")
_KILLED: Final = re.compile(r"REQUEST_KILL_JOB JobId=(\d+)")
_FREED: Final = re.compile(r"_slurm_rpc_epilog_complete: JobId=(\d+) ")
_CORES: Final = re.compile(r"_update_node_gres: nodes (\S+) gres set to: vcore:(\d+)")
_REASON: Final = re.compile(r"JobId=(\d+)\. State=PENDING\. Reason=(\w+)\.")
_COUNTS: Final = (
    *(_SUBMITTED, _RELEASED, _REQUIRED, _STARTED, _DONE, _KILLED, _FREED, _CORES, _REASON),
    *(re.compile(words) for words in ("cred_expire", "non-runnable", "[Rr]equeu(?!e_)", "draining|drained")),
)
_JOB: Final = re.compile(r"^JobId=(\d+) .*?\bName=(\S+) JobState=(\w+).*?\bProcCnt=(\d+)")
_KEPT: Final = re.compile(r"^job (\d+) (\S+) (\w+) (\d+)$")


@dataclass
class Job:
    """One job of Slurm's. Seconds since the epoch."""

    number: int
    name: str = ""
    state: str = ""
    cores: int = 0
    submitted_at: float = 0.0
    #: When nobody held it any more.
    eligible_at: float | None = None
    #: Where it has to run; empty: anywhere.
    required: str = ""
    started_at: float | None = None
    node: str = ""
    #: When it ended or was killed, and when its room was free again.
    ended_at: float | None = None
    freed_at: float | None = None
    #: Why it waited, by Slurm's own word, once nobody held it.
    reasons: set[str] = field(default_factory=set)

    @property
    def completed(self) -> bool:
        return self.state == "COMPLETED"

    @property
    def killed(self) -> bool:
        """It had begun, and did not come to its end."""
        return self.started_at is not None and not self.completed


@dataclass
class Log:
    """What a log says.

    :param cores: of each node, from when on.
    """

    jobs: dict[int, Job]
    cores: dict[str, list[tuple[float, int]]]
    #: Lines that no run should have: jobs that Slurm requeues, settings that it refuses.
    odd: list[str]

    @property
    def started(self) -> list[Job]:
        """Jobs that have begun, in that order."""
        return sorted((job for job in self.jobs.values() if job.started_at is not None), key=lambda job: _start(job))


def excerpt(log: str, jobs: str, sched: str = "") -> str:
    """The lines that count. Of why a job waits, those where it is another reason than before.

    :param jobs: of the plugin jobcomp/filetxt.
    :param sched: the log of the scheduler; of it, why jobs wait.
    """
    kept, reasons = [], dict[str, str]()
    why = [line.removeprefix("sched: ") for line in sched.splitlines() if _REASON.search(line)]
    # By their times, which all begin with.
    for line in sorted([*log.splitlines(), *why], key=lambda line: line[:25]):
        if not any(pattern.search(line) for pattern in _COUNTS):
            continue
        if (found := _REASON.search(line)) is not None:
            if reasons.get(found[1]) == found[2]:
                continue
            reasons[found[1]] = found[2]
        kept.append(line)
    for line in jobs.splitlines():
        if (found := _JOB.match(line)) is not None:
            kept.append(f"job {found[1]} {found[2]} {found[3]} {found[4]}")
    return "\n".join(kept) + "\n"


def read(text: str, most_cores: int) -> Log:
    """An excerpt, or a log with such lines behind it.

    :param most_cores: of each node before its number is first set.
    """
    log = Log({}, defaultdict(lambda: [(0.0, most_cores)]), [])
    jobs: dict[int, Job] = {}

    def job(number: str) -> Job:
        return jobs.setdefault(int(number), Job(int(number)))

    for line in text.splitlines():
        if (kept := _KEPT.match(line)) is not None:
            one = job(kept[1])
            one.name, one.state, one.cores = kept[2], kept[3], int(kept[4])
            continue
        if (timed := _AT.match(line)) is None:
            continue
        at, said = datetime.fromisoformat(timed[1]).timestamp(), timed[2]
        if (found := _SUBMITTED.search(said)) is not None:
            one = job(found[1])
            one.submitted_at = at
            one.eligible_at = at if int(found[2]) else None
        elif (found := _RELEASED.search(said)) is not None:
            job(found[1]).eligible_at = at
        elif (found := _REQUIRED.search(said)) is not None:
            job(found[2]).required = found[1]
        elif (found := _STARTED.search(said)) is not None:
            one = job(found[1] or found[3])
            one.started_at, one.node = at, found[2] or found[4]
        elif (found := _DONE.search(said) or _KILLED.search(said)) is not None:
            one = job(found[1])
            one.ended_at = at if one.ended_at is None else one.ended_at
        elif (found := _FREED.search(said)) is not None:
            job(found[1]).freed_at = at
        elif (found := _CORES.search(said)) is not None:
            log.cores[found[1]].append((at, int(found[2])))
        elif (found := _REASON.search(said)) is not None:
            # Two files with times in milliseconds: what was said in that of the release may be of before it.
            if (eligible_at := job(found[1]).eligible_at) is not None and at > eligible_at:
                job(found[1]).reasons.add(found[2])
        else:
            log.odd.append(line)
    log.jobs = jobs
    return log


@dataclass(frozen=True, slots=True)
class Wait:
    """How long a job that began had waited though a node had room for it: what Slurm's own looks take; seconds."""

    job: Job
    seconds: float


def waits(log: Log) -> list[Wait]:
    """Of each job that began: the time from when nobody held it on in which there was room for it."""
    on: dict[str, list[Job]] = defaultdict(list)
    for one in log.started:
        on[one.node].append(one)
    nodes = sorted({*log.cores, *on})
    found = []
    for one in log.started:
        begin, end = one.eligible_at if one.eligible_at is not None else one.submitted_at, _start(one)
        names = [one.required] if one.required else nodes
        total = 0.0
        moments = sorted({begin, end, *(at for name in names for at in _moments(log, on, name, begin, end))})
        for at, after in pairwise(moments):
            if any(_free(log, on, name, at, one) >= one.cores for name in names):
                total += after - at
        found.append(Wait(one, total))
    return found


def lost_core_s(log: Log) -> float:
    """Work of jobs that were killed, core-seconds."""
    return sum((_end(one) - _start(one)) * one.cores for one in log.started if one.killed)


def settle(log: Log, durations_s: Mapping[str, float]) -> None:
    """Count as completed who was ended after its time was over: Slurm had not heard of its end yet.

    :param durations_s: by the names of tasks.
    """
    for one in log.started:
        if not one.completed and _end(one) - _start(one) >= durations_s[_task(one)]:
            one.state = "COMPLETED"


def completed_at(log: Log) -> dict[str, float]:
    """When each task came to its end, by the name of its jobs without their number (``LABEL.TASK...``)."""
    found: dict[str, float] = {}
    for one in log.started:
        if one.completed:
            found.setdefault(_task(one), _end(one))
    return found


def _moments(log: Log, on: Mapping[str, Sequence[Job]], name: str, begin: float, end: float) -> Iterator[float]:
    """When a node's room changed within a time."""
    changes: Iterable[float] = (
        *(at for at, _ in log.cores[name]),
        *(_start(other) for other in on.get(name, ())),
        *(_freed(other) for other in on.get(name, ())),
    )
    return (at for at in changes if begin < at < end)


def _free(log: Log, on: Mapping[str, Sequence[Job]], name: str, at: float, but: Job) -> int:
    held = sum(o.cores for o in on.get(name, ()) if o is not but and _start(o) <= at < _freed(o))
    places = log.cores[name]
    return places[bisect_right(places, at, key=lambda place: place[0]) - 1][1] - held


def _task(job: Job) -> str:
    return job.name.split(".")[1]


def _start(job: Job) -> float:
    return job.started_at if job.started_at is not None else float("inf")


def _end(job: Job) -> float:
    return job.ended_at if job.ended_at is not None else float("inf")


def _freed(job: Job) -> float:
    return job.freed_at if job.freed_at is not None else _end(job)
