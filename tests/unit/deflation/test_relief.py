"""What a VM under pressure gets: what is free and what harvest VMs hold above minimum, never more."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from deflation.allocations import Allocation, Priority
from deflation.relief import relieve
from deflation.resources import TOLERANCE, ZERO, ResourceVector
from tests.unit.deflation.strategies import hosts, needs, runs, vectors

VM = Allocation(
    "low-1",
    Priority.DEFLATABLE,
    nominal=ResourceVector(4, 4096),
    minimum=ResourceVector(1, 1024),
    current=ResourceVector(2, 2048),
)
HARVEST = Allocation(
    "spare-1",
    Priority.HARVEST,
    nominal=ResourceVector(1, 512),
    minimum=ResourceVector(1, 512),
    current=ResourceVector(3, 1536),
    ceiling=ResourceVector(8, 8192),
)
NEIGHBOUR = replace(VM, name="low-2")
EVERYTHING = ResourceVector(memory_mib=2048)


def test_the_whole_deflation_comes_back_in_one_step_where_it_is_free() -> None:
    relief = relieve(VM, EVERYTHING, ResourceVector(8, 8192), [NEIGHBOUR, HARVEST])
    assert relief.target == ResourceVector(2, 4096)
    assert relief.harvest == {}
    assert relief.remaining.is_zero()
    assert relief.sentence == "low-1 gets 2048 MiB at once"


def test_harvest_vms_give_what_is_not_free_and_the_manager_is_asked_for_the_rest() -> None:
    relief = relieve(VM, EVERYTHING, ResourceVector(8, 500), [NEIGHBOUR, HARVEST])
    assert relief.harvest == {"spare-1": ResourceVector(3, 512)}
    assert relief.target == ResourceVector(2, 2048 + 500 + 1024)
    assert relief.remaining == ResourceVector(memory_mib=524)
    assert relief.sentence == (
        "low-1 gets 1524 MiB at once; taken back from harvest VMs spare-1; 524 MiB are asked of the manager"
    )


def test_a_harvest_vm_under_pressure_gives_nothing() -> None:
    relief = relieve(VM, EVERYTHING, ResourceVector(8, 500), [HARVEST], pressed={"spare-1"})
    assert relief.harvest == {}
    assert relief.target.memory_mib == 2548


def test_where_nothing_can_be_spared_the_manager_is_asked_for_all() -> None:
    relief = relieve(VM, EVERYTHING, ZERO, [NEIGHBOUR])
    assert relief.target == VM.current
    assert relief.remaining == EVERYTHING
    assert relief.sentence == "there is nothing to give to low-1; 2048 MiB are asked of the manager"


def test_a_vm_in_trouble_at_its_minimum_is_told_of() -> None:
    relief = relieve(replace(VM, current=VM.minimum), EVERYTHING, EVERYTHING)
    assert relief.sentence == "low-1 gets 2048 MiB at once; it was at its minimum, which is too small to live on"


@runs(300)
@given(hosts(largest=6), st.data(), st.one_of(vectors, needs), st.one_of(vectors, needs))
def test_relief_never_takes_from_others_and_never_gives_more_than_there_is(
    host: list[Allocation], data: st.DataObject, wants: ResourceVector, free: ResourceVector
) -> None:
    if not host:
        return
    vm = data.draw(st.sampled_from(host))
    others = {other.name: other for other in host if other is not vm}
    pressed = data.draw(st.sets(st.sampled_from(sorted(others)))) if others else set()
    relief = relieve(vm, wants, free, list(others.values()), pressed)
    assert vm.current.fits_in(relief.target), "nobody in trouble shrinks"
    assert relief.target.fits_in(vm.nominal.larger(vm.current))
    assert relief.target.less(vm.current).fits_in(wants)
    freed = ZERO
    for name, size in relief.harvest.items():
        donor = others[name]
        assert donor.priority is Priority.HARVEST
        assert name not in pressed
        assert donor.minimum.fits_in(size)
        assert size.fits_in(donor.current)
        freed = freed + donor.current.less(size)
    assert relief.target.less(vm.current).fits_in(free + freed), "the sum of sizes stays within capacity"
    whole = (vm.current + wants).smaller(vm.nominal.larger(vm.current))
    for got, rest, wanted in zip(relief.target, relief.remaining, whole, strict=True):
        assert abs(got + rest - wanted) < 1e-3 * TOLERANCE + 1e-6 * max(wanted, 1.0)


@runs()
@given(hosts(largest=6), st.data(), st.one_of(vectors, needs))
def test_when_the_harvest_vms_fall_short_a_second_reckoning_gives_only_what_is_free(
    host: list[Allocation], data: st.DataObject, free: ResourceVector
) -> None:
    if not host:
        return
    vm = data.draw(st.sampled_from(host))
    again = relieve(vm, vm.nominal, free)
    assert again.harvest == {}
    assert again.target.less(vm.current).fits_in(free)
