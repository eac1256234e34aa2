"""What a command writes into its own record, and what its guest's clock says, change nothing for others."""

from __future__ import annotations

from dataclasses import replace

from ebbtide.matcher.engines.records import Record, merged
from ebbtide.matcher.match.attempts import AttemptState, Claim, EngineMachine, Look, Seen
from ebbtide.matcher.match.rounds import Pool
from ebbtide.matcher.match.tasks import Cancel, Task, TaskOrder, TaskPhase, observe
from ebbtide.matcher.match.turns import Turn, turn
from ebbtide.matcher.predict.predictor import Predictor

NOW = 1000.0
HONEST = Task(
    TaskOrder("honest", ("true",), cores=2, restartable=True),
    "0a",
    1.0,
    TaskPhase.RUNNING,
    machine="n1",
    released_at=500.0,
    began_at=501.0,
    begun=1,
    began_attempt=1,
)
SLY = replace(HONEST, order=replace(HONEST.order, name="sly"), key="0b", released_at=NOW - 10.0)
HONEST_NAME, SLY_NAME = HONEST.attempt_name("ebb"), SLY.attempt_name("ebb")


def turned(sly: Task, engine: dict[str, Seen], record: Record, cores: dict[str, int]) -> Turn:
    """A turn in which a task has written such a record."""
    records = {SLY_NAME: record, HONEST_NAME: Record(Claim.BEGUN, 501.0, "n1", silent_s=1.0)}
    engine[HONEST_NAME] = Seen(AttemptState.RUNNING, "n1")
    machines = {name: EngineMachine(name, 4, usable) for name, usable in cores.items()}
    look = Look(machines, merged(engine, records, records))
    return turn([HONEST, sly], look, cores, Pool(Predictor(10.0)), NOW, "ebb")


def test_a_claim_of_long_ago_makes_no_task_older_than_its_release() -> None:
    sly = replace(SLY, phase=TaskPhase.RELEASED, began_at=None, begun=0, began_attempt=0)
    made = turned(sly, {SLY_NAME: Seen(AttemptState.RUNNING, "n1")}, Record(Claim.BEGUN, 1.0, "n1"), {"n1": 2})
    assert made.instructions == (Cancel(SLY_NAME),)
    assert [(task.name, task.stop, task.began_at) for task in made.changed] == [("sly", "preempt", NOW - 10.0)]


def test_the_machine_that_a_claim_names_is_not_that_of_a_task_which_its_engine_has_lost() -> None:
    sly = replace(SLY, machine="n2", released_at=1.0, began_at=2.0)
    made = turned(sly, {}, Record(Claim.BEGUN, 2.0, "n1", silent_s=1.0), {"n1": 2, "n2": 4})
    assert made.instructions == ()
    assert [(task.name, task.stop, task.machine) for task in made.changed] == [("sly", "", "n2")]


def test_a_guest_whose_clock_is_ahead_has_what_saved_its_work_begun_again() -> None:
    told = replace(HONEST, order=replace(HONEST.order, checkpoint_signal="USR1"), told_at=NOW - 31.0)
    ahead = Seen(AttemptState.ENDED, "n1", Claim.BEGUN, 501.0, exit_code=3, ended_at=NOW - 1.0 + 1200.0)
    again, _ = observe(told, ahead, NOW, "ebb")
    assert (again.phase, again.attempt, again.ran_s) == (TaskPhase.WAITING, 2, NOW - 501.0)
    ended, _ = observe(HONEST, ahead, NOW, "ebb")
    assert (ended.phase, ended.ended_at) == (TaskPhase.FAILED, NOW)


def test_no_task_ends_before_it_began_by_a_clock_that_is_behind() -> None:
    behind = Seen(AttemptState.ENDED, "n1", Claim.BEGUN, 501.0 - 7 * 86_400.0, exit_code=0, ended_at=NOW - 7 * 86_400.0)
    ended, _ = observe(HONEST, behind, NOW, "ebb")
    assert (ended.phase, ended.ended_at) == (TaskPhase.DONE, HONEST.began_at)
    fresh = replace(HONEST, phase=TaskPhase.RELEASED, began_at=None, begun=0, began_attempt=0)
    ended, _ = observe(fresh, behind, NOW, "ebb")
    assert (ended.began_at, ended.ended_at) == (HONEST.released_at, HONEST.released_at)
    # Nor where the manager's own was set back.
    ended, _ = observe(HONEST, replace(behind, ended_at=None), 1.0, "ebb")
    assert ended.ended_at == HONEST.began_at
