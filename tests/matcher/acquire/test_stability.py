"""Replacement by stability: who goes, how many, and what comes in their place."""

from __future__ import annotations

import math

import pytest

from ebbtide.deflation.errors import InvalidField
from ebbtide.matcher.acquire.acquirer import Acquirer, Decommission, Machine, Offered, PeriodOver, Standing, advance
from ebbtide.matcher.acquire.net_changes import AcquirerOptions, View, net_change
from ebbtide.matcher.acquire.stability import StabilityRecord, median_duration_s

HOUR_S = 3600.0
OPTIONS = AcquirerOptions(1, 99, replaced_share=0.25, least_utilisation=0.01, most_utilisation=1.0)


def view(cores: float, stability: float | None, known_s: float = 9 * HOUR_S, unchanged_s: float = 60.0) -> View:
    return View(cores, unchanged_s, False, stability, known_s)


def replaced(pool: dict[str, View], options: AcquirerOptions = OPTIONS) -> tuple[str, ...]:
    return net_change(pool, 0, frozenset(), 0, 0.5 * sum(one.cores for one in pool.values()), options).replaced


def test_the_least_stable_goes_and_not_the_one_that_changed_last() -> None:
    pool = {
        "a": view(4, 0.9, unchanged_s=1.0),
        "b": view(4, 0.3, unchanged_s=9e9),
        "c": view(4, 0.9),
        "d": view(4, 0.9),
    }
    assert replaced(pool) == ("b",)
    without = {name: View(one.cores, one.unchanged_s) for name, one in pool.items()}
    assert replaced(without) == ("a",)


def test_a_newcomer_is_neither_replaced_nor_counted_as_just_changed() -> None:
    pool = {"new": view(4, 0.1, known_s=HOUR_S), "b": view(4, 0.6), "c": view(4, 0.9), "d": view(4, 0.9)}
    assert replaced(pool) == ("b",)
    # Where machines are too many the worst goes first: the newcomer stands in the middle.
    fewer = AcquirerOptions(1, 99, replaced_share=0.0, least_utilisation=0.9, most_utilisation=1.0)
    assert net_change(pool, 0, frozenset(), 0, 11.0, fewer).removed == ("b",)


def test_machines_that_are_alike_are_not_swapped() -> None:
    pool = {str(n): view(4, 0.5 + 0.004 * n) for n in range(8)}
    assert replaced(pool) == ()


def test_the_share_is_one_of_cores() -> None:
    small = {f"s{n}": view(2, 0.1 + 0.01 * n) for n in range(6)}
    large = {f"l{n}": view(18, 0.9) for n in range(2)}
    # A quarter of 48 cores.
    assert replaced({**small, **large}) == ("s0", "s1", "s2", "s3", "s4", "s5")
    assert replaced({"big": view(18, 0.1), **{f"m{n}": view(6, 0.9 - 0.7 * (n == 0)) for n in range(5)}}) == ("big",)


def holding() -> Acquirer:
    return Acquirer({name: Machine(name, 0.0) for name in "abcd"}, next_at=0.0)


def asked() -> Acquirer:
    pool = {"a": view(4, 0.2), "b": view(4, 0.9), "c": view(4, 0.9), "d": view(4, 0.9)}
    state, _ = advance(holding(), PeriodOver(9 * HOUR_S, pool, 8.0), OPTIONS)
    (request,) = state.requests.values()
    assert (request.replaces, request.least_cores) == ("a", 4.0)
    assert "20%" in request.why
    return state


@pytest.mark.parametrize(("cores", "goes"), [(3.0, "new"), (4.0, "a"), (9.0, "a"), (None, "a")])
def test_a_machine_is_never_swapped_for_a_smaller_one(cores: float | None, goes: str) -> None:
    state, told = advance(asked(), Offered(9 * HOUR_S, 1, "new", cores), OPTIONS)
    assert [one.machine for one in told if isinstance(one, Decommission)] == [goes]
    assert {name for name, one in state.machines.items() if one.standing is Standing.LEAVING} == {goes}
    assert not state.requests


def test_a_record_is_a_mean_over_the_last_hours() -> None:
    record = StabilityRecord(HOUR_S)
    assert record.of("a") is None
    for minute in range(0, 600, 10):
        record.observe(60.0 * minute, {"a": 0.2, "b": 0.9, "silent": None})
    assert record.of("a") == pytest.approx(0.2)
    assert record.of("silent") is None
    # Half an hour of calm does not make it a calm machine; five hours do.
    for minute in range(600, 630, 10):
        record.observe(60.0 * minute, {"a": 1.0})
    half = record.of("a")
    assert half is not None
    assert half == pytest.approx(1.0 - 0.8 * math.exp(-0.5), abs=0.1)
    assert record.of("b") is None
    for minute in range(630, 930, 10):
        record.observe(60.0 * minute, {"a": 1.0})
    assert record.of("a") == pytest.approx(1.0, abs=0.01)


def test_the_median_of_what_tasks_are_said_to_run() -> None:
    assert median_duration_s([600.0, None, 1200.0, math.nan, 60.0], 1800.0) == 600.0
    assert median_duration_s([600.0, 1200.0], 1800.0) == 900.0
    assert median_duration_s([None, 0.0], 1800.0) == 1800.0


@pytest.mark.parametrize(("field", "value"), [("evidence_s", -1.0), ("least_gain", math.nan)])
def test_an_option_that_makes_no_sense_names_its_field(field: str, value: float) -> None:
    with pytest.raises(InvalidField, match=field):
        AcquirerOptions(**{field: value})  # type: ignore[arg-type]
    with pytest.raises(InvalidField, match="evidence_s"):
        StabilityRecord(0.0)
