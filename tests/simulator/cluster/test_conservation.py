"""Conservation under any arrivals: no node over capacity, no floor crossed, work in = work out; faults are found."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ebbtide.deflation.placement.policy_names import PlacementPolicy
from ebbtide.simulator.cluster.cluster import Cluster
from ebbtide.simulator.cluster.metrics import metrics_of
from ebbtide.simulator.cluster.settings import ClusterPolicy
from ebbtide.simulator.cluster.state import (
    ADMITTED,
    ALIVE,
    HELD_CORES,
    HIGH,
    HIGH_RATE,
    LOW,
    OFFERED,
    PREEMPTED,
    SOLD_MIB,
    SPARE,
    STAY_S,
    WHOLE,
)
from ebbtide.simulator.errors import ConservationBroken, InvalidParameter
from tests.simulator.cluster.vms import NEVER, Vm, arrivals, cluster, crowd, fed, sizes

NODES = [(8.0, 16384.0), (16.0, 24576.0), (4.0, 65536.0)]


@settings(max_examples=40, deadline=None)
@given(
    seed=st.integers(0, 2**32),
    policy=st.sampled_from(list(ClusterPolicy)),
    placement=st.sampled_from(list(PlacementPolicy)),
    overhead_mib=st.sampled_from([0.0, 320.0]),
    start_deflated=st.booleans(),
)
def test_every_event_of_every_policy_leaves_a_state_that_holds(
    seed: int, policy: ClusterPolicy, placement: PlacementPolicy, overhead_mib: float, start_deflated: bool
) -> None:
    host = cluster(NODES, policy, placement, overhead_mib=overhead_mib, start_deflated=start_deflated)
    fed(host, policy, crowd(np.random.default_rng(seed), 120))
    host.finish(host.now_s + 1000)
    assert all(vm.departs_s > host.now_s for node in range(3) for vm in host.on(node))


def test_crowded_clusters_deflate_preempt_and_refuse() -> None:
    host = cluster(NODES)
    rng = np.random.default_rng(1)
    # With nine tenths of low priority more is hosted than there is by any seed, with fewer by some only.
    fed(host, ClusterPolicy.DEFLATION, crowd(rng, 600, low=0.9))
    figures = metrics_of(host)
    assert min(figures[name] for name in ("deflations", "low_preempted", "low_rejected_share", "low_admitted")) > 0
    assert figures["hosted_overcommitment"] > 1


def test_no_low_priority_vm_is_worse_off_than_its_minimum_under_deflation() -> None:
    host = cluster(NODES)
    fed(host, ClusterPolicy.DEFLATION, crowd(np.random.default_rng(2), 300))
    hosted = [vm for node in range(3) for vm in host.on(node)]
    assert hosted
    for vm in hosted:
        assert vm.minimum.fits_in(vm.current)
        assert vm.low_priority or vm.current == vm.nominal


@dataclass(frozen=True)
class Break:
    """A way to break a state on purpose, and what is said of it."""

    rule: str
    how: Callable[[Cluster], None]


def _low(host: Cluster) -> int:
    """The slot of the low-priority VM."""
    return int(np.flatnonzero(host.vms.number == 0)[0])


def _fixed(host: Cluster) -> int:
    return int(np.flatnonzero((host.vms.number == 1) & (host.vms.node == 0))[0])


def _over_capacity(host: Cluster) -> None:
    host.nodes.capacity[0, 0] = 3.0


def _below_minimum(host: Cluster) -> None:
    host.vms.current[_low(host), 0] = 0.5


def _above_nominal(host: Cluster) -> None:
    host.vms.current[_low(host), 1] = 5000.0


def _fixed_deflated(host: Cluster) -> None:
    host.vms.current[_fixed(host), 0] = 1.0


def _free_forged(host: Cluster) -> None:
    host.nodes.free[0, 1] = 100.0


def _deflatable_forged(host: Cluster) -> None:
    host.nodes.deflatable[0, 0] = 4.0


def _member_lost(host: Cluster) -> None:
    host.nodes.members[0] = 1


def _departure_lost(host: Cluster) -> None:
    host.vms.place[_low(host)] = -1


def _slot_lost(host: Cluster) -> None:
    host.tally.state[SPARE] -= 1


def _low_forged(host: Cluster) -> None:
    host.nodes.low[0, 0] = 0.0


def _sold_forged(host: Cluster) -> None:
    host.nodes.sold_cores[0] += 1.0


def _level_drifted(host: Cluster) -> None:
    host.tally.levels[HELD_CORES] += 0.5


def _memory_drifted(host: Cluster) -> None:
    host.tally.levels[SOLD_MIB] += 512.0


def _high_drifted(host: Cluster) -> None:
    host.tally.levels[HIGH_RATE] -= 0.5


BREAKS = [
    Break("node 0 is over its capacity in cpu_cores", _over_capacity),
    Break("VM 0 on node 0 is below its minimum in cpu_cores", _below_minimum),
    Break("VM 0 on node 0 is above its nominal size in memory_mib", _above_nominal),
    Break("VM 1 on node 0 is fixed and yet has another than its nominal size in cpu_cores", _fixed_deflated),
    Break("node 0 says it has another amount of memory_mib free than its VMs leave", _free_forged),
    Break("node 0 says it could free another amount of cpu_cores", _deflatable_forged),
    Break("node 0 has other members than it counts", _member_lost),
    Break("VM 0 is not where the heap of departures says", _departure_lost),
    Break("slots are lost", _slot_lost),
    Break("what the cluster hosts is not the sum of its VMs", _level_drifted),
    Break("what the cluster hosts is not the sum of its VMs", _memory_drifted),
    Break("what the cluster hosts is not the sum of its VMs", _high_drifted),
    Break("node 0 says it could free another amount of cpu_cores", _low_forged),
    Break("node 0 says it hosts other cores than its VMs were sold", _sold_forged),
]


@pytest.mark.parametrize("broken", BREAKS, ids=lambda broken: broken.how.__name__.lstrip("_"))
def test_a_state_that_is_broken_on_purpose_is_found_at_the_next_event(broken: Break) -> None:
    # A second node, so that the next arrival leaves the broken one alone.
    host = cluster([(4.0, 8192.0), (64.0, 65536.0)], placement=PlacementPolicy.FIRST_FIT)
    fed(host, ClusterPolicy.DEFLATION, [Vm(0, 100, 4, 4096, minimum=(1, 1024)), Vm(1, 100, 2, 4096)])
    assert sizes(host) == {0: (2, 4096), 1: (2, 4096)}
    broken.how(host)
    with pytest.raises(ConservationBroken, match=rf"^at 2\.0+ s: {broken.rule}"):
        fed(host, ClusterPolicy.DEFLATION, [Vm(2, 100, 32, 32768)])


def test_room_that_is_kept_from_a_deflated_vm_is_found() -> None:
    host = cluster([(4.0, 8192.0)])
    fed(host, ClusterPolicy.DEFLATION, [Vm(0, NEVER, 4, 4096, minimum=(1, 1024))])
    slot = int(host.nodes.first[0])
    host.vms.current[slot, 0] = 2.0
    host.nodes.free[0, 0] = 2.0
    host.nodes.deflatable[0, 0] = 1.0
    host.nodes.low[0, 0] = 2.0
    with pytest.raises(ConservationBroken, match="keeps cpu_cores from VMs that are deflated"):
        host.finish(1)


def test_work_that_is_lost_is_found_at_the_end() -> None:
    host = cluster([(4.0, 8192.0)])
    fed(host, ClusterPolicy.DEFLATION, [Vm(0, 50, 1, 1024)])
    host.finish(60)
    host.tally.stays[STAY_S] -= 10
    with pytest.raises(ConservationBroken, match="VM-seconds"):
        host.finish(70)


def test_a_node_that_forgets_what_it_hosted_is_found_at_the_end() -> None:
    host = cluster([(4.0, 8192.0)], window_s=(10.0, 40.0))
    fed(host, ClusterPolicy.DEFLATION, [Vm(0, 50, 2, 1024)])
    host.finish(60)
    assert host.hosted_core_s().tolist() == [2 * 30]
    host.nodes.sold_core_s[0] -= 10
    with pytest.raises(ConservationBroken, match=r"the nodes hosted 50.0+ core-seconds, but the cluster 60.0+"):
        host.finish(70)


@pytest.mark.parametrize(
    ("policy", "sold_as", "rule"),
    [
        (ClusterPolicy.DEFLATION, HIGH, "a high-priority VM was preempted"),
        (ClusterPolicy.NO_OVERCOMMIT, LOW, "VMs were preempted, which the policy never does"),
        (ClusterPolicy.MEMORY_BALLOONING, LOW, "VMs were preempted, which the policy never does"),
    ],
)
def test_a_preemption_that_never_may_be_is_found_at_the_end(policy: ClusterPolicy, sold_as: int, rule: str) -> None:
    host = cluster([(4.0, 8192.0)], policy)
    fed(host, policy, [Vm(0, 50, 1, 1024)])
    host.finish(60)
    # As if one had come, been admitted and been preempted.
    host.tally.counts[WHOLE, sold_as, [OFFERED, ADMITTED, PREEMPTED]] += 1
    with pytest.raises(ConservationBroken, match=rule):
        host.finish(70)


def test_vms_that_vanish_are_found_at_the_end() -> None:
    host = cluster([(4.0, 8192.0)])
    fed(host, ClusterPolicy.DEFLATION, [Vm(0, 50, 1, 1024)])
    host.tally.counts[WHOLE, HIGH, [OFFERED, ADMITTED]] += 1
    with pytest.raises(ConservationBroken, match="neither left nor are still there"):
        host.finish(10)
    assert host.tally.state[ALIVE] == 1


@pytest.mark.parametrize(
    ("vms", "field"),
    [
        ([Vm(5, 6, 1, 1024), Vm(4, 6, 1, 1024)], "at_s"),
        ([Vm(5, 4, 1, 1024)], "departs_s"),
        ([Vm(5, 6, 1, 1024, minimum=(2, 1024))], "minimum"),
        ([Vm(5, 6, 1, 1024, minimum=(-1, 1024))], "minimum"),
        ([Vm(5, 6, NEVER, 1024)], "minimum"),
        ([Vm(5, 6, 1, 1024, curve=3)], "curve"),
    ],
)
def test_arrivals_that_cannot_be_are_an_error_and_change_nothing(vms: list[Vm], field: str) -> None:
    host = cluster([(4.0, 8192.0)])
    with pytest.raises(InvalidParameter) as caught:
        host.take(arrivals(vms))
    assert caught.value.field == field
    assert host.taken == 0


def test_arrivals_before_the_time_that_the_cluster_has_reached_are_an_error() -> None:
    host = cluster([(4.0, 8192.0)])
    host.finish(10)
    with pytest.raises(InvalidParameter, match="at_s"):
        host.take(arrivals([Vm(9, 20, 1, 1024)]))
