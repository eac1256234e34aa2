"""Memory of a guest that runs nothing of ours, by its balloon statistics alone."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ebbtide.deflation.allocations import Allocation, Priority
from ebbtide.deflation.bounds import Bound
from ebbtide.deflation.cascade.cascade import Cascade
from ebbtide.deflation.cascade.instructions import (
    Finish,
    GuestKind,
    GuestReading,
    Measured,
    Outcome,
    ReadGuest,
    Stopped,
    Throttle,
)
from ebbtide.deflation.cascade.ordinary import (
    FRESH_S,
    LONGEST_WINDOW_S,
    MISSED_PER_S,
    RESERVE_MIB,
    OrdinaryGuest,
    Statement,
)
from ebbtide.deflation.cascade.pressure import BUDGET_S, REFILL, PressureReading, PressureWatch
from ebbtide.deflation.cascade.steps import balloon_to_keep
from ebbtide.deflation.floors import BALLOON_FLOOR_MIB
from ebbtide.deflation.ledger import Layer
from ebbtide.deflation.resources import ResourceVector
from tests.unit.deflation.blocked import without
from tests.unit.deflation.script import entry

CALM = Statement(100.0, 500.0, 800.0, major_faults=7, swap_in_mib=0.0)
ALONE = without(Layer.APPLICATION, Layer.GUEST)
FULL = Bound(1, None, 800, 0)


def guest(*said: Statement | None, read_at: float = 100.4) -> OrdinaryGuest:
    """One that was looked at first before it said any of this."""
    found = OrdinaryGuest()
    found.observe(99.0, None)
    for statement in said:
        found.observe(read_at, statement)
    return found


def spare(found: OrdinaryGuest) -> float | None:
    reading = found.reading(2)
    return reading.spare_mib if reading is not None else None


# --- what is known ---------------------------------------------------------------------------------------------------


def test_what_is_usable_less_a_reserve_twice_as_large_as_our_agents_can_be_spared() -> None:
    reading = guest(CALM).reading(2)
    assert reading == GuestReading((0, 1), (), 500.0 - RESERVE_MIB, GuestKind.BALLOON, "")
    assert spare(guest(replace(CALM, total_mib=4000.0))) == 100.0
    assert spare(guest(replace(CALM, usable_mib=60.0))) == 0.0


def test_statistics_that_never_came_or_do_not_come_any_more_let_nothing_be_taken() -> None:
    assert spare(guest()) is None
    assert spare(guest(None)) is None
    assert spare(guest(CALM, read_at=100.0 + FRESH_S)) is not None
    assert spare(guest(CALM, read_at=100.1 + FRESH_S)) is None
    found = guest(CALM)
    found.observe(120.0, CALM)
    assert (found.fresh, spare(found)) == (False, None)


def test_a_statement_from_the_future_is_no_fresh_one() -> None:
    assert spare(guest(CALM, read_at=90.0)) is None


def test_what_was_said_before_a_step_does_not_count_after_it() -> None:
    found = guest(CALM)
    found.moved(100.6)
    assert spare(found) is None
    found.observe(101.2, replace(CALM, said_at=100.0))
    assert spare(found) is None
    found.observe(101.4, replace(CALM, said_at=101.0, usable_mib=400.0))
    assert spare(found) == 400.0 - RESERVE_MIB


def test_an_agent_that_was_started_just_now_waits_for_the_next_statement() -> None:
    """An earlier one may have taken something a moment ago."""
    found = OrdinaryGuest()
    found.observe(100.4, CALM)
    assert spare(found) is None
    found.observe(101.5, replace(CALM, said_at=101.0))
    assert spare(found) == 404.0


def test_a_clock_that_is_set_back_does_not_hide_what_is_said_from_then_on() -> None:
    found = guest(CALM)
    found.moved(100.6)
    found.observe(20.4, replace(CALM, said_at=20.0))
    assert spare(found) is None, "it may have been said before the step"
    found.observe(21.2, replace(CALM, said_at=21.0, usable_mib=400.0))
    assert spare(found) == 400.0 - RESERVE_MIB
    # A reading that was under way beside the step is no clock that was set back.
    found.moved(22.6)
    found.observe(22.1, replace(CALM, said_at=22.0))
    assert spare(found) is None


@pytest.mark.parametrize(
    "after",
    [
        replace(CALM, said_at=101.0, major_faults=7 + int(MISSED_PER_S)),
        replace(CALM, said_at=101.0, swap_in_mib=MISSED_PER_S / 256),
        replace(CALM, said_at=101.0, usable_mib=RESERVE_MIB / 2 - 1),
    ],
)
def test_rising_faults_and_little_usable_memory_are_named(after: Statement) -> None:
    found = guest(CALM)
    found.moved(100.5)
    found.observe(101.2, after)
    reading = found.reading(1)
    assert reading is not None
    assert reading.missed


def test_faults_that_were_as_many_before_the_step_are_none_of_its_doing() -> None:
    found = guest(CALM, replace(CALM, said_at=101.0, major_faults=107), read_at=101.2)
    found.moved(101.3)
    found.observe(102.2, replace(CALM, said_at=102.0, major_faults=217))
    reading = found.reading(1)
    assert reading is not None
    assert reading.missed == ""


@pytest.mark.parametrize(
    "after",
    [
        replace(CALM, said_at=101.0, major_faults=0),
        replace(CALM, said_at=101.0, major_faults=None),
        replace(CALM, said_at=101.0 + LONGEST_WINDOW_S, major_faults=10_000),
    ],
)
def test_counters_that_went_back_are_missing_or_are_old_accuse_nobody(after: Statement) -> None:
    found = guest(CALM, after, read_at=after.said_at)
    reading = found.reading(1)
    assert reading is not None
    assert reading.missed == ""


@given(
    usable_mib=st.floats(0, 1e6),
    total_mib=st.none() | st.floats(0, 1e6),
    balloon_mib=st.floats(0, 1e6),
    need_mib=st.floats(0, 1e6),
)
def test_no_step_takes_more_than_a_quarter_of_what_is_usable_beyond_the_reserve(
    usable_mib: float, total_mib: float | None, balloon_mib: float, need_mib: float
) -> None:
    said = replace(CALM, usable_mib=usable_mib, total_mib=total_mib)
    reading = guest(said).reading(1)
    assert reading is not None
    keep = balloon_to_keep(Bound(1, None, balloon_mib, 0), reading, need_mib)
    if keep is not None:
        assert balloon_mib - keep <= max(usable_mib - said.reserve_mib, 0.0) / 4 + 1e-6


# --- the cascade -----------------------------------------------------------------------------------------------------


class Host:
    """Plays the executor of a guest without an agent, step by step."""

    def __init__(self, target_mib: float) -> None:
        self.bound = FULL
        self.cascade = Cascade(FULL, ResourceVector(1, target_mib), 60.0, ALONE)
        self.pending = self.cascade.start(0.0)
        self.now = 0.0

    def say(self, spare_mib: float | None, missed: str = "") -> None:
        """Do what is instructed; the guest says this then, or nothing."""
        (instruction,) = self.pending
        if isinstance(instruction, Throttle) and instruction.balloon_mib is not None:
            self.bound = replace(self.bound, balloon_mib=instruction.balloon_mib)
        else:
            assert isinstance(instruction, ReadGuest)
        said = None if spare_mib is None else GuestReading((0,), (), spare_mib, GuestKind.BALLOON, missed)
        self.now += 1.0
        self.pending = self.cascade.handle(Measured(self.now, instruction.step, self.bound, said))

    def asked(self) -> float | None:
        (instruction,) = self.pending
        return instruction.balloon_mib if isinstance(instruction, Throttle) else None

    def outcome(self) -> Outcome:
        (instruction,) = self.pending
        assert isinstance(instruction, Finish)
        return instruction.outcome


def test_memory_goes_in_quarters_of_what_is_spare_and_the_ledger_names_the_kind() -> None:
    host = Host(600.0)
    host.say(400.0)
    assert host.asked() == 700.0
    host.say(300.0)
    assert host.asked() == 625.0
    host.say(225.0)
    assert host.asked() == 600.0
    host.say(200.0)
    row = entry(host.outcome(), Layer.HYPERVISOR, "memory_mib")
    assert (row.verified, host.outcome().shortfall.memory_mib) == (200.0, 0.0)
    assert "kind is balloon" in row.reason


def test_statistics_that_stop_in_the_middle_end_it_where_it_is() -> None:
    host = Host(600.0)
    host.say(400.0)
    host.say(None)
    assert host.outcome().after.balloon_mib == 700.0
    assert "no fresh reading of the guest, so no memory is taken" in host.outcome().sentence


def test_a_step_after_which_the_guest_misses_its_pages_is_given_back_and_is_the_last() -> None:
    host = Host(400.0)
    host.say(400.0)
    host.say(300.0)
    assert host.asked() == 625.0
    host.say(225.0, missed="the guest misses what was taken")
    assert host.asked() == 700.0, "the last step only"
    host.say(300.0, missed="the guest misses what was taken")
    assert host.outcome().after.balloon_mib == 700.0
    assert "the last 75 MiB go back" in host.outcome().sentence


def test_what_is_given_back_is_charged_in_full_until_it_is_read() -> None:
    host = Host(400.0)
    host.say(400.0)
    host.say(300.0, missed="the guest misses what was taken")
    (back,) = host.pending
    (finish,) = host.cascade.handle(Stopped(9.0, back.step, reason="under pressure"))
    assert isinstance(finish, Finish)
    assert finish.outcome.after.balloon_mib == 800.0


def test_from_a_guest_that_misses_its_pages_before_anything_was_taken_nothing_is_taken() -> None:
    host = Host(400.0)
    host.say(400.0, missed="the guest is short of memory")
    assert host.outcome().after == FULL
    assert "the guest is short of memory" in host.outcome().sentence


def test_whatever_a_balloon_driver_makes_up_the_floor_stays() -> None:
    """Figures that no guest has: they take from itself, and no more than down to the floor."""
    host = Host(0.0)
    host.say(2.0**54)
    assert host.asked() == BALLOON_FLOOR_MIB


def test_a_guest_whose_balloon_driver_claims_need_without_end_is_heard_for_its_budget_only() -> None:
    watch, heard = PressureWatch(), []
    row = Allocation("web", Priority.DEFLATABLE, FULL.size, ResourceVector(1, 300), ResourceVector(1, 500))
    for now in range(0, 7200, 2):
        # By little that is usable, and by pages that it misses: both may be made up.
        watch.observe(now, PressureReading("", 1.0, RESERVE_MIB, major_faults=now * 1000, ordinary=True))
        heard.append(watch.verdict(now, row).under_pressure)
    assert heard[0]
    assert sum(heard) * 2 <= BUDGET_S + (7200 - BUDGET_S) * REFILL
