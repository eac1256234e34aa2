"""What a VM has against what it should have: repairs, and when they are tried again."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deflation.bounds import Bound
from deflation.reconcile import (
    FIRST_PAUSE_S,
    LONGEST_PAUSE_S,
    SLACK,
    Repair,
    RepairPace,
    Resize,
    SetDisk,
    SetNetwork,
    SetQuota,
    SetShares,
    Sight,
    quota_of,
    repairs,
)
from deflation.resources import ResourceVector

NOMINAL = ResourceVector(4, 2048, 100, 50)
COMMITTED = ResourceVector(1.5, 1024, 40, 20)
#: As it should be: two of four vCPUs on line, each with 0.75 cores.
RIGHT = Sight(Bound(2, 0.75, 1024, 0, 40, 20), vcpus=4, disk_mib_s=40, network_mib_s=20)


def seen(**changes: object) -> Sight:
    """As it should be, but for some fields of the bound or of the sight."""
    bound = {name: changes.pop(name) for name in list(changes) if name in Bound.__slots__ and name not in SIGHT_ONLY}
    return replace(RIGHT, bound=replace(RIGHT.bound, **bound), **changes)  # type: ignore[arg-type]


SIGHT_ONLY = ("disk_mib_s", "network_mib_s")


def test_a_vm_that_is_as_it_should_be_needs_no_repair() -> None:
    assert repairs(COMMITTED, NOMINAL, RIGHT) == ()


@pytest.mark.parametrize(
    ("sight", "quota"),
    [
        (seen(quota_per_cpu=None), 0.75),
        (seen(quota_per_cpu=0.2), 0.75),
        (seen(cpus_online=3), 0.5),
        (seen(cpus_online=4, online_known=False), 0.375),
        (seen(parked_running=(3,)), 0.375),
    ],
    ids=["lifted", "lowered", "one CPU more", "guest silent after a reset", "a parked vCPU runs"],
)
def test_a_quota_is_put_right_over_the_cpus_that_may_run(sight: Sight, quota: float) -> None:
    (repair,) = repairs(COMMITTED, NOMINAL, sight)
    assert isinstance(repair, SetQuota)
    assert repair.cores_per_cpu == pytest.approx(quota)
    assert repair.why


def test_a_vm_at_its_nominal_size_has_no_quota() -> None:
    full = replace(RIGHT, bound=Bound(4, None, 1024, 0, 40, 20))
    assert repairs(replace(COMMITTED, cpu_cores=4), NOMINAL, full) == ()
    (repair,) = repairs(
        replace(COMMITTED, cpu_cores=4), NOMINAL, replace(full, bound=replace(full.bound, quota_per_cpu=0.5))
    )
    assert isinstance(repair, SetQuota)
    assert repair.cores_per_cpu is None


@pytest.mark.parametrize("memory_mib", [1200, 900])
def test_memory_is_put_right_in_both_directions(memory_mib: float) -> None:
    (repair,) = repairs(COMMITTED, NOMINAL, seen(balloon_mib=memory_mib))
    assert isinstance(repair, Resize)
    assert repair.target == COMMITTED
    assert f"{memory_mib:g} MiB" in repair.why


def test_a_guest_that_has_just_booted_is_given_time_but_never_more_than_it_may_have() -> None:
    assert repairs(COMMITTED, NOMINAL, seen(balloon_mib=900, young=True)) == ()
    assert repairs(COMMITTED, NOMINAL, seen(balloon_mib=1200, young=True))


def test_cpus_that_somebody_took_off_line_are_put_back() -> None:
    found = repairs(COMMITTED, NOMINAL, seen(cpus_online=1, quota_per_cpu=None))
    assert [type(repair) for repair in found] == [Resize]


@pytest.mark.parametrize("limit", [None, 90.0, 1.0])
def test_bandwidth_limits_are_put_right_where_bandwidth_was_sold(limit: float | None) -> None:
    found = repairs(COMMITTED, NOMINAL, seen(disk_mib_s=limit, network_mib_s=limit))
    assert [(type(repair)) for repair in found] == [SetDisk, SetNetwork]
    assert repairs(COMMITTED, ResourceVector(4, 2048), seen(disk_mib_s=limit, network_mib_s=limit)) == ()


@given(
    st.floats(0.1, 8),
    st.integers(1, 8),
    st.integers(1, 8),
    st.one_of(st.none(), st.floats(0.01, 1.5)),
    st.booleans(),
    st.booleans(),
)
def test_after_its_repair_the_quota_allows_the_committed_cores_and_no_more(
    cores: float, vcpus: int, online: int, quota: float | None, known: bool, lies: bool
) -> None:
    cores, online = min(cores, vcpus), min(online, vcpus)
    parked = (vcpus - 1,) if lies and online < vcpus else ()
    bound = Bound(online if known else vcpus, quota, 1024, 0)
    sight = Sight(bound, vcpus, known, parked)
    committed = ResourceVector(cores, 1024)
    for repair in repairs(committed, ResourceVector(8, 1024), sight):
        if isinstance(repair, SetQuota):
            quota = repair.cores_per_cpu
    running = bound.cpus_online if known and not parked else vcpus
    share = 1.0 if quota is None else min(quota, 1.0)
    assert share * running <= max(cores, 0) + SLACK.cpu_cores + 1e-9
    assert share * running >= min(cores, running) - SLACK.cpu_cores - 1e-9


def test_a_repaired_vm_needs_no_repair() -> None:
    wrong = seen(quota_per_cpu=0.1)
    found: tuple[Repair, ...] = repairs(COMMITTED, NOMINAL, wrong)
    (repair,) = found
    assert isinstance(repair, SetQuota)
    right = replace(wrong, bound=replace(wrong.bound, quota_per_cpu=repair.cores_per_cpu))
    assert repairs(COMMITTED, NOMINAL, right) == ()


def test_a_share_that_is_a_whole_core_needs_no_quota() -> None:
    assert quota_of(2, 2) is None
    assert quota_of(3, 2) is None
    assert quota_of(1.5, 2) == 0.75


def test_a_repair_that_does_not_hold_is_tried_ever_more_rarely() -> None:
    pace, now, pauses = RepairPace(), 0.0, []
    for _ in range(12):
        assert pace.due(now)
        pace.tried(now)
        assert not pace.due(now + FIRST_PAUSE_S - 1e-3)
        pauses.append(pace.not_before - now)
        now = pace.not_before
    assert pauses[:3] == [FIRST_PAUSE_S, 2 * FIRST_PAUSE_S, 4 * FIRST_PAUSE_S]
    assert max(pauses) == LONGEST_PAUSE_S
    pace.held()
    assert pace.due(now)


def test_shares_that_a_service_manager_has_reset_are_set_again() -> None:
    (repair,) = repairs(COMMITTED, NOMINAL, seen(cpu_shares=1024), 200)
    assert isinstance(repair, SetShares)
    assert repair.shares == 200
    assert repairs(COMMITTED, NOMINAL, seen(cpu_shares=200), 200) == ()
    assert repairs(COMMITTED, NOMINAL, seen(cpu_shares=None), 200) == ()
    assert repairs(COMMITTED, NOMINAL, seen(cpu_shares=77)) == ()


def test_a_silent_guest_is_limited_from_outside_only() -> None:
    silent = seen(cpus_online=4, online_known=False, balloon_mib=2000)
    assert [type(repair) for repair in repairs(COMMITTED, NOMINAL, silent)] == [SetQuota]


@pytest.mark.parametrize(("held_mib", "repaired"), [(896, False), (897, False), (780, False), (768, True)])
def test_less_than_a_dimm_is_not_missing_where_memory_comes_in_dimms(held_mib: float, repaired: bool) -> None:
    bound = replace(RIGHT.bound, balloon_mib=512, plugged_mib=held_mib - 512, dimms_mib=(128.0,) * 2)
    found = repairs(COMMITTED.with_component("memory_mib", 896), NOMINAL, replace(RIGHT, bound=bound))
    assert bool(found) is repaired
