"""What a VM is sold as when a change of that does not come to its end, or is to be undone for its owner."""

from __future__ import annotations

import pytest

from ebbtide.deflation.allocations import Priority
from ebbtide.deflation.resources import ResourceVector
from ebbtide.messages.common import Vector
from ebbtide.messages.vms import VMSpec
from hostagent.operations.respec import fallen_short, respec, returning

SOLD = VMSpec(
    name="web",
    priority=Priority.DEFLATABLE,
    nominal=Vector(cpu_cores=2, memory_mib=1024),
    minimum=Vector(cpu_cores=1, memory_mib=512),
)


def test_what_a_vm_has_grown_to_is_charged_though_the_change_fell_short() -> None:
    kept = fallen_short(SOLD, ResourceVector(2, 1500))
    assert kept.nominal.vector() == ResourceVector(2, 1500)
    assert kept.asked_minimum() == SOLD.asked_minimum()
    harvest = SOLD.model_copy(update={"priority": Priority.HARVEST, "ceiling": Vector(cpu_cores=3, memory_mib=1200)})
    kept = fallen_short(harvest, ResourceVector(2, 1500))
    assert (kept.nominal, kept.ceiling) == (SOLD.nominal, Vector(cpu_cores=3, memory_mib=1500))


def test_a_minimum_that_was_a_share_does_not_rise_with_what_was_reached() -> None:
    shares = SOLD.model_copy(update={"minimum": Vector(), "minimum_share": Vector(cpu_cores=0.5, memory_mib=0.5)})
    assert fallen_short(shares, ResourceVector(2, 1500)).asked_minimum() == ResourceVector(1, 512)


def test_within_what_it_was_sold_nothing_changes() -> None:
    assert fallen_short(SOLD, ResourceVector(1.5, 600)) == SOLD
    assert fallen_short(SOLD, ResourceVector(1.5, 400)).asked_minimum() == ResourceVector(1, 400)


@pytest.mark.parametrize("size", [ResourceVector(1, 2048), ResourceVector(0.5, 256), ResourceVector(4, 1024)])
@pytest.mark.parametrize("priority", list(Priority))
def test_what_counts_while_a_vm_is_given_back_is_wide_enough_for_both_sizes(
    priority: Priority, size: ResourceVector
) -> None:
    ceiling = Vector(cpu_cores=3, memory_mib=1200) if priority is Priority.HARVEST else None
    spec = SOLD.model_copy(update={"priority": priority, "ceiling": ceiling})
    row = returning(spec, size).allocation(size)
    for there in (size, SOLD.nominal.vector()):
        assert row.minimum.fits_in(there)
        assert there.fits_in(row.upper)


def test_what_the_running_domain_has_room_for_waits_for_no_start() -> None:
    new = SOLD.model_copy(update={"nominal": Vector(cpu_cores=1.33333333333, memory_mib=1024)})
    way = respec(SOLD, new, ResourceVector(2, 1024), ResourceVector(4, 4096))
    assert (way.at_next_start, way.why) == (None, "")
