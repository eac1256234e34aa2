"""Small clusters whose course can be followed with a pencil, one for each policy."""

from __future__ import annotations

import math

import pytest

from ebbtide.deflation.placement.policy_names import PlacementPolicy
from ebbtide.simulator.cluster.metrics import metrics_of, node_overcommitment
from ebbtide.simulator.cluster.settings import ClusterPolicy
from tests.simulator.cluster.vms import NEVER, Vm, arrivals, cluster, fed, sizes

NODE = (4.0, 8192.0)
#: A low-priority VM that has the node to itself, and three of high priority after it.
LOW = Vm(0, 100, 4, 4096, minimum=(1, 1024))
FIRST = Vm(10, 50, 2, 4096)
SECOND = Vm(20, 60, 1, 2048)
THIRD = Vm(30, 70, 1, 1024)


def test_deflation_takes_from_the_low_priority_vm_down_to_its_minimum_and_then_preempts_it() -> None:
    host = cluster([NODE])
    assert fed(host, ClusterPolicy.DEFLATION, [LOW, FIRST]) == [0, 0]
    assert sizes(host) == {0: (2, 4096), 1: (2, 4096)}
    assert fed(host, ClusterPolicy.DEFLATION, [SECOND]) == [0]
    assert sizes(host)[0] == (1, 2048)
    decisions = host.take(arrivals([THIRD]))
    assert decisions.node.tolist() == [0]
    assert decisions.victims.tolist() == [[0, 0, 3]]
    assert sizes(host) == {1: (2, 4096), 2: (1, 2048), 3: (1, 1024)}


def test_what_a_departure_frees_goes_back_to_those_that_gave_it() -> None:
    host = cluster([NODE])
    fed(host, ClusterPolicy.DEFLATION, [LOW, FIRST, SECOND])
    host.finish(55)
    assert sizes(host) == {0: (3, 4096), 2: (1, 2048)}
    host.finish(65)
    assert sizes(host) == {0: (4, 4096)}
    host.finish(100)
    assert host.alive == 0


def test_two_low_priority_vms_give_in_proportion_to_what_they_have_above_their_minimums() -> None:
    host = cluster([(8.0, 8192.0)])
    low = [Vm(0, NEVER, 4, 1024, minimum=(1, 1024)), Vm(0, NEVER, 4, 1024, minimum=(2, 1024))]
    fed(host, ClusterPolicy.DEFLATION, [*low, Vm(1, NEVER, 2.5, 1024)])
    assert sizes(host) == {0: (2.5, 1024), 1: (3.0, 1024), 2: (2.5, 1024)}


def test_what_a_preemption_frees_beyond_the_need_goes_to_the_others() -> None:
    host = cluster([(8.0, 8192.0)])
    low = [Vm(0, NEVER, 4, 1024, minimum=(3, 1024)), Vm(0, NEVER, 4, 1024, minimum=(3, 1024))]
    decisions = host.take(arrivals([*low, Vm(1, NEVER, 3, 1024)]))
    # At their minimums both leave 2 cores; one of them goes, and the other is back at nominal.
    assert decisions.node.tolist() == [0, 0, 0]
    assert len(decisions.victims) == 1
    (left,) = {0, 1} - {int(decisions.victims[0, 0])}
    assert sizes(host) == {left: (4, 1024), 2: (3, 1024)}


def test_a_low_priority_vm_deflates_its_like_but_preempts_none() -> None:
    host = cluster([NODE])
    nodes = fed(
        host,
        ClusterPolicy.DEFLATION,
        [LOW, Vm(1, NEVER, 3, 1024, minimum=(0.5, 1024)), Vm(2, NEVER, 4, 1024, minimum=(0.1, 192))],
    )
    assert nodes == [0, 0, -1]
    assert sum(cores for cores, _ in sizes(host).values()) == 4


def test_preemption_only_stops_the_low_priority_vm_at_once() -> None:
    host = cluster([NODE], ClusterPolicy.PREEMPTION_ONLY)
    assert fed(host, ClusterPolicy.PREEMPTION_ONLY, [LOW, FIRST]) == [0, 0]
    assert sizes(host) == {1: (2, 4096)}
    assert metrics_of(host)["low_preempted_share"] == 1.0


def test_without_overcommitment_what_does_not_fit_is_refused() -> None:
    host = cluster([NODE], ClusterPolicy.NO_OVERCOMMIT)
    assert fed(host, ClusterPolicy.NO_OVERCOMMIT, [LOW, FIRST]) == [0, -1]
    assert sizes(host) == {0: (4, 4096)}
    figures = metrics_of(host)
    assert figures["high_rejected_share"] == 1.0
    assert figures["low_preempted_share"] == 0.0


def test_ballooning_shrinks_memory_to_four_fifths_of_the_node_and_slows_everybody_down() -> None:
    host = cluster([NODE], ClusterPolicy.MEMORY_BALLOONING)
    assert fed(host, ClusterPolicy.MEMORY_BALLOONING, [LOW]) == [0]
    assert sizes(host) == {0: (4, 4096)}
    assert fed(host, ClusterPolicy.MEMORY_BALLOONING, [FIRST]) == [0]
    # 80 % of 8192 MiB, of which the fixed VM has 4096.
    assert sizes(host)[0] == pytest.approx((4, 6553.6 - 4096))
    host.finish(20)
    # 6 cores are sold where there are 4, from 10 s to 20 s.
    assert metrics_of(host)["high_throughput"] == pytest.approx(4 / 6)
    host.finish(60)
    assert sizes(host) == {0: (4, 4096)}


