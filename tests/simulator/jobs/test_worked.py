"""Runs that can be followed by hand."""

from __future__ import annotations

import math

import pytest

from ebbtide.simulator.inputs.batches import HIGH, LOW, UNKNOWN
from ebbtide.simulator.jobs.engine import Machines
from tests.simulator.jobs.scenes import job, run

ONE = Machines(1, 4)

#: Four cores: a long job on three of them, a wide one behind it, then two narrow ones, of which one is too long for
#: the gap.
QUEUE = [job(0, 3, 10), job(1, 4, 5), job(2, 1, 8), job(3, 1, 9)]


def test_strictly_no_job_passes_the_one_that_does_not_fit() -> None:
    assert run(QUEUE, ONE, discipline="strict").spans == {0: (0, 10), 1: (10, 15), 2: (15, 23), 3: (15, 24)}


def test_conserving_what_fits_starts_and_the_wide_one_waits_for_all_of_them() -> None:
    """Job 2 starts at 2 on the free core; job 3 at 10, when the long one ends; the wide one when both are gone."""
    queue = [*QUEUE[:2], job(2, 1, 9), QUEUE[3]]
    assert run(queue, ONE, discipline="conserving").spans == {0: (0, 10), 2: (2, 11), 3: (10, 19), 1: (19, 24)}


def test_easy_lets_pass_what_does_not_delay_the_first() -> None:
    """The wide job is promised 10 s; job 2 ends right then, job 3 would end later."""
    assert run(QUEUE, ONE, discipline="easy").spans == {0: (0, 10), 2: (2, 10), 1: (10, 15), 3: (15, 24)}


def test_easy_lets_pass_what_leaves_the_first_its_room() -> None:
    """At 10 s there is a core more than job 1 wants: on it job 2 may stay as long as it likes, job 3 has none left."""
    queue = [job(0, 3, 10), job(1, 3, 5), job(2, 1, 100), job(3, 1, 100)]
    assert run(queue, ONE, discipline="easy").spans == {0: (0, 10), 1: (10, 15), 2: (2, 102), 3: (15, 115)}


def test_easy_goes_by_what_was_requested_where_it_is_told_to() -> None:
    """Job 2 says 20 s and takes 8: it may not pass, since that is not known."""
    queue = [*QUEUE[:2], job(2, 1, 8, requested_s=20)]
    assert run(queue, ONE, discipline="easy", estimates="requested").spans[2] == (15, 23)
    assert run(queue, ONE, discipline="easy", estimates="exact").spans[2] == (2, 10)


def test_easy_knows_that_what_overruns_its_request_may_end_at_any_time() -> None:
    """Job 0 said 5 s. From then on the wide job may start at any moment, so that nothing passes it."""
    queue = [job(0, 3, 10, requested_s=5), job(1, 4, 5), job(6, 1, 2)]
    assert run(queue, ONE, discipline="easy", estimates="requested").spans == {0: (0, 10), 1: (10, 15), 2: (15, 17)}


def test_easy_uses_other_machines_than_the_reserved_one() -> None:
    """Of two machines of 4 cores, the first has room for the wide job first; the long narrow ones go to the other."""
    queue = [job(0, 3, 10), job(0, 3, 20), job(1, 4, 5), job(2, 1, 50), job(3, 1, 50)]
    spans = run(queue, Machines(2, 4), discipline="easy", policy="first-fit").spans
    assert spans == {0: (0, 10), 1: (0, 20), 2: (10, 15), 3: (2, 52), 4: (15, 65)}


def test_one_pass_looks_at_so_many_tasks_only() -> None:
    queue = [job(0, 3, 10), job(1, 4, 5), job(1, 4, 5), job(2, 1, 8)]
    assert run(queue, ONE, discipline="easy", depth=3).spans[3] == (2, 10)
    assert run(queue, ONE, discipline="easy", depth=2).spans[3][0] > 2


