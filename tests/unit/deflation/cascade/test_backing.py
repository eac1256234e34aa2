"""Whether swap backs a limit: refusals with their figures, and no way around them."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ebbtide.deflation.cascade.backing import RESERVE_MIB, Footprint, Swap, unbacked
from tests.unit.deflation.strategies import runs

VM = Footprint(touchable_mib=768)
SWAP = Swap(total_mib=1024, free_mib=1000)
sizes = st.floats(0, 4096)


def test_what_fits_into_free_swap_is_backed() -> None:
    assert unbacked(VM, 500, SWAP, 0) == ""


@pytest.mark.parametrize(
    ("vm", "swap", "others_mib", "reason"),
    [
        pytest.param(
            VM,
            Swap(0, 0),
            0,
            "the host has no swap, so no memory limit can be backed: the guest may touch 768 MiB, the limit is 500 MiB",
            id="no swap",
        ),
        pytest.param(
            VM,
            Swap(1024, 300),
            0,
            "swap cannot back the memory limit: it may need 268 MiB more (the guest may touch 768 MiB, the limit is "
            "500 MiB), but of 300 MiB free 0 MiB back other limits and 64 MiB are kept",
            id="swap too small",
        ),
        pytest.param(
            VM,
            SWAP,
            700,
            "swap cannot back the memory limit: it may need 268 MiB more (the guest may touch 768 MiB, the limit is "
            "500 MiB), but of 1000 MiB free 700 MiB back other limits and 64 MiB are kept",
            id="promised to others",
        ),
        pytest.param(
            replace(VM, swappiness=0),
            SWAP,
            0,
            "swappiness is 0, so the kernel would swap nothing and no memory limit can be backed: the guest may touch "
            "768 MiB, the limit is 500 MiB",
            id="swappiness",
        ),
        pytest.param(
            replace(VM, swap_room_mib=100),
            SWAP,
            0,
            "the VM's cgroups let 100 MiB more into swap, but the limit may need 268 MiB: the guest may touch 768 MiB, "
            "the limit is 500 MiB",
            id="cgroup's own swap limit",
        ),
        pytest.param(
            replace(VM, unswappable_mib=700),
            SWAP,
            0,
            "700 MiB of QEMU are locked, pinned or huge pages, which cannot be swapped, so no memory limit can be "
            "backed",
            id="locked",
        ),
    ],
)
def test_a_refusal_says_why_with_its_figures(vm: Footprint, swap: Swap, others_mib: float, reason: str) -> None:
    assert unbacked(vm, 500, swap, others_mib) == reason


def test_what_is_in_swap_already_needs_no_more_room() -> None:
    full = Swap(1024, 100)
    assert unbacked(VM, 500, full, 0)
    assert unbacked(replace(VM, swapped_mib=268), 500, full, 0) == ""


def test_an_emulator_beyond_its_allowance_needs_swap_as_well() -> None:
    assert replace(VM, beyond_allowance_mib=50).claim_mib(500) == 318
    assert replace(VM, beyond_allowance_mib=-50).claim_mib(500) == 268


@runs(500)
@given(sizes, sizes, sizes, sizes, sizes, sizes)
def test_with_all_limits_at_their_worst_swap_is_never_overrun(
    touchable: float, limit: float, swapped: float, free: float, others: float, beyond: float
) -> None:
    vm = Footprint(touchable, beyond, swapped)
    if not unbacked(vm, limit, Swap(8192, free), others):
        pushed_out = touchable + beyond - limit
        assert pushed_out <= swapped + max(free - others - RESERVE_MIB, 0.0) + 1e-6


@runs(300)
@given(sizes, sizes, sizes, sizes)
def test_a_higher_limit_is_backed_wherever_a_lower_one_is(
    limit: float, more: float, free: float, others: float
) -> None:
    if not unbacked(VM, limit, Swap(8192, free), others):
        assert not unbacked(VM, limit + more, Swap(8192, free), others)
