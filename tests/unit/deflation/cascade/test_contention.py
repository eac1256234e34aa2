"""Another program that undoes what is put right."""

from __future__ import annotations

from ebbtide.deflation.cascade.contention import WINDOW_S, Contention


def test_what_is_undone_three_times_within_minutes_is_a_contention_with_its_rate_until_it_ends() -> None:
    contention = Contention()
    for now in (0.0, 4.0):
        contention.repaired(now)
        assert contention.sentence == "", "that may be an accident"
    contention.repaired(12.0)
    assert contention.sentence == "another program undoes what is put right: 3 times in 12 s"
    contention.looked(20.0)
    assert contention.sentence, "a look in between proves nothing"
    contention.looked(13.0 + WINDOW_S)
    assert contention.sentence == ""
