"""The pace of reclaiming: grows while calm, is halved under strain, gives up in the end."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ebbtide.deflation.cascade.reclaim_pace import (
    FIRST_MIB,
    GROWTH_MIB,
    LEAST_MIB,
    MOST_FUTILE_ROUNDS,
    MOST_MIB,
    PROGRESS_MIB,
    Pace,
    PaceReading,
    Stop,
    next_pace,
)
from tests.unit.deflation.strategies import runs

CALM = PaceReading(pressure_percent=0, refaults_s=0, reclaimed_mib=16, seconds=0.1)

readings = st.builds(
    PaceReading,
    pressure_percent=st.one_of(st.just(0.0), st.floats(0, 100)),
    refaults_s=st.one_of(st.just(0.0), st.floats(0, 1e6)),
    reclaimed_mib=st.one_of(st.just(0.0), st.floats(-100, 300)),
    seconds=st.floats(0, 20),
)


def test_calm_rounds_grow_by_the_same_amount_each() -> None:
    pace = Pace()
    for number in range(1, 5):
        following = next_pace(pace, CALM)
        assert isinstance(following, Pace)
        pace = following
        assert pace.step_mib == FIRST_MIB + number * GROWTH_MIB


@pytest.mark.parametrize(
    "strain",
    [
        pytest.param(PaceReading(30, 0, 16, 0.1), id="pressure"),
        pytest.param(PaceReading(0, 5000, 16, 0.1), id="refaults"),
        pytest.param(PaceReading(0, 0, 16, 4.0), id="slow step"),
    ],
)
def test_a_strained_round_halves_the_step(strain: PaceReading) -> None:
    assert next_pace(Pace(step_mib=128), strain) == Pace(step_mib=64)


def test_memory_in_use_is_given_up_on_with_its_reason() -> None:
    pace: Pace | Stop = Pace()
    for _ in range(20):
        assert isinstance(pace, Pace)
        pace = next_pace(pace, PaceReading(50, 0, 8, 0.1))
        if isinstance(pace, Stop):
            break
    assert pace == Stop("the memory is in use: memory pressure of 50 % at the smallest step")


def test_steps_that_bring_nothing_are_given_up_on() -> None:
    pace: Pace | Stop = Pace()
    for _ in range(MOST_FUTILE_ROUNDS):
        assert isinstance(pace, Pace)
        pace = next_pace(pace, PaceReading(0, 0, 0, 0.1))
    assert pace == Stop(f"{MOST_FUTILE_ROUNDS} steps in a row brought nothing")


@runs(500)
@given(st.lists(readings, max_size=60))
def test_whatever_is_measured_the_step_stays_in_its_limits_and_grows_only_in_calm(rounds: list[PaceReading]) -> None:
    pace, futile = Pace(), 0
    for reading in rounds:
        following = next_pace(pace, reading)
        futile = 0 if reading.reclaimed_mib >= PROGRESS_MIB else futile + 1
        if isinstance(following, Stop):
            assert following.reason
            return
        assert futile < MOST_FUTILE_ROUNDS, "no end although nothing comes"
        assert LEAST_MIB <= following.step_mib <= MOST_MIB
        if reading.strained:
            assert following.step_mib == max(pace.step_mib / 2, LEAST_MIB)
        else:
            assert following.step_mib <= pace.step_mib + GROWTH_MIB
        pace = following


@runs(300)
@given(readings, st.floats(0, 1), st.integers(0, 400))
def test_more_strain_never_means_a_larger_step(reading: PaceReading, more: float, refaults: int) -> None:
    worse = PaceReading(
        reading.pressure_percent * (1 + more) + more,
        reading.refaults_s + refaults,
        reading.reclaimed_mib,
        reading.seconds,
    )
    first, second = next_pace(Pace(64), reading), next_pace(Pace(64), worse)
    if isinstance(first, Stop):
        assert isinstance(second, Stop)
    elif isinstance(second, Pace):
        assert second.step_mib <= first.step_mib


@runs(200)
@given(st.lists(st.builds(PaceReading, st.just(99.0), st.just(0.0), st.floats(1, 300), st.just(0.1)), min_size=20))
def test_strain_that_does_not_end_ends_the_reclaiming(rounds: list[PaceReading]) -> None:
    pace: Pace | Stop = Pace(MOST_MIB)
    for reading in rounds:
        assert isinstance(pace, Pace)
        pace = next_pace(pace, reading)
        if isinstance(pace, Stop):
            return
    raise AssertionError("went on for ever")
