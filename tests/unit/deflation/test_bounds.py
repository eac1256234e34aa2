from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ebbtide.deflation.bounds import Bound, held_by_guest, reclaimed
from ebbtide.deflation.resources import COMPONENTS, ResourceVector
from tests.unit.deflation.strategies import runs

bounds = st.builds(
    Bound,
    st.integers(1, 64),
    st.one_of(st.none(), st.floats(0.001, 1.5)),
    st.floats(0, 65_536),
    st.floats(0, 65_536),
    st.floats(0, 1000),
    st.floats(0, 1000),
)


@runs()
@given(bounds, bounds)
def test_both_layers_together_are_exactly_the_fall_of_the_bound(before: Bound, after: Bound) -> None:
    given_ = reclaimed(before, after)
    for component in COMPONENTS:
        fall = max(before.size[component] - after.size[component], 0.0)
        assert given_.total[component] == pytest.approx(fall, abs=1e-9)
        assert given_.guest[component] <= fall + 1e-9


def test_quota_counts_only_below_the_cpus_on_line() -> None:
    assert Bound(4, None, 0, 0).cpu_cores == 4
    assert Bound(4, 0.5, 0, 0).cpu_cores == 2
    assert Bound(2, 1.25, 0, 0).cpu_cores == 2
    assert Bound(3, 0.83333, 0, 0).cpu_cores == 2.5, "what a period of whole microseconds cuts off is no difference"


@pytest.mark.parametrize(
    ("before", "after", "guest", "hypervisor"),
    [
        # 4 cores -> 2.5: one CPU off line, the half by quota.
        (Bound(4, None, 512, 512), Bound(3, 2.5 / 3, 512, 512), (1.0, 0), (0.5, 0)),
        # Deflated a second time: 2.5 by quota on 3 -> 1.5 by quota on 2; above 2 CPUs half a core was left to take.
        (Bound(3, 2.5 / 3, 512, 512), Bound(2, 0.75, 512, 512), (0.5, 0), (0.5, 0)),
        # Held by quota to half a core each, two of four CPUs off line take nothing; the quota does.
        (Bound(4, 0.5, 512, 512), Bound(2, 0.75, 512, 512), (0, 0), (0.5, 0)),
        # virtio-mem fell by 300 while the balloon gave 100 back: 200 were reclaimed, all by the guest layer.
        (Bound(1, None, 412, 512), Bound(1, None, 512, 212), (0, 200), (0, 0)),
        # Growth is nothing reclaimed.
        (Bound(1, 0.5, 412, 212), Bound(4, None, 512, 512), (0, 0), (0, 0)),
    ],
)
def test_who_brought_the_fall_about(
    before: Bound, after: Bound, guest: tuple[float, float], hypervisor: tuple[float, float]
) -> None:
    given_ = reclaimed(before, after)
    assert (given_.guest.cpu_cores, given_.guest.memory_mib) == pytest.approx(guest)
    assert (given_.hypervisor.cpu_cores, given_.hypervisor.memory_mib) == pytest.approx(hypervisor)


def test_bandwidth_is_the_hypervisors() -> None:
    given_ = reclaimed(Bound(1, None, 512, 0, 100, 50), Bound(1, None, 512, 0, 40, 60))
    assert (given_.hypervisor.disk_mib_s, given_.hypervisor.network_mib_s) == (60, 0)
    assert given_.guest.is_zero()


@runs()
@given(bounds, st.floats(0.1, 64), st.floats(200, 65_536), st.floats(0, 1), st.floats(0, 1))
def test_the_guest_never_holds_more_than_a_vm_lacks(
    bound: Bound, cores: float, mib: float, part: float, boot: float
) -> None:
    nominal = ResourceVector(cores, mib)
    size = nominal * part
    held = held_by_guest(nominal, size, bound, mib * boot)
    assert held.fits_in(nominal.less(size))
    assert held_by_guest(nominal, nominal, bound, mib * boot).is_zero()


def test_what_is_off_line_or_unplugged_is_the_guests_and_the_rest_is_not() -> None:
    nominal, size = ResourceVector(4.0, 4096.0), ResourceVector(1.5, 1536.0)
    held = held_by_guest(nominal, size, Bound(2, 0.75, 1024.0, 1024.0), 2048.0)
    assert (held.cpu_cores, held.memory_mib) == (2.0, 1024.0)
