"""The limit that swap backs, in cascade and reinflation: last to take, first to give. Boot memory: 512 MiB."""

from __future__ import annotations

import math

from ebbtide.deflation.bounds import Bound, reclaimed
from ebbtide.deflation.cascade.cascade import Cascade
from ebbtide.deflation.cascade.instructions import ReadGuest, Throttle, Unplug
from ebbtide.deflation.cascade.mechanisms import Mechanism
from ebbtide.deflation.cascade.reinflation import Reinflation
from ebbtide.deflation.ledger import Layer
from ebbtide.deflation.resources import ResourceVector
from tests.unit.deflation.blocked import without
from tests.unit.deflation.script import Measured, Row, entry, measured, play

FULL = Bound(1, None, 512, 512)
QUIET = without(Layer.APPLICATION)
NO_UNPLUG = without(Layer.APPLICATION, Layer.GUEST)


def limited(limit_mib: float, balloon_mib: float = 512, plugged_mib: float = 512) -> Bound:
    return Bound(1, None, balloon_mib, plugged_mib, limit_mib=limit_mib)


def test_what_neither_guest_nor_balloon_gives_is_limited_from_outside_once() -> None:
    stopped = Bound(1, None, 512, 422)
    ballooned = Bound(1, None, 472, 422)
    outcome = play(
        Cascade(FULL, ResourceVector(1, 724), 60.0, QUIET),
        [
            Row(ReadGuest, {}, Measured, measured(FULL, spare_mib=200)),
            Row(Unplug, {"plugged_mib": 412}, Measured, measured(stopped, spare_mib=80)),
            Row(Throttle, {"balloon_mib": 472, "limit_mib": None}, Measured, measured(ballooned, spare_mib=0)),
            Row(
                Throttle, {"balloon_mib": None, "limit_mib": 724}, Measured, measured(limited(724, 472, 422)), takes_s=3
            ),
        ],
    )
    assert outcome.reached
    assert entry(outcome, Layer.GUEST, "memory_mib").verified == 90
    assert entry(outcome, Layer.HYPERVISOR, "memory_mib").verified == 210
    assert "no more memory to spare" in entry(outcome, Layer.HYPERVISOR, "memory_mib").reason


def test_a_refused_limit_falls_short_with_its_reason() -> None:
    why = "the host has no swap, so no memory limit can be backed: the guest may touch 1024 MiB, the limit is 724 MiB"
    outcome = play(
        Cascade(FULL, ResourceVector(1, 724), 60.0, NO_UNPLUG),
        [
            Row(ReadGuest, {}, Measured, measured(FULL)),
            Row(Throttle, {"limit_mib": 724}, Measured, measured(FULL, reason=why)),
        ],
    )
    assert outcome.shortfall == ResourceVector(memory_mib=300)
    assert why in entry(outcome, Layer.HYPERVISOR, "memory_mib").reason
    assert why in outcome.sentence


def test_a_limit_that_stops_half_way_counts_as_far_as_it_got() -> None:
    outcome = play(
        Cascade(FULL, ResourceVector(1, 724), 60.0, NO_UNPLUG),
        [
            Row(ReadGuest, {}, Measured, measured(FULL)),
            Row(Throttle, {"limit_mib": 724}, Measured, measured(limited(800), reason="the memory is in use")),
        ],
    )
    assert entry(outcome, Layer.HYPERVISOR, "memory_mib").verified == 224
    assert outcome.shortfall == ResourceVector(memory_mib=76)


def test_without_a_fresh_reading_of_the_guest_there_is_no_limit() -> None:
    outcome = play(
        Cascade(FULL, ResourceVector(1, 724), 60.0, NO_UNPLUG), [Row(ReadGuest, {}, Measured, measured(FULL, None))]
    )
    assert "no fresh reading of the guest" in entry(outcome, Layer.HYPERVISOR, "memory_mib").reason


