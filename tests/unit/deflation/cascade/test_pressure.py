"""Pressure of a guest: what is a sign of it, when it ends, and how often a guest's own request counts."""

from __future__ import annotations

import itertools
from dataclasses import fields, replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ebbtide.deflation.allocations import Allocation, Priority
from ebbtide.deflation.cascade.pressure import (
    AGAIN_S,
    BUDGET_S,
    CALM_S,
    COOL_DOWN_S,
    ENTER,
    HEARD_AGAIN,
    LEAVE,
    LONGEST_CALM_S,
    LONGEST_COOL_DOWN_S,
    LONGEST_WINDOW_S,
    REFILL,
    REQUEST_S,
    STALE_S,
    UNSEEN_S,
    WINDOW_S,
    PressureReading,
    PressureWatch,
    Thresholds,
)
from ebbtide.deflation.resources import ZERO, ResourceVector
from ebbtide.messages.guest import GuestStatus
from tests.unit.deflation.strategies import allocations, runs

CALM = PressureReading("boot-1", 500.0, 50.0, 0.0, 0.0, 0, 0, 1000, 0)
BLIND = PressureReading("boot-1", 500.0, 50.0, major_faults=1000)
LACKING = Allocation(
    "low-1",
    Priority.DEFLATABLE,
    nominal=ResourceVector(4, 2048),
    minimum=ResourceVector(1, 512),
    current=ResourceVector(2, 1024),
)


def later(
    reading: PressureReading, seconds: float, faults_per_s: float = 0, some: float = 0, full: float = 0
) -> PressureReading:
    """The reading after `seconds` in which so much happened; the averages follow at once."""
    return replace(
        reading,
        some_percent=None if reading.some_percent is None else some,
        full_percent=None if reading.full_percent is None else full,
        some_total_us=None if reading.some_total_us is None else reading.some_total_us + int(some * seconds * 1e4),
        full_total_us=None if reading.full_total_us is None else reading.full_total_us + int(full * seconds * 1e4),
        major_faults=None if reading.major_faults is None else reading.major_faults + int(faults_per_s * seconds),
    )


class Story:
    """Readings every two seconds."""

    def __init__(self, reading: PressureReading = CALM) -> None:
        self.watch, self.reading, self.now = PressureWatch(), reading, 100.0
        self.watch.observe(self.now, reading)

    def go_on(self, seconds: float, **happens: float) -> bool:
        """Whether the VM is under pressure in the end."""
        for _ in range(round(seconds / 2)):
            self.now += 2
            self.reading = later(self.reading, 2, **happens)
            self.watch.observe(self.now, self.reading)
        return self.pressed

    @property
    def pressed(self) -> bool:
        return self.watch.verdict(self.now, LACKING).under_pressure


@pytest.mark.parametrize(
    ("happens", "pressed"),
    [
        ({"some": 60, "full": 30, "faults_per_s": 300}, True),
        ({"some": 25, "full": 0, "faults_per_s": 20}, True),
        ({"some": 0, "full": 12, "faults_per_s": 20}, True),
        ({"some": 6, "full": 0, "faults_per_s": 150}, True),
        ({"some": 0, "full": 0, "faults_per_s": 500}, False),  # a program that starts
        ({"some": 60, "full": 60, "faults_per_s": 0}, False),  # a kernel that drops caches
        ({"some": 5, "full": 2, "faults_per_s": 50}, False),
    ],
)
def test_stalls_count_where_the_memory_is_missed(happens: dict[str, float], pressed: bool) -> None:
    assert Story().go_on(2, **happens) is pressed


def test_stalls_of_a_guest_without_memory_to_spare_count_without_faults() -> None:
    story = Story(replace(CALM, available_mib=45.0))
    assert not story.pressed
    assert story.go_on(2, some=40)


def test_a_guest_with_next_to_nothing_available_is_under_pressure_at_the_first_reading() -> None:
    assert Story(replace(CALM, available_mib=12.0)).pressed
    assert not Story(replace(CALM, available_mib=13.0)).pressed


def test_without_psi_faults_count_when_they_last() -> None:
    story = Story(BLIND)
    assert not story.go_on(2, faults_per_s=400)
    assert story.go_on(2, faults_per_s=400)


def test_a_stall_counts_until_a_second_reading_tells_whether_the_memory_is_missed() -> None:
    """An agent that is started in the middle has one reading: what it cannot tell yet is no reason to take memory."""
    stalled = replace(CALM, some_percent=60.0, full_percent=30.0)
    story = Story(stalled)
    verdict = story.watch.verdict(story.now, LACKING)
    assert (verdict.under_pressure, verdict.wants) == (True, ZERO)
    assert "it is not known yet whether the memory is missed" in verdict.sentence
    assert not story.go_on(2, some=60, full=30), "a kernel that drops caches"
    assert story.go_on(2, some=60, full=30, faults_per_s=300)


