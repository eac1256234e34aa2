"""Tasks whose machine's VM is being preempted: told, given time, ended, begun elsewhere; and what is withdrawn."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from ebbtide.matcher.match.attempts import AttemptState, Claim, EngineMachine, Look, Seen
from ebbtide.matcher.match.notices import PREEMPTED, Notice, noticed, saving_s
from ebbtide.matcher.match.rounds import Pool
from ebbtide.matcher.match.tasks import (
    Cancel,
    Drain,
    Release,
    SetCores,
    Signal,
    Task,
    TaskOrder,
    TaskPhase,
    Undrain,
    observe,
)
from ebbtide.matcher.match.turns import NO_CORES, Turn, turn
from ebbtide.matcher.predict.predictor import Predictor

SAVING = TaskOrder("train", ("true",), cores=2, restartable=True, checkpoint_signal="USR1")
WAITING = Task(SAVING, "0a", 1.0)
RELEASED = replace(WAITING, phase=TaskPhase.RELEASED, machine="n1", released_at=5.0)
RUNNING = replace(RELEASED, phase=TaskPhase.RUNNING, began_at=6.0, begun=1, began_attempt=1)
NAME = WAITING.attempt_name("ebb")
NOTICE = Notice(100.0, 20.0)
RUNS = Seen(AttemptState.RUNNING, "n1", Claim.BEGUN, 6.0, silent_s=1.0)


def ordered(task: Task, **changes: Any) -> Task:
    return replace(task, order=replace(task.order, **changes))


def at(task: Task, now: float, notice: Notice | None = NOTICE, gone: bool = False) -> tuple[Task, Any]:
    return noticed(task, notice and begun(notice, now), gone, now, "ebb")


def begun(notice: Notice, now: float) -> Notice:
    """As it is by a clock that nobody has set."""
    return replace(notice, passed_s=now - notice.at)


@pytest.mark.parametrize(
    ("changes", "seconds"),
    [
        ({}, 15.0),
        ({"checkpoint_grace_s": 4.0}, 4.0),
        ({"checkpoint_grace_s": 3600.0}, 15.0),
        ({"checkpoint_signal": None}, 0.0),
    ],
)
def test_who_is_told_has_as_long_as_it_asked_for_and_three_quarters_at_the_most(changes: Any, seconds: float) -> None:
    assert saving_s(replace(SAVING, **changes), NOTICE) == seconds
    assert saving_s(replace(SAVING, **changes), begun(NOTICE, 103.0)) == max(seconds - 3.0, 0.0)


@pytest.mark.parametrize("by_s", [180.0, -300.0])
def test_a_clock_that_is_set_within_a_notice_changes_nothing_of_its_time(by_s: float) -> None:
    told, _ = at(RUNNING, 101.0)
    for passed_s in (2.0, 14.9):
        goes_on, steps = noticed(told, replace(NOTICE, passed_s=passed_s), False, 100.0 + by_s + passed_s, "ebb")
        assert (goes_on, steps) == (told, (Signal(NAME, "USR1", "100.000"),))
    ended, steps = noticed(told, replace(NOTICE, passed_s=15.0), False, 115.0 + by_s, "ebb")
    assert (ended.stop, steps) == ("preempt", (Cancel(NAME),))
    silent = ordered(RUNNING, checkpoint_signal=None)
    assert noticed(silent, NOTICE, False, 100.0 + by_s, "ebb")[1] == (Cancel(NAME),)


def test_a_notice_is_told_also_where_the_clock_was_set_back_since_one_that_was_withdrawn() -> None:
    told, _ = at(RUNNING, 101.0)
    free, _ = at(told, 104.0, None)
    second, steps = at(free, 51.0, Notice(50.0, 20.0))
    assert (second.told_at, second.saves_until, steps) == (51.0, 65.0, (Signal(NAME, "USR1", "50.000"),))


def test_a_command_is_told_once_and_ended_when_its_time_is_up() -> None:
    told, steps = at(RUNNING, 101.0)
    assert (told.told_at, told.saves_until, told.stop) == (101.0, 115.0, "")
    assert steps == (Signal(NAME, "USR1", "100.000"),)
    assert "its command got USR1, and has 14 s to save its work" in told.sentence
    # Whether the engine has done it is the engine's to know, by the notice.
    assert at(told, 114.9) == (told, steps)
    ended, steps = at(told, 115.0)
    assert (ended.stop, ended.saves_until, steps) == ("preempt", None, (Cancel(NAME),))
    assert at(ended, 116.0) == (ended, ())
    # Its place in the line is that of its submission: it is the same task.
    again, _ = observe(ended, replace(RUNS, state=AttemptState.ENDED, exit_code=143), 117.0, "ebb")
    assert (again.phase, again.attempt, again.preemptions, again.told_at) == (TaskPhase.WAITING, 2, 1, None)
    assert "the VM n1 is being preempted; it is to be begun again" in again.sentence


def test_who_asked_for_no_signal_is_ended_at_once_and_who_was_only_released_taken_back() -> None:
    ended, steps = at(ordered(RUNNING, checkpoint_signal=None), 100.0)
    assert (ended.stop, steps) == ("preempt", (Cancel(NAME),))
    back, steps = at(RELEASED, 100.0)
    assert (back.stop, steps) == ("again", (Cancel(NAME, begun_too=False),))
    # It has begun after all: then it is told.
    after, steps = observe(back, RUNS, 101.0, "ebb")
    assert (after.phase, steps) == (TaskPhase.RUNNING, ())
    assert at(after, 101.0)[1] == (Signal(NAME, "USR1", "100.000"),)
    assert at(WAITING, 100.0) == (WAITING, ())


def test_a_vm_without_a_notice_ends_its_tasks_at_once() -> None:
    ended, steps = at(RUNNING, 100.0, Notice(100.0, 0.0))
    assert (ended.stop, ended.told_at, steps) == ("preempt", None, (Cancel(NAME),))


def test_who_may_not_be_begun_again_is_told_and_goes_on_as_long_as_its_machine() -> None:
    once = ordered(RUNNING, restartable=False)
    told, steps = at(once, 130.0)
    assert (told.stop, steps) == ("", (Signal(NAME, "USR1", "100.000"),))
    silent = ordered(once, checkpoint_signal=None)
    assert at(silent, 130.0) == (silent, ())
    failed, _ = observe(told, replace(RUNS, state=AttemptState.ENDED, exit_code=75), 131.0, "ebb")
    assert (failed.phase, failed.exit_code) == (TaskPhase.FAILED, 75)


@pytest.mark.parametrize(("code", "phase"), [(75, TaskPhase.WAITING), (143, TaskPhase.WAITING), (0, TaskPhase.DONE)])
def test_a_told_command_that_ends_is_begun_again_unless_it_is_done(code: int, phase: TaskPhase) -> None:
    told, _ = at(RUNNING, 101.0)
    after, _ = observe(told, replace(RUNS, state=AttemptState.ENDED, exit_code=code), 103.0, "ebb")
    assert after.phase is phase
    if code:
        assert f"its command ended with {code} on n1 after USR1; it is to be begun again" in after.sentence
    # In an attempt that was told nothing the same code is a failure, unless it is that of a signal.
    again = replace(RUNNING, attempt=2)
    untold, _ = observe(again, replace(RUNS, state=AttemptState.ENDED, exit_code=code or 1), 103.0, "ebb")
    assert untold.phase is (TaskPhase.WAITING if code == 143 else TaskPhase.FAILED)


def test_a_preemption_that_is_withdrawn_leaves_its_tasks_running_and_the_next_one_is_told_anew() -> None:
    told, _ = at(RUNNING, 101.0)
    # Its VM is off: that is no withdrawal.
    assert at(told, 105.0, None, gone=True) == (told, ())
    free, steps = at(told, 105.0, None)
    assert (free.phase, free.saves_until, free.told_at, steps) == (TaskPhase.RUNNING, None, 101.0, ())
    assert "not preempted after all" in free.sentence
    assert at(free, 106.0, None) == (free, ())
    second, steps = at(free, 201.0, Notice(200.0, 30.0))
    assert (second.told_at, steps) == (201.0, (Signal(NAME, "USR1", "200.000"),))


@pytest.mark.parametrize(
    ("grace_s", "ended_at", "phase"),
    [
        (None, 110.0, TaskPhase.WAITING),
        (None, 90_000.0, TaskPhase.FAILED),
        (5.0, 110.0, TaskPhase.FAILED),
        (3600.0, 3000.0, TaskPhase.WAITING),
    ],
)
def test_a_command_that_fails_long_after_a_withdrawn_preemption_has_failed(
    grace_s: float | None, ended_at: float, phase: TaskPhase
) -> None:
    told, _ = at(ordered(RUNNING, checkpoint_grace_s=grace_s), 101.0)
    free, _ = at(told, 104.0, None)
    ended = replace(RUNS, state=AttemptState.ENDED, exit_code=75, ended_at=ended_at)
    assert observe(free, ended, ended_at + 1.0, "ebb")[0].phase is phase


def turned(tasks: list[Task], look: Look, notices: dict[str, Notice], cores: dict[str, int], now: float) -> Turn:
    known = {machine: begun(notice, now) for machine, notice in notices.items()}
    return turn(tasks, look, cores, Pool(Predictor(now)), now, "ebb", frozenset(), known)


def test_a_machine_that_is_about_to_go_begins_nothing_and_the_next_in_line_is_who_was_first() -> None:
    first, second = RUNNING, ordered(replace(WAITING, key="0b"), name="second")
    seen = {NAME: RUNS, second.attempt_name("ebb"): Seen(AttemptState.HELD)}
    look = Look({"n1": EngineMachine("n1", 4, 4), "n2": EngineMachine("n2", 2, 2)}, seen)
    made = turned([first, second], look, {"n1": NOTICE}, {"n1": 4}, 115.0)
    assert made.instructions == (
        Drain("n1", PREEMPTED), Cancel(NAME), Release(second.attempt_name("ebb"), "n2")
    )  # fmt: skip
    assert [task.stop for task in made.changed] == ["preempt", ""]
    # It is over, and was submitted before the other: it gets its turn first.
    first = made.changed[0]
    seen[NAME] = replace(RUNS, state=AttemptState.ENDED, exit_code=143)
    made = turned([first, second], Look(made.machines, seen), {"n1": NOTICE}, {"n1": 4}, 116.0)
    (first,) = made.changed
    assert (first.phase, first.machine, first.attempt) == (TaskPhase.RELEASED, "n2", 2)


def test_a_machine_takes_tasks_again_when_its_vm_is_back_or_stays() -> None:
    drained = EngineMachine("n1", 4, 4, drained=PREEMPTED)

    def told(machine: EngineMachine, cores: int) -> Any:
        made = turned([], Look({"n1": machine}), {}, {"n1": cores}, 10.0)
        return made.instructions, made.machines["n1"]

    assert told(drained, 4)[0] == (Undrain("n1"),)
    steps, off = told(drained, 0)
    assert (steps, off.drained) == ((SetCores("n1", 0),), PREEMPTED)
    assert told(off, 3)[0] == (SetCores("n1", 3), Undrain("n1"))
    # What was drained before, for whatever reason, is not drained twice; what an operator drained stays so.
    empty = replace(drained, usable_cores=0, drained=NO_CORES)
    assert turned([], Look({"n1": empty}), {"n1": NOTICE}, {"n1": 0}, 10.0).instructions == ()
    assert told(replace(drained, drained="new disks"), 4)[0] == ()
