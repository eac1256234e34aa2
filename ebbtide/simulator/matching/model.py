"""The matcher as a model of experiments: a pool replayed from a VM trace, jobs, a scheme.

See docs/internals/matching.md.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

import numpy as np

from ebbtide.deflation.errors import InvalidField
from ebbtide.matcher.acquire.net_changes import AcquirerOptions
from ebbtide.matcher.match.matching import THRESHOLD
from ebbtide.matcher.policies.victims import ORDERS
from ebbtide.matcher.predict.calibration import CLASSES
from ebbtide.simulator.errors import InvalidParameter
from ebbtide.simulator.experiments.fields import Given
from ebbtide.simulator.experiments.model import INPUTS, POLICY, Input, Outcome
from ebbtide.simulator.experiments.shared import SharedArrays, fingerprint, shared_arrays
from ebbtide.simulator.generators.harvest import Packing
from ebbtide.simulator.generators.power import Cut
from ebbtide.simulator.generators.replayed import vm_columns
from ebbtide.simulator.inputs.batches import SeriesBatch, VmBatch
from ebbtide.simulator.jobs.settings import REQUEUE
from ebbtide.simulator.matching.acquiring import Acquisition, Removal
from ebbtide.simulator.matching.calibrating import FIGURES, KINDS, calibrate, figure, figures, of_machines
from ebbtide.simulator.matching.costs import Prices, VmKind
from ebbtide.simulator.matching.foresight import METRICS as FORESIGHT
from ebbtide.simulator.matching.foresight import foresight
from ebbtide.simulator.matching.others import Others
from ebbtide.simulator.matching.pools import Pool, PoolSettings, PowerSettings, Supply, pool
from ebbtide.simulator.matching.running import KINDS as KINDS_OF_JOBS
from ebbtide.simulator.matching.running import LIVE_ORDER, WARM_UP_S, Order, run
from ebbtide.simulator.matching.schemes import SCHEMES
from ebbtide.simulator.matching.variation import DURATIONS_S
from ebbtide.simulator.matching.workload import SHAPES, Workload

_DAY_S: Final = 86_400.0
#: Sizes of Spot and regular VMs, and minimums of harvest VMs (Agarwal et al. 2023 §2.1), each as likely.
VM_CORES: Final = (2, 4, 8)
_VERSION: Final = 3


@dataclass(frozen=True, slots=True)
class Case:
    """Settings of one case."""

    scheme: str
    vms: Input
    #: None: all cores have power all the time.
    power: Input | None
    pool: PoolSettings
    #: The first of so many pools: a run of seed n has the nth, beginning anew after the last.
    pool_seed: int
    pools: int
    workload: Workload
    order: Order
    #: Of P_c, in schemes by heartbeat.
    threshold: float
    #: None: all machines of the pool are ours all the time.
    acquisition: Acquisition | None
    validate: bool
    rows: bool = False
    #: Hold what is predicted against what comes of it, of all machines at regular times, too.
    calibrate: bool = False
    #: Every so-manieth job saves its work; 0: none.
    interruptible: int = 0
    #: So many other draws of the same VMs say what could be known (`simulator.matching.foresight`).
    other_draws: int = 0


#: What a run gives: of an acquirer where there is one, of the pool, and of its power where that is a trace's.
METRICS: Final = (
    *("jct_mean_s", "jct_p90_s", "jct_geometric_mean_s", "waste", "kills_per_task", "wait_mean_s", "brier"),
    *("lost_at_worst", "slowdown_geometric_mean", "slowed_4_share", "jobs_done", "jobs_left"),
    *(f"{name}_jct_geometric_mean_s" for name, _ in KINDS_OF_JOBS),
    *("span_s", "machines_requested", "machines_given_back", "machines_evicted", "machines_held_mean"),
    *("cores_held_mean", "cores_paid_mean", "utilisation", "cost_total", "core_h_paid", "pool_changes"),
    *("pool_gap_mean_min", "pool_gap_p50_min", "pool_gap_p95_min", "pool_within_10_min", "pool_within_1_h"),
    *("pool_gap_drift", *(f"pool_stable_for_{duration_s / 60:g}_min" for duration_s in DURATIONS_S)),
    *("pool_change_mean_cores", "pool_mean_cores", "pool_rejected_share", "pool_power_mean"),
    *("pool_hour_p50_changes", "pool_hour_p90_changes", "pool_day_p50_changes", "pool_day_p90_changes"),
    *("pool_rank_correlation", "pool_cores_p10", "pool_cores_p90"),
    *("pool_power_least", "pool_power_most", "pool_vms_evicted", "pool_vms_deferred", "pool_vms_relaunched"),
    *(figure(kind, decile, what) for kind in KINDS for what in FIGURES for decile in range(CLASSES)),
    "calibration_brier",
    *FORESIGHT,
)


class MatchingModel:
    """A run's seed draws the jobs and the pool: one of ``pools`` pools, beginning with that of ``pool_seed``.

    All schemes of one seed see one pool and the same jobs.
    """

    name: Final = "matching"
    version: Final = _VERSION
    metrics: Final = METRICS

    def settings(self, given: Mapping[str, Any]) -> Case:
        """Raises InvalidParameter."""
        g = Given(given)
        vms, power = g.inputs("vms", "power")
        if vms is None:
            raise InvalidParameter(f"{INPUTS}.vms", "is missing")
        acquisition = _acquisition(g)
        machines = g.whole("machines", 64, least=1)
        servers = g.whole("servers", 200, least=1, most=1_000_000)
        window_h, jobs = g.number("window_h", 0.0, least=0), g.whole("jobs", 50, least=1, most=1_000_000)
        if window_h and "jobs" in g:
            raise g.wrong("jobs", "must not be stated with window_h: as many come as make the load")
        case = Case(
            scheme=g.choice(POLICY, tuple(SCHEMES), "landmark"),
            vms=vms,
            power=power,
            pool=PoolSettings(
                packing=Packing(g.choice("packing", [p.value for p in Packing], Packing.RANDOM.value)),
                servers=servers,
                share=g.number("share", 0.1, above=0, most=1),
                least_lifetime_s=g.number("least_lifetime_s", 0.0, least=0),
                cpu_cores=g.number("cpu_cores", 48.0, above=0),
                memory_mib=g.number("memory_mib", 262_144.0, above=0),
                least_cpu_cores=g.number("least_cpu_cores", 2.0, least=0),
                grid_s=g.number("grid_s", 300.0, least=0),
                # An acquirer may come to have any server's.
                machines=machines if acquisition is None else servers,
                from_s=g.number("from_s", 3 * _DAY_S, least=0),
                until_s=g.number("until_s", 8 * _DAY_S, above=0),
                power=_power(g) if power is not None else None,
                drawn=g.whole("drawn", 10, least=1, most=1000),
                together=g.flag("together", False),
                threads_per_core=g.whole("threads_per_core", 1, least=1, most=8),
                followed_until_s=g.number("followed_until_s", 0.0, least=0),
                others=Others(g.number("others_share", 0.0, least=0), 3600.0 * g.number("others_life_h", 2.0, above=0)),
            ),
            pool_seed=g.whole("pool_seed", 1, least=0),
            pools=g.whole("pools", 10, least=1, most=1000),
            order=Order(
                g.choice("kills", tuple(ORDERS), LIVE_ORDER.kills),
                g.choice("requeue", tuple(REQUEUE), LIVE_ORDER.requeue),
            ),
            threshold=g.number("threshold", THRESHOLD, least=0, most=1),
            workload=Workload(
                load=g.number("load", 0.3, above=0),
                jobs=jobs,
                least_tasks=g.whole("least_tasks", 20, least=1),
                most_tasks=g.whole("most_tasks", 100, least=1, most=100_000),
                most_task_s=g.number("most_task_s", 3600.0, above=60),
                shape=g.choice("shape", SHAPES, SHAPES[0]),
                estimate_factor=g.number("estimate_factor", 1.0, above=0, most=999),
                estimate_error=g.number("estimate_error", 0.0, least=0, most=1),
                estimate_missing=g.number("estimate_missing", 0.0, least=0, most=1),
                rate_factors=g.numbers("rate_factors", (1.0,), above=0),
                rate_period_s=g.number("rate_period_s", 21_600.0, above=0),
                window_s=3600.0 * window_h or None,
                edge_s=3600.0 * g.number("edge_h", 0.0, least=0),
            ),
            acquisition=acquisition,
            validate=g.flag("validate", False),
            rows=g.flag("rows", False),
            calibrate=g.flag("calibrate", False),
            interruptible=g.whole("interruptible", 0, least=0),
            other_draws=g.whole("other_draws", 0, least=0, most=100),
        )
        g.end()
        if case.other_draws and not SCHEMES[case.scheme].predicting.sized:
            raise InvalidParameter(
                "other_draws", f"needs a policy that predicts with sizes, such as live, not {case.scheme}"
            )
        if SCHEMES[case.scheme].known and not (case.other_draws and acquisition is None):
            raise InvalidParameter("other_draws", f"must be at least 1 with {case.scheme}, which needs no acquirer")
        return case

    def prepare(self, settings: Sequence[Case], progress: Callable[[float], None]) -> dict[str, SharedArrays]:
        """The trace's VMs, and each pool once."""
        found: dict[str, SharedArrays] = {}
        columns: dict[str, Mapping[str, Any]] = {}
        drawn = [
            (case, case.pool_seed + number, draw)
            for case in settings
            for number in range(case.pools)
            for draw in range(case.other_draws + 1)
        ]
        cases = {_key(case, seed, draw): (case, seed, draw) for case, seed, draw in drawn}
        for number, (key, (case, seed, draw)) in enumerate(cases.items()):

            def make(case: Case = case, seed: int = seed, draw: int = draw) -> dict[str, Any]:
                path = str(case.vms.path)
                if path not in columns:
                    columns[path] = vm_columns(case.vms.batches(VmBatch, "vms", from_first=True))
                power = case.power.batches(SeriesBatch, "power", from_first=True) if case.power is not None else ()
                # Of another draw all servers are looked at.
                given = replace(case.pool, machines=case.pool.servers) if draw else case.pool
                made = pool(columns[path], given, seed, power, draw)
                arrays = {
                    "machine": made.machine,
                    "at_s": made.at_s,
                    "cores": made.cores,
                    "rejected": np.array([made.rejected_share]),
                    "arrives_until_s": np.array([made.arrives_until_s]),
                }
                if (supply := made.supply) is not None:
                    arrays |= {"power_at_s": supply.at_s, "power_share": supply.share}
                    arrays["power_did"] = np.array([supply.evicted, supply.deferred, supply.relaunched])
                return arrays

            inputs = [case.vms] if case.power is None else [case.vms, case.power]
            terms = [[fingerprint(one.path), one.format, dict(one.options), one.order] for one in inputs]
            what = [self.name, _VERSION, *(term for terms_of in terms for term in terms_of), key]
            found[key] = shared_arrays(what, make)
            progress((number + 1) / len(cases))
        return found

    def run(self, settings: Case, seed: int, prepared: Any, progress: Callable[[float], None]) -> Outcome:
        """One run. Raises InvalidParameter where the pool's changes are too short for the load."""
        pool_seed = settings.pool_seed + (seed - 1) % settings.pools
        found, *others = (
            _made(settings, prepared[_key(settings, pool_seed, draw)], draw) for draw in range(settings.other_draws + 1)
        )
        span_s = found.until_s - float(found.at_s[0])
        done = run(
            found,
            settings.workload,
            settings.scheme,
            seed,
            lambda at_s: progress(min((at_s - float(found.at_s[0])) / span_s, 1.0)),
            acquisition=settings.acquisition,
            order=settings.order,
            threshold=settings.threshold,
            validate=settings.validate,
            interruptible=settings.interruptible,
            others=others,
        )
        start_s = float(found.at_s[0]) + WARM_UP_S
        statistics = found.statistics(start_s, start_s + done.span_s)
        tables: dict[str, dict[str, Any]] = {"jobs": {"completion_s": done.completion_s}}
        if settings.rows:
            tables["jobs"] |= done.jobs
        if done.calibration is not None:
            counts, predicted, observed = done.calibration
            tables["calibration"] = {"count": counts, "predicted": predicted, "observed": observed}
        if done.acquired is not None:
            tables["held"] = done.acquired.held.table
        metrics = {**done.metrics, **{f"pool_{name}": value for name, value in statistics.items()}}
        if settings.calibrate and done.calibration is not None:
            metrics |= figures("started", *done.calibration)
            metrics |= of_machines(calibrate(found, SCHEMES[settings.scheme].predicting))
        if others and not SCHEMES[settings.scheme].known:
            metrics |= foresight(found, others, SCHEMES[settings.scheme].predicting)
        warnings = (*done.not_done, *found.beyond(), *settings.workload.warnings(done.span_s))
        return Outcome(metrics, tables, (*warnings, *_of_pools(settings.pools, seed)))