def test_after_a_long_time_without_a_reading_a_stall_counts_as_at_the_first() -> None:
    story = Story()
    story.now += LONGEST_WINDOW_S + 1
    story.watch.observe(story.now, later(story.reading, LONGEST_WINDOW_S + 1, faults_per_s=300, some=60))
    assert story.pressed
    assert not story.watch.verdict(story.now + STALE_S + 1, LACKING).under_pressure, "no memory is taken then anyway"


def test_pages_swapped_in_count_as_faults() -> None:
    watch, reading = PressureWatch(), replace(CALM, some_percent=30.0)
    watch.observe(0, reading)
    watch.observe(2, replace(reading, swap_in_pages=400))
    assert watch.verdict(2, LACKING).under_pressure


def test_a_first_reading_gives_no_rate() -> None:
    assert not Story(replace(CALM, some_percent=10.0, full_percent=5.0, major_faults=10**9)).pressed


@pytest.mark.parametrize("boot_id", ["boot-1", "boot-2"])
def test_a_counter_that_goes_back_gives_no_rate(boot_id: str) -> None:
    story = Story()
    story.watch.observe(story.now + 2, replace(CALM, boot_id=boot_id, major_faults=500, some_total_us=0))
    story.watch.observe(story.now + 4, replace(CALM, boot_id=boot_id, major_faults=0, some_total_us=0))
    assert not story.watch.verdict(story.now + 4, LACKING).under_pressure


def test_a_reboot_ends_the_pressure() -> None:
    story = Story()
    assert story.go_on(4, some=60, faults_per_s=300)
    story.watch.observe(story.now + 1, replace(CALM, boot_id="boot-2"))
    assert not story.watch.verdict(story.now + 1, LACKING).under_pressure


def test_a_guest_that_boots_begins_without_a_reading_and_what_it_claimed_stays_booked() -> None:
    story = Story()
    assert story.go_on(4, faults_per_s=200, some=50)
    story.watch.request(story.now, ResourceVector(1.0), LACKING, "")
    story.watch.boots(story.now)
    verdict = story.watch.verdict(story.now, LACKING)
    assert (verdict.under_pressure, verdict.known, verdict.wants) == (False, False, ZERO)
    assert story.watch.budget_s <= BUDGET_S - CALM_S


def test_what_the_totals_say_counts_before_the_averages_follow() -> None:
    watch = PressureWatch()
    watch.observe(0, CALM)
    watch.observe(2, replace(CALM, some_percent=6.0, some_total_us=1_200_000, major_faults=1100))
    assert watch.verdict(2, LACKING).under_pressure


def test_readings_in_quick_succession_do_not_make_a_rate_of_one_stall() -> None:
    watch = PressureWatch()
    watch.observe(0, CALM)
    watch.observe(0.2, replace(CALM, some_total_us=150_000, major_faults=1030))
    assert not watch.verdict(0.2, LACKING).under_pressure


def test_pressure_ends_only_after_it_has_been_calm_for_a_while() -> None:
    story = Story()
    assert story.go_on(4, some=60, faults_per_s=300)
    assert story.go_on(20, some=12, faults_per_s=30), "between the thresholds it stays as it is"
    assert story.go_on(CALM_S)
    assert not story.go_on(2)
    assert not story.go_on(20, some=12, faults_per_s=30), "between the thresholds it stays as it is"


def calm_after(story: Story) -> int:
    """So many seconds until pressure has ended."""
    assert story.go_on(2, some=60, faults_per_s=300)
    began = story.now
    while story.go_on(2):
        assert story.now - began < 1000
    return round(story.now - began)


def test_pressure_that_comes_back_takes_longer_to_end_each_time_up_to_a_limit() -> None:
    story = Story()
    first, *more = [calm_after(story) for _ in range(8)]
    assert first == CALM_S + 2
    assert more == [min(CALM_S * 2**n, LONGEST_CALM_S) + 2 for n in range(1, 8)]
    story.go_on(AGAIN_S + 2)
    assert calm_after(story) == first


def test_a_guest_that_never_said_a_word_is_not_under_pressure_and_gives_no_memory() -> None:
    verdict = PressureWatch().verdict(5, LACKING)
    assert (verdict.under_pressure, verdict.known) == (False, False)
    assert verdict.sentence == "no fresh reading, so no memory is taken"


