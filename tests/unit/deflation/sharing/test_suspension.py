"""Whether a VM can be suspended: room on the disk, time in its notice, and what was learned of the disk."""

from __future__ import annotations

import pytest

from ebbtide.deflation.sharing.suspension import PRIOR_MIB_S, learned_rate, saving_s, why_not_saved


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
    assert learned_rate(64.0, 400.0, 2.0) == pytest.approx(132.0)
    assert learned_rate(64.0, 20.0, 0.1) == 64.0
    assert learned_rate(64.0, 400.0, 0.0) == 64.0
    rate = PRIOR_MIB_S
    for _ in range(20):
        rate = learned_rate(rate, 100.0, 10.0)
    assert rate == pytest.approx(10.0, abs=0.1)
