"""What a VM under pressure gets: what is free and what others hold above their minimums, never more."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from ebbtide.deflation.allocations import Allocation, Priority
from ebbtide.deflation.resources import TOLERANCE, ZERO, ResourceVector
from ebbtide.deflation.sharing.pressure_response import (
    FELL_SHORT_S,
    GAVE_S,
    LASTING_S,
    RECOVERED_S,
    Neighbours,
    respond_to_pressure,
    room_besides_pressure,
)
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
    relief = respond_to_pressure(VM, EVERYTHING, ResourceVector(8, 8192), [NEIGHBOUR, HARVEST])
    assert relief.target == ResourceVector(2, 4096)
    assert relief.donors == {}
    assert relief.remaining.is_zero()
    assert relief.sentence == "low-1 gets 2048 MiB at once"


def test_harvest_vms_give_what_is_not_free_and_the_manager_is_asked_for_the_rest() -> None:
    relief = respond_to_pressure(VM, EVERYTHING, ResourceVector(8, 500), [NEIGHBOUR, HARVEST])
    assert relief.donors == {"spare-1": ResourceVector(3, 512)}
    assert relief.target == ResourceVector(2, 2048 + 500 + 1024)
    assert relief.remaining == ResourceVector(memory_mib=524)
    assert relief.sentence == ("low-1 gets 1524 MiB at once; taken from spare-1; 524 MiB are asked of the manager")


def test_a_harvest_vm_under_pressure_gives_nothing() -> None:
    relief = respond_to_pressure(VM, EVERYTHING, ResourceVector(8, 500), [HARVEST], pressed={"spare-1"})
    assert relief.donors == {}
    assert relief.target.memory_mib == 2548


def test_neighbours_without_pressure_give_down_to_their_minimums_where_harvest_vms_do_not_suffice() -> None:
    relief = respond_to_pressure(VM, EVERYTHING, ZERO, [NEIGHBOUR, HARVEST], neighbours={"low-2"})
    assert relief.donors == {"spare-1": ResourceVector(3, 512), "low-2": ResourceVector(2, 1024)}
    assert relief.target == ResourceVector(2, 2048 + 1024 + 1024)
    assert relief.remaining.is_zero()
    pressed = respond_to_pressure(VM, EVERYTHING, ZERO, [NEIGHBOUR], pressed={"low-2"}, neighbours={"low-2"})
    assert pressed.donors == {}
    fixed = replace(NEIGHBOUR, priority=Priority.FIXED)
    assert respond_to_pressure(VM, EVERYTHING, ZERO, [fixed], neighbours={"low-2"}).donors == {}


def test_neighbours_give_no_cpu() -> None:
    wants = ResourceVector(cpu_cores=2, memory_mib=100)
    relief = respond_to_pressure(VM, wants, ZERO, [NEIGHBOUR], neighbours={"low-2"})
    assert relief.donors == {"low-2": ResourceVector(2, 1948)}
    assert relief.target == ResourceVector(2, 2148)


def test_neighbours_are_asked_for_pressure_that_lasts_and_not_again_and_again() -> None:
    known, names = Neighbours(), ["low-1", "low-2", "low-3"]
    known.observe(0.0, names, ["low-1"])
    assert known.may_give(0.0, "low-1", names) == set(), "it may be over before they notice"
    known.observe(LASTING_S, names, ["low-1"])
    assert known.may_give(LASTING_S, "low-1", names) == {"low-2", "low-3"}
    known.gave(LASTING_S, "low-2")
    assert known.may_give(LASTING_S + GAVE_S - 1, "low-1", names) == {"low-3"}
    assert known.may_give(LASTING_S + GAVE_S, "low-1", names) == {"low-2", "low-3"}
    # Now low-3 is: what low-1 has just got does not go there.
    known.observe(100.0, names, ["low-3"])
    known.observe(100.0 + LASTING_S, names, ["low-3"])
    assert known.may_give(100.0 + LASTING_S, "low-3", names) == {"low-2"}
    assert known.may_give(LASTING_S + RECOVERED_S, "low-3", names) == {"low-1", "low-2"}


def test_one_that_fell_short_is_left_out_for_a_while_and_forgotten_once_it_is_gone() -> None:
    known = Neighbours()
    known.fell_short(0.0, "spare-1")
    assert known.unable(FELL_SHORT_S - 1) == {"spare-1"}
    assert known.unable(FELL_SHORT_S) == set()
    known.observe(1.0, ["low-1"], [])
    assert known.unable(1.0) == set()


def test_room_is_given_back_only_beyond_what_vms_under_pressure_want() -> None:
    room = room_besides_pressure(ResourceVector(2, 300), [ResourceVector(0, 200), ResourceVector(0, 50)])
    assert room == ResourceVector(2, 50)
    assert room_besides_pressure(ResourceVector(2, 50), [ResourceVector(0, 200)]) == ResourceVector(2, 0)


def test_where_nothing_can_be_spared_the_manager_is_asked_for_all() -> None:
    relief = respond_to_pressure(VM, EVERYTHING, ZERO, [NEIGHBOUR])
    assert relief.target == VM.current
    assert relief.remaining == EVERYTHING
    assert relief.sentence == "there is nothing to give to low-1; 2048 MiB are asked of the manager"


def test_a_vm_in_trouble_at_its_minimum_is_told_of() -> None:
    relief = respond_to_pressure(replace(VM, current=VM.minimum), EVERYTHING, EVERYTHING)
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
    relief = respond_to_pressure(vm, wants, free, list(others.values()), pressed)
    assert vm.current.fits_in(relief.target), "nobody in trouble shrinks"
    assert relief.target.fits_in(vm.nominal.larger(vm.current))
    assert relief.target.less(vm.current).fits_in(wants)
    freed = ZERO
    for name, size in relief.donors.items():
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
    again = respond_to_pressure(vm, vm.nominal, free)
    assert again.donors == {}
    assert again.target.less(vm.current).fits_in(free)
