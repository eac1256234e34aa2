"""The model `steady`: room before it is asked for (docs/research/steady.md)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from ebbtide.deflation.resources import ResourceVector
from ebbtide.simulator.cluster import workload
from ebbtide.simulator.errors import InvalidParameter
from ebbtide.simulator.experiments.fields import Given
from ebbtide.simulator.experiments.model import POLICY, Input, Outcome, Progress
from ebbtide.simulator.experiments.shared import SharedArrays, fingerprint, shared_arrays
from ebbtide.simulator.inputs.batches import VmBatch
from ebbtide.simulator.steady.guests import Habits
from ebbtide.simulator.steady.hosts import SCHEMES, STEADY
from ebbtide.simulator.steady.running import METRICS, Plan, Run

_MOST_NODES: Final = 1000


@dataclass(frozen=True, slots=True)
class Case:
    """One case of the model.

    :param demand: peak offered nominal memory per memory of the hosts.
    """

    vms: Input
    scheme: str
    demand: float
    low_share: float
    minimum_share: float
    sample_share: float
    capacity: ResourceVector
    window_s: tuple[float, float]
    warm_s: float
    grid_s: float
    #: VMs that came before it and are not seen to depart were followed no longer: their lives are drawn.
    followed_until_s: float
    reclaim_mib_s: float
    begins_s: float
    asked_mib: float | None
    habits: Habits


class SteadyModel:
    """VMs of a trace on as many hosts as make the wished demand for memory."""

    name: Final = "steady"
    version: Final = 5
    metrics: Final = METRICS

    def settings(self, given: Mapping[str, Any]) -> Case:
        """Raises InvalidParameter."""
        g, usual = Given(given), Habits()
        reserve_gib = g.number("reserve_gib", -1.0, least=-1)
        case = Case(
            vms=g.input("vms"),
            scheme=g.choice(POLICY, SCHEMES, STEADY),
            demand=g.number("demand", 1.2, above=0, most=10),
            low_share=g.number("low_share", 0.5, least=0, most=1),
            minimum_share=g.number("minimum_share", 0.3, least=0, most=1),
            sample_share=g.number("sample_share", 1.0, above=0, most=1),
            capacity=ResourceVector(
                g.number("node_cpu_cores", 64.0, above=0), g.number("node_memory_mib", 131072.0, above=0)
            ),
            window_s=(
                g.number("window_from_s", 4 * workload.DAY_S, least=0),
                g.number("window_until_s", 5 * workload.DAY_S, above=0),
            ),
            warm_s=g.number("warm_s", workload.DAY_S, least=0),
            grid_s=g.number("grid_s", 0.0, least=0),
            followed_until_s=g.number("followed_until_s", 0.0, least=0),
            reclaim_mib_s=g.number("reclaim_mib_s", 280.0, above=0),
            begins_s=g.number("begins_s", 1.0, least=0),
            asked_mib=reserve_gib * 1024 if reserve_gib >= 0 else None,
            habits=Habits(
                hot_from=g.number("hot_from", usual.hot_from, least=0, most=1),
                hot_to=g.number("hot_to", usual.hot_to, least=0, most=1),
                hot_stays_s=g.number("hot_stays_s", usual.hot_stays_s, above=0),
                warm_to=g.number("warm_to", usual.warm_to, least=0, most=1),
                hot_again_s=g.number("hot_again_s", usual.hot_again_s, above=0),
                warm_again_s=g.number("warm_again_s", usual.warm_again_s, above=0),
            ),
        )
        g.end()
        if case.window_s[0] >= case.window_s[1]:
            raise InvalidParameter("window_from_s", f"must be below window_until_s, but is {case.window_s[0]:g}")
        if case.habits.hot_from > case.habits.hot_to:
            raise InvalidParameter("hot_from", f"must not be above hot_to, but is {case.habits.hot_from:g}")
        return case

    def prepare(self, settings: Sequence[Case], progress: Progress) -> dict[tuple[str, float], SharedArrays]:
        """The sampled VMs of each input, by its path and the sample's share."""
        found = {}
        samples = {(str(one.vms.path), one.sample_share): one.vms for one in settings}
        for number, ((path, share), given) in enumerate(samples.items()):
            what = ["deflation-cluster", 1, fingerprint(given.path), given.format, dict(given.options), given.order]

            def read(given: Input = given, share: float = share) -> dict[str, NDArray[Any]]:
                return workload.sampled(given.batches(VmBatch, "vms", from_first=True), share).arrays()

            found[path, share] = shared_arrays([*what, share], read)
            progress((number + 1) / len(samples))
        for one in settings:
            last_s = float(found[str(one.vms.path), one.sample_share]["arrives_s"][-1])
            if one.window_s[0] > last_s:
                problem = f"is {one.window_s[0]:g}, but the last VM of the trace arrives at {last_s:g} s"
                raise InvalidParameter("window_from_s", problem)
        return found

    def run(self, settings: Case, seed: int, prepared: Any, progress: Progress) -> Outcome:
        """One run. The seed moves the tenants off the trace's grid, draws priorities, and what guests do."""
        of_times, of_vms, of_lives = (np.random.default_rng(one) for one in np.random.SeedSequence(seed).spawn(3))
        sample = workload.Sample.of(prepared[str(settings.vms.path), settings.sample_share])
        sample = workload.with_drawn_lives(sample, settings.followed_until_s, of_lives)
        sample = workload.moved_off_grid(sample, settings.grid_s, of_times)
        arrivals = workload.arrivals_of(sample, settings.low_share, settings.minimum_share, 1, of_vms)
        # What fits no host must not ask for any.
        fits = workload.fitting(arrivals.upper, settings.capacity.cpu_cores, settings.capacity.memory_mib)
        wide = workload.fits_no_node(sample, fits, settings.window_s)
        peak_mib = workload.offered(sample.part(fits), settings.window_s).peak_memory_mib
        if peak_mib <= 0 and wide:
            raise InvalidParameter("node_cpu_cores", "and node_memory_mib make hosts that no VM of the window fits")
        if peak_mib <= 0:
            raise InvalidParameter("window_from_s", "and window_until_s make a window in which the trace has no VM")
        nodes = workload.nodes_for(peak_mib, settings.demand, settings.capacity.memory_mib)
        if nodes > _MOST_NODES:
            raise InvalidParameter("sample_share", f"makes {nodes} hosts; at most {_MOST_NODES} are allowed")
        plan = Plan(
            settings.scheme,
            nodes,
            settings.capacity,
            settings.window_s,
            max(settings.window_s[0] - settings.warm_s, 0.0),
            settings.reclaim_mib_s,
            settings.begins_s,
            settings.asked_mib,
            settings.habits,
        )
        found = dict(Run(plan, arrivals, seed).go(progress))
        last_s, until_s = float(arrivals.at_s[-1]), settings.window_s[1]
        beyond = f"the window ends at {until_s:g} s, and the last VM of the trace arrives at {last_s:g} s"
        found["memory_demand"] = peak_mib / (nodes * settings.capacity.memory_mib)
        return Outcome(found, warnings=(*wide, *((beyond,) if last_s < until_s else ())))


MODEL: Final = SteadyModel()
