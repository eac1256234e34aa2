"""The model `deflation-cluster`: Fig. 8c and 8d of Sharma et al. 2019 §6.3 over a trace of VMs.

See docs/research/deflation-cluster.md.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from ebbtide.deflation.kernels import WIDTH
from ebbtide.deflation.placement.policy_names import PlacementPolicy
from ebbtide.simulator.cluster import metrics, workload
from ebbtide.simulator.cluster.applications import APPLICATIONS, curves_of
from ebbtide.simulator.cluster.cluster import CHUNK, Cluster
from ebbtide.simulator.cluster.members import CPU, MEMORY
from ebbtide.simulator.cluster.settings import ClusterPolicy, rules_of, under
from ebbtide.simulator.errors import InvalidParameter
from ebbtide.simulator.experiments.fields import Given
from ebbtide.simulator.experiments.model import POLICY, Input, Outcome, Progress
from ebbtide.simulator.experiments.shared import SharedArrays, fingerprint, shared_arrays
from ebbtide.simulator.inputs.batches import VmBatch

#: More are a slip, and would take all memory before anybody sees it.
_MOST_NODES: Final = 1_000_000


@dataclass(frozen=True, slots=True)
class ClusterSettings:
    """One case of the model."""

    vms: Input
    policy: ClusterPolicy
    placement: PlacementPolicy
    #: Peak offered nominal cores per core of the nodes.
    overcommitment: float
    #: Of the VMs whose priority the trace does not say.
    low_share: float
    #: Minimum of low-priority VMs as a share of nominal CPU and memory.
    minimum_share: float
    #: Of the trace's tenants.
    sample_share: float
    node_cpu_cores: float
    node_memory_mib: float
    overhead_mib: float
    #: What is measured, from the trace's beginning; what comes before is replayed to warm up.
    window_from_s: float
    window_until_s: float
    #: The grid of the trace's times, within which each tenant's VMs are moved.
    grid_s: float
    #: VMs that came before it and are not seen to depart were followed no longer: their lives are drawn.
    followed_until_s: float
    applications: tuple[str, ...]
    start_deflated: bool
    validate: bool

    @property
    def window_s(self) -> tuple[float, float]:
        return self.window_from_s, self.window_until_s


#: What a run gives.
METRICS: Final = (
    *("offered_overcommitment", "offered_overcommitment_mean", "offered_memory_overcommitment"),
    *("offered_peak_cores", "incompressible_cpu", "incompressible_memory", "nodes", "low_preempted_share"),
    *("low_preempted_cohort_share", "low_rejected_share", "high_rejected_share", "low_offered"),
    *("low_admitted", "low_preempted", "low_started_deflated", "high_offered", "high_admitted"),
    *("hosted_mean", "hosted_overcommitment", "hosted_overcommitment_peak", "hosted_memory_overcommitment"),
    *("held_cpu_share", "held_memory_share", "low_throughput", "high_throughput", "throughput_per_core"),
    *("deflations",),
)


class ClusterModel:
    """VMs of a trace on as many nodes as make the wished overcommitment."""

    name: Final = "deflation-cluster"
    version: Final = 1
    metrics: Final = METRICS

    def settings(self, given: Mapping[str, Any]) -> ClusterSettings:
        fields = Given(given)
        policies = [p.value for p in ClusterPolicy]
        settings = settings_of(fields, ClusterPolicy(fields.choice(POLICY, policies, ClusterPolicy.DEFLATION.value)))
        fields.end()
        return settings

    def bounds(self, settings: ClusterSettings) -> dict[str, float]:
        """The load that is left at the peak with every low-priority VM at its minimum, per core of the nodes."""
        return {
            "incompressible": workload.incompressible(
                settings.overcommitment, settings.low_share, settings.minimum_share
            )
        }

    def prepare(self, settings: Sequence[ClusterSettings], progress: Progress) -> dict[tuple[str, float], SharedArrays]:
        """The sampled VMs of each input, by its path and the sample's share."""
        samples = {(str(one.vms.path), one.sample_share): one.vms for one in settings}
        found = {}
        for number, ((path, share), given) in enumerate(samples.items()):

            def report(done: int, total: int, before: int = number) -> None:
                progress((before + (done / total if total else 1.0)) / len(samples))

            what = [self.name, 1, fingerprint(given.path), given.format, dict(given.options), given.order, share]

            def read(given: Input = given, share: float = share) -> dict[str, NDArray[Any]]:
                return workload.sampled(given.batches(VmBatch, "vms", report, from_first=True), share).arrays()

            found[path, share] = shared_arrays(what, read)
        for one in settings:
            last_s = float(found[str(one.vms.path), one.sample_share]["arrives_s"][-1])
            if one.window_from_s > last_s:
                problem = f"is {one.window_from_s:g}, but the last VM of the trace arrives at {last_s:g} s"
                raise InvalidParameter("window_from_s", problem)
        return found

    def run(self, settings: ClusterSettings, seed: int, prepared: Any, progress: Progress) -> Outcome:
        case = Case(settings, seed, prepared)
        arrivals, cluster = case.arrivals, case.cluster
        last = int(np.searchsorted(arrivals.at_s, settings.window_until_s))
        for start in range(0, last, CHUNK):
            end = min(start + CHUNK, last)
            cluster.take(arrivals.part(slice(start, end)))
            progress(end / last)
        cluster.finish(settings.window_until_s)
        return case.outcome()


