"""What live tasks are told: where they begin, what they wait for, and why; and what became of predictions."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from ebbtide.matcher.match.attempts import AttemptState, Claim, EngineMachine, Seen
from ebbtide.matcher.match.matching import MatchOptions
from ebbtide.matcher.match.rounds import LIVE, LIVE_PREDICTION, OFFERS, Choice, Pool, choose, demand_of
from ebbtide.matcher.match.tasks import Task, TaskOrder, TaskPhase, cancelled, observe, outcome, released
from ebbtide.matcher.predict.predictor import Predictor, PredictorOptions
from tests.matcher.pools import NOW_S, steady_and_shaky

BOTH = {"steady": EngineMachine("steady", 8, 8), "shaky": EngineMachine("shaky", 8, 8)}


@pytest.fixture(scope="module")
def taught() -> Predictor:
    """By which every shrink counts."""
    return steady_and_shaky(PredictorOptions())


def task(name: str, cores: int = 4, duration_s: float | None = 3600.0, **more: object) -> Task:
    return Task(TaskOrder(name, ("true",), cores, duration_s, True, **more), "0a", NOW_S)  # type: ignore[arg-type]


def runs(name: str, machine: str, cores: int = 8, left_s: float = 60.0) -> Task:
    order = TaskOrder(name, ("true",), cores, 100.0 + left_s)
    return Task(order, "0a", 1.0, TaskPhase.RUNNING, machine=machine, began_at=NOW_S - 100.0, begun=1)


def chosen(
    taught: Predictor,
    waiting: list[Task],
    busy: list[Task] | None = None,
    machines: dict[str, EngineMachine] | None = None,
    options: MatchOptions = LIVE,
) -> dict[str, Choice]:
    pool = Pool(taught.copy(), frozenset({"steady", "shaky"}), options)
    return choose(waiting, [*waiting, *(busy or [])], BOTH if machines is None else machines, pool, NOW_S)


def test_a_task_waits_for_a_machine_where_it_is_done_sooner_and_says_so(taught: Predictor) -> None:
    choice = chosen(taught, [task("long")], [runs("other", "steady")])["long"]
    assert (choice.machine, choice.waits_for) == (None, "steady")
    assert [(offer.machine, offer.wait_s) for offer in choice.offers] == [("steady", 60.0), ("shaky", 0.0)]
    steady, shaky = choice.offers
    assert 60.0 + 3600.0 < steady.expected_s < shaky.expected_s
    assert choice.completion_probability == steady.completion_probability is not None
    assert choice.sentence == (
        f"it waits for steady, free in 60 s: expected to be done in {steady.expected_s:.0f} s (it keeps its cores with "
        f"{steady.completion_probability:.0%}); shaky has room now, but there it is expected to be done in "
        f"{shaky.expected_s:.0f} s (it keeps its cores with {shaky.completion_probability:.0%})"
    )


def test_promised_room_is_taken_so_that_tasks_do_not_herd(taught: Predictor) -> None:
    waiting = [task(f"t{number}", 8) for number in range(3)]
    choices = chosen(taught, waiting, [runs("other", "steady")])
    assert choices["t0"].waits_for == "steady"
    assert choices["t1"].machine == "shaky"
    # Behind what the two before it take.
    assert choices["t2"].offers[0].wait_s >= 3600.0
    herd = chosen(taught, waiting, [runs("other", "steady")], options=replace(LIVE, promises=False))
    assert [herd[name].waits_for for name in ("t0", "t1", "t2")] == ["steady"] * 3


def test_attempts_and_dislike_lead_to_the_steady_machine_and_checkpoints_away_from_it(taught: Predictor) -> None:
    busy = [runs("other", "steady", left_s=4000.0)]

    def where(one: Task) -> str | None:
        choice = chosen(taught, [one], busy)["t"]
        return choice.machine or choice.waits_for

    assert where(task("t", duration_s=1800.0)) == "shaky"
    assert where(task("t", duration_s=1800.0, preemption_aversion=0.9)) == "steady"
    assert where(replace(task("t", duration_s=1800.0), preemptions=20)) == "steady"
    soon = [runs("other", "steady", left_s=250.0)]
    for every_s, expected in ((None, "steady"), (60.0, "shaky")):
        choice = chosen(taught, [task("t", duration_s=7200.0, checkpoint_s=every_s)], soon)["t"]
        assert (choice.machine or choice.waits_for) == expected


def test_usually_a_shrink_that_leaves_a_task_its_room_is_survived() -> None:
    """Here all shrinks are by one core, and hardly any two come within one task."""
    predictor = steady_and_shaky(LIVE_PREDICTION)
    probabilities = [chosen(predictor, [task("t", cores)])["t"].completion_probability for cores in (7, 8)]
    assert None not in probabilities
    survived, none = (1.0 - (probability or 0.0) for probability in probabilities)
    assert 0.0 < 1.5 * survived < none


def test_what_a_preemption_counts_beyond_its_time_is_said_apart(taught: Predictor) -> None:
    plain = chosen(taught, [task("t")])["t"].offers
    averse = chosen(taught, [task("t", preemption_aversion=0.5)])["t"].offers
    for one, other in zip(plain, averse, strict=True):
        assert (one.machine, one.expected_s) == (other.machine, other.expected_s)
        assert one.compared_s == one.expected_s
        # One duration for each preemption.
        assert other.completion_probability is not None
        counted_s = 3600.0 * (1.0 - other.completion_probability)
        assert other.compared_s == pytest.approx(other.expected_s + counted_s)
        assert f"a preemption counts {counted_s:.0f} s more" in other.in_words


def test_a_machine_whose_cores_nobody_can_take_keeps_them_and_promises_nothing(taught: Predictor) -> None:
    machines = {**BOTH, "fixed": EngineMachine("fixed", 8, 8)}
    choice = chosen(taught, [task("t")], machines=machines)["t"]
    assert (choice.machine, choice.completion_probability) == ("fixed", None)
    assert choice.sentence == "fixed: expected to be done in 3600 s (its cores cannot be taken)"


def test_a_machine_without_history_is_taken_after_better_ones_and_promises_nothing() -> None:
    pool = Pool(Predictor(0.0), frozenset(BOTH))
    waiting = [task("t")]
    choice = choose(waiting, waiting, BOTH, pool, NOW_S)["t"]
    assert (choice.machine, choice.completion_probability) == ("shaky", None)
    assert "nothing is known of its cores" in choice.sentence


def test_a_task_that_has_no_machine_is_told_why(taught: Predictor) -> None:
    assert chosen(taught, [task("t", 9)])["t"].sentence == "no machine has 9 usable cores; the largest has 8"
    down = {"steady": replace(BOTH["steady"], up=False), "shaky": replace(BOTH["shaky"], drained="new disks")}
    assert "all are down, or drained" in chosen(taught, [task("t")], machines=down)["t"].sentence
    others = {"steady": replace(BOTH["steady"], foreign_cores=5)}
    held = chosen(taught, [task("t")], machines=others)["t"]
    assert (held.sentence, held.offers) == ("it is unknown when 4 cores become free", ())
    now = chosen(
        taught,
        [task("t")],
        [runs("one", "steady"), runs("two", "shaky")],
        options=MatchOptions(delay=False),
    )["t"]
    assert (now.machine, now.waits_for) == (None, None)
    assert now.sentence == "no machine has 4 free cores now"


def test_who_is_being_ended_makes_room_at_once_however_long_it_ran(taught: Predictor) -> None:
    old = replace(runs("old", "steady", left_s=-90.0), began_at=NOW_S - 80_000.0)
    assert chosen(taught, [task("t")], [old])["t"].offers[-1].wait_s == 20_000.0
    ending = chosen(taught, [task("t")], [replace(old, stop="preempt")])["t"]
    assert (ending.waits_for, ending.offers[0].wait_s) == ("steady", 0.25)


def test_the_best_offers_are_told_with_the_one_that_has_room_now(taught: Predictor) -> None:
    machines = {f"n{number:02}": EngineMachine(f"n{number:02}", 8, 8) for number in range(40)}
    machines["shaky"] = BOTH["shaky"]
    busy = [runs(f"r{number}", f"n{number:02}", left_s=10.0 + number) for number in range(40)]
    choice = chosen(taught, [task("t")], busy, machines)["t"]
    assert choice.waits_for == "n00"
    assert [offer.machine for offer in choice.offers] == [*(f"n{number:02}" for number in range(OFFERS)), "shaky"]
    assert "; shaky has room now" in choice.sentence


@pytest.mark.parametrize("duration_s", [None, 0.0, math.inf])
def test_estimates_that_are_missing_or_nothing_are_matched_too(taught: Predictor, duration_s: float | None) -> None:
    choice = chosen(taught, [task("t", duration_s=duration_s)])["t"]
    assert choice.machine in BOTH
    assert choice.offers[0].expected_s >= (0.0 if duration_s == 0.0 else LIVE.fallback_s)


# --- outcomes --------------------------------------------------------------------------------------------------------


def ended(task: Task, **seen: object) -> Task:
    shown = Seen(AttemptState.ENDED, "steady", Claim.BEGUN, NOW_S, **seen)  # type: ignore[arg-type]
    return observe(task, shown, NOW_S + 500.0, "ebb")[0]


def begun(predicted: float | None = 0.75, restartable: bool = True) -> Task:
    waiting = task("t")
    waiting = replace(waiting, order=replace(waiting.order, restartable=restartable))
    shown = Seen(AttemptState.RUNNING, "steady", Claim.BEGUN, NOW_S, silent_s=0.0)
    return observe(released(waiting, "steady", NOW_S, "since", predicted), shown, NOW_S, "ebb")[0]


def test_a_prediction_came_true_if_the_attempt_ended_by_itself() -> None:
    one = begun()
    for code, phase in ((0, TaskPhase.DONE), (3, TaskPhase.FAILED)):
        after = ended(one, exit_code=code)
        assert (after.phase, outcome(one, after)) == (phase, (0.75, True))
        assert outcome(after, after) is None
    assert outcome(one, one) is None


def test_a_prediction_failed_if_the_attempt_was_broken_off_and_how_long_it_ran_is_remembered() -> None:
    one = begun()
    after = ended(one)
    assert (after.phase, after.preemptions, after.ran_s) == (TaskPhase.WAITING, 1, 500.0)
    assert outcome(one, after) == (0.75, False)
    assert (after.waits_since, after.broken_off_at) == (NOW_S + 500.0, NOW_S + 500.0)
    demand = demand_of(after, NOW_S + 600.0)
    assert (demand.attempts, demand.ran_s, demand.waited_s) == (1, 500.0, 100.0)
    # The attempt is over, and is counted once.
    assert outcome(after, replace(after, sentence="other")) is None


def test_tasks_without_a_prediction_and_those_that_go_on_anyway_say_nothing() -> None:
    for one in (begun(predicted=None), begun(restartable=False)):
        assert outcome(one, ended(one, exit_code=0)) is None
        assert outcome(one, ended(one)) is None
    stopped = cancelled(begun())
    after = ended(stopped, exit_code=143)
    assert (after.phase, outcome(stopped, after)) == (TaskPhase.CANCELLED, None)
