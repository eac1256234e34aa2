"""What becomes of preempted VMs in the simulator: by hand on one and two nodes, and over a trace."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ebbtide.deflation.placement.rebalance_pace import RebalancePace
from ebbtide.simulator.cluster.preempted import Costs, ReturningCluster, Way
from ebbtide.simulator.cluster.preemption_model import MODEL
from ebbtide.simulator.experiments.document import read
from ebbtide.simulator.experiments.model import Input, Outcome, checked
from tests.simulator.cluster.test_model import silent
from tests.simulator.cluster.test_model import trace as trace
from tests.simulator.cluster.vms import NEVER, Vm, arrivals, cluster, sizes

ROOT = Path(__file__).resolve().parents[3]
GIB = 1024.0
#: 4 cores and 4 GiB, at least 2 of each.
LOW = ((2.0, 2 * GIB), 4.0, 4 * GIB)


def low(at_s: float, departs_s: float = NEVER) -> Vm:
    minimum, cores, mib = LOW
    return Vm(at_s, departs_s, cores, mib, minimum)


def played(
    way: Way, vms: Sequence[Vm], until_s: float, nodes: int = 1, costs: Costs | None = None, **pace: float
) -> ReturningCluster:
    """Nodes of 8 cores and 8 GiB."""
    costs = costs or Costs(boot_s=40, notice_s=30, disk_mib_s=200)
    host = cluster([(8.0, 8 * GIB)] * nodes)
    run = ReturningCluster(host, arrivals(vms), way, costs, (0.0, NEVER), RebalancePace(**pace))
    run.run(until_s, silent)
    return run


def on(run: ReturningCluster, node: int = 0) -> dict[int, tuple[float, float]]:
    return sizes(run._cluster, node)


#: Two low VMs fill the node; at 1000 s one of high priority leaves room for one of them only.
CROWD = [low(0.0), low(1.0), Vm(1000.0, 5000.0, 6.0, 6 * GIB)]


def test_a_stopped_vm_is_back_twenty_seconds_after_the_room() -> None:
    run = played(Way.STOP, CROWD, 4999.0)
    assert len(on(run)) == 2
    run = played(Way.STOP, CROWD, 6000.0)
    assert on(run) == {0: (4.0, 4 * GIB), 1: (4.0, 4 * GIB)}
    assert run.account.preemptions == 1
    # It is off from 1000 to 5020 s, and its guest boots for 40 s.
    assert run.account.back_s == [pytest.approx(4060, abs=10)]
    assert run.account.off_vm_s == pytest.approx(4020, abs=10)
    # 2 GiB are written in 10 s, half of the part of the notice that programs have.
    assert run.account.lost_core_s == 0


def test_it_rests_after_its_preemption_though_there_is_room_at_once() -> None:
    run = played(Way.STOP, [*CROWD[:2], Vm(1000.0, 1001.0, 6.0, 6 * GIB)], 2000.0)
    assert run.account.back_s == [pytest.approx(70, abs=10)]


def test_one_that_is_preempted_while_it_boots_has_not_been_back_and_has_no_more_to_do() -> None:
    vms = [low(0.0), low(1.0, 3000.0), CROWD[2], Vm(5030.0, 6000.0, 6.0, 6 * GIB)]
    run = played(Way.STOP, vms, 7000.0)
    assert run.account.preemptions == 2
    # It starts at 5020 s, and goes again before it works; the second time it works from 6060 s on.
    assert run.account.back_s == [pytest.approx(5060, abs=10)]
    assert run.account.off_vm_s == pytest.approx(4020 + 990, abs=20)
    # 2000 s of work were left.
    assert 1 in on(played(Way.STOP, vms, 8030.0))
    assert 1 not in on(played(Way.STOP, vms, 8090.0))


def test_it_departs_later_by_the_time_for_which_it_was_off() -> None:
    vms = [low(0.0, 3000.0), low(1.0, 3000.0), CROWD[2]]
    # The other departs, and it is back 20 s later.
    departs_s = 3000.0 + 2060.0
    assert len(on(played(Way.STOP, vms, departs_s - 30.0))) == 1
    assert len(on(played(Way.STOP, vms, departs_s + 30.0))) == 0


def test_a_deleted_vm_is_gone_with_its_work() -> None:
    run = played(Way.DELETE, CROWD, 6000.0)
    assert len(on(run)) == 1
    assert run.account.back_s == []
    assert run.account.lost_core_s == pytest.approx(4 * 1000, abs=4)


@pytest.mark.parametrize(
    ("way", "disk_mib_s", "lost_s", "back_s"),
    [
        # No checkpoint within 20 s: the work since the last hour is lost; nor is the memory saved within 30 s.
        (Way.STOP, 50.0, 1000 - 600, 4060),
        (Way.SUSPEND, 50.0, 1000 - 600, 4060),
        # So fast that programs save their work in their 20 s, but not so that an agent begins to save the memory, which
        # half as much again as it may take has to fit into.
        (Way.STOP, 150.0, 0, 4060),
        (Way.SUSPEND, 150.0, 0, 4060),
        (Way.SUSPEND, 160.0, 0, 4020 + 2 * GIB / 160),
    ],
)
def test_what_the_notice_is_too_short_for_is_lost(way: Way, disk_mib_s: float, lost_s: float, back_s: float) -> None:
    run = played(way, CROWD, 6000.0, costs=Costs(disk_mib_s=disk_mib_s, checkpoint_every_s=600))
    assert run.account.lost_core_s == pytest.approx(4 * lost_s, abs=4)
    assert run.account.back_s == [pytest.approx(back_s, abs=10)]


@pytest.mark.parametrize(("way", "stays"), [(Way.STOP, 0), (Way.SUSPEND, 1), (Way.DELETE, 0)])
def test_of_two_that_are_as_far_the_one_goes_that_a_manager_would_choose(way: Way, stays: int) -> None:
    """The newer one has worked for less, the older one has less memory to save."""
    vms = [Vm(0.0, NEVER, 4.0, 2 * GIB, (2.0, GIB)), low(1.0), Vm(1000.0, 5000.0, 6.0, GIB)]
    assert on(played(way, vms, 2000.0)).keys() == {stays, 2}


def test_a_vm_moves_instead_of_being_preempted_where_that_does() -> None:
    # The other node has room for one at its minimum, and for the arriving VM by preemption only.
    vms = [*CROWD[:2], Vm(2.0, NEVER, 5.0, 5 * GIB), CROWD[2]]
    run = played(Way.MIGRATION, vms, 4000.0, nodes=2, costs=Costs(deadline_s=120))
    assert run.account.preemptions == 0
    assert (run.account.moves, run.account.moves_instead, run.account.moved_mib) == (1, 1, 2 * GIB)
    assert sorted(map(len, (on(run, 0), on(run, 1)))) == [2, 2]
    assert played(Way.STOP, vms, 4000.0, nodes=2).account.preemptions == 1


def test_it_is_not_waited_for_when_the_copy_would_take_too_long() -> None:
    """2 GiB in half of what a notice of 30 s leaves of 60."""
    vms = [*CROWD[:2], Vm(2.0, NEVER, 5.0, 5 * GIB), CROWD[2]]
    run = played(Way.MIGRATION, vms, 4000.0, nodes=2, costs=Costs(move_mib_s=136))
    assert (run.account.moves, run.account.preemptions) == (0, 1)
    run = played(Way.MIGRATION, vms, 4000.0, nodes=2, costs=Costs(move_mib_s=137))
    assert (run.account.moves, run.account.preemptions) == (1, 0)


def test_a_vm_that_stays_deflated_moves_to_where_there_is_room() -> None:
    # Two that leave at 100 s kept the second node busy.
    vms = [Vm(0.0, 100.0, 8.0, 8 * GIB), low(1.0), low(2.0), Vm(3.0, NEVER, 3.0, 3 * GIB)]
    stays, moves = (played(way, vms, 9000.0, nodes=2) for way in (Way.MIGRATION, Way.REBALANCING))
    assert stays.account.moves == 0
    assert moves.account.moves == 1
    assert {**on(moves, 0), **on(moves, 1)} == {1: (4.0, 4 * GIB), 2: (4.0, 4 * GIB), 3: (3.0, 3 * GIB)}


def test_no_more_moves_are_under_way_than_a_manager_makes_and_one_of_a_host() -> None:
    """2 GiB at 1 MiB/s from the look at 2100 s on; the one at 4200 s is the first that finds the move over."""
    vms = [Vm(0.0, 100.0, 8.0, 8 * GIB)] * 2 + [low(1.0)] * 4 + [Vm(3.0, NEVER, 3.0, 3 * GIB)] * 2

    def moves(most: int, until_s: float) -> int:
        costs = Costs(move_mib_s=1.0, rebalance_most_moves=most)
        return played(Way.REBALANCING, vms, until_s, nodes=4, costs=costs).account.moves

    assert [moves(1, 2200.0), moves(1, 4199.0), moves(1, 4201.0)] == [1, 1, 2]
    assert moves(2, 2200.0) == 2


def test_nobody_moves_away_from_where_a_preempted_vm_waits() -> None:
    vms = [Vm(0.0, 100.0, 8.0, 8 * GIB), low(1.0), low(2.0), Vm(3.0, NEVER, 3.0, 3 * GIB)]
    assert played(Way.REBALANCING, vms, 9000.0, nodes=2).account.moves == 1
    run = played(Way.REBALANCING, [*vms, Vm(4.0, NEVER, 3.0, 3 * GIB)], 9000.0, nodes=2)
    assert (run.account.preemptions, run.account.moves) == (1, 0)


def run(trace: Input, way: str, seed: int = 1, **given: Any) -> Outcome:
    base = {"overcommitment": 1.8, "window_from_s": 86_400, "window_until_s": 172_800, "grid_s": 300, "validate": True}
    settings = MODEL.settings({"inputs": {"vms": trace}, "policy": way, "low_share": 0.5} | base | given)
    return checked(MODEL.run(settings, seed, MODEL.prepare([settings], silent), silent))


@pytest.fixture(autouse=True)
def _cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EBB_CACHE_DIR", str(tmp_path_factory.getbasetemp() / "cache"))


def test_over_a_trace_the_ways_differ_as_they_should(trace: Input) -> None:
    found = {way.value: run(trace, way.value).metrics for way in Way}
    assert all(tuple(metrics) == MODEL.metrics for metrics in found.values())
    assert found["delete"]["work_lost_share"] > 5 * found["stop"]["work_lost_share"]
    assert found["suspend"]["work_lost_share"] <= found["stop"]["work_lost_share"]
    assert math.isnan(found["delete"]["back_median_s"])
    assert found["stop"]["back_median_s"] > 40
    assert found["migration"]["preempted_vms_share"] < found["stop"]["preempted_vms_share"]
    assert found["migration"]["moves_instead_per_day"] > 0
    roomy = {way: run(trace, way, overcommitment=1.3).metrics for way in ("migration", "rebalancing")}
    assert roomy["rebalancing"]["taken_core_h_per_day"] < roomy["migration"]["taken_core_h_per_day"]
    assert found["rebalancing"]["moves_per_day"] > found["rebalancing"]["moves_instead_per_day"]
    assert 0 < found["stop"]["deflated_vm_h_share"] < 1
    # Offered are the same VMs at the same times.
    assert len({metrics["low_offered"] for metrics in found.values()}) == 1


def test_the_same_seed_gives_the_same_figures(trace: Input) -> None:
    one, again = (run(trace, "rebalancing", seed=2).metrics for _ in range(2))
    assert np.array_equal(list(one.values()), list(again.values()), equal_nan=True)


def test_the_experiment_is_read_with_all_its_cases(trace: Input) -> None:
    experiment = read(ROOT / "experiments" / "preemption.toml", inputs={"vms": trace.path})
    cases = experiment.cases()
    assert len(cases) * len(experiment.seeds) == 7 * 5 * 10
    assert {MODEL.settings(case.given).way for case in cases} == set(Way)
    assert all(math.isfinite(MODEL.bounds(MODEL.settings(case.given))["incompressible"]) for case in cases)
