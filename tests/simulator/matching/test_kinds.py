"""Pools of harvest, Spot and regular VMs: who is evicted when, what is held, and what it costs."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from ebbtide.matcher.acquire.net_changes import AcquirerOptions
from ebbtide.simulator.errors import InvalidParameter
from ebbtide.simulator.generators.harvest import Packing
from ebbtide.simulator.matching.acquiring import Acquisition, Removal, at_once
from ebbtide.simulator.matching.costs import Prices, VmKind
from ebbtide.simulator.matching.pools import Pool
from ebbtide.simulator.matching.running import WARM_UP_S, Run, run
from ebbtide.simulator.matching.servers import Servers
from ebbtide.simulator.matching.workload import Workload, at_rates, jobs
from tests.simulator.matching.test_acquiring import HELD, SERVERS, SMALL, acquire, halves, stable_share

DAY_S = 86_400.0


def servers(kind: VmKind, cores: list[int], sizes: tuple[int, ...] = (4,), each: int = 1) -> Servers:
    """Servers with so many unallocated cores."""
    count = len(cores)
    made = Pool(np.arange(count), np.zeros(count), np.array(cores), count, DAY_S, 0.0)
    found = Servers(made, Packing.RANDOM, 1, kind, sizes, each)
    for server, value in enumerate(cores):
        found.change(server, value, 0.0)
    return found


def asked(found: Servers) -> set[int]:
    """Places at which machines are, after one request more than there are places."""
    for number in range(len(found.held) + 1):
        at_once(found.request(number))
    return set(np.flatnonzero(found.held).tolist())


@pytest.mark.parametrize(
    ("kind", "where", "has"),
    [
        (VmKind.HARVEST, {0, 2}, [9, 0, 4]),
        (VmKind.SPOT, {0, 2}, [4, 0, 4]),
        (VmKind.REGULAR, {0, 1, 2}, [4, 4, 4]),
    ],
)
def test_a_machine_is_placed_where_there_is_room_and_a_regular_one_anywhere(
    kind: VmKind, where: set[int], has: list[int]
) -> None:
    found = servers(kind, [9, 3, 4])
    assert asked(found) == where
    assert found.ours.tolist() == has
    refused = at_once(found.look()).refusals
    assert len(refused) == 4 - len(where)
    assert all(kind.value in why for why in refused.values())


def test_a_harvest_vm_shrinks_to_its_minimum_and_goes_below_it() -> None:
    found = servers(VmKind.HARVEST, [9])
    asked(found)
    assert [found.change(0, cores, 60.0) for cores in (6, 4, 12, 3)] == [[(0, 6)], [(0, 4)], [(0, 12)], [(0, 0)]]
    assert not found.held[0]
    assert found.change(0, 9, 70.0) == []


def test_a_spot_vm_keeps_its_size_and_goes_as_a_whole() -> None:
    found = servers(VmKind.SPOT, [9])
    asked(found)
    assert [found.change(0, cores, 60.0) for cores in (6, 4, 12, 3)] == [[], [], [], [(0, 0)]]
    assert not found.held[0]
    # That its server changed is not noticed: its cores have not.
    assert found.changed_s[0] == -np.inf


def test_a_regular_vm_is_never_evicted() -> None:
    found = servers(VmKind.REGULAR, [9])
    asked(found)
    assert [found.change(0, cores, 60.0) for cores in (3, 0)] == [[], []]
    assert found.ours.tolist() == [4]


def test_a_server_has_several_spot_vms_and_the_newest_go_first() -> None:
    found = servers(VmKind.SPOT, [13, 5], each=4)
    assert asked(found) == {0, 1, 2, 4}
    assert found.ours.tolist() == [4, 4, 4, 0, 4, 0, 0, 0]
    came = [number for _, number in sorted((int(found._came[place]), place) for place in (0, 1, 2))]
    assert found.change(0, 12, 60.0) == []
    assert found.change(0, 9, 60.0) == [(came[2], 0)]
    assert found.change(0, 3, 60.0) == [(came[1], 0), (came[0], 0)]
    assert set(np.flatnonzero(found.held)) == {4}


def test_sizes_are_drawn_for_each_request() -> None:
    found = servers(VmKind.SPOT, [10] * 300, (2, 4, 8))
    asked(found)
    counts = [int((found.ours == size).sum()) for size in (2, 4, 8)]
    assert sum(counts) == 300
    assert min(counts) > 70


@pytest.mark.parametrize("kind", list(VmKind))
def test_a_request_has_its_size_and_its_server_by_its_number_whatever_was_asked_for_before(kind: VmKind) -> None:
    cores = [10, 10, 6, 3] * 5
    among = servers(kind, cores, (2, 4, 8))
    alike = 0
    for number in range(1, 16):
        alone = servers(kind, [10] * 20, (2, 4, 8))
        at_once(alone.request(number))
        (place,) = np.flatnonzero(alone.held).tolist()
        before = among.held.copy()
        at_once(among.request(number))
        size = int(alone.least[place])
        if not before[place] and (kind is VmKind.REGULAR or cores[place] >= size):
            assert np.flatnonzero(among.held & ~before).tolist() == [place]
            assert among.least[place] == size
            alike += 1
    assert alike >= 5


def test_a_request_finds_each_server_with_room_as_often() -> None:
    found = servers(VmKind.HARVEST, [9, 3, 9, 9])
    counts = np.zeros(4)
    for number in range(1, 901):
        at_once(found.request(number))
        counts += found.held
        at_once(found.cancel(number))
    assert counts[1] == 0
    assert counts.sum() == 900
    # Four standard deviations.
    assert counts[[0, 2, 3]] == pytest.approx(300, abs=57)


def test_what_is_given_back_at_random_moves_no_machine_that_is_asked_for() -> None:
    """None is given back here; machines are asked for where others were evicted."""
    recent, random = (acquire(0.0, removal=removal).acquired for removal in (Removal.RECENT, Removal.RANDOM))
    assert recent is not None
    assert random is not None
    assert (recent.given_back, random.given_back) == (0, 0)
    assert recent.evicted > 10
    for one, other in zip(recent.held.servers, random.held.servers, strict=True):
        assert one.tolist() == other.tolist()


def rented(kind: VmKind, scheme: str = "capacity-random", **changes: Any) -> Run:
    options = AcquirerOptions(1, SERVERS, replaced_share=0.0)
    acquisition = Acquisition(options, kind=kind, vm_cores=(4,), removal=Removal.RANDOM, **changes)
    return run(halves(), SMALL, scheme, 1, validate=True, compile=False, acquisition=acquisition)


def test_every_kind_does_the_same_work_and_only_regular_vms_lose_nothing() -> None:
    spot, harvest, regular = (rented(kind) for kind in (VmKind.SPOT, VmKind.HARVEST, VmKind.REGULAR))
    for one in (spot, harvest, regular):
        assert one.results.jobs_done == SMALL.jobs
        assert one.metrics["cost_total"] > 0
        assert 0 < one.metrics["utilisation"] <= 1
    assert (regular.results.kills, regular.metrics["machines_evicted"]) == (0, 0)
    assert spot.results.kills > 0
    assert spot.metrics["machines_evicted"] > 0
    four = rented(VmKind.SPOT, vms_per_server=4)
    assert four.results.jobs_done == SMALL.jobs
    assert four.metrics["machines_evicted"] > 0
    for one in (spot, regular):
        assert one.acquired is not None
        assert {cores % 4 for cores in one.acquired.held.cores} == {0}


@pytest.mark.parametrize(("kind", "share"), [(VmKind.REGULAR, 1.0), (VmKind.SPOT, 0.25)])
def test_a_core_hour_costs_its_price_however_long_a_pool_is_paid_for(kind: VmKind, share: float) -> None:
    found = rented(kind, prices=Prices(spot_discount=0.75)).metrics
    assert found["cost_total"] / found["core_h_paid"] == pytest.approx(share)


@pytest.mark.parametrize(("kind", "share"), [(VmKind.REGULAR, 1.0), (VmKind.SPOT, 0.25)])
def test_the_cost_is_that_of_the_cores_that_were_held_from_the_first_job_on(kind: VmKind, share: float) -> None:
    found = rented(kind, prices=Prices(spot_discount=0.75))
    assert found.acquired is not None
    table = found.acquired.held.table
    late = table["at_s"] >= WARM_UP_S
    core_h = (table["cores"] + table["leaving_cores"])[late]
    assert table["cost_per_h"][late] == pytest.approx(share * core_h)
    # Steps are 300 s; evictions within them are counted to the second, and the last one is not over.
    assert found.metrics["cost_total"] == pytest.approx(share * core_h.sum() / 12.0, rel=0.1)
    assert found.metrics["cores_paid_mean"] == pytest.approx(core_h.mean())


def test_machines_that_go_at_random_are_not_those_that_changed_last() -> None:
    """Half of the servers change every ten minutes: by Algorithm 2 their machines go first, and calm ones are left."""
    recent, random = (
        stable_share(acquire(0.125, least=2, removal=removal)) for removal in (Removal.RECENT, Removal.RANDOM)
    )
    assert random < 0.7
    assert recent > random + 0.15


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"kind": VmKind.SPOT}, "vm_cores"),
        ({"vm_cores": (0, 2)}, "vm_cores"),
        ({"vms_per_server": 0}, "vms_per_server"),
        ({"vms_per_server": 2}, "vms_per_server"),
        ({"vms_per_server": 2, "kind": VmKind.SPOT, "vm_cores": (4,), "removal": Removal.FUTURE}, "vms_per_server"),
    ],
)
def test_what_cannot_be_rented_is_named(changes: dict[str, Any], field: str) -> None:
    with pytest.raises(InvalidParameter, match=field):
        Acquisition(**changes)


def test_without_sizes_no_costs_are_told() -> None:
    acquisition = Acquisition(AcquirerOptions(HELD, HELD))
    found = run(halves(), SMALL, "capacity-random", 1, compile=False, acquisition=acquisition)
    assert "cost_total" not in found.metrics


def test_jobs_come_as_often_as_their_rates_say() -> None:
    """1 and 4 in turn: of two and a half periods the first and third have 1 and .5, the second 4."""
    workload = Workload(rate_factors=(1.0, 4.0), rate_period_s=100.0)
    even_s = np.linspace(0.0, 250.0, 5501)
    found = at_rates(workload, even_s, 250.0)
    assert (np.diff(found) > 0).all()
    counts = np.histogram(found, [0.0, 100.0, 200.0, 250.0])[0]
    assert counts / 5501 == pytest.approx([1 / 5.5, 4 / 5.5, 0.5 / 5.5], abs=1e-3)


def test_a_changing_rate_changes_when_jobs_come_and_nothing_else() -> None:
    pool = halves()
    many = Workload(load=0.5, jobs=300, least_tasks=1, most_tasks=1, cores=(1,))
    even, until_s = jobs(many, pool, WARM_UP_S, 3)
    period_s = (until_s - WARM_UP_S) / 4.0
    changing = Workload(
        load=0.5, jobs=300, least_tasks=1, most_tasks=1, cores=(1,), rate_factors=(1, 4), rate_period_s=period_s
    )
    found, found_until_s = jobs(changing, pool, WARM_UP_S, 3)
    assert found_until_s == until_s
    assert found.task_runtime_s.values.tolist() == even.task_runtime_s.values.tolist()
    counts = np.histogram(found.submit_s - WARM_UP_S, period_s * np.arange(5))[0]
    # 30, 120, 30, 120 are expected.
    assert counts[[0, 2]].sum() == pytest.approx(60, abs=3 * 7)
    assert counts.sum() == 300


def test_one_rate_is_what_it_was() -> None:
    plain, stated = (
        jobs(Workload(load=0.5, jobs=9, cores=(1,), rate_factors=factors), halves(), WARM_UP_S, 3)[0]
        for factors in ((1.0,), (2.0,))
    )
    assert plain.submit_s.tolist() == stated.submit_s.tolist()


def test_a_window_of_so_many_hours_has_as_many_jobs_as_make_the_load() -> None:
    pool = halves()
    for most_task_s in (1200.0, 3600.0):
        workload = Workload(load=0.5, window_s=0.5 * DAY_S, most_task_s=most_task_s)
        batch, until_s = jobs(workload, pool, WARM_UP_S, 3)
        assert until_s == WARM_UP_S + 0.5 * DAY_S
        assert ((batch.submit_s >= WARM_UP_S) & (batch.submit_s <= until_s)).all()
        work = [float(batch.task_runtime_s.row(n).sum() * batch.cpu_cores[n]) for n in range(len(batch.cpu_cores))]
        wanted = 0.5 * pool.mean_cores(WARM_UP_S, until_s) * 0.5 * DAY_S
        # The nearest: without the last job, or with one more, it is no nearer.
        assert abs(sum(work) - wanted) <= abs(sum(work[:-1]) - wanted)
        assert abs(sum(work) - wanted) < max(work)


def test_half_the_load_of_a_window_is_its_first_jobs() -> None:
    workload = Workload(load=0.5, window_s=0.75 * DAY_S, most_task_s=1200.0)
    all_jobs, half = (jobs(workload, halves(), WARM_UP_S, 3, share)[0] for share in (1.0, 0.5))
    count = len(half.cpu_cores)
    assert count == pytest.approx(len(all_jobs.cpu_cores) / 2, rel=0.2)
    assert half.cpu_cores.tolist() == all_jobs.cpu_cores[:count].tolist()
    tasks = half.task_runtime_s.values
    assert tasks.tolist() == all_jobs.task_runtime_s.values[: len(tasks)].tolist()


def test_a_window_that_ends_after_the_pools_changes_is_refused() -> None:
    with pytest.raises(InvalidParameter, match="window_h"):
        jobs(Workload(window_s=2 * DAY_S), halves(), WARM_UP_S, 3)


@pytest.mark.parametrize(
    ("factors", "hours", "warned"),
    [((1, 4), 23.9, True), ((1, 4), 24.0, False), ((1, 4, 2), 24.0, True), ((3,), 1.0, False), ((2, 2), 1.0, False)],
)
def test_a_window_of_less_than_two_periods_of_the_rate_is_warned_of(
    factors: tuple[float, ...], hours: float, warned: bool
) -> None:
    found = Workload(rate_factors=factors).warnings(3600.0 * hours)
    assert len(found) == warned
    assert all(f"less than {12 * len(factors)} h, two periods of their rate" in sentence for sentence in found)


@pytest.mark.parametrize(
    ("field", "value"),
    [("rate_factors", ()), ("rate_factors", (1, 0)), ("rate_period_s", 0.0), ("window_h", 0.0)],
)
def test_a_bad_rate_names_its_field(field: str, value: object) -> None:
    with pytest.raises(InvalidParameter, match=field):
        Workload(**{field.replace("window_h", "window_s"): value})  # type: ignore[arg-type]


def test_what_a_pool_rejected_is_known_in_a_window_without_changes_too() -> None:
    found = Pool(np.arange(2), np.zeros(2), np.array([4, 8]), 2, DAY_S, 0.25).statistics(0.0, DAY_S)
    assert (found["changes"], found["mean_cores"], found["rejected_share"]) == (0.0, 12.0, 0.25)
