"""Steady mode simulated: by hand on one host, the rival's rule by hand, and what a run conserves."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ebbtide.deflation.allocations import Allocation, Priority
from ebbtide.deflation.resources import ResourceVector
from ebbtide.simulator.cluster.state import HIGH, LOW, Arrivals
from ebbtide.simulator.errors import InvalidParameter
from ebbtide.simulator.experiments.model import Input
from ebbtide.simulator.steady import guests
from ebbtide.simulator.steady.guests import FAULT_S, PAGES_PER_MIB, Guest, Habits
from ebbtide.simulator.steady.hosts import LOOK_S, PROXMOX, REACTIVE, SCHEMES, STEADY, SimulatedHost, Totals
from ebbtide.simulator.steady.model import MODEL
from ebbtide.simulator.steady.proxmox import STEP_MIB, Ballooned, ballooned
from ebbtide.simulator.steady.running import METRICS, Plan, Run
from guestagent import memory

CALM = Habits(hot_from=0.25, hot_to=0.25, hot_stays_s=1e9, warm_to=0.0)
CAPACITY = ResourceVector(32.0, 32_768.0)


def guest(habits: Habits = CALM, nominal_mib: float = 8192.0) -> Guest:
    return Guest(habits, nominal_mib, np.random.default_rng(1), 0.0)


def vm(name: str, low: bool = True, memory_mib: float = 8192.0) -> Allocation:
    size = ResourceVector(2.0, memory_mib)
    least = ResourceVector(0.5, memory_mib / 4) if low else size
    return Allocation(name, Priority.DEFLATABLE if low else Priority.FIXED, size, least, size)


def host(scheme: str, asked_mib: float | None = None) -> SimulatedHost:
    return SimulatedHost("a", CAPACITY, scheme, 100.0, 1.0, asked_mib, Totals())


# --- guests ----------------------------------------------------------------------------------------------------------


def test_a_guest_keeps_what_the_guest_agent_keeps() -> None:
    assert (guests.RESERVE_SHARE, guests.LEAST_RESERVE_MIB) == (memory.RESERVE_SHARE, memory.RESERVE_MIB)


def test_a_guest_with_all_its_memory_reads_nothing_again() -> None:
    one = guest()
    assert one.live_until(1000.0, 8192.0) == 0.0
    assert one.reading(8192.0).major_faults == 0
    assert one.reading(8192.0).available_mib == 0.75 * 8192


def test_what_is_short_of_the_hot_part_is_read_again_each_time_it_is_touched() -> None:
    one = guest()
    short_mib = 1.0
    size = one.hot_mib + one.kernel_mib - short_mib
    pages = one.live_until(60.0, size)
    assert pages == pytest.approx(short_mib * PAGES_PER_MIB * 60.0 / CALM.hot_again_s)
    assert one.stalled_s == pytest.approx(pages * FAULT_S)


def test_a_guest_reads_no_more_than_its_disk_gives() -> None:
    one = guest()
    assert one.live_until(10.0, 0.0) == pytest.approx(10.0 / FAULT_S)


# --- the rival -------------------------------------------------------------------------------------------------------


def test_the_rival_takes_100_mib_a_step_of_those_that_have_memory_free() -> None:
    roomy, tight = Ballooned("r", 4096, 1024, 4096, 2000), Ballooned("t", 4096, 1024, 4096, 0)
    assert ballooned([roomy, tight], 9000.0, 10_000.0) == {"r": 4096 - STEP_MIB}
    assert ballooned([tight], 9000.0, 10_000.0) == {"t": 4096 - STEP_MIB}


def test_the_rival_gives_to_those_without_memory_free_and_does_nothing_near_its_goal() -> None:
    roomy, tight = Ballooned("r", 2048, 1024, 4096, 2000), Ballooned("t", 2048, 1024, 4096, 0)
    assert ballooned([roomy, tight], 4000.0, 10_000.0) == {"t": 2048 + STEP_MIB}
    assert ballooned([roomy, tight], 8005.0, 10_000.0) == {}


@given(
    st.lists(st.tuples(st.floats(0, 4000), st.floats(0, 4000), st.floats(0, 1), st.floats(0, 4000)), max_size=5),
    st.floats(0, 20_000),
)
def test_the_rival_stays_within_minimum_nominal_and_its_step(
    vms: list[tuple[float, float, float, float]], used_mib: float
) -> None:
    rows = [
        Ballooned(str(i), low + part * span, low, low + span, free) for i, (low, span, part, free) in enumerate(vms)
    ]
    for row in rows:
        size = ballooned(rows, used_mib, 16_000.0).get(row.name, row.current)
        assert row.minimum - 1e-6 <= size <= row.nominal + 1e-6
        assert abs(size - row.current) <= STEP_MIB + 1e-6


# --- one host --------------------------------------------------------------------------------------------------------


def filled(scheme: str, asked_mib: float | None = None) -> SimulatedHost:
    """Four VMs of 8 GiB fill a host of 32 GiB; their guests use a quarter."""
    made = host(scheme, asked_mib)
    for number in range(4):
        assert made.take(0.0, vm(str(number)), guest()) == 0.0
    return made


def test_without_steady_mode_an_arrival_waits_for_its_memory() -> None:
    full = filled(REACTIVE)
    for look in range(1, 200):
        full.look(look * LOOK_S)
    assert full.free().memory_mib == 0
    assert full.take(2000.0, vm("new", low=False, memory_mib=2000.0), None) == pytest.approx(1.0 + 20.0)
    assert full.free().memory_mib == pytest.approx(0.0, abs=4.0)


def test_with_steady_mode_it_finds_its_memory_and_nobody_misses_any() -> None:
    full = filled(STEADY, asked_mib=2048.0)
    for look in range(1, 200):
        full.look(look * LOOK_S)
    assert 2048 <= full.free().memory_mib <= 2048 + 64
    assert full.take(2000.0, vm("new", low=False, memory_mib=2000.0), None) == 0.0
    full.live_until(3000.0)
    assert full.totals.refaults == 0.0
    assert full.totals.trimmed_mib == pytest.approx(2048, abs=64)


def test_the_rival_frees_a_fifth_of_the_host() -> None:
    full = filled(PROXMOX)
    for look in range(1, 200):
        full.look(look * LOOK_S)
    assert full.free().memory_mib == pytest.approx(0.2 * CAPACITY.memory_mib, abs=11.0)


def test_a_guest_whose_hot_part_grows_is_given_memory_before_others_are_trimmed() -> None:
    full = filled(STEADY, asked_mib=4096.0)
    for look in range(1, 100):
        full.look(look * LOOK_S)
    one = full.vms["0"]
    assert one.guest is not None
    size = one.allocation.current.memory_mib
    one.guest.hot_mib = size - one.guest.reserve_mib - 20.0
    full.look(1000.0)
    assert one.allocation.current.memory_mib > size


def test_a_guest_that_missed_its_memory_is_left_alone_also_if_it_lacked_nothing_meanwhile() -> None:
    full = filled(STEADY, asked_mib=4096.0)
    for look in range(1, 100):
        full.look(look * LOOK_S)
    one = full.vms["0"]
    assert one.guest is not None
    one.guest.hot_mib = one.allocation.current.memory_mib - one.guest.reserve_mib - 20.0
    full.look(1000.0)
    one.guest.hot_mib = 2048.0
    full.leave(1001.0, "3")
    full.look(1010.0)
    assert not any(vm.deflated for vm in full.vms.values())
    full.look(1020.0)
    assert full.take(1022.0, vm("new", low=False, memory_mib=6000.0), None) == 0.0
    for now in range(1030, 1060, 10):
        full.look(now)
    assert not one.deflated, "it rests for a minute"
    assert full.vms["1"].deflated
    for now in range(1060, 1100, 10):
        full.look(now)
    assert one.deflated


def test_pressure_lasts_until_the_guest_has_been_calm_for_as_long_as_a_host_asks_for() -> None:
    full = filled(REACTIVE)
    full.take(10.0, vm("new", low=False), None)
    one = full.vms["0"]
    assert one.guest is not None
    one.guest.hot_mib = one.allocation.current.memory_mib - 0.2 * one.guest.reserve_mib
    full.live_until(20.0)
    pressed = []
    for now in (30.0, 40.0, 50.0):
        one.guest.hot_mib = 2048.0
        full.live_until(now)
        pressed.append(one.pressed)
    assert pressed == [True, False, False]


def looked(at: SimulatedHost, from_s: float, until_s: float) -> None:
    for look in range(int(from_s / LOOK_S), int(until_s / LOOK_S) + 1):
        at.look(look * LOOK_S)


def test_a_reserve_that_lacks_a_little_for_hours_is_not_taken_for_one_that_is_filled_slowly() -> None:
    full = filled(STEADY, asked_mib=2048.0)
    looked(full, 10.0, 2000.0)
    refill_s = full.learner.refill_s
    assert full.take(2001.0, vm("small", low=False, memory_mib=200.0), None) == 0.0
    assert 64 < 2048 - full.free().memory_mib < 256
    looked(full, 2010.0, 20_000.0)
    full.leave(20_001.0, "small")
    looked(full, 20_010.0, 20_100.0)
    assert full.learner.refill_s == refill_s


def test_the_time_of_a_reclaim_is_no_part_of_a_refill() -> None:
    """As on a real host, where nothing is trimmed beside an operation."""
    full = filled(STEADY, asked_mib=2048.0)
    looked(full, 10.0, 2000.0)
    before_s = full.learner.refill_s
    assert full.take(2001.0, vm("fits", low=False, memory_mib=2000.0), None) == 0.0
    looked(full, 2010.0, 2010.0)
    reclaim_s = full.take(2011.0, vm("waits", low=False, memory_mib=10_000.0), None)
    assert reclaim_s > 90.0
    looked(full, 2020.0, 2400.0)
    took_s = before_s + 4 * (full.learner.refill_s - before_s)
    assert 0 < took_s < 90.0


# --- runs ------------------------------------------------------------------------------------------------------------


def arrivals(seed: int, count: int = 60) -> Arrivals:
    chance = np.random.default_rng(seed)
    at = np.sort(chance.uniform(0, 20_000, count))
    upper = np.zeros((count, 4))
    upper[:, 0] = chance.choice([1.0, 2.0, 4.0], count)
    upper[:, 1] = upper[:, 0] * 3072
    sold = np.where(chance.random(count) < 0.6, LOW, HIGH)
    return Arrivals(
        at_s=at,
        departs_s=at + chance.exponential(6000.0, count),
        upper=upper,
        minimum=np.where((sold == LOW)[:, None], upper / 4, upper),
        sold_as=sold.astype(np.int64),
        curve=np.zeros(count, np.int64),
        draws=chance.random((count, 2)),
    )


def run_of(scheme: str, seed: int) -> tuple[Run, Mapping[str, float]]:
    plan = Plan(scheme, 2, CAPACITY, (4000.0, 20_000.0), 0.0, 280.0, 1.0, None, Habits())
    run = Run(plan, arrivals(seed), seed)
    return run, run.go(lambda share: None)


@settings(max_examples=8, deadline=None)
@given(st.sampled_from(SCHEMES), st.integers(0, 1000))
def test_no_host_holds_more_than_it_has_and_no_vm_less_than_its_minimum(scheme: str, seed: int) -> None:
    run, found = run_of(scheme, seed)
    assert set(found) <= set(METRICS)
    assert 0 <= found["at_once_share"] <= 1 - found["refused_share"]
    for one in run._hosts.values():
        total = sum(row.charge.memory_mib for row in one.rows())
        assert total <= CAPACITY.memory_mib + 1e-6
        for row in one.rows():
            assert row.minimum.fits_in(row.current)
            assert row.current.fits_in(row.nominal)
            assert row.priority is not Priority.FIXED or row.current == row.nominal


@pytest.mark.parametrize("scheme", SCHEMES)
def test_a_run_is_the_same_again(scheme: str) -> None:
    assert run_of(scheme, 3)[1] == run_of(scheme, 3)[1]


def test_who_is_there_when_a_window_without_warm_up_begins_is_no_arrival_of_it() -> None:
    plan = Plan(REACTIVE, 1, CAPACITY, (4000.0, 8000.0), 4000.0, 280.0, 1.0, None, Habits())
    count = 14
    size = np.tile([1.0, 3072.0, 0.0, 0.0], (count, 1))
    standing = Arrivals(
        at_s=np.arange(float(count)),
        departs_s=np.full(count, np.inf),
        upper=size,
        minimum=size / 4,
        sold_as=np.full(count, LOW, np.int64),
        curve=np.zeros(count, np.int64),
        draws=np.zeros((count, 2)),
    )
    run = Run(plan, standing, 1)
    found = run.go(lambda share: None)
    assert run._totals.reclaimed_mib > 0, "they found no room at once"
    assert (found["arrivals"], found["reclaimed_gib_per_day"]) == (0, 0)


def test_vms_that_the_trace_lost_sight_of_need_not_stay_for_ever(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Thirty of a day that nobody saw depart, and one every hour that stays for thirty hours, of 8 GiB each."""
    monkeypatch.setenv("EBB_CACHE_DIR", str(tmp_path / "cache"))
    rows = [f"0,{n},2,8.0,0,0,1,86400" for n in range(30)]
    rows += [f"{3600 * n},{n},2,8.0,0,0,0,108000" for n in range(1, 72)]
    path = tmp_path / "pieces.csv"
    path.write_text("\n".join(["arrival_s,batch,cores,mem_gb,dur_lo_s,dur_hi_s,censored,dur_s", *rows]) + "\n")
    window = {"demand": 1.0, "window_from_s": 172_800, "window_until_s": 173_400, "warm_s": 0}
    hosts = {}
    for until_s in (0, 86_400):
        given = {"inputs": {"vms": Input(path, "azure-derived")}, "followed_until_s": until_s, **window}
        case = MODEL.settings(given)
        found = MODEL.run(case, 1, MODEL.prepare([case], lambda share: None), lambda share: None)
        hosts[until_s] = found.metrics["nodes"]
    # Of 128 GiB each, for sixty VMs and for thirty.
    assert hosts == {0: 4, 86_400: 2}