MODEL: Final = MatchingModel()


def _of_pools(pools: int, seed: int) -> tuple[str, ...]:
    """Where a seed has another's pool again, which no interval over seeds knows of."""
    if 1 <= seed <= pools:
        return ()
    return (
        f"seeds other than 1 to {pools} have the pools of those again, and where both are run intervals take them as "
        "independent: the setting pools must be no less than the seeds",
    )


def _acquisition(g: Given) -> Acquisition | None:
    """By `acquirer`, which is off where it is not said."""
    if not g.flag("acquirer", False):
        return None
    budget_cores = g.number("budget_cores", 0.0, least=0)
    try:
        options = AcquirerOptions(
            least_machines=g.whole("least_machines", 1, least=0),
            most_machines=g.whole("most_machines", 64, least=1),
            replaced_share=g.number("replaced_share", 0.1, least=0, most=1),
            least_utilisation=g.number("least_utilisation", 0.6, least=0, most=1),
            most_utilisation=g.number("most_utilisation", 0.8, least=0, most=1),
            period_s=g.number("period_s", 3600.0, above=0),
            expected_cores=g.number("expected_cores", 4.0, above=0),
            evidence_s=g.number("evidence_s", 9000.0, least=0),
            least_gain=g.number("least_gain", 0.05, least=0, most=1),
        )
    except InvalidField as error:
        # What the acquirer itself refuses, of two settings that do not go together.
        raise InvalidParameter(error.field, error.problem) from error
    kind = VmKind(g.choice("vm_kind", [kind.value for kind in VmKind], VmKind.HARVEST.value))
    sizes = g.numbers("vm_cores", () if kind is VmKind.HARVEST else VM_CORES, above=0)
    if any(size != int(size) for size in sizes):
        raise g.wrong("vm_cores", "must be whole numbers")
    return Acquisition(
        options,
        allocation=Packing(g.choice("allocation", [p.value for p in Packing], Packing.RANDOM.value)),
        step_s=g.number("step_s", 300.0, above=0),
        budget_cores=budget_cores or None,
        kind=kind,
        vm_cores=tuple(int(size) for size in sizes),
        vms_per_server=g.whole("vms_per_server", 1, least=1),
        removal=Removal(g.choice("removal", [one.value for one in Removal], Removal.RECENT.value)),
        prices=Prices(
            g.number("spot_discount", Prices().spot_discount, least=0, most=0.99),
            g.number("harvest_discount", Prices().harvest_discount, least=0, most=0.99),
        ),
    )


