"""Cold pages in the cascade: when they are asked for, and what stands in the ledger where they are not."""

from __future__ import annotations

from dataclasses import replace

from ebbtide.deflation.cascade.cascade import Cascade
from ebbtide.deflation.cascade.instructions import (
    ColdReclaimed,
    GuestReading,
    Measured,
    ReadGuest,
    ReclaimCold,
    Stopped,
    Unplug,
)
from ebbtide.deflation.cascade.mechanisms import Mechanism
from ebbtide.deflation.ledger import Layer, LedgerEntry
from ebbtide.deflation.resources import ResourceVector
from tests.unit.deflation.blocked import without
from tests.unit.deflation.model_vm import ModelVM, run

NO_OTHERS = without(Layer.APPLICATION, Mechanism.MEMORY_LIMIT)
TARGET = ResourceVector(4, 640)


def cold_row(vm: ModelVM) -> LedgerEntry:
    outcome, _ = run(Cascade(vm.bound, TARGET, 60.0, NO_OTHERS), vm)
    assert outcome.reached, outcome.sentence
    (row,) = [row for row in outcome.ledger if row.layer is Layer.COLD]
    assert row.resource == "memory_mib"
    return row


def test_where_free_pages_are_enough_nothing_is_asked() -> None:
    row = cold_row(ModelVM(application_mib=64, cold_mib=100))
    assert (row.asked, row.verified) == (0, 0)
    assert row.reason == "free pages are enough: nothing had to become free"


def test_what_free_pages_do_not_cover_is_asked_for_and_stands_in_a_row_of_its_own() -> None:
    # 792 MiB to spare, of which 292 are free; 384 are to go.
    row = cold_row(ModelVM(application_mib=64, cold_mib=500))
    assert (row.asked, row.verified, row.reason) == (92, 92, "")


def test_a_guest_that_gives_none_is_deflated_all_the_same() -> None:
    row = cold_row(ModelVM(application_mib=64, cold_mib=500, cold_at_most_mib=0))
    assert (row.asked, row.verified, row.reason) == (92, 0, "the rest is in use")


def test_an_older_guest_agent_is_unsupported_and_nothing_fails() -> None:
    row = cold_row(ModelVM(application_mib=64))
    assert (row.asked, row.reason) == (0, "unsupported: the guest agent does not say what is free")


def test_it_is_stopped_like_all_else_and_meanwhile_no_more_is_unplugged_than_is_free() -> None:
    vm = ModelVM(application_mib=64)
    machine = Cascade(vm.bound, TARGET, 60.0, NO_OTHERS)
    (read,) = machine.start(0)
    assert isinstance(read, ReadGuest)
    guest = GuestReading((0, 1, 2, 3), (), 792, free_mib=100)
    cold, unplug = machine.handle(Measured(1, read.step, vm.bound, guest))
    assert isinstance(cold, ReclaimCold)
    assert (cold.memory_mib, cold.limit_s) == (71, 5)
    assert isinstance(unplug, Unplug)
    assert unplug.plugged_mib == 512 - 100
    smaller = replace(vm.bound, plugged_mib=412.0)
    # It waits for the next part: nothing is free now.
    assert machine.handle(Measured(2, unplug.step, smaller, replace(guest, free_mib=0, spare_mib=692))) == []
    machine.handle(Stopped(3, cold.step, "the guest is under pressure"))
    assert machine.outcome is not None
    assert machine.outcome.after.plugged_mib == 412


def test_an_unplug_that_fell_short_meanwhile_is_tried_again_when_more_is_free() -> None:
    outcome, exchanges = run(
        Cascade(ModelVM().bound, TARGET, 60.0, NO_OTHERS),
        ModelVM(application_mib=64, cold_mib=600, unplug_at_most_mib=90),
    )
    assert outcome.before.plugged_mib - outcome.after.plugged_mib > 90
    assert any(isinstance(one.instruction, ReclaimCold) for one in exchanges)


def test_a_guest_that_gives_nothing_and_promises_more_is_not_asked_again() -> None:
    vm = ModelVM(application_mib=64)
    machine = Cascade(vm.bound, TARGET, 60.0, NO_OTHERS)
    (read,) = machine.start(0)
    reading = Measured(1, read.step, vm.bound, GuestReading((0, 1, 2, 3), (), 792, free_mib=0))
    (cold,) = machine.handle(reading)
    assert isinstance(cold, ReclaimCold)
    after = machine.handle(ColdReclaimed(2, cold.step, 0.0, done=False))
    assert [type(one) for one in after] == [ReadGuest], "it is unplugged without"


def test_where_the_host_does_not_have_them_go_first_the_ledger_has_no_such_row() -> None:
    vm = ModelVM(application_mib=64, cold_mib=500)
    blocked = without(Layer.APPLICATION, Mechanism.MEMORY_LIMIT, Mechanism.COLD)
    outcome, exchanges = run(Cascade(vm.bound, TARGET, 60.0, blocked), vm)
    assert outcome.reached, outcome.sentence
    assert Layer.COLD not in {row.layer for row in outcome.ledger}
    assert not any(isinstance(one.instruction, ReclaimCold) for one in exchanges)