def test_vms_that_fit_no_host_ask_for_none_and_are_warned_of(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Twenty of 8 GiB, and one each of too many cores and of too much memory."""
    monkeypatch.setenv("EBB_CACHE_DIR", str(tmp_path / "cache"))
    rows = [f"{n},{n},2,8.0,0,0,0,9000" for n in range(20)] + ["20,20,256,8.0,0,0,0,9000", "21,21,2,900.0,0,0,0,9000"]
    path = tmp_path / "wide.csv"
    path.write_text("\n".join(["arrival_s,batch,cores,mem_gb,dur_lo_s,dur_hi_s,censored,dur_s", *rows]) + "\n")
    window = {"demand": 1.0, "window_from_s": 0, "window_until_s": 600, "warm_s": 0}
    case = MODEL.settings({"inputs": {"vms": Input(path, "azure-derived")}, **window})
    found = MODEL.run(case, 1, MODEL.prepare([case], lambda share: None), lambda share: None)
    assert found.metrics["nodes"] == 1
    assert "2 of 22 VMs in the window fit no node" in found.warnings[0]


@pytest.mark.parametrize(
    ("given", "field"),
    [
        ({"policy": "none"}, "policy"),
        ({"window_from_s": 10.0, "window_until_s": 10.0}, "window_from_s"),
        ({"hot_from": 0.9}, "hot_from"),
        ({"reserve_gib": -2}, "reserve_gib"),
        ({"more": 1}, "more"),
    ],
)
def test_a_setting_that_makes_no_sense_is_named(given: dict[str, object], field: str, tmp_path: Path) -> None:
    with pytest.raises(InvalidParameter, match=field):
        MODEL.settings({"inputs": {"vms": Input(tmp_path / "vms")}, **given})