def test_an_old_reading_is_none() -> None:
    story = Story()
    assert story.watch.verdict(story.now + STALE_S, LACKING).known
    assert not story.watch.verdict(story.now + STALE_S + 1, LACKING).known


def test_a_guest_that_falls_silent_under_pressure_stays_so_for_a_while() -> None:
    story = Story()
    story.go_on(4, some=60, faults_per_s=300)
    silent = story.watch.verdict(story.now + UNSEEN_S, LACKING)
    assert silent.under_pressure
    assert f"silent for {UNSEEN_S:.0f} s" in silent.sentence
    assert not story.watch.verdict(story.now + UNSEEN_S + 1, LACKING).under_pressure
    story.watch.observe(story.now + UNSEEN_S + 1, CALM)
    assert not story.watch.verdict(story.now + UNSEEN_S + 1, LACKING).under_pressure


def test_under_pressure_a_vm_wants_all_its_memory_back_and_no_cpu() -> None:
    story = Story()
    story.go_on(2, some=60, full=30, faults_per_s=300)
    verdict = story.watch.verdict(story.now, LACKING)
    assert verdict.wants == ResourceVector(memory_mib=1024)
    assert verdict.sentence == (
        "under memory pressure: some task waits for memory 60 % of the time, all do 30 %, 300 major faults a second, "
        "500 MiB available, reserve 50 MiB"
    )


def test_a_request_is_heard_up_to_the_nominal_size_and_stands_for_a_while() -> None:
    watch = PressureWatch()
    assert watch.request(10, ResourceVector(0.5, 10_000), LACKING, "a batch job starts") == ""
    verdict = watch.verdict(10, LACKING)
    assert verdict.under_pressure
    assert verdict.wants == ResourceVector(0.5, 1024)
    assert "asks for more itself: a batch job starts" in verdict.sentence
    grown = replace(LACKING, current=ResourceVector(2.5, 1500))
    assert watch.verdict(10 + REQUEST_S, grown).wants == ResourceVector(memory_mib=548)
    assert not watch.verdict(11 + REQUEST_S, LACKING).under_pressure


def test_a_request_for_what_the_vm_has_does_not_count() -> None:
    watch = PressureWatch()
    whole = replace(LACKING, current=LACKING.nominal)
    assert watch.request(0, ResourceVector(memory_mib=1), whole, "") == "the VM has all of that which it was sold"
    assert watch.request(0, ZERO, LACKING, "") == "the request names nothing"
    assert watch.request(0, ResourceVector(memory_mib=1), LACKING, "") == ""


def test_a_request_counts_once_in_its_cool_down() -> None:
    watch, more = PressureWatch(), ResourceVector(memory_mib=100)
    assert watch.request(0, more, LACKING, "") == ""
    assert watch.request(20, more, LACKING, "") == "asked 20 s ago; it counts again in 40 s"
    assert watch.request(COOL_DOWN_S, more, LACKING, "") == ""


def counted(watch: PressureWatch, now: float) -> float:
    """When a guest that asks every second is heard next."""
    while watch.request(now, ResourceVector(memory_mib=10), LACKING, ""):
        now += 1
    return now


def test_a_guest_that_keeps_asking_is_heard_less_and_less() -> None:
    watch, times = PressureWatch(), [0.0]
    counted(watch, 0.0)
    for _ in range(9):
        times.append(counted(watch, times[-1] + 1))
    gaps = [b - a for a, b in itertools.pairwise(times)]
    assert gaps == [min(COOL_DOWN_S * 2**n, LONGEST_COOL_DOWN_S) for n in range(9)]


def test_a_guest_that_was_deflated_again_has_reason_to_ask_again() -> None:
    watch = PressureWatch()
    second = counted(watch, counted(watch, 0.0) + 1)
    third = counted(watch, second + 1)
    assert third - second == 2 * COOL_DOWN_S
    watch.deflated()
    assert counted(watch, third + 1) - third == COOL_DOWN_S


def test_a_guest_that_was_silent_for_long_is_heard_as_at_first() -> None:
    watch = PressureWatch()
    second = counted(watch, counted(watch, 0.0) + 1)
    third = counted(watch, second + 4 * COOL_DOWN_S)
    assert counted(watch, third + 1) - third == COOL_DOWN_S


