"""Another program that undoes what is put right."""

from __future__ import annotations

from ebbtide.deflation.cascade.contention import WINDOW_S, Contention
from ebbtide.deflation.cascade.reconcile import Resize, SetQuota
from ebbtide.deflation.resources import ResourceVector

WANTED, OTHER = ResourceVector(cpu_cores=1.0), ResourceVector(cpu_cores=2.0)
QUOTA, SIZE, NOTHING = frozenset({SetQuota}), frozenset({Resize}), frozenset[type[SetQuota]]()


def test_what_is_undone_three_times_within_minutes_is_a_contention_with_its_rate_until_it_ends() -> None:
    contention = Contention()
    contention.repaired(WANTED, QUOTA)
    for now in (0.0, 4.0):
        contention.looked(now, WANTED, QUOTA)
        assert contention.sentence == "", "that may be an accident"
        contention.repaired(WANTED, QUOTA)
    contention.looked(12.0, WANTED, QUOTA)
    assert contention.sentence == "another program undoes what is put right: 3 times in 12 s"
    contention.looked(20.0, WANTED, NOTHING)
    assert contention.sentence, "a look in between proves nothing"
    contention.looked(13.0 + WINDOW_S, WANTED, NOTHING)
    assert contention.sentence == ""


def test_a_repair_that_falls_short_again_and_again_is_undone_by_nobody() -> None:
    contention = Contention()
    for now in range(10):
        contention.looked(now, WANTED, QUOTA | SIZE if now == 0 else SIZE)
        contention.repaired(WANTED, QUOTA if now == 0 else NOTHING)
    assert contention.sentence == ""


def test_what_was_undone_counts_once_until_it_is_put_right_again() -> None:
    contention = Contention()
    contention.repaired(WANTED, QUOTA)
    for now in range(10):
        contention.looked(now, WANTED, QUOTA)
    assert contention.sentence == ""


def test_what_differs_because_something_else_is_wanted_now_was_not_undone() -> None:
    contention = Contention()
    for now in range(10):
        contention.repaired(WANTED, QUOTA)
        contention.looked(now, OTHER, QUOTA)
    assert contention.sentence == ""
