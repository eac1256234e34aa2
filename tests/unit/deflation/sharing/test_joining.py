"""A VM that starts deflated takes part in the split as one of the VMs: one alpha."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ebbtide.deflation.allocations import Allocation, Priority
from ebbtide.deflation.resources import COMPONENTS, QUANTUM, ZERO, ResourceVector
from ebbtide.deflation.sharing.proportional import joining, split_need
from tests.unit.deflation.strategies import allocations, hosts, needs, runs


def low(name: str, cores: float = 4.0, minimum: float = 0.5) -> Allocation:
    nominal, size = ResourceVector(4, 4096), ResourceVector(cores, 4096)
    return Allocation(name, Priority.DEFLATABLE, nominal, ResourceVector(minimum, 512), size, overhead_mib=100)


def test_the_newcomer_shrinks_as_much_as_the_others() -> None:
    joined = joining([low("a"), low("b")], low("new"), ResourceVector(0, 5000), ResourceVector(0.5, 512))
    assert joined is not None
    # 12 cores sold on 8: all three have 2.67 of 4.
    assert joined.size.cpu_cores == pytest.approx(8 / 3, abs=0.01)
    assert joined.size.memory_mib == 4096
    assert joined.need.cpu_cores == joined.size.cpu_cores
    assert joined.need.memory_mib == 0


def test_it_starts_at_nominal_where_that_fits() -> None:
    joined = joining([low("a")], low("new"), ResourceVector(4, 5000), ResourceVector(0.5, 512))
    assert joined is not None
    assert (joined.size, joined.need) == (ResourceVector(4, 4096), ZERO)


def test_where_even_its_minimum_does_not_fit_it_does_not_join() -> None:
    full = [low("a", minimum=4.0), low("b", minimum=3.8)]
    assert joining(full, low("new"), ResourceVector(0, 5000), ResourceVector(0.5, 512)) is None


def test_what_it_needs_to_boot_is_asked_of_the_others() -> None:
    joined = joining([low("a", cores=4)], low("new"), ResourceVector(0, 5000), ResourceVector(3.0, 512))
    assert joined is not None
    assert (joined.size.cpu_cores, joined.need.cpu_cores) == (3.0, 3.0)


@runs(200)
@given(hosts(on_grid=True), allocations("new", on_grid=True), needs, st.integers(0, 10))
def test_all_have_one_alpha_and_the_need_makes_the_room(
    rows: list[Allocation], newcomer: Allocation, free: ResourceVector, tenths: int
) -> None:
    newcomer = Allocation(
        "new", newcomer.priority, newcomer.nominal, newcomer.minimum, newcomer.nominal, newcomer.ceiling
    )
    if newcomer.priority is Priority.FIXED:
        return
    joined = joining(rows, newcomer, free, newcomer.minimum)
    together = split_need([*rows, newcomer], newcomer.charge.less(free))
    if joined is None:
        assert not together.shortfall.is_zero()
        return
    assert newcomer.minimum.fits_in(joined.size)
    assert joined.size.fits_in(newcomer.nominal)
    # After the others have given the need, the newcomer fits.
    split = split_need(rows, joined.need)
    assert split.shortfall.is_zero()
    freed = sum((row.current.less(split.targets.get(row.name, row.current)) for row in rows), ZERO)
    assert joined.size.fits_in(free + freed + ResourceVector(1e-5, 1e-5, 1e-5, 1e-5))
    # And they have the sizes that the split of all together gives them, but for a step of rounding each.
    for row in rows:
        alone, whole = split.targets.get(row.name, row.current), together.targets.get(row.name, row.current)
        for component in COMPONENTS:
            assert alone[component] == pytest.approx(whole[component], abs=2 * QUANTUM[component])