def test_a_job_of_several_tasks_is_done_with_its_last() -> None:
    told = run([job(0, 2, 3, 10, 4)], ONE)
    assert [(r[1], r[3], r[4]) for r in told.rows] == [(0, 0, 3), (2, 3, 7), (1, 0, 10)]
    measures = told.results.measures
    assert (measures["completion_mean_s"], measures["completion_count"], measures["wait_mean_s"]) == (10, 1, 0)
    assert measures["task_wait_mean_s"] == 1
    assert measures["slowdown_mean"] == 1


@pytest.mark.parametrize(
    ("kills", "gone"),
    [("oldest", [0, 1]), ("newest", [2, 1])],
)
def test_a_shrink_kills_in_the_order_of_the_option_until_the_rest_fits(kills: str, gone: list[int]) -> None:
    """Three tasks of 2 cores on 6; from 6 to 3 cores only one can stay, and what is killed loses all its work."""
    queue = [job(t, 2, 20) for t in (0, 1, 2)]
    told = run(queue, None, [(0, "a", 6), (5, "a", 3), (10, "a", 6)], kills=kills)
    assert [int(r[0]) for r in told.rows if not r[5]] == gone
    kept = 3 - sum(gone)
    assert told.spans[kept] == (kept, kept + 20)
    # Both start again when the machine has grown.
    assert [told.spans[g] for g in gone] == [(10, 30), (10, 30)]
    results = told.results
    assert (results.kills, results.changes) == (2, 3)
    assert results.lost_core_s == sum(2 * (5 - g) for g in gone)
    assert results.waste == results.lost_core_s / (results.lost_core_s + 120)
    assert results.useful_core_s == 120
    # 6 cores for 5 s, 3 for 5 s, 6 until 30 s.
    assert results.there_core_s == 30 + 15 + 120
    assert results.used_core_s == 120 + results.lost_core_s
    assert results.goodput == 120 / 165


@pytest.mark.parametrize(("requeue", "order"), [("tail", [2, 0, 1]), ("head", [0, 1, 2])])
def test_killed_tasks_wait_at_the_head_or_the_tail_in_the_order_of_their_kills(requeue: str, order: list[int]) -> None:
    queue = [job(0, 2, 20), job(0, 2, 20), job(3, 2, 20)]
    told = run(queue, None, [(0, "a", 4), (5, "a", 0), (10, "a", 2)], requeue=requeue)
    assert [int(r[0]) for r in told.rows if r[5]] == order
    assert [told.spans[i] for i in order] == [(10, 30), (30, 50), (50, 70)]
    assert told.results.measures["task_wait_max_s"] == max(50 - 3 if requeue == "head" else 45, 45)


def test_a_task_that_ends_with_the_shrink_has_completed() -> None:
    told = run([job(0, 2, 5)], None, [(0, "a", 2), (5, "a", 0)])
    assert told.results.kills == 0
    assert told.spans == {0: (0, 5)}


def test_room_of_one_instant_is_there_for_the_arrivals_of_that_instant() -> None:
    told = run([job(0, 2, 5), job(5, 2, 1)], Machines(1, 2))
    assert told.spans[1] == (5, 6)


def test_a_killed_task_goes_to_a_machine_that_grows_at_the_same_instant() -> None:
    told = run([job(0, 2, 10)], None, [(0, "a", 2), (4, "a", 1), (4, "b", 2)])
    assert [(r[2], r[3], r[4], r[5]) for r in told.rows] == [(0, 0, 4, 0), (1, 4, 14, 1)]


def test_a_checkpoint_keeps_what_was_done_before_it() -> None:
    """10 s of use, then 1 s for the checkpoint; killed at 25 s there are two of them, so 20 s are kept and 5 lost.

    35 s take three checkpoints: 38 s. After the kill 15 s are left, with one checkpoint: from 30 to 46 s.
    """
    told = run(
        [job(0, 2, 35)], None, [(0, "a", 2), (25, "a", 0), (30, "a", 2)], checkpoint_every_s=10, checkpoint_cost_s=1
    )
    assert told.spans == {0: (30, 46)}
    assert told.results.lost_core_s == 2 * (25 - 20) + 2 * 1
    assert told.results.useful_core_s == 70
    whole = run([job(0, 2, 35)], Machines(1, 2), checkpoint_every_s=10, checkpoint_cost_s=1)
    assert whole.spans == {0: (0, 38)}
    even = run([job(0, 2, 30)], Machines(1, 2), checkpoint_every_s=10, checkpoint_cost_s=1)
    assert even.spans == {0: (0, 32)}


