"""Reinflation, table by table: hypervisor, guest, application. Boot memory is 512 MiB."""

from __future__ import annotations

import math

import pytest

from ebbtide.deflation.bounds import Bound
from ebbtide.deflation.cascade.instructions import Finish, Stopped, Throttle, Unplug
from ebbtide.deflation.cascade.mechanisms import Mechanism, Mechanisms
from ebbtide.deflation.cascade.reinflation import Phase, Reinflation, TellApplication
from ebbtide.deflation.errors import InvalidField, ProtocolViolation
from ebbtide.deflation.ledger import Layer
from ebbtide.deflation.resources import ResourceVector
from tests.unit.deflation.blocked import without
from tests.unit.deflation.script import Measured, Row, Told, entry, measured, play

NOMINAL = ResourceVector(4, 1024)
DEFLATED = Bound(2, 0.75, 412, 212)
FULL = Bound(4, 1.0, 512, 512)


def reinflation(
    before: Bound = DEFLATED, target: ResourceVector = NOMINAL, mechanisms: Mechanisms | None = None
) -> Reinflation:
    return Reinflation(before, target, boot_mib=512, cpus_present=4, deadline_s=60.0, mechanisms=mechanisms)


def test_layers_come_back_in_reverse_order() -> None:
    raised = Bound(2, 1.0, 512, 212)
    outcome = play(
        reinflation(),
        [
            Row(
                Throttle,
                {"cpu_cores": 4, "cpus_online": 2, "balloon_mib": 512, "limit_s": 60, "disk_mib_s": None},
                Measured,
                measured(raised, (0, 1)),
                takes_s=1,
            ),
            Row(
                Unplug,
                {"online": (0, 1, 2, 3), "plugged_mib": 512, "limit_s": 59},
                Measured,
                measured(FULL, (0, 1, 2, 3)),
                takes_s=2,
            ),
            Row(Throttle, {"cpu_cores": 4, "cpus_online": 4, "balloon_mib": None}, Measured, measured(FULL)),
            Row(TellApplication, {"target": NOMINAL, "bound_mib": 1024}, Told, {"reason": ""}, takes_s=1),
        ],
    )
    assert outcome.reached
    assert outcome.seconds == 4
    assert [row.layer for row in outcome.ledger][::2] == [Layer.HYPERVISOR, Layer.GUEST, Layer.APPLICATION]
    assert entry(outcome, Layer.HYPERVISOR, "memory_mib").verified == 100
    assert entry(outcome, Layer.GUEST, "memory_mib").verified == 300
    assert entry(outcome, Layer.APPLICATION, "memory_mib").verified == 0
    given = [entry(outcome, layer, "cpu_cores").verified for layer in Layer if layer is not Layer.COLD]
    assert sum(given) == 2.5


def test_an_application_that_shrank_for_nothing_is_told_where_nothing_is_given() -> None:
    machine = Reinflation(FULL, NOMINAL, boot_mib=512, cpus_present=4, deadline_s=60.0, owed=True)
    outcome = play(machine, [Row(TellApplication, {"target": NOMINAL, "bound_mib": 1024}, Told)])
    assert outcome.reached
    assert play(reinflation(FULL), []).reached, "one that is owed nothing is not"


def test_a_balloon_that_is_slow_to_give_back_is_not_made_up_for_by_plugging() -> None:
    """450 of 512 so far: with 450 + 512 plugged the VM would end above its target once the balloon has followed."""
    before, slow = Bound(1, None, 400, 300), Bound(1, None, 450, 300)
    outcome = play(
        reinflation(before, ResourceVector(1, 900)),
        [
            Row(Throttle, {"balloon_mib": 512}, Measured, measured(slow)),
            Row(Unplug, {"online": None, "plugged_mib": 388}, Measured, measured(Bound(1, None, 470, 388))),
            Row(Throttle, {"balloon_mib": 512}, Measured, measured(Bound(1, None, 490, 388))),
            Row(TellApplication, {}, Told),
        ],
    )
    assert outcome.shortfall == ResourceVector(memory_mib=22)


