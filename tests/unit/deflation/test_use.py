"""Minimums by what a VM uses: worked by hand, and what holds for any use."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ebbtide.deflation.floors import HARD_FLOOR, effective_minimum
from ebbtide.deflation.resources import ResourceVector
from ebbtide.deflation.use import Use, minimum_cpu_cores, minimum_memory_mib, use_of

NOMINAL = ResourceVector(cpu_cores=4.0, memory_mib=4096.0)


@pytest.mark.parametrize(
    ("cores", "kept"), [(0.0, 0.1), (0.05, 0.1), (0.2, 0.3), (0.5, 0.75), (0.51, 0.8), (3.0, 4.0), (9.0, 4.0)]
)
def test_it_keeps_half_as_many_cores_again_as_it_used(cores: float, kept: float) -> None:
    assert minimum_cpu_cores(Use(cores, None), NOMINAL) == kept


@pytest.mark.parametrize(
    ("used_mib", "kept_mib"), [(0.0, 410.0), (900.5, 1311.0), (3600.0, 4010.0), (3900.0, 4096.0), (4096.0, 4096.0)]
)
def test_it_keeps_what_it_uses_and_a_tenth_of_its_memory(used_mib: float, kept_mib: float) -> None:
    assert minimum_memory_mib(Use(None, used_mib), NOMINAL) == kept_mib


def test_a_small_vm_keeps_a_reserve_of_96_mib_and_the_floor() -> None:
    small = NOMINAL.with_component("memory_mib", 512.0)
    assert minimum_memory_mib(Use(None, 200.0), small) == 296.0
    assert minimum_memory_mib(Use(None, 20.0), small) == HARD_FLOOR.memory_mib


def test_what_was_not_said_is_not_zero() -> None:
    use = use_of(4096.0, None, None, 5.0)
    assert use == Use(None, None)
    assert (minimum_cpu_cores(use, NOMINAL), minimum_memory_mib(use, NOMINAL)) == (None, None)
    assert use_of(4096.0, 3000.0, 2.5, 5.0) == Use(0.5, 1096.0)
    assert use_of(4096.0, 5000.0, 2.5, 0.0) == Use(None, 0.0)
    # A guest that was reset while it was measured begins to count anew.
    assert use_of(4096.0, 3000.0, -2.0, 5.0).cpu_cores == 0.0


@given(
    st.floats(0, 64), st.floats(0, 1e5), st.floats(0.5, 64), st.floats(256, 1e5),
)  # fmt: skip
def test_a_minimum_is_what_the_vm_can_have_and_covers_what_it_used(
    cores: float, used_mib: float, vcpus: float, memory_mib: float
) -> None:
    nominal = ResourceVector(cpu_cores=math.ceil(vcpus), memory_mib=memory_mib)
    use = Use(cores, used_mib)
    kept_cores, kept_mib = minimum_cpu_cores(use, nominal), minimum_memory_mib(use, nominal)
    assert kept_cores is not None
    assert kept_mib is not None
    kept = ResourceVector(cpu_cores=kept_cores, memory_mib=kept_mib)
    assert kept.fits_in(nominal)
    assert effective_minimum(kept, nominal) == kept
    assert kept_cores >= min(cores, nominal.cpu_cores) - 1e-6
    assert kept_mib >= min(used_mib + 96, memory_mib)
