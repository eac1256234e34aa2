"""Commands that others have ended by a signal, and what becomes of their tasks."""

from __future__ import annotations

from dataclasses import replace

import pytest

from ebbtide.matcher.engines.records import Record, merged
from ebbtide.matcher.match.attempts import AttemptState, Claim, Seen
from ebbtide.matcher.match.tasks import Task, TaskOrder, TaskPhase, cancelled, observe

ORDER = TaskOrder("train", ("true",), restartable=True)
RUNNING = Task(
    ORDER, "0a", 1.0, TaskPhase.RUNNING, machine="n1", released_at=5.0, began_at=6.0, begun=1, began_attempt=1
)
NAME = RUNNING.attempt_name("ebb")


def after(task: Task, engine: Seen | None, code: int) -> Task:
    """A task whose record says that its command ended so."""
    record = {NAME: Record(Claim.BEGUN, 6.0, "n1", code, 7.0, silent_s=2.0)}
    seen = merged({NAME: engine} if engine is not None else {}, record, record)[NAME]
    return observe(task, seen, 10.0, "ebb")[0]


@pytest.mark.parametrize(("code", "name"), [(129, "SIGHUP"), (130, "SIGINT"), (137, "SIGKILL"), (143, "SIGTERM")])
@pytest.mark.parametrize("known", [False, True])
def test_a_command_that_others_have_ended_is_begun_again_where_it_may_be(code: int, name: str, known: bool) -> None:
    """Its engine has lost it, or took that to be its own end: its machine was turned off under it."""
    engine = Seen(AttemptState.ENDED, "n1", exit_code=code) if known else None
    again = after(RUNNING, engine, code)
    assert (again.phase, again.attempt, again.preemptions, again.machine) == (TaskPhase.WAITING, 2, 1, None)
    assert again.sentence == f"its command was ended by {name} on n1; it is to be begun again"
    last = after(replace(RUNNING, begun=ORDER.max_attempts), engine, code)
    assert (last.phase, last.exit_code) == (TaskPhase.FAILED, code)
    assert last.sentence == f"its command was ended by {name} on n1; it has been begun 5 times"


def test_a_command_that_the_manager_has_ended_as_lost_is_begun_again_where_it_may_be() -> None:
    lost = replace(RUNNING, stop="lost", sentence="the engine forgot that it had begun")
    again = after(lost, Seen(AttemptState.ENDED, "n1", exit_code=143), 143)
    assert (again.phase, again.attempt) == (TaskPhase.WAITING, 2)
    assert again.sentence == "the engine forgot that it had begun; it is to be begun again"


def test_one_that_may_not_be_begun_again_has_failed_and_one_that_was_cancelled_is_cancelled() -> None:
    once = after(replace(RUNNING, order=replace(ORDER, restartable=False)), None, 137)
    assert (once.phase, once.exit_code, once.sentence) == (TaskPhase.FAILED, 137, "its command ended with 137 on n1")
    assert after(cancelled(RUNNING), None, 143).phase is TaskPhase.CANCELLED


@pytest.mark.parametrize("code", [1, 127, 128, 134, 136, 139, 255])
def test_a_command_that_ends_by_what_it_does_itself_has_failed(code: int) -> None:
    failed = after(RUNNING, None, code)
    assert (failed.phase, failed.exit_code) == (TaskPhase.FAILED, code)
