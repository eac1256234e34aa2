"""The acquirer on replayed servers: interpreted, with everything checked after every event."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from ebbtide.matcher.acquire.net_changes import AcquirerOptions
from ebbtide.simulator.errors import InvalidParameter
from ebbtide.simulator.generators.harvest import Packing
from ebbtide.simulator.matching import known_truth
from ebbtide.simulator.matching.acquiring import Acquisition, Removal
from ebbtide.simulator.matching.pools import Pool
from ebbtide.simulator.matching.running import WARM_UP_S, Run, run
from ebbtide.simulator.matching.workload import Workload

DAY_S = 86_400.0
SMALL = Workload(load=0.5, jobs=6, least_tasks=3, most_tasks=6, most_task_s=3600.0, cores=(1, 2))
SERVERS, HELD = 24, 8


def halves(least: int = 0, seed: int = 1) -> Pool:
    return known_truth.halves(SERVERS, least, seed)


def acquire(share: float, scheme: str = "capacity-random", seed: int = 1, least: int = 0, **changes: Any) -> Run:
    options = AcquirerOptions(HELD, HELD, replaced_share=share)
    acquisition = Acquisition(options, **{"step_s": 900.0, **changes})
    return run(halves(least), SMALL, scheme, seed, validate=True, compile=False, acquisition=acquisition)


def stable_share(found: Run) -> float:
    """Of the machines held while jobs came, those on calm servers."""
    return known_truth.calm_share(found, WARM_UP_S, math.inf)


def test_a_pool_converges_to_calm_machines_only_where_restless_ones_are_replaced() -> None:
    without, replaced = (stable_share(acquire(share, least=2)) for share in (0.0, 0.125))
    # Half of the servers are calm, and none goes by itself here.
    assert without < 0.7
    assert replaced > without + 0.2


@pytest.mark.parametrize("scheme", ["capacity-random", "capacity-filling", "landmark", "sized"])
def test_no_task_is_killed_by_a_machine_that_is_given_back(scheme: str) -> None:
    """Where servers change only once, whatever is killed would have been killed by the acquirer."""
    calm = Pool(np.arange(SERVERS), np.zeros(SERVERS), np.full(SERVERS, 6), SERVERS, 2.5 * DAY_S, 0.0)
    acquisition = Acquisition(AcquirerOptions(HELD, HELD, replaced_share=0.5))
    found = run(calm, SMALL, scheme, 1, validate=True, compile=False, acquisition=acquisition)
    assert found.acquired is not None
    assert found.acquired.given_back > 50
    assert (found.results.kills, found.results.jobs_done) == (0, SMALL.jobs)
    assert found.acquired.evicted == 0
    # Leaving ones are there beside those that are kept.
    assert set(found.acquired.held.machines[1:]) == {HELD}


def test_what_on_demand_vms_take_away_is_made_up_for() -> None:
    found = acquire(0.0)
    assert found.acquired is not None
    assert found.acquired.evicted > 0
    assert found.acquired.given_back == 0
    assert found.acquired.requested == HELD + found.acquired.evicted
    assert min(found.acquired.held.machines) == HELD


def test_the_number_of_machines_follows_the_work() -> None:
    options = AcquirerOptions(1, SERVERS, replaced_share=0.0)
    found = run(halves(), SMALL, "capacity-random", 1, validate=True, compile=False, acquisition=Acquisition(options))
    assert found.acquired is not None
    held = np.array(found.acquired.held.machines)
    at_s = np.array(found.acquired.held.at_s)
    assert held[(at_s > 7200.0) & (at_s < WARM_UP_S)].max() == 1
    assert held[at_s >= WARM_UP_S].max() >= 3
    assert found.results.jobs_done == SMALL.jobs


@pytest.mark.parametrize("allocation", list(Packing))
def test_every_allocation_gives_machines(allocation: Packing) -> None:
    found = acquire(0.125, allocation=allocation)
    assert found.acquired is not None
    assert found.acquired.given_back > 10
    assert found.results.jobs_done == SMALL.jobs


def test_a_run_is_the_same_every_time() -> None:
    one, other = (acquire(0.125) for _ in range(2))
    assert one.completion_s.tolist() == other.completion_s.tolist()


def test_an_oracle_does_not_know_what_will_be_held() -> None:
    with pytest.raises(InvalidParameter, match="oracle-no-kill"):
        acquire(0.1, "oracle-no-kill")


def test_a_step_is_no_longer_than_a_period() -> None:
    with pytest.raises(InvalidParameter, match="step_s"):
        Acquisition(step_s=7200.0)


@pytest.mark.parametrize("removal", [Removal.RECENT, Removal.STABILITY, Removal.FUTURE])
def test_calm_servers_are_what_is_held_in_the_end(removal: Removal) -> None:
    """By each rule; by stability a machine is known for hours before it goes, and calm ones stay."""
    options = AcquirerOptions(HELD, HELD, replaced_share=0.125, evidence_s=7200.0)
    acquisition = Acquisition(options, removal=removal)
    found = run(halves(2), SMALL, "capacity-random", 1, validate=True, compile=False, acquisition=acquisition)
    assert known_truth.calm_share(found, 20 * 3600.0, 30 * 3600.0) > 0.75
    assert found.acquired is not None
    held = found.acquired.held
    changes = [len(np.setdiff1d(held.servers[n - 1], held.servers[n])) for n in range(1, len(held.servers))]
    late = [count for at_s, count in zip(held.at_s[1:], changes, strict=True) if at_s > 20 * 3600.0]
    if removal is Removal.STABILITY:
        # Swaps stop where there is nothing to gain.
        assert sum(late) < 0.5 * sum(changes)


def test_by_stability_no_machine_is_swapped_that_is_like_the_others() -> None:
    """All servers change as often: nothing is gained by a swap, and the rule by last change goes on and on."""
    given = {}
    for removal in (Removal.RECENT, Removal.STABILITY):
        options = AcquirerOptions(HELD, HELD, replaced_share=0.125, evidence_s=7200.0, least_gain=0.25)
        pool_of = known_truth.halves(SERVERS, 2, 3, restless_s=3600.0, calm_s=3600.0)
        acquisition = Acquisition(options, removal=removal)
        found = run(pool_of, SMALL, "capacity-random", 1, validate=True, compile=False, acquisition=acquisition)
        assert found.acquired is not None
        given[removal] = found.acquired.given_back
    assert given[Removal.STABILITY] < 0.3 * given[Removal.RECENT]
