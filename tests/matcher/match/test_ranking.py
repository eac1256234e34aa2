"""Machines in the order in which to give them a task."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ebbtide.deflation.errors import InvalidField
from ebbtide.matcher.match.ranking import Machine, rank_machines
from ebbtide.matcher.predict.changes import Change
from tests.matcher.equation_one import history_of

#: Two machines that keep being taken from and given back, and one that was left alone for longer.
CHANGES = [
    *(Change("shaky", 100.0 * n, 1.0 + n % 2, 2.0 - n % 2) for n in range(1, 10)),
    Change("steady", 200.0, 0.0, 4.0),
    Change("steady", 700.0, 4.0, 5.0),
    Change("newcomer", 940.0, 0.0, 4.0),
]


def test_the_best_comes_first_and_the_unknown_last() -> None:
    machines = [Machine("unknown", 8), Machine("newcomer", 4), Machine("steady", 5), Machine("shaky", 1)]
    ranked = rank_machines(machines, history_of(CHANGES, 1000.0), 1000.0, 60.0)
    assert [machine.name for machine in ranked] == ["steady", "shaky", "newcomer", "unknown"]
    known = [m.completion_probability for m in ranked if m.completion_probability is not None]
    assert known == sorted(known, reverse=True)
    assert ranked[-1].completion_probability is None
    assert ranked[-1].since_change_s is None
    assert (ranked[0].since_change_s, ranked[0].last_change) == (300.0, "growth")


def test_ties_go_to_more_cores_and_then_to_the_name() -> None:
    machines = [Machine("c", 2), Machine("b", 4), Machine("a", 2)]
    ranked = rank_machines(machines, history_of([], 0.0), 0.0, 60.0)
    assert [machine.name for machine in ranked] == ["b", "a", "c"]


def test_a_machine_whose_cores_cannot_be_taken_has_no_probability() -> None:
    (ranked,) = rank_machines([Machine("steady", 5, variable=False)], history_of(CHANGES, 1000.0), 1000.0, 60.0)
    assert ranked.completion_probability is None
    assert ranked.since_change_s == 300.0


def test_a_machine_that_is_gone_and_listed_again_starts_without_history() -> None:
    changes = [*CHANGES, Change("steady", 950.0, 5.0, 0.0)]
    (ranked,) = rank_machines([Machine("steady", 5)], history_of(changes, 1000.0), 1000.0, 60.0)
    assert (ranked.completion_probability, ranked.last_change) == (None, None)


@pytest.mark.parametrize("duration_s", [-1.0, math.nan, math.inf])
def test_a_bad_duration_is_refused_even_without_history(duration_s: float) -> None:
    with pytest.raises(InvalidField, match="duration_s"):
        rank_machines([Machine("a", 1)], history_of([], 0.0), 0.0, duration_s)


@given(now=st.floats(1000, 1300), duration_s=st.floats(0, 500), order=st.permutations(["steady", "shaky", "newcomer"]))
def test_the_order_is_the_same_whichever_way_the_machines_come(now: float, duration_s: float, order: list[str]) -> None:
    history = history_of(CHANGES, now)
    machines = [Machine(name, len(name)) for name in order]
    ranked = rank_machines(machines, history, now, duration_s)
    assert ranked == rank_machines(sorted(machines, key=lambda m: m.name), history, now, duration_s)
    assert {machine.name for machine in ranked} == set(order)