def test_only_some_jobs_make_checkpoints_where_it_is_said_so() -> None:
    """Of two alike that are killed at 25 s the first has 20 of its 35 s behind it, the second none."""
    shrinks = [(0, "a", 2), (25, "a", 0), (30, "a", 2)]
    told = run([job(0, 1, 35), job(0, 1, 35)], None, shrinks, checkpoint_every_s=10, checkpointed=2)
    assert told.spans == {0: (30, 45), 1: (30, 65)}
    assert told.results.lost_core_s == (25 - 20) + 25


def test_high_priority_goes_first_and_low_last_if_priorities_count() -> None:
    queue = [job(0, 2, 5), *(job(1, 2, 5, priority=p) for p in (LOW, UNKNOWN, HIGH))]
    with_priorities = run(queue, Machines(1, 2), priorities=True).spans
    assert [with_priorities[i][0] for i in (1, 2, 3)] == [15, 10, 5]
    without = run(queue, Machines(1, 2)).spans
    assert [without[i][0] for i in (1, 2, 3)] == [5, 10, 15]


def test_memory_is_room_as_well_unless_it_does_not_count() -> None:
    queue = [job(0, 1, 5, memory_mib=600), job(0, 1, 5, memory_mib=600), job(0, 1, 5)]
    assert run(queue, Machines(1, 4, 1000)).spans == {0: (0, 5), 1: (5, 10), 2: (0, 5)}
    assert run(queue, Machines(1, 4, 1000), memory=False).spans == {0: (0, 5), 1: (0, 5), 2: (0, 5)}


def test_a_job_that_no_machine_will_ever_hold_is_refused_and_counted() -> None:
    told = run([job(0, 5, 1), job(0, 4, 1)], ONE)
    assert (told.results.jobs_refused, told.results.jobs_done, told.results.jobs_left) == (1, 1, 0)
    waits = run([job(0, 5, 1), job(0, 4, 1)], None, [(0, "a", 4)])
    assert (waits.results.jobs_refused, waits.results.jobs_done, waits.results.jobs_left) == (0, 1, 1)
    told = run([job(0, 5, 1), job(0, 4, 1)], None, [(0, "a", 4)], most_cores=4)
    assert (told.results.jobs_refused, told.results.jobs_done, told.results.jobs_left) == (1, 1, 0)


def test_a_job_that_wants_more_memory_than_any_machine_has_is_refused_and_counted() -> None:
    """Under strict order it would keep all others waiting for ever."""
    queue = [job(0, 1, 5, memory_mib=2000), job(0, 1, 5, memory_mib=1000)]
    told = run(queue, Machines(1, 4, 1000), discipline="strict")
    assert (told.results.jobs_refused, told.results.jobs_done, told.results.jobs_left) == (1, 1, 0)
    assert told.results.refused_work_share == 0.5
    assert run(queue, Machines(1, 4, 1000), memory=False).results.jobs_done == 2
    told = run(queue, None, [(0, "a", 4)], most_mib=1000)
    assert (told.results.jobs_refused, told.results.jobs_done) == (1, 1)


def test_parts_of_cores_are_rounded_up_for_tasks_and_down_for_machines() -> None:
    told = run([job(0, 1.5, 5), job(0, 2.0000000001, 5)], None, [(0, "a", 4.9)])
    assert told.spans == {0: (0, 5), 1: (0, 5)}
    assert told.results.there_core_s == 20


def test_what_takes_no_time_ends_where_it_starts() -> None:
    told = run([job(1, 4, 0), job(1, 4, 0, 0), job(1, 4, 2)], ONE)
    assert told.spans == {0: (1, 1), 1: (1, 1), 2: (1, 3)}
    assert told.results.jobs_done == 3


