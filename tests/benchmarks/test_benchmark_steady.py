"""The benchmark `steady`: its parts."""

from __future__ import annotations

from benchmarks.deflating import steady


def test_the_host_hands_out_what_its_guests_have_and_what_is_free() -> None:
    assert steady.HOST_MIB == steady.VMS * steady.SIZE.memory_mib + steady.FREE_MIB == 1728
