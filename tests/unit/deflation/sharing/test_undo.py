"""Mode off: which sizes undo everything, and that memory is never handed out twice."""

from __future__ import annotations

import math

from hypothesis import given

from ebbtide.deflation.allocations import Allocation, Priority
from ebbtide.deflation.resources import ResourceVector
from ebbtide.deflation.sharing.undo import is_worth_while, lacking, undone
from tests.unit.deflation.strategies import hosts, runs, vectors


def vm(name: str, cores: float, memory_mib: float, priority: Priority = Priority.DEFLATABLE) -> Allocation:
    nominal = ResourceVector(3, 1024)
    ceiling = ResourceVector(6, 2048) if priority is Priority.HARVEST else None
    return Allocation(name, priority, nominal, ResourceVector(0.5, 320), ResourceVector(cores, memory_mib), ceiling)


@runs(200)
@given(hosts(), vectors)
def test_cpu_and_bandwidth_are_whole_again_and_memory_as_far_as_there_is_room(
    rows: list[Allocation], room: ResourceVector
) -> None:
    targets = undone(rows, room)
    grown = 0.0
    for row in rows:
        target = targets.get(row.name, row.current)
        assert row.current.fits_in(target)
        assert target.fits_in(row.nominal.larger(row.current))
        for component in ("cpu_cores", "disk_mib_s", "network_mib_s"):
            assert target[component] >= row.nominal[component] - 1e-6
        grown += target.memory_mib - row.current.memory_mib
    assert grown <= room.memory_mib + 1e-6
    lack = math.fsum(r.nominal.less(r.current).memory_mib for r in rows if r.priority is not Priority.FIXED)
    if lack <= room.memory_mib:
        after = [row for row in rows if row.priority is not Priority.FIXED]
        assert all(targets.get(r.name, r.current).memory_mib >= r.nominal.memory_mib - 1e-6 for r in after)


def test_nobody_is_named_who_has_all() -> None:
    assert undone([vm("a", 3, 1024), vm("b", 5, 1500, Priority.HARVEST)], ResourceVector(9, 9000)) == {}


def test_a_harvest_vm_gets_its_nominal_size_and_no_more() -> None:
    targets = undone([vm("h", 1, 512, Priority.HARVEST)], ResourceVector(9, 9000))
    assert targets == {"h": ResourceVector(3, 1024)}


def test_cpu_is_given_back_beyond_what_the_host_has() -> None:
    targets = undone([vm("a", 1, 512), vm("b", 1.5, 1024)], ResourceVector())
    assert targets == {"a": ResourceVector(3, 512), "b": ResourceVector(3, 1024)}


def test_memory_goes_first_to_those_under_pressure() -> None:
    targets = undone([vm("a", 3, 512), vm("b", 3, 512)], ResourceVector(memory_mib=100), ["b"])
    assert targets == {"b": ResourceVector(3, 612)}


def test_what_is_lacking_leaves_rounding_out() -> None:
    rows = [vm("a", 2.999, 1023.5), vm("b", 2, 1024), vm("c", 3, 1000)]
    assert lacking(rows) == {"b": ResourceVector(cpu_cores=1), "c": ResourceVector(memory_mib=24)}


def test_a_flutter_of_free_memory_is_no_reason_to_grow_unless_it_completes_a_vm() -> None:
    assert not is_worth_while(vm("a", 3, 900), ResourceVector(3, 905))
    assert is_worth_while(vm("a", 3, 900), ResourceVector(3, 916))
    assert is_worth_while(vm("a", 3, 1020), ResourceVector(3, 1024))
    assert is_worth_while(vm("a", 2, 900), ResourceVector(2.05, 900))
    assert not is_worth_while(vm("a", 2, 900), ResourceVector(2.01, 900))