def test_ballooning_refuses_what_does_not_fit_with_all_balloons_full() -> None:
    host = cluster([NODE], ClusterPolicy.MEMORY_BALLOONING)
    assert fed(host, ClusterPolicy.MEMORY_BALLOONING, [LOW, FIRST, Vm(11, NEVER, 1, 3073)]) == [0, 0, -1]
    assert fed(host, ClusterPolicy.MEMORY_BALLOONING, [Vm(12, NEVER, 1, 3072)]) == [0]
    assert sizes(host)[0] == (4, 1024)


def test_balloons_are_filled_to_one_level_above_the_minimums() -> None:
    host = cluster([(8.0, 10000.0)], ClusterPolicy.MEMORY_BALLOONING)
    low = [Vm(0, NEVER, 1, 2000, minimum=(1, 1000)), Vm(0, NEVER, 1, 5000, minimum=(1, 1000))]
    fed(host, ClusterPolicy.MEMORY_BALLOONING, [*low, Vm(1, NEVER, 1, 3000)])
    # 8000 - 3000 - 2 x 1000 above the minimums: the small one has its 1000, the other the rest.
    assert sizes(host) == {0: (1, 2000), 1: (1, 3000), 2: (1, 3000)}


def test_at_one_instant_departures_come_before_arrivals() -> None:
    host = cluster([NODE], ClusterPolicy.NO_OVERCOMMIT)
    assert fed(host, ClusterPolicy.NO_OVERCOMMIT, [Vm(0, 10, 4, 1024), Vm(10, 20, 4, 1024)]) == [0, 0]


def test_best_fit_takes_the_node_whose_shape_is_that_of_the_demand() -> None:
    nodes = [(8.0, 8192.0), (8.0, 8192.0)]
    first = [Vm(0, NEVER, 6, 1024), Vm(0, NEVER, 1, 4096)]
    for placement, expected in ((PlacementPolicy.BEST_FIT, 0), (PlacementPolicy.FIRST_FIT, 0)):
        host = cluster(nodes, placement=placement)
        assert fed(host, ClusterPolicy.DEFLATION, [first[0]]) == [expected]
    host = cluster(nodes, placement=PlacementPolicy.BEST_FIT)
    # The first node is left with much memory and little CPU, so what wants memory goes there, what wants CPU does not.
    assert fed(host, ClusterPolicy.DEFLATION, [first[0], first[1], Vm(1, NEVER, 4, 512)]) == [0, 0, 1]
    host = cluster(nodes, placement=PlacementPolicy.FIRST_FIT)
    assert fed(host, ClusterPolicy.DEFLATION, [first[0], first[1], Vm(1, NEVER, 1, 512)]) == [0, 0, 0]


def test_two_choices_takes_one_of_the_two_that_were_drawn() -> None:
    nodes = [(8.0, 8192.0)] * 4
    host = cluster(nodes, placement=PlacementPolicy.TWO_CHOICES)
    drawn = [Vm(0, NEVER, 1, 1024, draws=(0.99, 0.4)), Vm(0, NEVER, 1, 1024, draws=(0.3, 0.3))]
    # 0.99 of four nodes is the last, 0.4 of the other three the second; they are alike, so the first of them it is.
    assert fed(host, ClusterPolicy.DEFLATION, drawn)[0] == 1
    assert fed(cluster(nodes, placement=PlacementPolicy.TWO_CHOICES), ClusterPolicy.DEFLATION, drawn[1:])[0] == 0


def test_a_vm_costs_its_node_its_overhead_too() -> None:
    host = cluster([NODE], ClusterPolicy.NO_OVERCOMMIT, overhead_mib=320)
    whole = Vm(0, NEVER, 1, 8192)
    assert fed(host, ClusterPolicy.NO_OVERCOMMIT, [whole]) == [-1]
    assert fed(host, ClusterPolicy.NO_OVERCOMMIT, [Vm(0, NEVER, 1, 8192 - 320)]) == [0]


def test_throughput_is_the_integral_of_the_utility_curves() -> None:
    host = cluster([NODE], applications=["many"])
    fed(host, ClusterPolicy.DEFLATION, [LOW, FIRST])
    host.finish(20)
    # 10 s at nominal, 10 s at half the CPU, where the curve says 0.7.
    assert metrics_of(host)["low_throughput"] == pytest.approx((10 + 7) / 20)


def test_only_the_window_is_measured() -> None:
    host = cluster([NODE], window_s=(15.0, 25.0))
    fed(host, ClusterPolicy.DEFLATION, [LOW, FIRST, SECOND])
    host.finish(40)
    figures = metrics_of(host)
    assert figures["high_offered"] == 1
    assert math.isnan(figures["low_rejected_share"])
    # 6 nominal cores from 15 s to 20 s, 7 until 25 s, on 4.
    assert figures["hosted_overcommitment"] == pytest.approx((6 + 7) / 2 / 4)
    assert figures["hosted_overcommitment_peak"] == pytest.approx(7 / 4)
    assert node_overcommitment(host).tolist() == pytest.approx([(6 + 7) / 2 / 4])
