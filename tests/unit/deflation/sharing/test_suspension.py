"""Whether a VM can be suspended: room on the disk, time in its notice, and what was learned of the disk."""

from __future__ import annotations

import pytest

from ebbtide.deflation.sharing.suspension import BELIEVED_S, SavingRate, power_off_s, saving_s, why_not_saved


def test_there_must_be_room_for_the_memory_and_a_margin() -> None:
    assert why_not_saved(500.0, 820.0, 60.0, 100.0) == ""
    assert why_not_saved(500.0, 819.0, 60.0, 100.0) == (
        "its memory would take 820 MiB of the disk for saved memory, which has 819"
    )
    assert "not known" in why_not_saved(500.0, None, 60.0, 100.0)


def test_two_thirds_of_the_notice_must_do_with_care() -> None:
    assert saving_s(536.0, 100.0) == pytest.approx(9.0)
    assert why_not_saved(536.0, 1e6, 13.5, 100.0) == ""
    assert why_not_saved(536.0, 1e6, 13.4, 100.0) == (
        "saving its 536 MiB may take 9 s at 100 MiB/s, and 9 s of its notice are for that"
    )


def test_what_the_disk_took_is_learned_from_saves_that_say_something() -> None:
    assert SavingRate().saved(400.0, 2.0).mib_s(0.0) == pytest.approx(132.0)
    assert SavingRate().saved(20.0, 0.1).mib_s(0.0) == 64.0
    assert SavingRate().saved(400.0, 0.0).mib_s(0.0) == 64.0
    rate = SavingRate()
    for _ in range(20):
        rate = rate.saved(100.0, 10.0)
    assert rate.mib_s(0.0) == pytest.approx(10.0, abs=0.1)


def test_a_save_that_was_not_ready_in_time_says_how_fast_the_disk_is_at_the_most() -> None:
    fast = SavingRate().saved(500.0, 0.4)
    slow = fast.not_ready(10.0, 4000.0, 40.0)
    assert slow.mib_s(10.0) == 100.0
    assert slow.not_ready(20.0, 4000.0, 10.0).mib_s(20.0) == 100.0, "it says no more than that"
    assert slow.not_ready(20.0, 4000.0, 80.0).mib_s(20.0) == 50.0
    assert slow.saved(500.0, 0.4).mib_s(20.0) == 100.0, "a small one may be in the host's memory still"
    assert slow.saved(4000.0, 8.0).mib_s(20.0) > fast.mib_s(0.0) / 2, "one of its size was ready"
    assert slow.mib_s(10.0 + BELIEVED_S) == fast.mib_s(0.0), "or it would never be tried again"
    assert fast.not_ready(10.0, 4000.0, 0.0) == fast


def test_what_saving_does_not_need_of_its_part_of_the_notice_is_for_powering_off() -> None:
    assert power_off_s(60.0, 5.0) == 20.0
    assert power_off_s(60.0, 30.0) == 10.0
    assert power_off_s(60.0, 40.0) == 0.0
    assert power_off_s(3.0, 5.0) == 0.0