def test_no_cpu_is_lost_while_others_are_on_their_way() -> None:
    """1.9 cores as 2 x 0.95: 2.5 cores over 3 CPUs would leave 1.67 until the third is on line. The cap is 2.5."""
    before = Bound(2, 0.95, 512, 512)
    outcome = play(
        reinflation(before, ResourceVector(2.5, 1024)),
        [
            Row(Throttle, {"cpu_cores": 2.5, "cpus_online": 2}, Measured, measured(before, (0, 1))),
            Row(Unplug, {"online": (0, 1, 2), "plugged_mib": None}, Measured, measured(Bound(3, 0.95, 512, 512))),
            Row(Throttle, {"cpu_cores": 2.5, "cpus_online": 3}, Measured, measured(Bound(3, 2.5 / 3, 512, 512))),
            Row(TellApplication, {}, Told),
        ],
    )
    assert outcome.reached


def test_fewer_cpus_than_asked_for_share_the_whole_quota() -> None:
    before = Bound(1, 0.5, 512, 512)
    outcome = play(
        reinflation(before, ResourceVector(2.5, 1024)),
        [
            Row(Throttle, {"cpu_cores": 2.5, "cpus_online": 1}, Measured, measured(Bound(1, None, 512, 512), (0,))),
            Row(
                Unplug,
                {"online": (0, 1, 2)},
                Measured,
                measured(Bound(2, 2.5 / 3, 512, 512), (0, 1), reason="CPU 2: no such CPU"),
            ),
            Row(Throttle, {"cpu_cores": 2.5, "cpus_online": 2}, Measured, measured(Bound(2, 1.25, 512, 512), (0, 1))),
            Row(TellApplication, {}, Told),
        ],
    )
    assert outcome.shortfall == ResourceVector(0.5)
    assert "CPU 2: no such CPU" in outcome.sentence


def test_when_the_bound_cannot_be_read_the_quota_stays_that_of_the_cpus_known_to_be_on_line() -> None:
    """It may be too much for those that have come on line: the domain's cap, reckoned of the target alone, holds."""
    before = Bound(1, 0.5, 512, 512)
    play(
        reinflation(before, ResourceVector(2.5, 1024)),
        [
            Row(Throttle, {"cpu_cores": 2.5, "cpus_online": 1}, Measured, measured(before, (0,))),
            Row(Unplug, {"online": (0, 1, 2)}, Measured, measured(None, (0, 1, 2))),
            Row(Throttle, {"cpu_cores": 2.5, "cpus_online": 1}, Measured, measured(Bound(3, None, 512, 512))),
            Row(TellApplication, {}, Told),
        ],
    )


def test_a_guest_that_says_nothing_gets_memory_but_no_map_of_cpus() -> None:
    outcome = play(
        reinflation(),
        [
            Row(Throttle, {}, Measured, measured(Bound(2, 1.0, 512, 212), None)),
            Row(Unplug, {"online": None, "plugged_mib": 512}, Measured, measured(Bound(2, 1.0, 512, 512), None)),
            Row(Throttle, {"cpus_online": 2}, Measured, measured(Bound(2, 2.0, 512, 512), None)),
            Row(TellApplication, {}, Told, {"reason": "the guest agent is not connected"}),
        ],
    )
    assert outcome.shortfall == ResourceVector(2)
    assert "no CPU is put on line" in entry(outcome, Layer.GUEST, "cpu_cores").reason


def test_a_vm_without_a_memory_device_comes_back_by_balloon() -> None:
    before = Bound(1, None, 300, 0)
    outcome = play(
        reinflation(before, ResourceVector(1, 512), without(Layer.APPLICATION, Mechanism.VIRTIO_MEM)),
        [Row(Throttle, {"balloon_mib": 512, "cpu_cores": None}, Measured, measured(Bound(1, None, 512, 0)))],
    )
    assert outcome.reached
    assert "blocked by the test" in entry(outcome, Layer.APPLICATION, "memory_mib").reason


def test_without_quota_none_is_set() -> None:
    before = Bound(2, None, 512, 512)
    play(
        reinflation(before, NOMINAL, without(Layer.APPLICATION, Mechanism.QUOTA)),
        [
            Row(Throttle, {"cpu_cores": None}, Measured, measured(before, (0, 1))),
            Row(Unplug, {"online": (0, 1, 2, 3)}, Measured, measured(Bound(4, None, 512, 512), (0, 1, 2, 3))),
            Row(Throttle, {"cpu_cores": None}, Measured, measured(Bound(4, None, 512, 512), (0, 1, 2, 3))),
        ],
    )