def settings_of(fields: Given, policy: ClusterPolicy) -> ClusterSettings:
    """What all models of a cluster have. The caller reads its own fields, and ends them.

    :raises InvalidParameter: names the field.
    """
    settings = ClusterSettings(
        vms=fields.input("vms"),
        policy=policy,
        placement=PlacementPolicy(
            fields.choice("placement", [p.value for p in PlacementPolicy], PlacementPolicy.BEST_FIT.value)
        ),
        overcommitment=fields.number("overcommitment", above=0, most=100),
        low_share=fields.number("low_share", 0.5, least=0, most=1),
        minimum_share=fields.number("minimum_share", 0.3, least=0, most=1),
        sample_share=fields.number("sample_share", 1.0, above=0, most=1),
        node_cpu_cores=fields.number("node_cpu_cores", 48.0, above=0),
        node_memory_mib=fields.number("node_memory_mib", 131072.0, above=0),
        overhead_mib=fields.number("overhead_mib", 0.0, least=0),
        window_from_s=fields.number("window_from_s", 4 * workload.DAY_S, least=0),
        window_until_s=fields.number("window_until_s", 9 * workload.DAY_S, above=0),
        grid_s=fields.number("grid_s", 0.0, least=0),
        followed_until_s=fields.number("followed_until_s", 0.0, least=0),
        applications=fields.texts("applications", tuple(APPLICATIONS)),
        start_deflated=fields.flag("start_deflated", False),
        validate=fields.flag("validate", False),
    )
    if settings.window_from_s >= settings.window_until_s:
        raise InvalidParameter("window_from_s", f"must be below window_until_s, but is {settings.window_from_s:g}")
    curves_of(settings.applications)
    return settings


class Case:
    """One case under one seed: its VMs, and nodes for them.

    :raises InvalidParameter: no VM within the window, or too many nodes.
    """

    def __init__(self, settings: ClusterSettings, seed: int, prepared: Any) -> None:
        arrays = prepared[str(settings.vms.path), settings.sample_share]
        of_times, of_vms, of_lives = (np.random.default_rng(one) for one in np.random.SeedSequence(seed).spawn(3))
        sample = workload.with_drawn_lives(workload.Sample.of(arrays), settings.followed_until_s, of_lives)
        sample = workload.moved_off_grid(sample, settings.grid_s, of_times)
        self._until_s = settings.window_until_s
        curves = curves_of(settings.applications)
        asked = workload.arrivals_of(sample, settings.low_share, settings.minimum_share, len(curves.points), of_vms)
        # What fits no node must not ask for any; whatever the policy, so that all have as many.
        sizes = asked.minimum if settings.start_deflated else asked.upper
        memory_mib = settings.node_memory_mib - settings.overhead_mib
        fits = workload.fitting(sizes, settings.node_cpu_cores, memory_mib)
        self._wide = workload.fits_no_node(sample, fits, settings.window_s)
        self._demand = demand = workload.offered(sample.part(fits), settings.window_s)
        if demand.peak_cores <= 0 and self._wide:
            raise InvalidParameter("node_cpu_cores", "and node_memory_mib make nodes that no VM of the window fits")
        if demand.peak_cores <= 0:
            raise InvalidParameter("window_from_s", "and window_until_s make a window in which the trace has no VM")
        nodes = workload.nodes_for(demand.peak_cores, settings.overcommitment, settings.node_cpu_cores)
        if nodes > _MOST_NODES:
            raise InvalidParameter("overcommitment", f"makes {nodes} nodes; at most {_MOST_NODES} are allowed")
        capacity = np.zeros((nodes, WIDTH))
        capacity[:, CPU], capacity[:, MEMORY] = settings.node_cpu_cores, settings.node_memory_mib
        self._least = workload.offered(workload.at_minimums(sample, asked).part(fits), settings.window_s)
        self.arrivals = under(settings.policy, asked)
        rules = rules_of(
            settings.policy,
            settings.placement,
            overhead_mib=settings.overhead_mib,
            start_deflated=settings.start_deflated,
            validate=settings.validate,
        )
        self.cluster = Cluster(capacity, rules, curves, settings.window_s)

    def outcome(self) -> Outcome:
        """Figures of a run that has come to its end."""
        cluster, demand = self.cluster, self._demand
        last_s, until_s = float(self.arrivals.at_s[-1]), self._until_s
        beyond = f"the window ends at {until_s:g} s, and the last VM of the trace arrives at {last_s:g} s"
        capacity = cluster.nodes.capacity
        cores, mib = capacity[:, CPU].sum(), capacity[:, MEMORY].sum()
        found = {
            "offered_overcommitment": demand.peak_cores / cores,
            "offered_overcommitment_mean": demand.mean_cores / cores,
            "offered_memory_overcommitment": demand.peak_memory_mib / mib,
            "offered_peak_cores": demand.peak_cores,
            "incompressible_cpu": self._least.peak_cores / cores,
            "incompressible_memory": self._least.peak_memory_mib / mib,
        } | metrics.metrics_of(cluster)
        days = np.arange(len(demand.daily_mean_cores), dtype=np.int64)
        return Outcome(
            found,
            {
                "nodes": {
                    "node": np.arange(len(capacity)),
                    "overcommitment": metrics.node_overcommitment(self.cluster),
                },
                "days": {"day": days, "offered_overcommitment": np.array(demand.daily_mean_cores) / cores},
            },
            (*self._wide, *((beyond,) if last_s < until_s else ())),
        )


MODEL: Final = ClusterModel()
