"""Whether a placement waits for guests that cannot be deflated yet, and for how long."""

from __future__ import annotations

from ebbtide.deflation.placement.waiting import helps, waits_s
from ebbtide.deflation.resources import ZERO, ResourceVector

MISSING = ResourceVector(1.0, 600.0)


def memory(mib: float, cores: float = 1.0) -> ResourceVector:
    return ResourceVector(cores, mib)


def test_what_can_be_taken_now_is_not_waited_for() -> None:
    assert not helps(MISSING, memory(600.0), memory(500.0, 0.0), enough=True)


def test_what_is_needed_is_waited_for() -> None:
    assert helps(MISSING, memory(200.0), memory(400.0, 0.0), enough=True)


def test_what_would_not_be_enough_is_waited_for_only_before_a_preemption() -> None:
    assert not helps(MISSING, memory(100.0), memory(400.0, 0.0), enough=True)
    assert helps(MISSING, memory(100.0), memory(400.0, 0.0), enough=False), "fewer have to go"


def test_what_is_not_missing_is_not_waited_for() -> None:
    assert not helps(ResourceVector(2.0, 0.0), memory(0.0), memory(400.0, 0.0), enough=False)
    assert not helps(MISSING, ZERO, ZERO, enough=False)


def test_all_that_is_left_is_waited_for_since_the_time_is_only_a_guess() -> None:
    assert waits_s(left_s=30.0, in_s=5.0, has_other_hosts=True) == 30.0
    assert waits_s(left_s=30.0, in_s=90.0, has_other_hosts=False) == 30.0


def test_where_it_probably_takes_too_long_other_hosts_come_first() -> None:
    assert waits_s(left_s=30.0, in_s=90.0, has_other_hosts=True) == 0.0


def test_past_the_deadline_nobody_waits() -> None:
    assert waits_s(left_s=0.0, in_s=0.0, has_other_hosts=False) == 0.0
