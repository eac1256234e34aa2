"""The simulated cluster, one event at a time."""

from __future__ import annotations

import numpy as np

from ebbtide.deflation.placement.policy_names import PlacementPolicy
from ebbtide.simulator.cluster.cluster import Cluster
from ebbtide.simulator.cluster.settings import ClusterPolicy, rules_of
from ebbtide.simulator.cluster.state import HIGH, LOW, Arrivals, Curves
from tests.simulator.two_worlds import OVERHEAD_MIB, SHAPES, Arrival, Decided, Size

#: Throughput in proportion to size: no decision depends on it.
CURVES = Curves(np.array([[0.0, 1.0]]), np.array([[0.0, 1.0]]), np.array([2]))


class SimulatedWorld:
    """A cluster like that of `tests.simulator.two_worlds.live_world`, checked after every event."""

    def __init__(self, hosts: int, policy: PlacementPolicy) -> None:
        self._ids = [f"host-{number:02d}" for number in range(hosts)]
        capacity = np.array([list(SHAPES[number % len(SHAPES)]) for number in range(hosts)])
        self._rules = rules_of(ClusterPolicy.DEFLATION, policy, overhead_mib=OVERHEAD_MIB, validate=True)
        self._capacity = capacity
        self._cluster = Cluster(capacity, self._rules, CURVES)

    def warm_up(self) -> None:
        """Have everything compiled."""
        Cluster(self._capacity, self._rules, CURVES).finish(1.0)

    def arrive(self, vm: Arrival) -> Decided:
        """Ask for a VM; departures before it take place."""
        assert vm.number == self._cluster.taken
        decisions = self._cluster.take(
            Arrivals(
                at_s=np.array([vm.at_s]),
                departs_s=np.array([vm.departs_s]),
                upper=np.array([list(vm.nominal)]),
                minimum=np.array([list(vm.minimum)]),
                sold_as=np.array([HIGH if vm.fixed else LOW]),
                curve=np.array([0]),
                draws=np.zeros((1, 2)),
            )
        )
        node = int(decisions.node[0])
        victims = [f"vm-{number:06d}" for number in decisions.victims[:, 0].tolist()]
        return Decided(self._ids[node] if node >= 0 else None, victims)

    def depart_until(self, at_s: float) -> None:
        """Time passes, and who departs until then goes."""
        self._cluster.finish(at_s)

    def sizes(self, host: str) -> dict[str, Size]:
        """What each VM of a host has."""
        node = self._ids.index(host)
        return {f"vm-{vm.number:06d}": tuple(vm.current) for vm in self._cluster.on(node)}  # type: ignore[misc]
