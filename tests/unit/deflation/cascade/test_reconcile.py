"""What a VM has against what it should have: repairs, and when they are tried again."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ebbtide.deflation.bounds import EMULATOR_SHARE, Bound
from ebbtide.deflation.cascade.reconcile import (
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
    held_below,
    held_beyond,
    quota_of,
    repairs,
    spread_of,
)
from ebbtide.deflation.resources import ZERO, ResourceVector

NOMINAL = ResourceVector(4, 2048, 100, 50)
COMMITTED = ResourceVector(1.5, 1024, 40, 20)
#: As it should be: two of four vCPUs on line, each with 0.75 cores.
CAP = 1.5 * (1 + EMULATOR_SHARE)
RIGHT = Sight(
    Bound(2, 0.75, 1024, 0, 40, 20, cap_cores=CAP, vcpus=4), vcpus=4, online=2, disk_mib_s=40, network_mib_s=20
)


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
        (seen(cpus_online=4, online_known=False, quota_per_cpu=0.375), 0.75),
        (seen(cpus_online=4, online_known=False, online=None, quota_per_cpu=0.3), None),
    ],
    ids=["lifted", "lowered", "one CPU more", "a silent guest's last word", "a guest that never said, lowered"],
)
def test_a_quota_is_put_right_over_the_cpus_that_are_on_line(sight: Sight, quota: float | None) -> None:
    (repair,) = repairs(COMMITTED, NOMINAL, sight)
    assert isinstance(repair, SetQuota)
    assert repair.cores_per_cpu == pytest.approx(quota)
    assert repair.why


def test_a_vm_at_its_nominal_size_has_no_quota() -> None:
    full = replace(RIGHT, bound=Bound(4, None, 1024, 0, 40, 20), online=4)
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
    st.one_of(st.none(), st.integers(1, 8)),
    st.one_of(st.none(), st.floats(0.01, 1.5)),
    st.one_of(st.none(), st.floats(0.01, 9)),
    st.booleans(),
)
def test_whatever_a_guest_says_of_its_cpus_it_gets_what_is_committed_and_no_more(
    cores: float, vcpus: int, online: int, said: int | None, quota: float | None, cap: float | None, answers: bool
) -> None:
    cores, online = min(cores, vcpus), min(online, vcpus)
    said = min(said, vcpus) if said is not None else None
    answers = answers and said is not None
    bound = Bound(said if answers and said is not None else vcpus, quota, 1024, 0, cap_cores=cap, vcpus=vcpus)
    sight = Sight(bound, vcpus, answers, said)
    for repair in repairs(ResourceVector(cores, 1024), ResourceVector(8, 1024), sight):
        if isinstance(repair, SetQuota):
            quota, cap = repair.cores_per_cpu, repair.cap_cores
    real = Bound(online, quota, 1024, 0, cap_cores=cap, vcpus=vcpus)
    assert real.cpu_cores <= cores + SLACK.cpu_cores + 1e-3
    if said == online:
        assert real.cpu_cores >= min(cores, online) - SLACK.cpu_cores - 1e-3, "the last word was true: nothing is lost"


def test_a_vm_whose_limits_leave_it_less_than_its_minimum_is_an_alarm() -> None:
    one_on_line = seen(cpus_online=4, online_known=False, online=1, quota_per_cpu=0.3, cap_cores=0.93)
    assert held_below(0.9, one_on_line) == pytest.approx(0.3)
    assert held_below(0.9, replace(one_on_line, bound=replace(one_on_line.bound, quota_per_cpu=0.9))) is None
    # What the guest has taken off line itself is its own affair.
    assert held_below(2.0, seen(cpus_online=1, online=1, quota_per_cpu=None, cap_cores=None)) is None


@pytest.mark.parametrize(
    ("online", "cap", "may_be_parked", "spread"),
    [
        (0, CAP, True, 1),
        (2, CAP, True, 2),
        (2, None, True, 2),
        (8, CAP, True, 4),
        (0, None, True, 4),
        (0, CAP + 0.1, True, 4),
        (0, CAP, False, 4),
    ],
    ids=["never said", "said", "said, no cap", "said more", "no cap", "a cap above its size", "nobody parks"],
)
def test_a_silent_guests_size_is_spread_over_one_cpu_only_where_nobody_knows_which_and_the_cap_holds_it(
    online: int, cap: float | None, may_be_parked: bool, spread: int
) -> None:
    bound = Bound(4, None, 1024, 0, cap_cores=cap, vcpus=4)
    assert spread_of(online, 1.5, bound, may_be_parked) == spread


@given(cores=st.floats(0.1, 8), vcpus=st.integers(1, 8), cap=st.none() | st.floats(0.1, 9), online=st.integers(1, 8))
def test_where_nobody_knows_what_is_on_line_a_vm_has_its_size_and_never_more_than_that(
    cores: float, vcpus: int, cap: float | None, online: int
) -> None:
    """However many of its vCPUs run, by the cap that was read, which holds until another is set."""
    size, before = min(cores, float(vcpus)), Bound(vcpus, None, 1024, 0, cap_cores=cap, vcpus=vcpus)
    spread = spread_of(0, size, before, may_be_parked=True)
    after = replace(before, quota_per_cpu=quota_of(size, spread), cpus_online=min(online, vcpus))
    least = min(size, float(after.cpus_online)) - SLACK.cpu_cores
    assert after.cpu_cores <= size + SLACK.cpu_cores
    if spread == 1:
        assert replace(after, cap_cores=None).cpu_cores >= least


def test_a_repaired_vm_needs_no_repair() -> None:
    wrong = seen(quota_per_cpu=0.1)
    found: tuple[Repair, ...] = repairs(COMMITTED, NOMINAL, wrong)
    (repair,) = found
    assert isinstance(repair, SetQuota)
    right = replace(wrong, bound=replace(wrong.bound, quota_per_cpu=repair.cores_per_cpu, cap_cores=repair.cap_cores))
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
    pace.at_once()
    assert pace.due(now)
    pace.tried(now)
    assert pace.not_before - now == LONGEST_PAUSE_S, "as if it had been tried in its turn"
    pace.held()
    assert pace.due(now)
    pace.tried(now)
    assert pace.not_before - now == FIRST_PAUSE_S


def test_shares_that_a_service_manager_has_reset_are_set_again() -> None:
    (repair,) = repairs(COMMITTED, NOMINAL, seen(cpu_shares=1024), 200)
    assert isinstance(repair, SetShares)
    assert repair.shares == 200
    assert repairs(COMMITTED, NOMINAL, seen(cpu_shares=200), 200) == ()
    assert repairs(COMMITTED, NOMINAL, seen(cpu_shares=None), 200) == ()
    assert repairs(COMMITTED, NOMINAL, seen(cpu_shares=77)) == ()


def test_a_silent_guest_is_limited_from_outside_only() -> None:
    silent = seen(cpus_online=4, online_known=False, balloon_mib=2000)
    assert repairs(COMMITTED, NOMINAL, silent) == (), "memory is taken by its own word only"
    lifted = seen(cpus_online=4, online_known=False, balloon_mib=2000, cap_cores=None)
    assert [type(repair) for repair in repairs(COMMITTED, NOMINAL, lifted)] == [SetQuota]


def test_a_silent_guest_is_charged_with_what_it_holds_beyond_its_size_until_it_is_measured() -> None:
    silent = seen(online_known=False, balloon_mib=2000)
    beyond = held_beyond(COMMITTED, ZERO, silent)
    assert beyond == ResourceVector(memory_mib=2000.0)
    assert held_beyond(COMMITTED, beyond, seen(balloon_mib=1800)).memory_mib == 1800, "it speaks, and gives it back"
    assert held_beyond(COMMITTED, beyond, seen()).is_zero(), "it is gone"
    assert held_beyond(COMMITTED, ZERO, seen(balloon_mib=2000)).is_zero(), "of one that speaks it is taken instead"


@pytest.mark.parametrize(("held_mib", "repaired"), [(896, False), (897, False), (780, False), (768, True)])
def test_less_than_a_dimm_is_not_missing_where_memory_comes_in_dimms(held_mib: float, repaired: bool) -> None:
    bound = replace(RIGHT.bound, balloon_mib=512, plugged_mib=held_mib - 512, dimms_mib=(128.0,) * 2)
    found = repairs(COMMITTED.with_component("memory_mib", 896), NOMINAL, replace(RIGHT, bound=bound))
    assert bool(found) is repaired
