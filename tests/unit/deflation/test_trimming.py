"""Trimming: idle memory is taken in small steps up to the reserve, and given back on the first sign of need."""

from __future__ import annotations

from dataclasses import dataclass, replace

from hypothesis import given, settings
from hypothesis import strategies as st

from ebbtide.deflation.allocations import Allocation, Priority
from ebbtide.deflation.cascade.pressure import STALE_S, PressureReading
from ebbtide.deflation.resources import ResourceVector
from ebbtide.deflation.trimming import BEGIN_MIB, USUAL, Trimmer, TrimRow

IDLE = PressureReading("boot", available_mib=3000.0, reserve_mib=50.0, some_total_us=0, major_faults=0)


def vm(
    name: str = "a",
    current: float = 4096.0,
    minimum: float = 1024.0,
    priority: Priority = Priority.DEFLATABLE,
) -> Allocation:
    ceiling = ResourceVector(2.0, 8192.0) if priority is Priority.HARVEST else None
    size = ResourceVector(2.0, 4096.0)
    least = size if priority is Priority.FIXED else ResourceVector(0.5, minimum)
    return Allocation(name, priority, size, least, ResourceVector(2.0, current), ceiling)


@dataclass
class Guest:
    """A guest that says what it is told to say, every ten seconds."""

    reading: PressureReading = IDLE
    stalled_share: float = 0.0
    faults_per_s: float = 0.0

    def speak(self, trimmer: Trimmer, now: float, name: str = "a") -> None:
        earlier = self.reading
        self.reading = replace(
            earlier,
            some_total_us=(earlier.some_total_us or 0) + round(self.stalled_share * 10e6),
            major_faults=(earlier.major_faults or 0) + round(self.faults_per_s * 10),
        )
        trimmer.observe(now, name, self.reading)


def heard(guest: Guest, trimmer: Trimmer, name: str = "a") -> None:
    """Two readings: the first gives no rate."""
    guest.speak(trimmer, -10.0, name)
    guest.speak(trimmer, 0.0, name)


def test_idle_memory_is_taken_in_small_steps_while_the_reserve_lacks_some() -> None:
    trimmer, guest, size, taken = Trimmer(), Guest(), 4096.0, []
    heard(guest, trimmer)
    for now in range(0, 200, 10):
        if now:
            guest.speak(trimmer, now)
        steps = trimmer.steps(now, [TrimRow(vm(current=size))], 4096.0 - size, 500.0)
        if steps:
            taken.append(size - steps["a"].memory_mib)
            size = steps["a"].memory_mib
    assert max(taken) <= USUAL.nominal_share * 4096.0
    assert 500.0 <= 4096.0 - size <= 500.0 + USUAL.least_mib
    assert sum(1 for one in taken if one > 0) == len(taken) >= 7


def test_a_small_lack_does_not_begin_it_and_a_full_reserve_ends_it() -> None:
    trimmer = Trimmer()
    assert not trimmer.is_filling(1000.0 - BEGIN_MIB / 2, 1000.0)
    assert trimmer.is_filling(800.0, 1000.0)
    assert trimmer.is_filling(990.0, 1000.0)
    assert not trimmer.is_filling(1000.0, 1000.0)
    assert not trimmer.is_filling(990.0, 1000.0)


def test_without_a_second_reading_or_with_an_old_one_nothing_is_taken() -> None:
    trimmer, guest = Trimmer(), Guest()
    guest.speak(trimmer, 0.0)
    assert trimmer.steps(0.0, [TrimRow(vm())], 0.0, 1000.0) == {}
    guest.speak(trimmer, 10.0)
    assert trimmer.steps(10.0 + STALE_S + 0.1, [TrimRow(vm())], 0.0, 1000.0) == {}
    assert set(trimmer.steps(11.0, [TrimRow(vm())], 0.0, 1000.0)) == {"a"}


def test_of_a_guest_that_does_not_count_its_stalls_or_its_faults_nothing_is_taken() -> None:
    for reading in (replace(IDLE, some_total_us=None), replace(IDLE, major_faults=None)):
        trimmer = Trimmer()
        for now in (-10.0, 0.0):
            trimmer.observe(now, "a", reading)
        assert trimmer.steps(0.0, [TrimRow(vm())], 0.0, 1000.0) == {}


def test_a_reboot_tells_nothing_of_the_time_before_it() -> None:
    trimmer, guest = Trimmer(), Guest()
    guest.speak(trimmer, 0.0)
    guest.reading = replace(guest.reading, boot_id="another")
    guest.speak(trimmer, 10.0)
    assert trimmer.steps(10.0, [TrimRow(vm())], 0.0, 1000.0) == {}


def test_beyond_the_budget_of_stalls_or_faults_nothing_is_taken() -> None:
    for guest in (Guest(stalled_share=0.01), Guest(faults_per_s=3.0)):
        trimmer = Trimmer()
        heard(guest, trimmer)
        assert trimmer.steps(0.0, [TrimRow(vm())], 0.0, 1000.0) == {}


def test_memory_that_is_missed_is_given_back_at_once_half_of_it_first() -> None:
    for guest in (
        Guest(stalled_share=0.01, faults_per_s=5.0),
        Guest(faults_per_s=20.0),
        Guest(replace(IDLE, available_mib=70.0)),
    ):
        trimmer = Trimmer()
        heard(guest, trimmer)
        rows = [TrimRow(vm(current=2096.0))]
        assert trimmer.steps(0.0, rows, 4000.0, 0.0)["a"].memory_mib == 3096.0
        # Not again by the same reading, but by the next.
        assert trimmer.steps(1.0, [TrimRow(vm(current=3096.0))], 4000.0, 0.0) == {}
        guest.speak(trimmer, 10.0)
        assert trimmer.steps(10.0, [TrimRow(vm(current=3096.0))], 4000.0, 0.0)["a"].memory_mib == 3596.0