def test_a_reading_comes_from_what_the_guest_says() -> None:
    body = {
        "boot_id": "b",
        "uptime_s": 1.0,
        "cpus": {"present": [0], "online": [0], "unpluggable": []},
        "memory": {"total_mib": 9, "available_mib": 5, "reserve_mib": 4, "floor_mib": 8, "unpluggable_mib": 1},
    }
    assert GuestStatus.model_validate(body).pressure_reading() == PressureReading("b", 5.0, 4.0)
    psi = {"memory_some_avg10": 1, "memory_full_avg10": 2, "cpu_some_avg10": 3}
    totals = {"memory_some_total_us": 4, "memory_full_total_us": 5}
    full = body | {"pressure": psi | totals, "major_faults": 6, "swap_in_pages": 7}
    expected = PressureReading("b", 5.0, 4.0, 1.0, 2.0, 4, 5, 6, 7)
    assert GuestStatus.model_validate(full).pressure_reading() == expected


def test_the_thresholds_leave_room_between_beginning_and_end() -> None:
    for field in fields(Thresholds):
        begin, end = getattr(ENTER, field.name), getattr(LEAVE, field.name)
        assert end > begin if field.name in ("available", "witness_available") else end < begin, field.name


def test_the_documentation_has_these_figures() -> None:
    text = " ".join((Path(__file__).parents[4] / "docs/internals/pressure.md").read_text().split())
    rows = [
        f"**and a witness** | {ENTER.some_percent:g} % | {LEAVE.some_percent:g} % |",
        f"**and a witness** | {ENTER.full_percent:g} % | {LEAVE.full_percent:g} % |",
        f"| {ENTER.witness_faults_per_s:g} /s | {LEAVE.witness_faults_per_s:g} /s |",
        f"| under {ENTER.witness_available:.0%} | from {LEAVE.witness_available:.0%} |".replace("%", " %"),
        f"| {ENTER.faults_per_s:g} /s with {ENTER.faults_some_percent:g} % | "
        f"{LEAVE.faults_per_s:g} /s or {LEAVE.faults_some_percent:g} % |",
        f"| under {ENTER.available:.0%} | from {LEAVE.available:.0%} |".replace("%", " %"),
        f"at least {WINDOW_S:g} s (and at most {LONGEST_WINDOW_S:g} s) apart",
        f"within the right column for {CALM_S:g} s",
        f"within {AGAIN_S:g} s of its end that time doubles, up to {LONGEST_CALM_S:g} s",
        f"stays under pressure for {UNSEEN_S:g} s",
        f"younger than {STALE_S:g} s",
        f"counts as pressure for {REQUEST_S:g} s",
        f"counts once in {COOL_DOWN_S:g} s",
        f"up to {LONGEST_COOL_DOWN_S:g} s",
    ]
    assert [row for row in rows if row not in text] == []


amounts = st.one_of(st.none(), st.floats(0, 100))
counters = st.one_of(st.none(), st.integers(0, 2**64 - 1))
readings = st.builds(
    PressureReading,
    st.sampled_from(["a", "b"]),
    st.floats(0, 1e9),
    st.floats(0, 1e9),
    amounts,
    amounts,
    counters,
    counters,
    counters,
    counters,
)
asked = st.builds(ResourceVector, st.floats(0, 4096), st.floats(0, 1e9))


@runs()
@given(allocations(), st.lists(st.tuples(st.floats(0, 100), st.one_of(readings, asked)), max_size=20))
def test_whatever_a_guest_says_it_wants_no_more_than_it_was_sold(
    vm: Allocation, story: list[tuple[float, PressureReading | ResourceVector]]
) -> None:
    watch, now = PressureWatch(), 0.0
    for seconds, said in story:
        now += seconds
        if isinstance(said, PressureReading):
            watch.observe(now, said)
        else:
            watch.request(now, said, vm, "x")
        verdict = watch.verdict(now, vm)
        assert verdict.sentence
        assert (vm.current + verdict.wants).fits_in(vm.nominal.larger(vm.current))
        assert verdict.under_pressure or verdict.wants.is_zero()


