"""One run: jobs, fixed machines, a scheme; who waited, and what it cost."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Final

import numpy as np
from numpy.typing import NDArray

from ebbtide.matcher.policies.waiting import CORE_HOUR, RESERVED_SHARE
from ebbtide.simulator.errors import ConservationBroken, InvalidParameter
from ebbtide.simulator.inputs.batches import JobBatch
from ebbtide.simulator.jobs.engine import Engine, Machines, Sink
from ebbtide.simulator.jobs.results import Results
from ebbtide.simulator.jobs.rows import JobRowsTable
from ebbtide.simulator.jobs.settings import Settings
from ebbtide.simulator.waiting import arrays as a
from ebbtide.simulator.waiting import spot
from ebbtide.simulator.waiting.learning import MODELS
from ebbtide.simulator.waiting.meanwhile import Asked, Version, ahead, decides, grown_meanwhile
from ebbtide.simulator.waiting.policy import RECORDS, Options, elastic, policy
from ebbtide.simulator.waiting.schemes import Scheme

#: Counts of jobs among the metrics.
COUNTED: Final = ("too_large", "rented", "tried", "untried", "revoked", "stayed", "gave_up")
#: Metrics of models of waits; NaN where there is none.
MODEL_METRICS: Final = (
    *(f"model_{name}_{kind}" for name in MODELS for kind in ("mcc", "mixed_mcc")),
    *("model_ahead_mcc", "model_rows", "model_late", "model_versions", "model_believed_share"),
)
#: Jobs of one task each, from their beginning at each call.
Jobs = Callable[[], Iterable[JobBatch]]


@dataclass(frozen=True, slots=True)
class Terms:
    """Thresholds and what is measured; times in s.

    :param error: of lengths that are known with an error: each is off by an even draw of up to this share.
    :param try_up_to: the chance to be long up to which a job is tried where only some are; with it ``hold_s``, for
        which a job is held for trials of others, and ``half_life_s`` of what others tell.
    :param learn_every_s: how often a forest is grown that learns meanwhile.
    :param memory: whether memory counts.
    :param order: fixed machines take who came first (``arrival``), the ``shortest`` (by core-time, to a quarter), or
        any (``random``, drawn at each start; not where waits are known or predicted: who would wait then hangs on what
        is drawn).
    """

    short_below_s: float = 900.0
    wait_below_s: float = 86_400.0
    by_core_time: bool = True
    error: float = 0.1
    try_up_to: float = 0.7
    hold_s: float = 120.0
    half_life_s: float = 120.0
    learn_every_s: float = 7 * 86_400.0
    memory: bool = True
    order: str = "arrival"
    from_s: float = -math.inf
    validate: bool = False


@dataclass(frozen=True, slots=True)
class Run:
    """What a scheme made of the jobs that came in [from_s, the last of them]."""

    results: Results
    #: Time in the queue, over all jobs; completion time without the runtime (what trials took is in it); runtime; s.
    wait_mean_s: float
    delay_mean_s: float
    #: Dollars for the fixed machines while jobs come, for core-time on them after that, and for those on demand.
    fixed_cost: float
    after_cost: float
    on_demand_cost: float
    #: Core-seconds on demand, and those of them that were lost to trials; share of the fixed machines that is used.
    on_demand_core_s: float
    tried_core_s: float
    fixed_utilisation: float
    #: Jobs: at once on demand (too large for a fixed machine, or not), tried, stayed after it, gave up waiting; share
    #: that waited at all.
    too_large: int
    rented: int
    tried: int
    stayed: int
    gave_up: int
    waited_share: float
    #: Jobs that were not tried, since jobs like them were long; trials that ended with their spot machine.
    untried: int
    revoked: int
    #: Forests that decided, and Matthews' coefficient of what each said of jobs until the next one came.
    versions: tuple[Version, ...]
    ahead_mcc: float

    @property
    def metrics(self) -> dict[str, float]:
        """Figures by name; costs in dollars and as shares of what the fixed machines cost."""
        total = self.fixed_cost + self.after_cost + self.on_demand_cost
        found = {
            "wait_mean_h": self.wait_mean_s / 3600,
            "delay_mean_h": self.delay_mean_s / 3600,
            "on_demand_share": self.on_demand_cost / self.fixed_cost if self.fixed_cost else math.nan,
            "total_cost": total,
            "fixed_cost": self.fixed_cost,
            "after_cost": self.after_cost,
            "on_demand_cost": self.on_demand_cost,
            "on_demand_core_h": self.on_demand_core_s / 3600,
            "tried_core_h": self.tried_core_s / 3600,
            "fixed_utilisation": self.fixed_utilisation,
            "waited_share": self.waited_share,
            "wait_max_h": self.results.measures["task_wait_max_s"] / 3600,
            "wait_p99_h": self.results.measures["task_wait_p99_s"] / 3600,
            "slowdown_mean": self.results.measures["slowdown_mean"],
            **{name: float(getattr(self, name)) for name in COUNTED},
            "jobs": float(self.results.jobs),
            "jobs_refused": float(self.results.jobs_refused),
        }
        return found | self._of_models()

    def _of_models(self) -> dict[str, float]:
        """Of the last forest, but how many there were and the share of those that were believed."""
        found = dict.fromkeys(MODEL_METRICS, math.nan)
        if self.versions:
            learned = self.versions[-1].learned
            found |= {f"model_{name}_mcc": value for name, value in learned.mcc.items()}
            found |= {f"model_{name}_mixed_mcc": value for name, value in learned.mixed.items()}
            found["model_ahead_mcc"] = self.ahead_mcc
            found["model_rows"], found["model_late"] = float(learned.rows), float(learned.late)
            found["model_versions"] = float(len(self.versions))
            found["model_believed_share"] = float(np.mean([version.learned.believed for version in self.versions]))
        return found


@dataclass(frozen=True, slots=True)
class _Span:
    count: int
    first_s: float
    last_s: float
    #: Cores of the widest job.
    widest: int


def run(
    jobs: Jobs,
    machines: Machines,
    scheme: Scheme,
    terms: Terms,
    seed: int,
    training: Jobs | None = None,
    progress: Callable[[float], None] | None = None,
    compile: bool = True,
    rows: JobRowsTable | None = None,
) -> Run:
    """Run it to the end.

    Who would wait too long is known after a run in which all such jobs wait and give up: under a work-conserving order
    they never touch the fixed machines, so that without them all others start when they did (§2.1).

    :param rows: takes what became of each job.
    :param training: what a forest learns from; default: the jobs themselves.
    :raises InvalidParameter: jobs of several tasks, or none.
    """
    runs = _Runs(machines, scheme, terms, seed, compile)
    span = runs.span(jobs)
    told = progress or (lambda share: None)
    asked: Asked | None = None
    versions: list[Version] = []
    options = runs.options(span)
    if terms.order == "random" and scheme.late in ("known", "forest", "meanwhile"):
        raise InvalidParameter("order", "cannot be random where waits are known or predicted: take arrival or shortest")
    if not machines.count and options.wait_below_s == math.inf:
        raise InvalidParameter("machines", "must be at least 1 where jobs wait for them for ever")
    if scheme.late == "known":
        options = replace(options, late="marks", marks=runs.marks(jobs, span)[0])
        told(0.5)
    elif scheme.late in ("forest", "meanwhile"):
        asked = runs.asked(jobs if scheme.late == "meanwhile" or training is None else training)
        told(0.5)
    engine = runs.engine(
        (lambda: rows.named(jobs())) if rows else jobs, span, options, done=rows.take if rows else None
    )
    if asked is not None and scheme.late == "forest":
        versions.append(Version(span.first_s, asked.learn(seed)))
        decides(engine, versions[0].learned)
    elif asked is not None:
        times_s = np.arange(span.first_s + terms.learn_every_s, span.last_s, terms.learn_every_s).tolist()
        versions.extend(grown_meanwhile(engine, asked, times_s, terms.wait_below_s, seed))
    found = engine.run(
        (lambda now_s: told(min(1.0, (now_s - span.first_s) / (span.last_s - span.first_s + 1)))) if progress else None
    )
    ahead_mcc = ahead(versions, asked) if asked is not None and scheme.late == "meanwhile" else math.nan
    return _figures(engine, found, machines, max(span.first_s, terms.from_s), span, tuple(versions), ahead_mcc)


@dataclass(frozen=True)
class _Runs:
    machines: Machines
    scheme: Scheme
    terms: Terms
    seed: int
    compile: bool

    def span(self, jobs: Jobs) -> _Span:
        count, first_s, last_s, widest = 0, math.inf, -math.inf, 1
        for batch in jobs():
            if not len(batch):
                continue
            if (np.diff(batch.task_runtime_s.offsets) != 1).any():
                raise InvalidParameter("jobs", "must have one task each")
            count += len(batch)
            first_s, last_s = min(first_s, float(batch.submit_s[0])), max(last_s, float(batch.submit_s[-1]))
            widest = max(widest, math.ceil(np.nanmax(batch.cpu_cores)))
        if not count:
            raise InvalidParameter("jobs", "are none")
        if not self.terms.from_s < last_s:
            raise InvalidParameter("from_s", f"must be before the last job, which comes at {last_s:g}")
        return _Span(count, first_s, last_s, widest)

    def options(self, span: _Span, learning: bool = False) -> Options:
        scheme, terms = self.scheme, self.terms
        wait_s = {"forever": math.inf, "never": 0.0}.get(scheme.late, terms.wait_below_s)
        return Options(
            short_below_s=0.0 if scheme.short == "none" else terms.short_below_s,
            wait_below_s=wait_s,
            tries=scheme.short in ("tried", "some", "spot") and not learning,
            lifetimes=spot.lifetimes(self.seed) if scheme.short == "spot" and not learning else np.empty(0),
            try_up_to=terms.try_up_to if scheme.short == "some" else 1.0,
            hold_s=terms.hold_s if scheme.short == "some" else 0.0,
            half_life_s=terms.half_life_s,
            by_core_time=terms.by_core_time,
            random=terms.order == "random",
        )

    def marks(self, jobs: Jobs, span: _Span) -> tuple[NDArray[np.int8], int]:
        """Who would wait b or longer, of jobs that wait for want of being known as short; how many were asked."""
        marks = np.zeros(span.count, np.int8)
        options = replace(self.options(span, learning=True), marks=marks, fills_marks=True)
        engine = self.engine(jobs, span, options, known=True)
        engine.run()
        return marks, int(engine.policy_state.knobs[a.KNOB.decisions])

    def asked(self, jobs: Jobs) -> Asked:
        """What is learned from, as the paper's is: a run under both policies with perfect knowledge, every job that
        has to wait a row, or every so manyth if they are too many."""
        span = self.span(jobs)
        marks, decisions = self.marks(jobs, span)
        stride = max(-(-decisions // RECORDS), 1)
        options = replace(self.options(span, learning=True), late="marks", marks=marks, records=True, stride=stride)
        engine = self.engine(jobs, span, options, known=True)
        engine.run()
        state = engine.policy_state
        count = int(state.knobs[a.KNOB.recorded])
        return Asked(state.rows[:count], state.labels[:count], state.asked_s[:count], stride)

    def engine(
        self, jobs: Jobs, span: _Span, options: Options, known: bool = False, done: Sink | None = None
    ) -> Engine:
        """An engine for one pass; ``known``: lengths are, whatever the scheme says."""
        off = self.scheme.short == "off" and not known
        return Engine(
            _off(jobs(), self.terms.error, self.seed) if off else jobs(),
            self.machines,
            policy=policy(options, self.machines),
            settings=Settings(
                memory=self.terms.memory,
                by_length=self.terms.order == "shortest",
                estimates="requested" if off else "exact",
                from_s=self.terms.from_s,
                to_s=math.nextafter(span.last_s, math.inf),
                validate=self.terms.validate,
            ),
            seed=self.seed,
            # What is too large for a fixed machine is rented for.
            most_cores=max(self.machines.cpu_cores, span.widest),
            elastic=elastic(self.machines),
            done=done,
            compile=self.compile,
        )


def _off(batches: Iterable[JobBatch], error: float, seed: int) -> Iterator[JobBatch]:
    """The same jobs with lengths that are believed with an error."""
    generator = np.random.default_rng([seed, 2])
    for batch in batches:
        factor = 1.0 + generator.uniform(-error, error, len(batch))
        yield replace(batch, requested_s=np.maximum(batch.task_runtime_s.values * factor, 1e-9))


def _figures(
    engine: Engine,
    found: Results,
    machines: Machines,
    from_s: float,
    span: _Span,
    versions: tuple[Version, ...],
    ahead_mcc: float,
) -> Run:
    state: a.Waiting = engine.policy_state

    def total(place: int) -> float:
        return float(state.sums[place] + state.sums[place + 1])

    # Kept twice, by the engine and by what is paid.
    if total(a.PAID.jobs) != found.measures["completion_count"]:
        raise ConservationBroken("the jobs that were paid for are not those that were done")
    count = total(a.PAID.jobs) or math.nan
    seconds = span.last_s - from_s
    there = machines.count * machines.cpu_cores * seconds
    return Run(
        results=found,
        wait_mean_s=total(a.PAID.wait_s) / count,
        delay_mean_s=total(a.PAID.delay_s) / count,
        fixed_cost=there / 3600 * CORE_HOUR * RESERVED_SHARE,
        after_cost=total(a.PAID.after_core_s) / 3600 * CORE_HOUR * RESERVED_SHARE,
        on_demand_cost=total(a.PAID.dollars),
        on_demand_core_s=total(a.PAID.core_s),
        tried_core_s=total(a.PAID.lost_core_s),
        fixed_utilisation=total(a.PAID.fixed_core_s) / there if there else math.nan,
        **{name: int(state.knobs[getattr(a.KNOB, name)]) for name in COUNTED},
        waited_share=total(a.PAID.late) / count,
        versions=versions,
        ahead_mcc=ahead_mcc,
    )
