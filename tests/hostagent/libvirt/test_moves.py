"""What is known of a move before it is made."""

from __future__ import annotations

import pytest

from hostagent.libvirt.moves import risk_of


@pytest.mark.parametrize(
    ("accelerator", "version", "risky"),
    [("qemu", 7_002_022, True), ("qemu", 9_000_000, False), ("kvm", 7_002_022, False), (None, 0, False)],
)
def test_an_emulated_guest_that_moves_under_an_old_qemu_may_lose_writes(
    accelerator: str | None, version: int, risky: bool
) -> None:
    assert ("may lose writes" in risk_of(accelerator, version)) == risky