def test_a_guest_that_claims_pressure_without_end_is_heard_for_its_budget_only() -> None:
    watch, heard = PressureWatch(), []
    for now in range(0, 7200, 2):
        watch.observe(now, replace(CALM, available_mib=1.0))
        heard.append(watch.verdict(now, LACKING).under_pressure)
    first = heard.index(False)
    assert first * 2 == BUDGET_S, "at first all of it counts"
    assert sum(heard) * 2 <= BUDGET_S + (7200 - BUDGET_S) * REFILL, "then a part of the time"
    assert not any(heard[first : first + int(HEARD_AGAIN * BUDGET_S / REFILL) // 2 - 1])


def test_a_spent_budget_comes_back_while_there_is_no_claim() -> None:
    watch, now = PressureWatch(), 0.0
    while watch.budget_s > 0:
        watch.observe(now, replace(CALM, available_mib=1.0))
        spent = watch.verdict(now, LACKING)
        now += 2.0
    assert (spent.under_pressure, spent.wants, spent.known) == (False, ZERO, True)
    assert spent.sentence.startswith("it has claimed pressure for 900 s, which is all that counts; again in ")
    for _ in range(int(BUDGET_S / REFILL)):
        now += 1.0
        watch.observe(now, CALM)
        watch.verdict(now, LACKING)
    assert watch.budget_s == BUDGET_S
    watch.observe(now + 2, replace(CALM, available_mib=1.0))
    assert watch.verdict(now + 2, LACKING).under_pressure


@pytest.mark.parametrize("pause_s", [8, 170, 182], ids=["calm", "silence", "silence until it is forgotten"])
def test_calm_and_silence_between_two_claims_spend_the_budget_too(pause_s: int) -> None:
    """A guest claims pressure, says a moment later that all is well, then nothing until shortly before its end."""
    watch, heard_s, now = PressureWatch(), 0, 0.0
    while now < 8 * 3600:
        watch.observe(now, replace(CALM, available_mib=1.0))
        watch.verdict(now, LACKING)
        watch.observe(now + 0.01, CALM)
        heard_s += sum(watch.verdict(now + 0.02 + second, LACKING).under_pressure for second in range(pause_s))
        now += pause_s
    assert heard_s <= BUDGET_S + (now - BUDGET_S) * REFILL + 2 * UNSEEN_S


def test_the_calm_by_which_pressure_ends_is_no_claim() -> None:
    story = Story()
    story.go_on(4, some=60, faults_per_s=300)
    spent = BUDGET_S - story.watch.budget_s
    while story.pressed:
        story.go_on(2)
    assert BUDGET_S - story.watch.budget_s <= spent + 4


@pytest.mark.parametrize(
    "claim",
    [replace(CALM, available_mib=0.0), replace(CALM, some_percent=60.0)],
    ids=["nothing available", "a stall without a rate"],
)
def test_a_guest_that_takes_a_claim_back_by_another_boot_begins_pressure_only_as_often_as_its_budget_allows(
    claim: PressureReading,
) -> None:
    watch, heard = PressureWatch(), 0
    for tenth in range(36_000):
        now = tenth / 10
        watch.observe(now, replace(claim, boot_id="b2"))
        heard += watch.verdict(now, LACKING).under_pressure
        watch.observe(now + 0.001, replace(CALM, boot_id="b1"))
        assert not watch.verdict(now + 0.001, LACKING).under_pressure
    assert 0 < heard <= (BUDGET_S + 3600 * REFILL) / CALM_S + 1
    assert watch.budget_s < BUDGET_S / 2


def test_a_guest_that_begins_and_ends_a_stall_while_its_faults_go_back_spends_its_budget() -> None:
    watch, heard = PressureWatch(), 0
    for tenth in range(36_000):
        now, faults = tenth / 10, 10**6 - tenth
        watch.observe(now, replace(CALM, some_percent=60.0, major_faults=faults, swap_in_pages=None))
        heard += watch.verdict(now, LACKING).under_pressure
        watch.observe(now + 0.05, replace(CALM, major_faults=faults, swap_in_pages=None))
        watch.verdict(now + 0.05, LACKING)
    assert 0 < heard <= (BUDGET_S + 3600 * REFILL) / CALM_S + 1


def test_a_calm_that_ends_by_another_boot_that_claims_again_counts_as_claimed() -> None:
    watch, heard_s, now = PressureWatch(), 0, 0
    for turn in range(800):
        boot_id = f"b{turn}"
        watch.observe(now, replace(CALM, boot_id=boot_id, available_mib=0.0))
        watch.verdict(now, LACKING)
        for second in range(1, 9):
            watch.observe(now + second, replace(CALM, boot_id=boot_id))
            heard_s += watch.verdict(now + second, LACKING).under_pressure
        now += 9
    assert heard_s <= BUDGET_S + now * REFILL


def test_pressure_that_comes_back_after_a_reboot_takes_longer_to_end() -> None:
    story = Story()
    assert calm_after(story) == CALM_S + 2
    assert story.go_on(100, some=60, faults_per_s=300)
    story.reading = replace(CALM, boot_id="boot-2")
    assert not story.go_on(AGAIN_S - 50)
    assert calm_after(story) == CALM_S * 4 + 2
