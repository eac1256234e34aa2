"""Steps of plugged memory that go on from the guest's word, while the host has not heard: only what it hears counts."""

from __future__ import annotations

from typing import Any

import pytest

from ebbtide.deflation.bounds import Bound
from ebbtide.deflation.cascade.cascade import Cascade
from ebbtide.deflation.cascade.instructions import GuestReading, ReadGuest, Stopped, Throttle, Unplug
from ebbtide.deflation.cascade.mechanisms import Mechanism
from ebbtide.deflation.ledger import Layer
from ebbtide.deflation.resources import ResourceVector
from tests.unit.deflation.blocked import without
from tests.unit.deflation.model_vm import Behaviour, ModelVM, run
from tests.unit.deflation.script import Measured, Row, entry, play

FULL = Bound(1, None, 512, 512)
MEANS = without(Layer.APPLICATION, Mechanism.MEMORY_LIMIT, Mechanism.QUOTA)


def said(bound: Bound | None, spare_mib: float, total_mib: float) -> dict[str, Any]:
    return {"bound": bound, "guest": GuestReading((0,), (), spare_mib, total_mib=total_mib), "reason": ""}


def take(target_mib: float, deadline_s: float = 60.0) -> Cascade:
    return Cascade(FULL, ResourceVector(1, target_mib), deadline_s, MEANS)


FIRST = [
    Row(ReadGuest, {}, Measured, said(FULL, 300, 1000)),
    Row(Unplug, {"plugged_mib": 362, "until_total_mib": 850}, Measured, said(FULL, 150, 850)),
]


def test_the_next_step_goes_on_from_the_guests_word_and_the_host_hears_at_the_end() -> None:
    outcome = play(
        take(800),
        [
            *FIRST,
            Row(
                Unplug, {"plugged_mib": 288, "until_total_mib": 776}, Measured, said(Bound(1, None, 512, 362), 76, 776)
            ),
            Row(
                Unplug, {"plugged_mib": 288, "until_total_mib": None}, Measured, said(Bound(1, None, 512, 288), 76, 776)
            ),
        ],
    )
    assert outcome.reached
    assert entry(outcome, Layer.GUEST, "memory_mib").verified == 224


def test_what_a_guest_only_says_does_not_count() -> None:
    heard = Row(Unplug, {"plugged_mib": 362, "until_total_mib": None}, Measured, said(FULL, 0, 850))
    outcome = play(take(874), [*FIRST, heard])
    assert outcome.after == FULL
    assert not outcome.reached


def test_stopped_before_the_host_has_heard_the_vm_counts_with_what_it_knows() -> None:
    cascade = take(700)
    pending = cascade.start(0.0)
    for row in FIRST:
        (one,) = pending
        pending = cascade.handle(row.answer(1.0, one.step, **row.says))
    cascade.handle(Stopped(2.0, pending[0].step, "the guest is under pressure"))
    assert cascade.outcome is not None
    assert cascade.outcome.after == FULL


def test_a_size_that_cannot_be_read_at_the_end_is_read_again() -> None:
    unread = Row(Unplug, {"until_total_mib": None}, Measured, said(None, 150, 850))
    read = Row(ReadGuest, {}, Measured, said(Bound(1, None, 512, 362), 150, 850))
    outcome = play(take(874), [*FIRST, unread, read])
    assert outcome.reached


def test_the_balloon_goes_on_before_the_host_has_heard() -> None:
    outcome = play(
        Cascade(Bound(1, None, 512, 100), ResourceVector(1, 450), 60.0, MEANS),
        [
            Row(ReadGuest, {}, Measured, said(Bound(1, None, 512, 100), 900, 600)),
            Row(Unplug, {"plugged_mib": 0, "until_total_mib": 500}, Measured, said(Bound(1, None, 512, 100), 800, 500)),
            Row(Throttle, {"balloon_mib": 450}, Measured, said(Bound(1, None, 450, 100), 700, 450)),
            Row(Unplug, {"plugged_mib": 0}, Measured, said(Bound(1, None, 450, 0), 700, 450)),
        ],
    )
    assert outcome.reached
    assert outcome.after == Bound(1, None, 450, 0)


def test_what_the_guest_gave_while_the_size_could_not_be_read_is_not_taken_once_more() -> None:
    unread = Row(Unplug, {"plugged_mib": 0, "until_total_mib": 512}, Measured, said(None, 400, 512))
    read = Row(ReadGuest, {}, Measured, said(Bound(1, None, 512, 100), 400, 512))
    outcome = play(
        Cascade(Bound(1, None, 512, 100), ResourceVector(1, 450), 60.0, MEANS),
        [
            Row(ReadGuest, {}, Measured, said(Bound(1, None, 512, 100), 500, 612)),
            unread,
            read,
            Row(Throttle, {"balloon_mib": 450}, Measured, said(Bound(1, None, 450, 100), 338, 450)),
            Row(Unplug, {"plugged_mib": 0, "until_total_mib": None}, Measured, said(Bound(1, None, 450, 0), 338, 450)),
        ],
    )
    assert outcome.after == Bound(1, None, 450, 0)


def test_what_the_guest_is_behind_its_word_comes_on_top_of_the_next_step() -> None:
    behind = [
        Row(ReadGuest, {}, Measured, said(FULL, 40, 1024)),
        Row(Unplug, {"plugged_mib": 492, "until_total_mib": 1004}, Measured, said(FULL, 21, 1005)),
    ]
    # Half of 21 less what the first step still lacks, in blocks of 2 MiB; the next one is another MiB behind.
    next_ = [
        Row(Unplug, {"plugged_mib": 484, "until_total_mib": 997}, Measured, said(FULL, 14, 998)),
        Row(Unplug, {"plugged_mib": 480, "until_total_mib": 994}, Measured, said(FULL, 10, 994)),
    ]
    heard = Row(
        Unplug, {"plugged_mib": 480, "until_total_mib": None}, Measured, said(Bound(1, None, 512, 482), 10, 994)
    )
    means = without(Layer.APPLICATION, Mechanism.MEMORY_LIMIT, Mechanism.QUOTA, Mechanism.BALLOON)
    outcome = play(Cascade(FULL, ResourceVector(1, 900), 60.0, means), [*behind, *next_, heard])
    assert outcome.after.plugged_mib == 482


@pytest.mark.parametrize("deadline_s", [3.0, 60.0])
def test_with_little_time_left_the_host_is_waited_for(deadline_s: float) -> None:
    vm = ModelVM(behaviour=Behaviour.NONE, lags=True)
    _, exchanges = run(Cascade(vm.bound, ResourceVector(4, 800), deadline_s), vm)
    words = [e.instruction.until_total_mib for e in exchanges if isinstance(e.instruction, Unplug)]
    assert any(word is not None for word in words) == (deadline_s == 60.0)
