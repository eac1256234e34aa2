"""The pace at which cold pages become free: whatever the guest does, nothing protected or in need is taken."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from guestagent.cold.pace import (
    LARGEST_STEP,
    MIB,
    PATIENCE,
    REST_S,
    THRESHOLD,
    ColdReclaim,
    End,
    Reclaim,
    Reclaimed,
    Rest,
    Rested,
    Stop,
)

SIZES = st.integers(0, 4096).map(lambda mib: mib * MIB)


@st.composite
def guests(draw: st.DrawFn) -> tuple[ColdReclaim, dict[str, int], int, float]:
    groups = draw(st.dictionaries(st.sampled_from(["system.slice", "user.slice"]), SIZES))
    wanted, until = draw(SIZES), draw(st.floats(0, 30))
    return ColdReclaim(wanted, groups, until), groups, wanted, until


@given(guests(), st.data())
def test_it_ends_and_takes_no_more_than_is_wanted_cold_and_unprotected_and_nothing_under_pressure(
    made: tuple[ColdReclaim, dict[str, int], int, float], data: st.DataObject
) -> None:
    machine, groups, wanted, until = made
    now, pressure = 0.0, 0.0
    asked = dict.fromkeys(groups, 0)
    instruction = machine.start(now)
    for _ in range(2000):
        if isinstance(instruction, End):
            break
        if isinstance(instruction, Reclaim):
            assert now < until
            assert pressure < THRESHOLD, "who waits for memory is left alone"
            assert 0 < instruction.size <= min(LARGEST_STEP, wanted - machine.freed)
            asked[instruction.group] += instruction.size
            assert asked[instruction.group] <= groups[instruction.group], "what is protected stays"
            seconds = data.draw(st.floats(0, 1))
            now += seconds
            freed = data.draw(st.integers(0, instruction.size))
            instruction = machine.handle(Reclaimed(now, freed, seconds))
            assert isinstance(instruction, Rest | End), "it rests after each step"
        else:
            assert instruction.seconds >= REST_S
            now += instruction.seconds
            pressure = data.draw(st.sampled_from([0.0, THRESHOLD / 2, THRESHOLD, 1.0]))
            refaulted = data.draw(st.sampled_from([0, 0, 0, machine.freed]))
            instruction = machine.handle(Rested(now, pressure, refaulted))
    assert isinstance(instruction, End)
    assert 0 <= instruction.freed <= wanted
    assert now <= until + 2.0 + REST_S, "one step and its rest may be under way at the end"


def machine(wanted_mib: int = 512, **groups_mib: int) -> ColdReclaim:
    groups = {f"{name}.slice": mib * MIB for name, mib in groups_mib.items()}
    return ColdReclaim(wanted_mib * MIB, groups, until=100.0)


def test_a_step_is_the_smaller_the_more_tasks_wait() -> None:
    calm, busy = machine(system=200), machine(system=200)
    for one in (calm, busy):
        assert one.start(0.0) == Reclaim("system.slice", 20 * MIB)
        assert one.handle(Reclaimed(0.05, 20 * MIB, 0.05)) == Rest(REST_S)
    assert calm.handle(Rested(0.2, 0.0, 0)) == Reclaim("system.slice", 20 * MIB)
    assert busy.handle(Rested(0.2, THRESHOLD / 2, 0)) == Reclaim("system.slice", 10 * MIB)


def test_pressure_that_stays_ends_it_and_pressure_that_goes_does_not() -> None:
    one = machine(system=400)
    one.start(0.0)
    one.handle(Reclaimed(0.1, 32 * MIB, 0.1))
    for _ in range(PATIENCE):
        assert isinstance(one.handle(Rested(1.0, 0.5, 0)), Rest)
    assert isinstance(one.handle(Rested(1.0, 0.0, 0)), Reclaim)
    one.handle(Reclaimed(0.1, 32 * MIB, 0.1))
    said = [one.handle(Rested(1.0, 0.5, 0)) for _ in range(PATIENCE + 1)]
    assert said[-1] == End(64 * MIB, True, "tasks wait for memory 50% of the time")


def test_what_is_read_back_at_once_was_not_cold() -> None:
    one = machine(system=400)
    one.start(0.0)
    one.handle(Reclaimed(0.1, 32 * MIB, 0.1))
    end = one.handle(Rested(0.2, 0.0, 16 * MIB))
    assert end == End(32 * MIB, True, "16 MiB were read back: the rest is not cold")


def test_a_group_that_gives_nothing_is_left_for_the_other_and_then_it_ends() -> None:
    one = machine(system=100, user=90)
    assert one.start(0.0) == Reclaim("system.slice", 10 * MIB)
    one.handle(Reclaimed(0.1, MIB, 0.1))
    assert one.handle(Rested(0.2, 0.0, 0)) == Reclaim("user.slice", 9 * MIB)
    one.handle(Reclaimed(0.1, 0, 0.1))
    end = one.handle(Rested(0.2, 0.0, 0))
    assert end == End(MIB, True, "the rest of the guest's memory is in use or protected")


def test_called_off_it_does_nothing_more() -> None:
    one = machine(system=100)
    one.start(0.0)
    assert one.handle(Stop("called off")) == End(0, True, "called off")
    assert isinstance(one.handle(Rested(0.2, 0.0, 0)), End)