def test_a_rest_below_a_block_is_left() -> None:
    before = Bound(1, None, 512, 212)
    outcome = play(
        reinflation(before, ResourceVector(1, 727), without(Layer.APPLICATION, block_mib=128.0)),
        [Row(Throttle, {"balloon_mib": None}, Measured, measured(before))],
    )
    assert outcome.shortfall == ResourceVector(memory_mib=3)


def test_bandwidth_is_raised_from_outside() -> None:
    before = Bound(1, None, 512, 0, disk_mib_s=10, network_mib_s=10)
    play(
        reinflation(before, ResourceVector(1, 512, 100, 10), without(Layer.APPLICATION)),
        [
            Row(
                Throttle,
                {"disk_mib_s": 100, "network_mib_s": None},
                Measured,
                measured(Bound(1, None, 512, 0, 100, 10)),
            )
        ],
    )


def test_a_target_below_the_bound_shrinks_nothing() -> None:
    outcome = play(reinflation(FULL, ResourceVector(1, 300)), [])
    assert outcome.ledger == ()
    assert outcome.reached
    assert "nothing to give back" in outcome.sentence


def test_a_reinflation_that_is_called_off_ends_at_once() -> None:
    machine = reinflation()
    (throttle,) = machine.start(0)
    (finish,) = machine.handle(Stopped(2, throttle.step, reason="called off"))
    assert isinstance(finish, Finish)
    assert finish.outcome.after == DEFLATED
    assert "called off" in finish.outcome.sentence
    assert machine.handle(Measured(3, throttle.step, **measured(FULL))) == []
    assert machine.handle(Stopped(3, 0)) == []
    early = reinflation()
    (finish,) = early.handle(Stopped(1e6, 0, reason="called off"))
    assert isinstance(finish, Finish)
    assert finish.outcome.seconds == 0


def test_late_and_wrong_answers() -> None:
    machine = reinflation()
    (throttle,) = machine.start(0)
    assert machine.handle(Told(1, throttle.step + 1)) == []
    with pytest.raises(ProtocolViolation, match=r"^Told does not answer what phase raising asked$"):
        machine.handle(Told(1, throttle.step))
    with pytest.raises(ProtocolViolation, match="starts once"):
        machine.start(1)
    assert machine.phase is Phase.RAISING


@pytest.mark.parametrize("deadline_s", [-1, math.nan, math.inf])
def test_a_deadline_that_is_none_is_refused_by_name(deadline_s: float) -> None:
    with pytest.raises(InvalidField) as caught:
        Reinflation(DEFLATED, NOMINAL, 512, 4, deadline_s)
    assert caught.value.field == "deadline_s"


def test_a_growth_is_known_only_as_far_as_it_was_read_since_something_was_given() -> None:
    """What was plugged last was not read: the bound is that of an earlier reading."""
    raised = Bound(2, 1.0, 512, 212)
    outcome = play(
        reinflation(),
        [
            Row(Throttle, {}, Measured, measured(raised, (0, 1))),
            Row(Unplug, {"plugged_mib": 512}, Measured, {"bound": None, "reason": "the monitor does not answer"}),
            Row(Throttle, {}, Measured, {"bound": None, "reason": "the monitor does not answer"}),
            Row(TellApplication, {}, Told),
        ],
    )
    assert (outcome.measured, outcome.reached, outcome.after) == (False, False, raised)
    assert "what was given last is not verified" in outcome.sentence


def test_a_reading_at_the_end_makes_up_for_one_that_failed() -> None:
    outcome = play(
        reinflation(),
        [
            Row(Throttle, {}, Measured, measured(Bound(2, 1.0, 512, 212), (0, 1))),
            Row(Unplug, {"plugged_mib": 512}, Measured, {"bound": None, "reason": "the monitor does not answer"}),
            Row(Throttle, {}, Measured, measured(FULL)),
            Row(TellApplication, {}, Told),
        ],
    )
    assert (outcome.measured, outcome.reached) == (True, True)