def test_only_what_lies_in_the_window_is_measured() -> None:
    """Job 1 comes in it; of the work, what was done in it: 4 of 10 s of job 0, and 6 of 8 of job 1."""
    told = run([job(0, 1, 10), job(7, 1, 8), job(15, 1, 4)], Machines(1, 2), from_s=6, to_s=13)
    results = told.results
    assert results.measures["completion_count"] == 1
    assert results.measures["completion_mean_s"] == 8
    assert results.useful_core_s == pytest.approx(4 + 6)
    assert results.there_core_s == 14
    assert results.jobs_done == 3


def test_a_trace_that_begins_late_is_measured_from_its_first_event_on() -> None:
    told = run([job(1e6, 1, 10)], Machines(1, 2))
    assert told.results.there_core_s == 20
    assert told.results.ended_s == 1e6 + 10


def test_no_jobs_at_all_are_no_figures() -> None:
    results = run([], ONE).results
    assert (results.jobs, results.events) == (0, 0)
    assert math.isnan(results.measures["wait_mean_s"])
    assert math.isnan(results.waste)


def test_percentiles_are_of_all_jobs_and_those_that_are_never_done_wait_for_ever() -> None:
    """Six take turns on one core, and wait 0 to 5 s; four want two cores that never come."""
    queue = [job(0, 1, 1.0)] * 6 + [job(0, 2, 1.0)] * 4
    measures = run(queue, moves=[(0.0, "m0", 1.0)]).results.measures
    assert (measures["wait_count"], measures["wait_mean_s"]) == (6, 2.5)
    assert measures["wait_p50_s"] == 4.0
    assert measures["task_wait_p50_s"] == 4.0
    assert measures["wait_p90_s"] == measures["completion_p90_s"] == math.inf
    later = run(queue, moves=[(0.0, "m0", 1.0)], from_s=1.0).results.measures
    assert math.isnan(later["wait_p50_s"])


def test_the_least_loaded_node_has_the_fewest_cores_in_use_whatever_it_has_free() -> None:
    """A node of 4 cores that has none in use is taken before one of 9 that has one, and the first of those alike."""
    queue = [job(0, 1, 10.0), job(1, 1, 10.0), job(2, 3, 10.0), job(3, 2, 10.0), job(4, 6, 10.0)]
    moves = [(0.0, "m0", 9.0), (0.0, "m1", 4.0)]
    rows = run(queue, moves=moves, policy="least-loaded").rows
    assert [int(row[2]) for row in sorted(rows)] == [0, 1, 0, 1, 0]


def test_worst_fit_takes_the_node_with_the_most_idle_cores_whatever_is_in_use() -> None:
    """Of 9 and 4 cores the first has more to spare until 6 of it are taken, and no longer when it has shrunk to 3."""
    queue = [job(0, 1, 10.0), job(1, 5, 10.0), job(2, 2, 10.0), job(20, 2, 10.0)]
    moves = [(0.0, "m0", 9.0), (0.0, "m1", 4.0), (15.0, "m0", 3.0)]
    rows = run(queue, moves=moves, policy="worst-fit").rows
    assert [int(row[2]) for row in sorted(rows)] == [0, 0, 1, 1]


def test_node_filling_fills_the_node_that_reports_and_random_spreads() -> None:
    """Eight tasks of one core at once on eight machines of two: whatever the draws, a filled node is full at once."""
    queue = [job(0, 1, *(10.0,) * 8)]
    filled = run(queue, Machines(8, 2), policy="filling", seed=3)
    assert len({int(r[2]) for r in filled.rows}) == 4
    spread = {len({int(r[2]) for r in run(queue, Machines(8, 2), policy="random", seed=s).rows}) for s in range(8)}
    assert max(spread) > 4
    again = [run(queue, Machines(8, 2), policy="random", seed=5).rows for _ in range(2)]
    assert again[0] == again[1]
