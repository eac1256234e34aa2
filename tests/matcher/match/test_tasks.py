"""The tasks' state machine: whatever an engine shows, no task is lost and none begins twice unless it may."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from ebbtide.matcher.match.attempts import (
    RECOUNTED,
    AttemptState,
    Claim,
    EngineMachine,
    Look,
    Seen,
    attempt_name,
    task_of,
)
from ebbtide.matcher.match.notices import Notice
from ebbtide.matcher.match.rounds import Pool
from ebbtide.matcher.match.tasks import (
    BEGIN_LIMIT_S,
    HEARTBEAT_LIMIT_S,
    LAUNCH_LIMIT_S,
    MOST_LAUNCHES,
    REFUSED_PAUSE_S,
    SILENCE_LIMIT_S,
    Cancel,
    Drain,
    Forget,
    Instruction,
    Release,
    SetCores,
    Signal,
    Submit,
    Task,
    TaskOrder,
    TaskPhase,
    Undrain,
    cancelled,
    observe,
    preempted,
    refused,
)
from ebbtide.matcher.match.turns import LEAVING, NO_CORES, turn, without
from ebbtide.matcher.predict.predictor import Predictor

ORDER = TaskOrder("train", ("true",), cores=2)
SAFE = replace(ORDER, restartable=True)
WAITING = Task(ORDER, "0a", 1.0)
NAME = WAITING.attempt_name("ebb")
RELEASED = replace(WAITING, phase=TaskPhase.RELEASED, machine="n1", released_at=5.0)
RUNNING = replace(RELEASED, phase=TaskPhase.RUNNING, began_at=6.0, begun=1, began_attempt=1)
BEGUN = Seen(AttemptState.RUNNING, "n1", Claim.BEGUN, 6.0)
LOST = Seen(AttemptState.ENDED, "n1", Claim.BEGUN, 6.0, reason="node fail")


def look_at(task: Task, seen: Seen | None, now: float = 10.0) -> tuple[Task, tuple[Instruction, ...]]:
    return observe(task, seen, now, "ebb")


def restartable(task: Task) -> Task:
    return replace(task, order=SAFE)


def test_the_name_of_an_attempt_says_whose_it_is() -> None:
    assert attempt_name("ebb", "a-1", "0a", 2) == "ebb.a-1.0a.2"
    assert task_of("ebb.a-1.0a.2", "ebb") == ("a-1", "0a", 2)
    assert task_of("other.a-1.0a.2", "ebb") is None
    assert task_of("somebody's job", "ebb") is None


def test_a_task_that_the_engine_does_not_know_is_given_to_it() -> None:
    assert look_at(WAITING, None) == (WAITING, (Submit(NAME, ORDER),))


def test_a_task_that_the_engine_does_not_take_is_given_to_it_after_pauses_and_fails_at_last() -> None:
    task, now = WAITING, 10.0
    for number in range(1, MOST_LAUNCHES):
        task = refused(replace(task, phase=TaskPhase.RELEASED, machine="n1"), "DOS line breaks", now)
        assert (task.phase, task.machine, task.refusals) == (TaskPhase.WAITING, None, number)
        pause_s = REFUSED_PAUSE_S * 2 ** (number - 1)
        assert look_at(task, None, now + pause_s - 0.1) == (task, ())
        now += pause_s
        assert look_at(task, None, now) == (task, (Submit(NAME, ORDER),))
    failed = refused(task, "DOS line breaks", now)
    assert (failed.phase, failed.sentence) == (TaskPhase.FAILED, "it could not be begun 5 times: DOS line breaks")
    taken, _ = look_at(task, Seen(AttemptState.HELD), now)
    assert (taken.refusals, taken.refused_at, taken.launches) == (0, None, 0)


def test_an_engine_that_takes_no_more_for_now_fails_no_task() -> None:
    task, now = WAITING, 10.0
    for _ in range(3 * MOST_LAUNCHES):
        task = refused(task, "AssocMaxSubmitJobLimit", now, full=True)
        assert task.phase is TaskPhase.WAITING
        now += REFUSED_PAUSE_S * 16
        assert look_at(task, None, now)[1] == (Submit(NAME, ORDER),)


def test_a_task_that_the_engine_does_not_take_takes_no_cores_from_those_behind_it() -> None:
    first, second = (Task(TaskOrder(name, ("true",), cores=2), "0a", 0.0) for name in ("first", "second"))
    look = Look({"n1": EngineMachine("n1", 2, 2)}, {second.attempt_name("ebb"): Seen(AttemptState.HELD)})
    made = turn([refused(first, "no", 9.0), second], look, {}, Pool(Predictor(10.0)), 10.0, "ebb")
    assert made.instructions == (Release(second.attempt_name("ebb"), "n1"),)


def test_a_release_that_did_not_arrive_is_matched_anew() -> None:
    after, steps = look_at(RELEASED, Seen(AttemptState.HELD))
    assert (after.phase, after.machine, steps) == (TaskPhase.WAITING, None, ())


def test_what_begins_runs_and_what_ends_with_0_is_done() -> None:
    after, steps = look_at(RELEASED, BEGUN)
    assert (after.phase, after.machine, after.began_at, after.begun, steps) == (TaskPhase.RUNNING, "n1", 6.0, 1, ())
    ended = Seen(AttemptState.ENDED, "n1", Claim.BEGUN, 6.0, exit_code=0, ended_at=9.0)
    after, steps = look_at(after, ended)
    assert (after.phase, after.ended_at, after.exit_code, steps) == (TaskPhase.DONE, 9.0, 0, (Forget(NAME),))


def test_a_short_task_that_ended_between_two_looks_has_begun_once() -> None:
    after, _ = look_at(RELEASED, Seen(AttemptState.GONE, "n1", Claim.BEGUN, 6.0, exit_code=0, ended_at=6.1))
    assert (after.phase, after.begun, after.began_at) == (TaskPhase.DONE, 1, 6.0)


def test_a_command_that_fails_is_not_begun_again_even_where_it_may_be() -> None:
    after, _ = look_at(restartable(RUNNING), Seen(AttemptState.ENDED, "n1", Claim.BEGUN, 6.0, exit_code=3))
    assert (after.phase, after.exit_code) == (TaskPhase.FAILED, 3)
    assert "ended with 3" in after.sentence


def test_a_lost_task_is_begun_again_only_where_it_may_be() -> None:
    after, _ = look_at(RUNNING, LOST)
    assert after.phase is TaskPhase.FAILED
    assert "not restartable" in after.sentence
    assert "node fail" in after.sentence
    after, _ = look_at(restartable(RUNNING), LOST)
    assert (after.phase, after.attempt, after.preemptions, after.machine) == (TaskPhase.WAITING, 2, 1, None)


@pytest.mark.parametrize("state", [AttemptState.ENDED, AttemptState.GONE])
def test_what_its_engine_has_lost_is_begun_nowhere_else_while_its_command_goes_on(state: AttemptState) -> None:
    after, steps = look_at(restartable(RUNNING), replace(LOST, state=state, silent_s=3.0))
    assert (after.phase, after.attempt, steps) == (TaskPhase.RUNNING, 1, ())
    assert "its command goes on" in after.sentence
    assert look_at(cancelled(RUNNING), replace(LOST, state=state, silent_s=3.0))[1] == (Cancel(NAME),)
    ended, _ = look_at(after, replace(LOST, state=state, silent_s=3.0, exit_code=0))
    assert ended.phase is TaskPhase.DONE
    again, _ = look_at(after, replace(LOST, state=state, silent_s=HEARTBEAT_LIMIT_S + 1))
    assert (again.phase, again.attempt) == (TaskPhase.WAITING, 2)


@pytest.mark.parametrize(("code", "phase"), [(None, "waiting"), (0, "done"), (3, "failed")])
def test_what_its_engine_takes_to_run_and_nobody_has_heard_of_for_long_is_ended(code: int | None, phase: str) -> None:
    task = restartable(RUNNING)
    assert look_at(task, replace(BEGUN, silent_s=SILENCE_LIMIT_S)) == (task, ())
    after, steps = look_at(task, replace(BEGUN, silent_s=SILENCE_LIMIT_S + 1))
    assert (after.stop, steps) == ("lost", (Cancel(NAME),))
    assert "does not know" in after.sentence
    ended, _ = look_at(after, replace(LOST, silent_s=SILENCE_LIMIT_S + 2, exit_code=code))
    assert ended.phase == phase


def test_what_its_engine_has_suspended_is_silent_for_good_reason() -> None:
    task = restartable(RUNNING)
    assert look_at(task, replace(BEGUN, silent_s=100 * SILENCE_LIMIT_S, suspended=True)) == (task, ())


def test_what_runs_on_a_machine_that_stands_still_is_silent_for_good_reason() -> None:
    look = Look({"n1": EngineMachine("n1", 4, 4)}, {NAME: replace(BEGUN, silent_s=SILENCE_LIMIT_S + 60.0)})
    still = turn([RUNNING], look, {"n1": 4}, Pool(Predictor(10.0)), 10.0, "ebb", paused=frozenset({"n1"}))
    assert (still.changed, still.instructions) == ((), ())
    gone = turn([RUNNING], look, {"n1": 4}, Pool(Predictor(10.0)), 10.0, "ebb", paused=frozenset({"n2"}))
    assert gone.instructions == (Cancel(NAME),)


@pytest.mark.parametrize("state", [AttemptState.ENDED, AttemptState.GONE])
def test_what_its_engine_has_lost_with_a_machine_that_stands_still_is_begun_nowhere_else(state: AttemptState) -> None:
    task = restartable(RUNNING)
    silent = replace(LOST, state=state, silent_s=10 * SILENCE_LIMIT_S)
    pool = Pool(Predictor(10.0))
    (still,) = turn([task], Look({}, {NAME: silent}), {}, pool, 10.0, "ebb", paused=frozenset({"n1"})).changed
    assert (still.phase, still.attempt, still.machine) == (TaskPhase.RUNNING, 1, "n1")
    assert "its command goes on" in still.sentence
    # It ended while nobody could hear of it, or its VM is back or gone and nothing is heard.
    done, _ = look_at(still, replace(silent, suspended=True, exit_code=0))
    assert done.phase is TaskPhase.DONE
    (again,) = turn([still], Look({}, {NAME: silent}), {}, pool, 10.0, "ebb").changed
    assert (again.phase, again.attempt) == (TaskPhase.WAITING, 2)


def test_attempts_are_limited() -> None:
    after, _ = look_at(replace(restartable(RUNNING), begun=5), LOST)
    assert after.phase is TaskPhase.FAILED
    assert "begun 5 times" in after.sentence


def test_an_engine_that_forgot_a_task_before_it_began_gets_the_same_attempt_again() -> None:
    """Its record sees to it that only one of the two begins."""
    after, steps = look_at(RELEASED, None)
    assert (after.phase, after.attempt, steps) == (TaskPhase.WAITING, 1, (Submit(NAME, ORDER),))


@pytest.mark.parametrize("state", [AttemptState.HELD, AttemptState.RELEASED])
def test_an_engine_that_forgot_that_a_task_began_may_not_begin_it_again(state: AttemptState) -> None:
    after, steps = look_at(RUNNING, replace(BEGUN, state=state))
    assert (after.stop, steps) == ("lost", (Cancel(NAME),))
    ended, _ = look_at(after, replace(LOST))
    assert ended.phase is TaskPhase.FAILED
    again, _ = look_at(restartable(after), replace(LOST))
    assert (again.phase, again.attempt) == (TaskPhase.WAITING, 2)


def test_what_has_begun_goes_on_without_its_record_and_ends_as_its_engine_says() -> None:
    running = Seen(AttemptState.RUNNING, "n1")
    assert look_at(RUNNING, running, 6.0 + LAUNCH_LIMIT_S) == (RUNNING, ())
    failed, _ = look_at(restartable(RUNNING), Seen(AttemptState.ENDED, "n1", exit_code=7))
    assert (failed.phase, failed.exit_code, failed.begun) == (TaskPhase.FAILED, 7, 1)
    broken_off, _ = look_at(RUNNING, Seen(AttemptState.ENDED, "n1", reason="node fail"))
    assert broken_off.phase is TaskPhase.FAILED


def test_what_has_begun_and_nobody_knows_any_more_is_ended_and_begun_again_only_where_it_may_be() -> None:
    lost, steps = look_at(RUNNING, None)
    assert (lost.phase, lost.stop, steps) == (TaskPhase.RUNNING, "lost", (Cancel(NAME),))
    sealed = Seen(AttemptState.GONE, claim=Claim.SEALED)
    ended, _ = look_at(lost, sealed)
    assert (ended.phase, ended.preemptions) == (TaskPhase.FAILED, 1)
    assert "not restartable" in ended.sentence
    again, _ = look_at(restartable(lost), sealed)
    assert (again.phase, again.attempt, again.preemptions) == (TaskPhase.WAITING, 2, 1)


@pytest.mark.parametrize("state", [AttemptState.HELD, AttemptState.RELEASED])
@pytest.mark.parametrize("wanted", [False, True])
def test_what_has_begun_has_begun_however_often_its_engine_shows_it_as_new_without_its_record(
    state: AttemptState, wanted: bool
) -> None:
    task = RUNNING if wanted else cancelled(RUNNING)
    # Its scheduler and its record are lost, and the first call to end it does not arrive.
    for _ in range(2):
        task, steps = look_at(task, Seen(state))
        assert (task.phase, task.machine, steps) == (TaskPhase.RUNNING, "n1", (Cancel(NAME),))
    task, _ = look_at(task, Seen(state, claim=Claim.SEALED))
    task, _ = look_at(task, Seen(AttemptState.GONE, claim=Claim.SEALED))
    phase, said = (TaskPhase.FAILED, "not restartable") if wanted else (TaskPhase.CANCELLED, "while it ran on n1")
    assert (task.phase, said in task.sentence) == (phase, True)


def test_a_command_that_does_not_begin_where_its_engine_says_that_it_runs_is_taken_back() -> None:
    running = Seen(AttemptState.RUNNING, "n1")
    assert look_at(RELEASED, running, 5.0 + LAUNCH_LIMIT_S) == (RELEASED, ())
    after, steps = look_at(RELEASED, running, 6.0 + LAUNCH_LIMIT_S)
    assert (after.stop, after.begun, steps) == ("again", 0, (Cancel(NAME, begun_too=False),))


def test_what_does_not_begin_is_taken_back_unless_it_begins_after_all() -> None:
    released = Seen(AttemptState.RELEASED, "n1")
    assert look_at(RELEASED, released, 5.0 + BEGIN_LIMIT_S) == (RELEASED, ())
    after, steps = look_at(RELEASED, released, 6.0 + BEGIN_LIMIT_S)
    assert (after.stop, steps) == ("again", (Cancel(NAME, begun_too=False),))
    sealed, _ = look_at(after, Seen(AttemptState.ENDED, claim=Claim.SEALED))
    assert (sealed.phase, sealed.attempt, sealed.preemptions) == (TaskPhase.WAITING, 2, 0)
    begun, steps = look_at(after, BEGUN)
    assert (begun.phase, begun.stop, steps) == (TaskPhase.RUNNING, "", ())
    ended, _ = look_at(after, Seen(AttemptState.GONE, "n1", Claim.BEGUN, 6.0, exit_code=0))
    assert ended.phase is TaskPhase.DONE
    early, _ = look_at(RELEASED, released, 1.0)  # the clock was set back
    assert look_at(early, released, 2.0 + BEGIN_LIMIT_S)[0].stop == "again"


def test_each_attempt_that_does_not_begin_gives_the_next_one_twice_the_time() -> None:
    task, now, waits = RELEASED, 5.0, []
    for _ in range(8):
        seen, began = Seen(AttemptState.RELEASED, "n1"), now
        while not task.stop:
            now += BEGIN_LIMIT_S
            task, _ = look_at(task, seen, now + 0.1)
        waits.append((now - began) / BEGIN_LIMIT_S)
        task, _ = look_at(task, Seen(AttemptState.ENDED, claim=Claim.SEALED), now)
        assert (task.phase, task.stop) == (TaskPhase.WAITING, "")
        task = replace(task, phase=TaskPhase.RELEASED, machine="n1", released_at=now)
    assert waits == [1, 2, 4, 8, 16, 32, 64, 64]
    begun, _ = look_at(task, BEGUN, now)
    assert (begun.phase, begun.unbegun) == (TaskPhase.RUNNING, 0)


def test_a_cancelled_task_is_sealed_and_never_begins() -> None:
    after, steps = look_at(cancelled(WAITING), None)
    assert (after.phase, steps) == (TaskPhase.WAITING, (Cancel(NAME),))
    after, _ = look_at(after, Seen(AttemptState.GONE, claim=Claim.SEALED))
    assert after.phase is TaskPhase.CANCELLED


def test_a_running_task_is_cancelled_and_one_that_was_done_first_is_done() -> None:
    stopping = cancelled(RUNNING)
    assert look_at(stopping, BEGUN)[1] == (Cancel(NAME),)
    after, _ = look_at(stopping, Seen(AttemptState.ENDED, "n1", Claim.BEGUN, exit_code=143))
    assert after.phase is TaskPhase.CANCELLED
    after, _ = look_at(stopping, Seen(AttemptState.ENDED, "n1", Claim.BEGUN, exit_code=0))
    assert after.phase is TaskPhase.DONE
    assert cancelled(after) == after


def test_what_an_engine_ends_is_broken_off_and_not_what_its_owner_wanted() -> None:
    # A scheduler that has lost its state gives a job's number to another job, and ends the wrong one.
    after, steps = look_at(WAITING, Seen(AttemptState.ENDED, reason="cancelled"))
    assert (after.stop, steps) == ("again", (Cancel(NAME, begun_too=False),))
    after, _ = look_at(restartable(RUNNING), replace(LOST, reason="cancelled"))
    assert (after.phase, after.attempt) == (TaskPhase.WAITING, 2)


def test_an_engine_that_ends_attempts_before_they_begin_is_tried_again_a_few_times() -> None:
    task = RELEASED
    failed = Seen(AttemptState.ENDED, reason="failed, exit code 98")
    for _ in range(MOST_LAUNCHES - 1):
        task, steps = look_at(task, failed)
        assert steps == (Cancel(task.attempt_name("ebb"), begun_too=False),)
        task, _ = look_at(task, replace(failed, claim=Claim.SEALED))
        assert task.phase is TaskPhase.WAITING
    task, _ = look_at(task, failed)
    assert task.phase is TaskPhase.FAILED
    assert "exit code 98" in task.sentence


def test_a_task_that_has_ended_leaves_nothing_alive() -> None:
    done = replace(RUNNING, phase=TaskPhase.DONE)
    assert look_at(done, Seen(AttemptState.RELEASED, "n1")) == (done, (Cancel(NAME),))


def test_a_shrink_that_leaves_room_harms_nobody_and_a_larger_one_the_latest_that_may_be_harmed() -> None:
    tasks = [
        replace(RUNNING, order=replace(SAFE, name="old"), began_at=1.0),
        replace(RUNNING, order=replace(SAFE, name="young"), began_at=9.0),
        replace(RUNNING, order=replace(ORDER, name="fixed"), began_at=10.0),
    ]

    def victims(cores: int) -> list[str]:
        changed = preempted(tasks, {"n1": EngineMachine("n1", 8, cores)})
        assert all(task.stop == "preempt" for task in changed)
        return [task.name for task in changed]

    assert victims(6) == []
    assert victims(5) == victims(4) == ["young"]
    assert victims(2) == victims(0) == ["young", "old"]
    stopping = [replace(tasks[0], stop="preempt"), *tasks[1:]]
    assert preempted(stopping, {"n1": EngineMachine("n1", 8, 4)}) == []


def test_an_attempt_that_has_not_begun_is_younger_than_what_runs_whenever_an_earlier_one_began() -> None:
    ran = replace(RUNNING, order=replace(SAFE, name="ran"), began_at=1000.0, released_at=990.0)
    again = replace(ran, order=replace(SAFE, name="again"), phase=TaskPhase.RELEASED, began_at=10.0, released_at=2000.0)
    (victim,) = preempted([ran, again], {"n1": EngineMachine("n1", 8, ran.order.cores)})
    assert victim.name == "again", "it has no work to lose"


def test_cores_of_machines_follow_what_the_manager_knows() -> None:
    machines = {
        "n1": EngineMachine("n1", 4, 4),
        "n2": EngineMachine("n2", 4, 0, drained=NO_CORES),
        "n3": EngineMachine("n3", 4, 4),
        "n4": EngineMachine("n4", 4, 3),
        "n5": EngineMachine("n5", 4, 0, drained="new disks"),
        "n6": EngineMachine("n6", 4, 4, drained=RECOUNTED),
    }
    made = turn([], Look(machines), {"n1": 0, "n2": 9, "n3": 2, "n5": 4}, Pool(Predictor(10.0)), 10.0, "ebb")
    assert made.instructions == (
        SetCores("n1", 0), Drain("n1", NO_CORES), SetCores("n2", 4), Undrain("n2"), SetCores("n3", 2),
        SetCores("n5", 4), Undrain("n6"),
    )  # fmt: skip
    assert made.machines["n2"].usable_cores == 4
    assert made.machines["n5"].drained == "new disks"


def test_a_machine_that_is_to_be_given_back_takes_no_task_and_the_next_of_its_name_does() -> None:
    machines = {"n1": EngineMachine("n1", 4, 4), "n2": EngineMachine("n2", 4, 0, drained=NO_CORES)}
    pool = Pool(Predictor(10.0))
    task = Task(TaskOrder("t", ("true",)), "0a", 0.0)
    look = Look(machines, {task.attempt_name("ebb"): Seen(AttemptState.HELD)})
    made = turn([task], look, {"n2": 0}, pool, 10.0, "ebb", {"n1", "n2"})
    assert made.instructions == (Drain("n1", LEAVING),)
    assert made.choices["t"].machine is None
    again = turn([task], Look(made.machines, look.attempts), {"n2": 0}, pool, 11.0, "ebb", {"n2"})
    assert again.instructions[0] == Undrain("n1")
    assert again.choices["t"].machine == "n1"


def test_machines_that_are_no_vms_of_ours_are_neither_drained_nor_is_their_drain_taken_away() -> None:
    machines = {
        # Without a vcore; and what another manager has closed, which has its own reasons and its own label.
        "foreign": EngineMachine("foreign", 4, 0),
        "theirs-1": EngineMachine("theirs-1", 4, 4, drained="ebbtide b: it is to be given back"),
        "theirs-2": EngineMachine("theirs-2", 4, 4, drained="ebbtide b: its VM is being preempted"),
        "theirs-3": EngineMachine("theirs-3", 4, 0, drained="ebbtide b: no core is left"),
    }
    made = turn([], Look(machines), {}, Pool(Predictor(10.0)), 10.0, "ebb")
    assert (made.instructions, made.machines) == ((), machines)
    # Nor do those with another label touch what the default one has closed.
    closed = turn([], Look({"n1": EngineMachine("n1", 4, 4)}), {}, Pool(Predictor(10.0)), 10.0, "ebb", {"n1"})
    assert closed.instructions == (Drain("n1", LEAVING),)
    assert turn([], Look(closed.machines), {}, Pool(Predictor(11.0)), 11.0, "b").instructions == ()


@pytest.mark.parametrize("label", ["ebb", "b"])
def test_what_a_manager_has_closed_it_opens_also_where_its_vm_is_gone_for_good(label: str) -> None:
    machines = {"n1": EngineMachine("n1", 4, 4), "n2": EngineMachine("n2", 4, 4)}
    notice = {"n1": Notice(10.0, 30.0)}
    made = turn([], Look(machines), {"n1": 4, "n2": 0}, Pool(Predictor(10.0)), 10.0, label, notices=notice)
    assert [type(one) for one in made.instructions] == [Drain, SetCores, Drain]
    made = turn([], Look(made.machines), {}, Pool(Predictor(11.0)), 11.0, label)
    assert made.instructions == (Undrain("n1"), Undrain("n2"))


def test_a_vm_that_was_closed_without_a_label_is_opened_by_the_manager_that_has_it() -> None:
    machines = {"n1": EngineMachine("n1", 4, 0, drained=NO_CORES)}
    made = turn([], Look(machines), {"n1": 2}, Pool(Predictor(10.0)), 10.0, "b")
    assert made.instructions == (SetCores("n1", 2), Undrain("n1"))


def test_who_must_make_room_is_ended_in_the_turn_that_sees_it_and_begun_again_in_the_one_that_sees_it_gone() -> None:
    task = replace(RUNNING, order=SAFE)
    machines = {"n1": EngineMachine("n1", 4, 4), "n2": EngineMachine("n2", 4, 4)}
    made = turn([task], Look(machines, {NAME: BEGUN}), {"n1": 1}, Pool(Predictor(10.0)), 10.0, "ebb")
    assert made.instructions == (SetCores("n1", 1), Cancel(NAME))
    (ending,) = made.changed
    gone = {NAME: Seen(AttemptState.ENDED, "n1", Claim.BEGUN, 6.0, reason="cancelled")}
    made = turn([ending], Look(made.machines, gone), {"n1": 1}, Pool(Predictor(11.0)), 11.0, "ebb")
    (again,) = made.changed
    anew = again.attempt_name("ebb")
    assert (again.preemptions, again.attempt, again.machine) == (1, 2, "n2")
    assert made.instructions == (Forget(NAME), Submit(anew, SAFE), Release(anew, "n2"))


class AnyEngine(RuleBasedStateMachine):
    """An engine that loses, repeats and kills at will; only records, which the test knows, are to be trusted."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 10.0
        orders = {"safe": replace(SAFE, checkpoint_signal="USR1"), "once": replace(ORDER, checkpoint_signal="TERM")}
        self.tasks = {name: Task(replace(order, name=name), "0a", 1.0) for name, order in orders.items()}
        self.ended: dict[str, Task] = {}
        #: Cancelled by their owner.
        self.unwanted: set[str] = set()
        self.engine: dict[str, AttemptState] = {}
        self.where: dict[str, str] = {}
        self.claims: dict[str, Claim] = {}
        self.codes: dict[str, int] = {}
        self.begun: list[str] = []
        #: Attempts whose commands run, whatever the engine thinks.
        self.alive: set[str] = set()
        #: That its machine is about to go, unless that was withdrawn.
        self.notice: Notice | None = None

    @rule(going=st.booleans())
    def a_preemption_begins_or_is_withdrawn(self, going: bool) -> None:
        self.notice = Notice(self.now, 2 * BEGIN_LIMIT_S) if going else None

    @rule(
        carried_out=st.integers(0, 6), room=st.integers(0, 4), meanwhile=st.sampled_from([""] * 12 + ["safe", "once"])
    )
    def a_turn(self, carried_out: int, room: int, meanwhile: str = "") -> None:
        """The manager looks, stores, and carries out some of what it wanted before it is killed.

        :param meanwhile: a task that its owner cancels while the turn is thought over.
        """
        self.now += 1.0
        going = self.notice
        notices = {"n1": replace(going, passed_s=self.now - going.at)} if going is not None else {}
        attempts = {
            name: Seen(
                self.engine.get(name, AttemptState.GONE),
                self.where.get(name),
                self.claims.get(name, Claim.NONE),
                6.0 if self.claims.get(name) is Claim.BEGUN else None,
                self.codes.get(name) if self.engine.get(name, AttemptState.GONE) in ENDED else None,
                silent_s=3.0 if name in self.alive else 1e3,
            )
            for name in {*self.engine, *self.claims}
        }
        look = Look({"n1": EngineMachine("n1", 4, room)}, attempts)
        pool = Pool(Predictor(self.now))
        made = turn(tuple(self.tasks.values()), look, {}, pool, self.now, "ebb", frozenset(), notices)
        assert not (notices and any(isinstance(one, Release) for one in made.instructions))
        if meanwhile in self.tasks:
            self.unwanted.add(meanwhile)
            self.tasks[meanwhile] = cancelled(self.tasks[meanwhile])
            made = without(made, {meanwhile}, "ebb")
        for task in made.changed:
            self.tasks[task.name] = task
            if task.final:
                self.ended[task.name] = self.tasks.pop(task.name)
        for instruction in made.instructions[:carried_out]:
            self._carry_out(instruction)

    def _carry_out(self, instruction: Instruction) -> None:
        match instruction:
            case Submit(attempt):
                self.engine.setdefault(attempt, AttemptState.HELD)
            case Release(attempt, machine) if self.engine.get(attempt) is AttemptState.HELD:
                self.engine[attempt], self.where[attempt] = AttemptState.RELEASED, machine
            case Cancel(attempt, begun_too):
                claim = self.claims.setdefault(attempt, Claim.SEALED)
                if (claim is Claim.SEALED or begun_too) and attempt in self.engine:
                    if self.engine[attempt] is AttemptState.RUNNING:
                        self.alive.discard(attempt)
                    self.engine[attempt] = AttemptState.ENDED
            case Signal(attempt):
                assert self.claims[attempt] is Claim.BEGUN, "there is a command to be told"
            case Forget(attempt) if self.engine.get(attempt) is AttemptState.ENDED:
                del self.engine[attempt]

    @rule(data=st.data())
    def something_begins(self, data: st.DataObject) -> None:
        ready = sorted(name for name, state in self.engine.items() if state is AttemptState.RELEASED)
        if ready:
            self._begin(data.draw(st.sampled_from(ready)))

    def _begin(self, name: str) -> None:
        if name in self.claims:
            self.engine[name] = AttemptState.ENDED
        else:
            self.claims[name] = Claim.BEGUN
            self.engine[name] = AttemptState.RUNNING
            self.begun.append(name)
            self.alive.add(name)

    @rule(data=st.data(), code=st.sampled_from([0, 0, 0, None, 75, 137]))
    def something_ends(self, data: st.DataObject, code: int | None) -> None:
        """By itself, where 75 is what a command ends with that has saved its work; or with its machine (None, 137)."""
        if self.alive:
            self._end(data.draw(st.sampled_from(sorted(self.alive))), code)

    def _end(self, name: str, code: int | None) -> None:
        self.alive.discard(name)
        if self.engine.get(name) is AttemptState.RUNNING:
            self.engine[name] = AttemptState.ENDED
        if code is not None:
            self.codes[name] = code

    @rule(data=st.data())
    def the_engine_forgets(self, data: st.DataObject) -> None:
        """A task, or what has become of it since it was submitted."""
        if self.engine:
            name = data.draw(st.sampled_from(sorted(self.engine)))
            if data.draw(st.booleans()):
                del self.engine[name]
            else:
                self.engine[name] = data.draw(st.sampled_from([AttemptState.HELD, AttemptState.RELEASED]))

    @rule()
    def time_passes(self) -> None:
        self.now += BEGIN_LIMIT_S

    @invariant()
    def nothing_begins_twice_that_may_not(self) -> None:
        assert len(self.begun) == len(set(self.begun))
        assert sum(task_of(name, "ebb") == ("once", "0a", int(name.split(".")[3])) for name in self.begun) <= 1

    @invariant()
    def no_task_runs_twice_at_a_time(self) -> None:
        tasks = [name.split(".")[1] for name in self.alive]
        assert len(tasks) == len(set(tasks))

    @invariant()
    def nothing_is_done_that_did_not_run_to_its_end(self) -> None:
        for task in self.ended.values():
            if task.phase is TaskPhase.DONE:
                assert self.codes[task.attempt_name("ebb")] == 0
            assert task.phase is not TaskPhase.CANCELLED or task.name in self.unwanted

    @invariant()
    def who_was_told_or_killed_and_may_be_begun_again_has_not_failed(self) -> None:
        for task in self.ended.values():
            if task.phase is TaskPhase.FAILED and task.order.restartable and (task.told_at or task.exit_code == 137):
                assert task.begun == task.order.max_attempts

    def teardown(self) -> None:
        """With an engine that behaves from now on, every task ends."""
        self.notice = None
        for _ in range(60):
            if not self.tasks:
                return
            self.a_turn(carried_out=100, room=4)
            for name, state in list(self.engine.items()):
                if state is AttemptState.RELEASED:
                    self._begin(name)
            for name in list(self.alive):
                self._end(name, 0)
        raise AssertionError(f"lost: {self.tasks}")


ENDED = (AttemptState.ENDED, AttemptState.GONE)
TestAnyEngine = AnyEngine.TestCase
TestAnyEngine.settings = settings(max_examples=100, stateful_step_count=30, deadline=None)