def test_a_blocked_limit_is_not_used_and_its_reason_stands_in_the_ledger() -> None:
    blocked = without(
        Layer.APPLICATION, Layer.GUEST, Mechanism.MEMORY_LIMIT, why={Mechanism.MEMORY_LIMIT: "QEMU has locked memory"}
    )
    outcome = play(Cascade(FULL, ResourceVector(1, 724), 60.0, blocked), [Row(ReadGuest, {}, Measured, measured(FULL))])
    assert "QEMU has locked memory" in entry(outcome, Layer.HYPERVISOR, "memory_mib").reason


def test_no_limit_goes_below_the_hard_floor() -> None:
    play(
        Cascade(FULL, ResourceVector(1, 10), 60.0, NO_UNPLUG),
        [
            Row(ReadGuest, {}, Measured, measured(FULL)),
            Row(Throttle, {"limit_mib": 192}, Measured, measured(limited(192))),
        ],
    )


def test_below_an_earlier_limit_the_guest_is_asked_for_all_that_lies_beyond_the_target() -> None:
    """Limited to 700 of 1024: unplugging 100 would lower nothing; with 424 gone, no limit is needed for 600."""
    unplugged = limited(700, 512, 88)
    outcome = play(
        Cascade(limited(700), ResourceVector(1, 600), 60.0, QUIET),
        [
            Row(ReadGuest, {}, Measured, measured(limited(700), spare_mib=2000)),
            Row(Unplug, {"plugged_mib": 88}, Measured, measured(unplugged, spare_mib=0)),
        ],
    )
    assert outcome.reached
    assert entry(outcome, Layer.GUEST, "memory_mib").verified == 100


def test_what_was_unplugged_below_a_limit_is_not_counted_as_given_by_the_guest() -> None:
    given = reclaimed(limited(700), limited(600, 512, 412))
    assert given.guest.memory_mib == 0
    assert given.hypervisor.memory_mib == 100


def test_the_limit_is_raised_first_and_lifted_when_it_would_limit_nothing() -> None:
    before = limited(500, 412, 412)
    lifted = Bound(1, None, 512, 412)
    outcome = play(
        Reinflation(before, ResourceVector(1, 1024), 512, 1, 60.0, QUIET),
        [
            Row(Throttle, {"limit_mib": math.inf, "balloon_mib": 512}, Measured, measured(lifted)),
            Row(Unplug, {"plugged_mib": 512}, Measured, measured(FULL)),
            Row(Throttle, {"limit_mib": None}, Measured, measured(FULL)),
        ],
    )
    assert outcome.reached
    assert entry(outcome, Layer.HYPERVISOR, "memory_mib").verified == 424
    assert entry(outcome, Layer.GUEST, "memory_mib").verified == 100


def test_a_target_below_what_the_guest_holds_raises_the_limit_to_it_and_nothing_else() -> None:
    outcome = play(
        Reinflation(limited(500), ResourceVector(1, 600), 512, 1, 60.0, NO_UNPLUG),
        [Row(Throttle, {"limit_mib": 600, "balloon_mib": None}, Measured, measured(limited(600)))],
    )
    assert outcome.reached


def test_a_limit_is_raised_even_where_it_could_not_be_set() -> None:
    silent = without(Layer.APPLICATION, Layer.GUEST, Mechanism.BALLOON, Mechanism.MEMORY_LIMIT)
    play(
        Reinflation(limited(500), ResourceVector(1, 1024), 512, 1, 60.0, silent),
        [Row(Throttle, {"limit_mib": math.inf}, Measured, measured(FULL, None))],
    )


def test_a_reinflation_of_cpu_leaves_the_memory_limit_alone() -> None:
    before = Bound(1, 0.5, 512, 512, limit_mib=500)
    play(
        Reinflation(before, ResourceVector(1, 400), 512, 1, 60.0, NO_UNPLUG),
        [
            Row(
                Throttle,
                {"limit_mib": None, "cpu_cores": 1.0},
                Measured,
                measured(Bound(1, None, 512, 512, limit_mib=500)),
            )
        ],
    )
