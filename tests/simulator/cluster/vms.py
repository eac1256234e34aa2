"""Arrivals and clusters for tests."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ebbtide.deflation.placement.policy_names import PlacementPolicy
from ebbtide.deflation.resources import ResourceVector
from ebbtide.simulator.cluster.applications import curves_of
from ebbtide.simulator.cluster.cluster import Cluster
from ebbtide.simulator.cluster.settings import ClusterPolicy, rules_of, under
from ebbtide.simulator.cluster.state import HIGH, LOW, Arrivals
from ebbtide.simulator.inputs.batches import Floats

NEVER = math.inf


@dataclass(frozen=True)
class Vm:
    """One arrival; ``minimum`` in cores and MiB makes it one of low priority."""

    at_s: float
    departs_s: float
    cores: float
    mib: float
    minimum: tuple[float, float] | None = None
    curve: int = 0
    draws: tuple[float, float] = (0.0, 0.0)


def arrivals(vms: Sequence[Vm]) -> Arrivals:
    """As columns."""
    upper = np.array([[vm.cores, vm.mib, 0.0, 0.0] for vm in vms]).reshape(-1, 4)
    minimum = np.array([[*(vm.minimum or (vm.cores, vm.mib)), 0.0, 0.0] for vm in vms]).reshape(-1, 4)
    return Arrivals(
        at_s=np.array([vm.at_s for vm in vms], np.float64),
        departs_s=np.array([vm.departs_s for vm in vms], np.float64),
        upper=upper,
        minimum=minimum,
        sold_as=np.array([HIGH if vm.minimum is None else LOW for vm in vms], np.int64),
        curve=np.array([vm.curve for vm in vms], np.int64),
        draws=np.array([vm.draws for vm in vms], np.float64).reshape(-1, 2),
    )


def cluster(
    nodes: Sequence[tuple[float, float]],
    policy: ClusterPolicy = ClusterPolicy.DEFLATION,
    placement: PlacementPolicy = PlacementPolicy.BEST_FIT,
    window_s: tuple[float, float] = (0.0, NEVER),
    overhead_mib: float = 0.0,
    start_deflated: bool = False,
    validate: bool = True,
    applications: Sequence[str] = ("many", "memcached", "spark-als"),
) -> Cluster:
    """Nodes of so many cores and MiB, checked after every event."""
    capacity: Floats = np.array([[cores, mib, 0.0, 0.0] for cores, mib in nodes])
    rules = rules_of(policy, placement, overhead_mib=overhead_mib, start_deflated=start_deflated, validate=validate)
    return Cluster(capacity, rules, curves_of(applications), window_s)


def fed(host: Cluster, policy: ClusterPolicy, vms: Sequence[Vm]) -> list[int]:
    """Let VMs arrive under a policy: the node of each, -1 where it is refused."""
    nodes: list[int] = host.take(under(policy, arrivals(vms))).node.tolist()
    return nodes


def sizes(host: Cluster, node: int = 0) -> dict[int, tuple[float, float]]:
    """Cores and MiB of the VMs on a node, by number."""
    return {vm.number: (vm.current.cpu_cores, vm.current.memory_mib) for vm in host.on(node)}


def crowd(rng: np.random.Generator, count: int, *, low: float = 0.6, span_s: float = 4.0) -> list[Vm]:
    """Arrivals on a coarse grid of times, so that many things happen at one instant; sizes and minimums vary."""
    found = []
    at_s = 0.0
    for _ in range(count):
        at_s += float(rng.integers(0, 3))
        cores = float(rng.choice([1, 2, 4, 8]))
        mib = cores * float(rng.choice([768, 1792, 4096]))
        share = float(rng.choice([0.0, 0.25, 0.3, 0.5, 1.0]))
        minimum = None
        if rng.random() < low:
            size = ResourceVector(max(round(cores * share, 2), 0.1), max(math.ceil(mib * share), 192.0))
            minimum = (size.cpu_cores, size.memory_mib)
        stay_s = NEVER if rng.random() < 0.05 else float(rng.integers(0, int(span_s * 20)))
        found.append(
            Vm(at_s, at_s + stay_s, cores, mib, minimum, int(rng.integers(0, 3)), (rng.random(), rng.random()))
        )
    return found
