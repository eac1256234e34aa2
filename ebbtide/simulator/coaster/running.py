"""One run: servers, jobs, and transient servers or none; how long short tasks waited, and what was paid."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from ebbtide.matcher.policies.cloudcoaster import is_long, kept_servers, most_transients, probes
from ebbtide.simulator.chance import draws_of
from ebbtide.simulator.coaster import arrays as a
from ebbtide.simulator.coaster import loop
from ebbtide.simulator.compiling import announced, compiled
from ebbtide.simulator.errors import ConservationBroken, InvalidParameter
from ebbtide.simulator.inputs.batches import JobBatch
from ebbtide.simulator.jobs.columns import Floats

#: What a run gives.
METRICS: Final = (
    *("delay_mean_s", "delay_max_s", "delay_p50_s", "delay_p90_s", "delay_p99_s", "long_delay_mean_s"),
    *("short_completion_mean_s", "long_completion_mean_s", "short_tasks", "long_work_share", "servers_on_demand"),
    *("utilisation", "transient_most", "transient_peak", "transient_mean", "transient_lifetime_mean_h"),
    *("transient_lifetime_max_h", "probes_void", "span_h", "arrivals_h", "normalised_mean", "saving"),
    *("saving_asked", "transient_all_mean", "saving_all"),
)
POLICIES: Final = ("eagle", "cloudcoaster", "by-wait", "always-on")
#: Eagle as its paper tells it, and as its published simulator does it.
RULES: Final = ("paper", "simulator")
#: What has a probe on a server on demand at least: each short task, or each job of such.
COPIES: Final = ("task", "job")


@dataclass(frozen=True, slots=True)
class Terms:
    """A cluster and its rules (Ogden and Guo 2019 §4: 4000 servers, 80 for short tasks only, p = .5, r = 1 to 3).

    :param policy: ``eagle``: all servers on demand; ``cloudcoaster``: transient ones in place of some, by long load;
        ``by-wait``: the same by the expected wait of short tasks, above ``longest_wait_s``, each kept until the others
        have ``kept_share`` of that, with bursts of work in mind for ``memory_s``; ``always-on``: as many as those are
        at most, on demand and all the time.
    :param cutoff_s: mean of the tasks from which a job is long.
    :param rules: ``paper``: a task is passed over ``bypasses`` times at most, and a server runs the job that it has to
        its end; ``simulator``: those who pass a task may take ``most_delays`` times its own estimate together, the job
        that a server has competes with those that wait, and durations and estimates are cut to whole seconds.
    :param copies: whether each short task has a probe on a server on demand, or each ``job``.
    :param bypasses: how often shortest remaining first may pass over a task; ``shortest``: whether there is such an
        order at all; ``sticky``: whether a server goes on with the job that it has.
    :raises InvalidParameter: names the field.
    """

    policy: str = "cloudcoaster"
    servers: int = 4000
    short_servers: int = 80
    replaced_share: float = 0.5
    cost_ratio: float = 3.0
    threshold: float = 0.95
    longest_wait_s: float = 170.0
    memory_s: float = 300.0
    kept_share: float = 0.15
    provisioning_s: float = 120.0
    cutoff_s: float = 90.5811
    probe_ratio: float = 2.0
    least_probes: int = 20
    rules: str = "paper"
    copies: str = "task"
    bypasses: int = 5
    most_delays: float = 5.0
    shortest: bool = True
    sticky: bool = True
    validate: bool = False

    def __post_init__(self) -> None:
        if self.policy not in POLICIES:
            raise InvalidParameter("policy", f"must be one of {', '.join(POLICIES)}, not {self.policy!r}")
        if self.rules not in RULES:
            raise InvalidParameter("rules", f"must be one of {', '.join(RULES)}, not {self.rules!r}")
        if self.copies not in COPIES:
            raise InvalidParameter("copies", f"must be one of {', '.join(COPIES)}, not {self.copies!r}")
        if not 0 < self.short_servers < self.servers:
            raise InvalidParameter("short_servers", f"must be above 0 and below servers, but is {self.short_servers}")
        if not 0 <= self.replaced_share <= 1:
            raise InvalidParameter("replaced_share", f"must be a share, but is {self.replaced_share:g}")
        if not self.probe_ratio >= 1:
            raise InvalidParameter("probe_ratio", "must be at least 1, so that every task has a probe")
        if not self.cost_ratio > 0:
            raise InvalidParameter("cost_ratio", f"must be above 0, but is {self.cost_ratio:g}")
        for name in (
            "provisioning_s",
            "longest_wait_s",
            "kept_share",
            "memory_s",
            "least_probes",
            "bypasses",
            "most_delays",
        ):
            if not getattr(self, name) >= 0:
                raise InvalidParameter(name, f"must not be negative, but is {getattr(self, name):g}")
        if self.transient and kept_servers(self.short_servers, self.replaced_share) < 1:
            raise InvalidParameter("replaced_share", "must leave one server on demand for a copy of each short task")

    @property
    def transient(self) -> bool:
        """Whether there are transient servers."""
        return self.policy in ("cloudcoaster", "by-wait")

    @property
    def sizes(self) -> tuple[int, int, int]:
        """Servers on demand, those of them for short tasks only, and the most transient ones."""
        if self.policy == "eagle":
            return self.servers, self.short_servers, 0
        kept = kept_servers(self.short_servers, self.replaced_share)
        general = self.servers - self.short_servers
        most = most_transients(self.short_servers, self.cost_ratio, self.replaced_share)
        if self.policy == "always-on":
            return general + kept + most, kept + most, 0
        return general + kept, kept, most


@dataclass(frozen=True, slots=True)
class Run:
    """What came of it; rows of ``state`` are jobs, tasks, servers."""

    terms: Terms
    state: a.Coaster
    long: Any
    ended_s: float
    #: Names of the jobs, and of how many their tasks want more than one core.
    names: Any
    wide: int = 0

    @property
    def warnings(self) -> tuple[str, ...]:
        """What is to be said of jobs that are not taken as they are."""
        if not self.wide:
            return ()
        jobs = len(self.state.at_s)
        return (f"{self.wide} of {jobs} jobs want more than one core a task, and get one slot a task all the same",)

    def rows(self) -> dict[str, Any]:
        """What became of each job, in the order of the trace."""
        state = self.state
        return {
            "job": np.arange(len(state.at_s)),
            "id": self.names,
            "tasks": np.diff(state.offsets),
            "long": np.asarray(self.long, bool),
            "submitted_s": np.array(state.at_s),
            "ended_s": np.array(state.ended_s),
            "waited_mean_s": np.add.reduceat(state.waited_s, state.offsets[:-1]) / np.diff(state.offsets),
        }

    def delays(self) -> dict[str, Any]:
        """How the waits of short tasks are distributed (Fig. 3): so many wait no longer."""
        share = np.linspace(0, 1, 101)
        short = self.short_delay_s
        return {"share": share, "delay_s": np.quantile(short, share) if len(short) else np.full(101, math.nan)}

    @property
    def short_delay_s(self) -> Floats:
        """How long each short task waited from the submission of its job; s."""
        tasks = np.repeat(~self.long, np.diff(self.state.offsets))
        found: Floats = self.state.waited_s[tasks]
        return found

    @property
    def metrics(self) -> dict[str, float]:
        """Figures by name."""
        state, terms = self.state, self.terms
        short = self.short_delay_s
        long = self.state.waited_s[np.repeat(self.long, np.diff(state.offsets))]
        spans = state.ended_s - state.at_s
        span_s = self.ended_s - float(state.at_s[0])
        servers, _, most = terms.sizes
        arrivals_s = float(state.numbers[a.NUMBER.arrived_s] - state.at_s[0])
        # While jobs come: in a tail without new work all servers are given back.
        active = float(state.numbers[a.NUMBER.arriving_s]) / arrivals_s if arrivals_s > 0 else math.nan
        active_all = float(state.numbers[a.NUMBER.active_s]) / span_s if span_s > 0 else math.nan
        there_s = span_s * servers + float(state.numbers[a.NUMBER.active_s])
        came = int(state.knobs[a.KNOB.came])
        replaced = terms.short_servers - kept_servers(terms.short_servers, terms.replaced_share)
        found = {
            "delay_mean_s": _of(short, np.mean),
            "delay_max_s": _of(short, np.max),
            **{f"delay_p{p}_s": float(np.percentile(short, p)) if len(short) else math.nan for p in (50, 90, 99)},
            "long_delay_mean_s": _of(long, np.mean),
            "short_completion_mean_s": _of(spans[~self.long], np.mean),
            "long_completion_mean_s": _of(spans[self.long], np.mean),
            "short_tasks": float(len(short)),
            "long_work_share": _share(self.long, state),
            "servers_on_demand": float(servers),
            "utilisation": float(state.numbers[a.NUMBER.busy_s]) / there_s if there_s > 0 else 0.0,
            "transient_most": float(most),
            "transient_peak": float(state.knobs[a.KNOB.peak]),
            "transient_mean": active,
            "transient_lifetime_mean_h": float(state.numbers[a.NUMBER.lived_s]) / came / 3600 if came else float("nan"),
            "transient_lifetime_max_h": float(state.numbers[a.NUMBER.longest_s]) / 3600,
            "probes_void": float(state.knobs[a.KNOB.void]),
            "span_h": span_s / 3600,
            "arrivals_h": arrivals_s / 3600,
        }
        coaster = terms.transient
        # What is paid in servers on demand, in place of those that were given up (Table 1).
        found["normalised_mean"] = active / terms.cost_ratio if coaster else math.nan
        found["saving"] = 1.0 - active / terms.cost_ratio / replaced if coaster and replaced else math.nan
        # The same if they are paid from when they are asked for, also those that are given up before they come.
        paid = active + float(state.numbers[a.NUMBER.asked_arriving_s]) / arrivals_s if arrivals_s > 0 else math.nan
        found["saving_asked"] = 1.0 - paid / terms.cost_ratio / replaced if coaster and replaced else math.nan
        found["transient_all_mean"] = active_all
        found["saving_all"] = 1.0 - active_all / terms.cost_ratio / replaced if coaster and replaced else math.nan
        return found


def run(batches: Iterable[JobBatch], terms: Terms, seed: int, compile: bool = True) -> Run:
    """Run it to the end.

    :raises InvalidParameter: no jobs.
    :raises ConservationBroken: an error of the simulator.
    """
    at, mean, counts, runtimes, names = [], [], [], [], []
    wide = 0
    for batch in batches:
        names.append(batch.id.astype(np.str_))
        wide += int((batch.cpu_cores > 1).sum())
        tasks = batch.task_runtime_s
        at.append(batch.submit_s)
        mean.append(np.where(np.isfinite(batch.runtime_s), batch.runtime_s, tasks.means()))
        counts.append(tasks.lengths)
        runtimes.append(tasks.values[tasks.offsets[0] : tasks.offsets[-1]])
    if terms.rules == "simulator":
        mean, runtimes = [np.floor(part) for part in mean], [np.floor(part) for part in runtimes]
    if not at or not sum(len(part) for part in at):
        raise InvalidParameter("jobs", "are none")
    tasks_of = np.concatenate(counts).astype(np.int64)
    state = _state(np.concatenate(at), np.concatenate(mean), tasks_of, np.concatenate(runtimes), terms, seed)
    ended_s = float((_compiled() if compile else loop.simulate)(state))
    broken = int(state.knobs[a.KNOB.broken])
    ran = (state.begun == tasks_of).all() and (state.done == tasks_of).all() and (state.waited_s >= 0).all()
    if broken == 0 and not ran:
        broken = 5
    if broken == 0 and not math.isclose(state.numbers[a.NUMBER.busy_s], state.runtime_s.sum(), rel_tol=1e-9):
        broken = 10
    if broken:
        raise ConservationBroken(a.RULES[broken])
    long = np.array([is_long(mean_s, terms.cutoff_s) for mean_s in state.mean_s], bool)
    return Run(terms, state, long, ended_s, np.concatenate(names), wide)


def _state(at_s: Floats, mean_s: Floats, tasks: Any, runtime_s: Floats, terms: Terms, seed: int) -> a.Coaster:
    fixed, short, most = terms.sizes
    knobs = np.zeros(a.KNOBS, np.int64)
    knobs[a.KNOB.fixed], knobs[a.KNOB.short], knobs[a.KNOB.most] = fixed, short, most
    knobs[a.KNOB.least_probes], knobs[a.KNOB.bypasses] = terms.least_probes, terms.bypasses
    knobs[a.KNOB.sticky], knobs[a.KNOB.shortest], knobs[a.KNOB.validate] = terms.sticky, terms.shortest, terms.validate
    knobs[a.KNOB.published], knobs[a.KNOB.each_task] = terms.rules == "simulator", terms.copies == "task"
    knobs[a.KNOB.by_wait] = terms.policy == "by-wait"
    numbers = np.zeros(a.NUMBERS)
    numbers[a.NUMBER.longest_wait_s], numbers[a.NUMBER.memory_s] = terms.longest_wait_s, terms.memory_s
    numbers[a.NUMBER.most_delays], numbers[a.NUMBER.kept_share] = terms.most_delays, terms.kept_share
    numbers[a.NUMBER.cutoff_s], numbers[a.NUMBER.probe_ratio] = terms.cutoff_s, terms.probe_ratio
    numbers[a.NUMBER.threshold], numbers[a.NUMBER.provisioning_s] = terms.threshold, terms.provisioning_s
    numbers[a.NUMBER.since_s] = at_s[0]
    entries = sum(
        count if is_long(mean, terms.cutoff_s) else probes(count, terms.probe_ratio, terms.least_probes)
        for count, mean in zip(tasks.tolist(), mean_s.tolist(), strict=True)
    )
    servers, made, waited_s, ran_on = a.empty(fixed + most, entries, len(runtime_s), len(tasks))
    return a.Coaster(
        knobs=knobs,
        numbers=numbers,
        draws=draws_of(seed),
        at_s=np.ascontiguousarray(at_s, np.float64),
        mean_s=np.ascontiguousarray(mean_s, np.float64),
        offsets=np.concatenate([[0], np.cumsum(tasks)]).astype(np.int64),
        runtime_s=np.ascontiguousarray(runtime_s, np.float64),
        waited_s=waited_s,
        ran_on=ran_on,
        begun=np.zeros(len(tasks), np.int64),
        done=np.zeros(len(tasks), np.int64),
        ended_s=np.zeros(len(tasks)),
        servers=servers,
        queued_s=np.zeros(fixed + most),
        expected_s=np.zeros(fixed + most),
        since_s=np.zeros(fixed + most),
        open=np.zeros(fixed + most, np.int64),
        entries=made,
        delayed_s=np.zeros(entries),
    )


@functools.cache
def _compiled() -> Callable[[a.Coaster], float]:
    return announced(compiled(loop.simulate), "coaster")


def _of(values: Floats, how: Callable[[Floats], Any]) -> float:
    return float(how(values)) if len(values) else float("nan")


def _share(long: Any, state: a.Coaster) -> float:
    work = np.add.reduceat(state.runtime_s, state.offsets[:-1])
    return float(work[long].sum() / work.sum()) if work.sum() > 0 else float("nan")
