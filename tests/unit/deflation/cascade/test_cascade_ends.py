"""How a cascade ends: nothing to do, stopped from outside, answers that come late or do not fit."""

from __future__ import annotations

import math
from typing import Any

import pytest

from ebbtide.deflation.bounds import Bound
from ebbtide.deflation.cascade.cascade import Cascade, Phase
from ebbtide.deflation.cascade.instructions import AskApplication, Finish, Mode, Stopped, Unplug
from ebbtide.deflation.errors import InvalidField, ProtocolViolation
from ebbtide.deflation.ledger import Layer
from ebbtide.deflation.resources import ZERO, ResourceVector
from tests.unit.deflation.blocked import without
from tests.unit.deflation.script import (
    ApplicationAnswered,
    Measured,
    answered,
    entry,
    measured,
    play,
)

FULL = Bound(4, None, 512, 512)
ALL_CPUS: dict[str, Any] = {"online": (0, 1, 2, 3), "unpluggable": (3, 2, 1)}
NO_APPLICATION = without(Layer.APPLICATION)


def test_components_above_the_bound_are_left_alone() -> None:
    outcome = play(Cascade(Bound(2, 0.5, 400, 100), ResourceVector(4, 1024), 60.0), [])
    assert outcome.ledger == ()
    assert outcome.reached
    assert "nothing to take" in outcome.sentence


def test_what_is_below_a_step_of_a_size_bothers_nobody() -> None:
    """A balloon moves in pages and a quota in microseconds: 0.4 MiB too much is the size that was asked for."""
    outcome = play(Cascade(Bound(3, 0.8334, 412.4, 312), ResourceVector(2.5, 724), 60.0), [])
    assert outcome.reached
    assert "nothing to take" in outcome.sentence


def test_pressure_stops_the_cascade_at_what_was_reached() -> None:
    cascade = Cascade(FULL, ResourceVector(2, 724), 60.0, NO_APPLICATION)
    (read,) = cascade.start(0)
    unplug, offline = cascade.handle(Measured(1, read.step, **measured(FULL, **ALL_CPUS, spare_mib=200)))
    after = Bound(2, None, 512, 412)
    assert cascade.handle(Measured(1, offline.step, **measured(Bound(2, None, 512, 470), (0, 1), (1,)))) == []
    (step,) = cascade.handle(Measured(2, unplug.step, **measured(after, (0, 1), (1,), spare_mib=100)))
    assert isinstance(step, Unplug)
    (finish,) = cascade.handle(Stopped(3, step.step, reason="the guest is under memory pressure"))
    assert isinstance(finish, Finish)
    assert finish.outcome.after == after
    assert finish.outcome.shortfall == ResourceVector(memory_mib=200)
    assert finish.outcome.sentence.endswith("stopped: the guest is under memory pressure")
    assert entry(finish.outcome, Layer.GUEST, "memory_mib").reason == "the guest is under memory pressure"
    assert cascade.phase is Phase.DONE
    assert cascade.handle(Measured(4, step.step, **measured(Bound(2, None, 512, 300)))) == []
    assert cascade.handle(Stopped(5, 0, reason="again")) == []
    assert cascade.outcome is finish.outcome


def test_a_cascade_that_is_stopped_before_it_began_took_no_time() -> None:
    (finish,) = Cascade(FULL, ResourceVector(2, 724), 60.0).handle(Stopped(5000.0, 0, reason="called off"))
    assert isinstance(finish, Finish)
    assert finish.outcome.seconds == 0
    assert all(row.verified == 0 for row in finish.outcome.ledger)


def test_late_answers_are_dropped() -> None:
    cascade = Cascade(FULL, ResourceVector(4, 724), 60.0)
    (ask,) = cascade.start(0)
    (read,) = cascade.handle(ApplicationAnswered(30, ask.step, reason="no answer in time"))
    assert cascade.handle(ApplicationAnswered(31, ask.step, **answered(300))) == []
    assert cascade.handle(Measured(31, read.step + 1, **measured(FULL, spare_mib=9))) == []
    assert cascade.phase is Phase.READING
    assert cascade.guest is None


def test_an_answer_of_the_wrong_kind_is_a_violation_in_one_sentence() -> None:
    cascade = Cascade(FULL, ResourceVector(4, 724), 60.0)
    (ask,) = cascade.start(0)
    with pytest.raises(ProtocolViolation, match=r"^Measured does not answer what phase asked asked$"):
        cascade.handle(Measured(1, ask.step, **measured(FULL)))
    assert cascade.phase is Phase.ASKED


def test_a_cascade_starts_once() -> None:
    cascade = Cascade(FULL, ResourceVector(4, 724), 60.0)
    cascade.start(0)
    with pytest.raises(ProtocolViolation, match=r"^the phase is asked: a cascade starts once$"):
        cascade.start(1)


@pytest.mark.parametrize("deadline_s", [-0.1, math.nan, math.inf])
def test_a_deadline_that_is_none_is_refused_by_name(deadline_s: float) -> None:
    with pytest.raises(InvalidField) as caught:
        Cascade(FULL, ZERO, deadline_s)
    assert caught.value.field == "deadline_s"


def test_force_reaches_the_application() -> None:
    (ask,) = Cascade(FULL, ResourceVector(4, 724), 60.0, mode=Mode.FORCE).start(0)
    assert isinstance(ask, AskApplication)
    assert ask.mode is Mode.FORCE
