"""An application may refuse, but not for ever."""

from __future__ import annotations

import pytest

from ebbtide.deflation.cascade.asking import FORGOTTEN_S, LONGEST_RETRY_S, Refusal, mode_of_asking
from ebbtide.deflation.cascade.instructions import Mode

ASK, FORCE = Mode.ASK, Mode.FORCE


@pytest.mark.parametrize("mode", Mode)
def test_an_application_that_never_refused_is_asked_as_the_operation_wishes(mode: Mode) -> None:
    assert mode_of_asking(5, mode, None) is mode


@pytest.mark.parametrize("mode", Mode)
def test_one_that_refused_without_a_time_is_asked_again_by_the_next_operation(mode: Mode) -> None:
    assert mode_of_asking(100, mode, Refusal(100)) is mode


@pytest.mark.parametrize(
    ("wished", "granted"), [(0, 0), (7, 7), (LONGEST_RETRY_S, LONGEST_RETRY_S), (1e5, LONGEST_RETRY_S)]
)
def test_a_refusal_is_respected_for_its_time_within_a_limit_and_then_it_is_told(wished: float, granted: float) -> None:
    refusal = Refusal(100, wished)
    if granted:
        assert mode_of_asking(100 + granted - 0.1, ASK, refusal) is None
    assert mode_of_asking(100 + granted, ASK, refusal) is FORCE
    assert mode_of_asking(100 + granted + FORGOTTEN_S, ASK, refusal) is ASK


def test_an_operation_that_forces_does_not_wait_for_one_that_was_only_asked() -> None:
    assert mode_of_asking(101, FORCE, Refusal(100, 60, ASK)) is FORCE
    assert mode_of_asking(101, FORCE, Refusal(100, 60, FORCE)) is None
    assert mode_of_asking(160, FORCE, Refusal(100, 60, FORCE)) is FORCE