def test_no_more_is_given_back_than_is_not_spoken_for_and_to_harvest_vms_than_their_budget() -> None:
    rows = [TrimRow(vm("low", 2096.0)), TrimRow(vm("spare", 2096.0, priority=Priority.HARVEST))]

    def given(**room_and_budget: float) -> dict[str, float]:
        trimmer = Trimmer()
        for row in rows:
            heard(Guest(replace(IDLE, available_mib=70.0)), trimmer, row.allocation.name)
        steps = trimmer.steps(0.0, rows, 4000.0, 0.0, **room_and_budget)
        return {name: step.memory_mib - 2096.0 for name, step in steps.items()}

    assert given() == {"low": 1000.0, "spare": 1000.0}
    assert given(room_mib=1500.0) == {"low": 1000.0, "spare": 500.0}
    assert given(budget_mib=300.0) == {"low": 1000.0, "spare": 300.0}
    assert given(budget_mib=0.0) == {"low": 1000.0}
    assert given(room_mib=0.0) == {}


def test_a_vm_that_missed_its_memory_is_left_alone_for_longer_each_time() -> None:
    trimmer, guest = Trimmer(), Guest()
    heard(guest, trimmer)
    rests, now = [], 0.0
    for _ in range(4):
        guest.reading = replace(guest.reading, available_mib=70.0)
        guest.speak(trimmer, now := now + 10)
        trimmer.steps(now, [TrimRow(vm())], 0.0, 1000.0)
        began = now
        guest.reading = replace(guest.reading, available_mib=3000.0)
        while True:
            guest.speak(trimmer, now := now + 10)
            if trimmer.steps(now, [TrimRow(vm())], 0.0, 1000.0):
                break
        rests.append(now - began)
    assert rests == [60.0, 120.0, 240.0, 480.0]


def test_harvest_vms_give_first_and_fixed_ones_never() -> None:
    trimmer, names = Trimmer(), ("low", "spare", "high")
    rows = [
        TrimRow(vm("low")),
        TrimRow(vm("spare", priority=Priority.HARVEST)),
        TrimRow(vm("high", priority=Priority.FIXED)),
    ]
    guests = {name: Guest() for name in names}
    for name, guest in guests.items():
        heard(guest, trimmer, name)
    assert set(trimmer.steps(0.0, rows, 0.0, 64.0)) == {"spare"}
    for name, guest in guests.items():
        guest.speak(trimmer, 10.0, name)
    assert set(trimmer.steps(10.0, rows, 0.0, 1000.0)) == {"spare", "low"}


_GUEST = st.builds(
    PressureReading,
    boot_id=st.sampled_from(["one", "two"]),
    available_mib=st.floats(0, 5000),
    reserve_mib=st.floats(0, 200),
    some_total_us=st.none() | st.integers(0, 10**9),
    major_faults=st.none() | st.integers(0, 10**6),
    swap_in_pages=st.none() | st.integers(0, 10**6),
)
_VM = st.tuples(st.sampled_from(list(Priority)), st.floats(64, 4096), st.floats(0, 1), st.booleans(), st.booleans())


@settings(max_examples=300)
@given(
    st.lists(_VM, min_size=1, max_size=4),
    st.lists(st.tuples(st.floats(0.1, 30), st.lists(_GUEST, min_size=4, max_size=4)), max_size=12),
    st.floats(0, 4000),
    st.floats(0, 4000),
)
def test_no_step_breaks_a_bound_or_a_bar_whatever_the_guests_say(
    vms: list[tuple[Priority, float, float, bool, bool]],
    rounds: list[tuple[float, list[PressureReading]]],
    free_mib: float,
    reserve_mib: float,
) -> None:
    trimmer, now, rows = Trimmer(), 0.0, []
    for number, (priority, minimum, place, may_trim, may_grow) in enumerate(vms):
        current = 4096.0 if priority is Priority.FIXED else minimum + place * (4096.0 - minimum)
        rows.append(TrimRow(vm(str(number), current, minimum, priority), may_trim, may_grow))
    for gap, readings in rounds:
        now += gap
        for row, reading in zip(rows, readings, strict=False):
            trimmer.observe(now, row.allocation.name, reading)
        steps = trimmer.steps(now, rows, free_mib, reserve_mib)
        given_mib = taken_mib = 0.0
        for row in rows:
            one = row.allocation
            if one.name not in steps:
                continue
            moved = steps[one.name].memory_mib - one.current.memory_mib
            if moved > 0:
                assert row.may_grow
                assert steps[one.name].memory_mib <= one.nominal.memory_mib + 1e-6
                given_mib += moved
            else:
                assert row.may_trim
                assert one.priority is not Priority.FIXED
                assert steps[one.name].memory_mib >= one.minimum.memory_mib - 1e-6
                assert -moved <= USUAL.nominal_share * one.nominal.memory_mib + 1e-6
                taken_mib -= moved
        assert given_mib <= free_mib + 1e-6
        # Never more than what the reserve lacks, but for the least step of each VM.
        assert taken_mib <= max(reserve_mib - free_mib + given_mib, 0.0) + USUAL.least_mib + 1e-6