def _power(g: Given) -> PowerSettings:
    cut = Cut(g.choice("power_cut", [cut.value for cut in Cut], Cut.SERVERS.value))
    return PowerSettings(
        cut,
        g.number("power_from_s", 0.0, least=0),
        g.number("power_step_s", 900.0, least=60, most=_DAY_S),
    )


def _made(case: Case, arrays: Mapping[str, Any], draw: int) -> Pool:
    """A pool as `MatchingModel.prepare` left it."""
    return Pool(
        np.array(arrays["machine"]),
        np.array(arrays["at_s"]),
        np.array(arrays["cores"]),
        case.pool.servers if draw else case.pool.machines,
        case.pool.until_s,
        float(arrays["rejected"][0]),
        _supply(arrays),
        float(arrays["arrives_until_s"][0]),
    )


def _supply(arrays: Mapping[str, Any]) -> Supply | None:
    if "power_did" not in arrays:
        return None
    evicted, deferred, relaunched = (int(value) for value in arrays["power_did"])
    return Supply(np.array(arrays["power_at_s"]), np.array(arrays["power_share"]), evicted, deferred, relaunched)


def _key(case: Case, seed: int, draw: int) -> str:
    """What a pool depends on, but the trace's content."""
    power = "" if case.power is None else f"|{case.power.path}"
    return f"{case.vms.path}|{case.pool}|{seed}{power}" + (f"|{draw}" if draw else "")
