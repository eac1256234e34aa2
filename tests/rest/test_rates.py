"""Token buckets without a clock."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ebbtide.deflation.errors import InvalidField
from ebbtide.rest.rates import Buckets, Rate


def test_a_burst_passes_and_then_one_for_each_part_of_a_second() -> None:
    buckets, rate = Buckets(), Rate(per_s=10.0, burst=3.0)
    assert [buckets.take("a", rate, 5.0) for _ in range(3)] == [0.0] * 3
    assert buckets.take("a", rate, 5.0) == pytest.approx(0.1)
    assert buckets.take("a", rate, 5.06) == pytest.approx(0.04)
    assert buckets.take("a", rate, 5.1) == 0.0
    assert buckets.take("a", rate, 5.1) > 0.0
    assert [buckets.take("a", rate, 9.0) for _ in range(4)][:3] == [0.0] * 3


def test_callers_do_not_use_up_what_others_may_send() -> None:
    buckets, rate = Buckets(), Rate(1.0, 1.0)
    assert buckets.take("a", rate, 0.0) == 0.0
    assert buckets.take("a", rate, 0.0) > 0.0
    assert buckets.take("b", rate, 0.0) == 0.0


def test_only_so_many_callers_are_remembered_and_the_quietest_goes_first() -> None:
    buckets, rate = Buckets(most=3), Rate(0.001, 1.0)
    for caller in "abcd":
        assert buckets.take(caller, rate, 0.0) == 0.0
    assert len(buckets) == 3
    assert buckets.take("d", rate, 0.0) > 0.0
    assert buckets.take("a", rate, 0.0) == 0.0


@given(
    rate=st.builds(Rate, st.floats(0.1, 1000), st.floats(1, 500)),
    pauses=st.lists(st.floats(0, 2), max_size=200),
)
def test_never_more_than_the_burst_and_the_rate_pass(rate: Rate, pauses: list[float]) -> None:
    buckets, now, passed = Buckets(), 0.0, 0
    for pause in pauses:
        now += pause
        wait_s = buckets.take("a", rate, now)
        assert wait_s >= 0.0
        if not wait_s:
            passed += 1
        assert passed <= rate.burst + rate.per_s * now + 1e-6


@given(rate=st.builds(Rate, st.floats(0.1, 1000), st.floats(1, 20)))
def test_who_waits_as_long_as_was_said_passes(rate: Rate) -> None:
    buckets, now = Buckets(), 100.0
    for _ in range(50):
        now += (wait_s := buckets.take("a", rate, now))
        if wait_s:
            assert buckets.take("a", rate, now) == 0.0


@pytest.mark.parametrize(
    ("per_s", "burst", "field"),
    [(0.0, 1.0, "per_s"), (-1.0, 1.0, "per_s"), (math.nan, 1.0, "per_s"), (math.inf, 1.0, "per_s"),
     (1.0, 0.5, "burst"), (1.0, math.nan, "burst"), (1.0, math.inf, "burst")],
)  # fmt: skip
def test_a_rate_that_is_none_is_refused(per_s: float, burst: float, field: str) -> None:
    with pytest.raises(InvalidField) as refused:
        Rate(per_s, burst)
    assert refused.value.field == field
