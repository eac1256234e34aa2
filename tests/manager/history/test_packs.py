"""Folding of the history: means, maxima and what is not known come through, however often steps are made coarser."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cluster_manager.history.packs import AT, MAXIMA, SEEN, WIDTH, Pack, decoded, encoded, folded, joined
from cluster_manager.history.steps import grid_of

MEANS = [number for number in range(SEEN) if number not in MAXIMA]
STEPS = 60


@st.composite
def hours(draw: st.DrawFn) -> Pack:
    """An hour of a host and two VMs in minutes; some steps are missing, some were seen for a part only."""
    seed = draw(st.integers(0, 2**32 - 1))
    generator = np.random.default_rng(seed)
    values = (generator.random((STEPS, 3, WIDTH)) * draw(st.sampled_from([1.0, 4096.0, 1e6]))).astype(np.float32)
    values[..., SEEN] = generator.choice([15.0, 30.0, 45.0, 60.0], (STEPS, 3))
    missing = generator.random((STEPS, 3)) < draw(st.sampled_from([0.0, 0.3, 0.9, 1.0]))
    values[missing] = np.nan
    values[missing, SEEN] = 0.0
    return Pack(3600 * draw(st.integers(0, 500_000)), 60, ("", "a", "b"), values)


@given(hours())
def test_sums_over_time_are_the_same_before_and_after(hour: Pack) -> None:
    seen = hour.values[..., SEEN].astype(np.float64)
    coarse = folded([hour], hour.names, hour.start, 600, 6)
    assert np.array_equal(coarse.values[..., SEEN].sum(axis=0), seen.sum(axis=0))
    for number in MEANS:
        before = np.nansum(hour.values[..., number].astype(np.float64) * seen, axis=0)
        after = np.nansum(coarse.values[..., number].astype(np.float64) * coarse.values[..., SEEN], axis=0)
        assert after == pytest.approx(before, rel=1e-6)


@given(hours())
def test_no_mean_and_no_maximum_goes_beyond_what_went_into_it(hour: Pack) -> None:
    coarse = folded([hour], hour.names, hour.start, 600, 6)
    for step in range(6):
        fine = hour.values[10 * step : 10 * step + 10]
        for entity in range(3):
            known = fine[fine[:, entity, SEEN] > 0, entity]
            found = coarse.values[step, entity]
            if not len(known):
                assert np.isnan(found[:SEEN]).all()
                continue
            assert (found[MEANS] <= known[:, MEANS].max(axis=0)).all()
            assert (found[MEANS] >= known[:, MEANS].min(axis=0)).all()
            assert np.array_equal(found[list(MAXIMA)], known[:, list(MAXIMA)].max(axis=0))


@given(hours())
def test_folding_in_between_comes_to_the_same(hour: Pack) -> None:
    at_once = folded([hour], hour.names, hour.start, 3600, 1)
    twice = folded([folded([hour], hour.names, hour.start, 600, 6)], hour.names, hour.start, 3600, 1)
    assert twice.values == pytest.approx(at_once.values, rel=1e-5, nan_ok=True)


@given(hours(), st.integers(0, STEPS), st.integers(0, STEPS))
def test_packs_in_pieces_or_twice_come_to_the_same(hour: Pack, one: int, other: int) -> None:
    cuts = sorted({0, one, other, STEPS})
    pieces = [hour.within(hour.start + 60 * first, hour.start + 60 * last) for first, last in itertools.pairwise(cuts)]
    whole, again = joined(pieces), folded([*pieces, hour], hour.names, hour.start, 600, 6)
    assert len(whole) == 1
    assert np.array_equal(whole[0].values, hour.values, equal_nan=True)
    once = folded([hour], hour.names, hour.start, 600, 6)
    assert again.values[..., :SEEN] == pytest.approx(once.values[..., :SEEN], rel=1e-6, nan_ok=True)


@given(hours())
def test_a_pack_is_read_as_it_was_written(hour: Pack) -> None:
    found = decoded(hour.start, 60, encoded(hour))
    assert (found.start, found.step_s, found.names) == (hour.start, 60, hour.names)
    assert np.array_equal(found.values, hour.values, equal_nan=True)


@given(st.binary(max_size=200))
def test_what_is_no_pack_is_said_to_be_none(body: bytes) -> None:
    with pytest.raises(ValueError, match="damaged"):
        decoded(0, 60, body)


def test_packs_with_a_hole_between_them_or_of_other_names_are_not_joined() -> None:
    row = np.zeros((1, 1, WIDTH), dtype=np.float32)
    packs = [Pack(0, 60, ("",), row), Pack(60, 60, ("",), row), Pack(180, 60, ("",), row), Pack(240, 60, ("x",), row)]
    assert [(pack.start, len(pack.values)) for pack in joined(packs)] == [(0, 2), (180, 1), (240, 1)]


def test_a_vm_on_two_hosts_in_one_step_is_the_mean_by_time() -> None:
    there, here = (np.full((1, 1, WIDTH), value, dtype=np.float32) for value in (2.0, 4.0))
    there[..., SEEN], here[..., SEEN] = 45.0, 15.0
    found = folded([Pack(0, 60, ("web",), there), Pack(0, 60, ("web",), here)], ("web",), 0, 60, 1)
    assert found.values[0, 0, AT["bound_cpu_cores"]] == pytest.approx(2.5)
    assert found.values[0, 0, AT["cpu_pressure_max_percent"]] == 4.0


@given(
    st.floats(0, 2e9),
    st.floats(1, 4e8),
    st.integers(2, 2000),
    st.sampled_from([60, 600, 3600]),
)
def test_a_grid_covers_what_was_asked_for_in_no_more_steps_than_that(
    begin: float, length: float, points: int, least_s: int
) -> None:
    grid = grid_of(begin, begin + length, points, least_s)
    assert grid.steps <= points
    assert grid.step_s >= least_s
    assert grid.step_s % 60 == grid.start % grid.step_s == 0
    assert grid.start <= begin
    assert grid.end >= begin + length
    assert len(grid.times()) == grid.steps
