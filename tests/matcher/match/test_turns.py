"""What one turn has the engine do with machines that are drained, and by whom, or that fail; what is left of it."""

from __future__ import annotations

from dataclasses import replace

import pytest

from ebbtide.matcher.match.attempts import DEFAULT_LABEL, AttemptState, Claim, EngineMachine, Look, Seen
from ebbtide.matcher.match.rounds import Pool
from ebbtide.matcher.match.tasks import (
    BEGIN_LIMIT_S,
    MOST_LAUNCHES,
    Cancel,
    Drain,
    Instruction,
    Release,
    SetCores,
    Signal,
    Submit,
    Task,
    TaskOrder,
    TaskPhase,
    Undrain,
    refused,
    released,
)
from ebbtide.matcher.match.turns import (
    BEYOND_S,
    FOREIGN,
    LEAVING,
    UNBEGUN_PAUSE_S,
    UNRECORDED_PAUSE_S,
    Turn,
    Unrecorded,
    in_turn,
    said_by,
    turn,
    without,
)
from ebbtide.matcher.predict.predictor import Predictor


def turned(machine: EngineMachine, label: str, leaving: bool = False) -> Turn:
    """A turn with one machine that is to be given back, or is somebody else's."""
    names = frozenset({machine.name})
    look, pool = Look({machine.name: machine}), Pool(Predictor(0.0))
    if leaving:
        return turn((), look, {}, pool, 0.0, label, leaving=names)
    return turn((), look, {}, pool, 0.0, label, foreign=names)


@pytest.mark.parametrize("label", [DEFAULT_LABEL, "south"])
def test_a_machine_that_is_to_be_given_back_is_drained_and_one_of_somebody_else_is_not(label: str) -> None:
    machine = EngineMachine("harvest-1", 2, 2)
    assert turned(machine, label, leaving=True).instructions == (Drain("harvest-1", said_by(label, LEAVING)),)
    made = turned(machine, label)
    assert made.instructions == ()
    # It takes none of our tasks all the same.
    assert made.machines["harvest-1"].drained == FOREIGN


@pytest.mark.parametrize(
    ("label", "words", "up", "instructions"),
    [
        # Another manager's word, an operator's: whatever happens.
        ("south", LEAVING, True, ()),
        ("south", LEAVING, False, ()),
        ("south", "new disks", False, ()),
        # Ours, of when it was ours or of a version that went by names.
        ("south", said_by("south", LEAVING), True, (Undrain("harvest-1"),)),
        (DEFAULT_LABEL, LEAVING, False, (Undrain("harvest-1"),)),
        # Another manager may have this label, too: it would drain again what we give free, in each turn.
        (DEFAULT_LABEL, LEAVING, True, ()),
    ],
)
def test_the_drain_of_somebody_elses_machine_is_taken_away_only_where_it_was_ours(
    label: str, words: str, up: bool, instructions: tuple[Instruction, ...]
) -> None:
    machine = EngineMachine("harvest-1", 2, 2, up=up, drained=words)
    assert turned(machine, label).instructions == instructions


MACHINES = {name: EngineMachine(name, 2, 2) for name in ("n1", "n2")}


def task_of(name: str, user: str | None = None) -> Task:
    return Task(TaskOrder(name, ("true",), cores=2, user=user), "0a", 1.0)


def after(tasks: list[Task], attempts: dict[str, Seen], now: float, unrecorded: Unrecorded, *names: str) -> Turn:
    look = Look({name: MACHINES[name] for name in names or MACHINES}, attempts)
    return turn(tasks, look, {}, Pool(Predictor(now)), now, "ebb", unrecorded=unrecorded)


def test_a_machine_where_no_record_can_be_written_fails_no_task_and_gets_one_again_after_a_pause() -> None:
    task, now, unrecorded = task_of("train"), 10.0, dict[tuple[str, str | None], float]()
    for _ in range(2 * MOST_LAUNCHES):
        # It is the only machine at first, and the next time another one is there.
        task = released(task, "n1", now, "n1: it has room")
        failed = Seen(AttemptState.ENDED, "n1", reason="failed, exit code 98", unrecorded=True)
        made = after([task], {task.attempt_name("ebb"): failed}, now, unrecorded, "n1")
        (task,) = made.changed
        assert (task.phase, task.stop, task.launches) == (TaskPhase.RELEASED, "again", 0)
        assert "could not write its record on n1" in task.sentence
        assert "could not write their records there" in made.machines["n1"].drained
        sealed = {task.attempt_name("ebb"): replace(failed, claim=Claim.SEALED)}
        made = after([task], sealed, now + 1.0, made.unrecorded, "n1")
        (task,) = made.changed
        assert (task.phase, task.machine) == (TaskPhase.WAITING, None)
        attempt, held = task.attempt_name("ebb"), Seen(AttemptState.HELD)
        elsewhere = after([task], {attempt: held}, now + 2.0, made.unrecorded)
        assert elsewhere.instructions == (Release(attempt, "n2"),)
        assert after([task], {attempt: held}, now + 2.0, made.unrecorded, "n1").instructions == ()
        now += UNRECORDED_PAUSE_S
        made = after([task], {attempt: held}, now, made.unrecorded, "n1")
        assert (made.instructions, made.unrecorded) == ((Release(attempt, "n1"),), {})
        unrecorded = dict(made.unrecorded)


def test_a_user_whose_records_cannot_be_written_anywhere_takes_no_machine_from_others() -> None:
    tasks = [task_of("first", "full"), task_of("second", "other"), task_of("third", "full")]
    held = {task.attempt_name("ebb"): Seen(AttemptState.HELD) for task in tasks}
    made = after(tasks, held, 10.0, {("n1", "full"): 100.0}, "n1")
    assert made.instructions == (Release(tasks[1].attempt_name("ebb"), "n1"),)
    made = after(tasks, held, 10.0, {("n1", "full"): 100.0})
    assert [(one.attempt, one.machine) for one in made.instructions if isinstance(one, Release)] == [
        (tasks[0].attempt_name("ebb"), "n2"),
        (tasks[1].attempt_name("ebb"), "n1"),
    ]
    assert "attempts of full" in made.machines["n1"].drained


def releases(made: Turn) -> list[tuple[str, str]]:
    """Tasks that begin, and where."""
    return [(one.attempt.split(".")[1], one.machine) for one in made.instructions if isinstance(one, Release)]


def test_a_machine_that_is_shut_to_one_user_does_not_change_the_order_of_tasks() -> None:
    one = [Task(TaskOrder(name, ("true",), cores=1, user="full"), "0a", 1.0) for name in ("first", "third")]
    tasks = [one[0], task_of("second", "other"), one[1]]
    held = {task.attempt_name("ebb"): Seen(AttemptState.HELD) for task in tasks}
    look = Look({"n1": EngineMachine("n1", 1, 1), "n2": MACHINES["n2"]}, held)
    made = turn(tasks, look, {}, Pool(Predictor(10.0)), 10.0, "ebb", unrecorded={("n1", "full"): 100.0})
    assert releases(made) == [("first", "n2")]
    # What the third would take is promised to the second.
    assert (made.choices["second"].waits_for, made.choices["third"].waits_for) == ("n2", "n2")
    assert made.choices["third"].offers[0].wait_s > made.choices["second"].offers[0].wait_s


def test_room_that_is_promised_is_kept_from_a_user_to_whom_another_machine_is_shut() -> None:
    tasks = [task_of("first", "other"), Task(TaskOrder("second", ("true",), user="full"), "0a", 1.0)]
    held = {task.attempt_name("ebb"): Seen(AttemptState.HELD) for task in tasks}
    runs = Task(TaskOrder("runs", ("true",)), "0a", 1.0, TaskPhase.RUNNING, machine="n2", began_at=1.0, begun=1)
    held[runs.attempt_name("ebb")] = Seen(AttemptState.RUNNING, "n2", Claim.BEGUN, 1.0)
    look = Look({"n1": EngineMachine("n1", 1, 1), "n2": MACHINES["n2"]}, held)
    beside = Pool(Predictor(10.0)), 10.0, "ebb"
    made = turn([runs, *tasks], look, {}, *beside, unrecorded={("n1", "full"): 100.0})
    assert (made.choices["first"].waits_for, releases(made)) == ("n2", [])
    assert releases(turn([runs, *tasks], look, {}, *beside)) == [("second", "n1")]


def test_who_gets_none_of_the_machines_that_there_are_is_told_so() -> None:
    task = task_of("train", "full")
    held = {task.attempt_name("ebb"): Seen(AttemptState.HELD)}
    choice = after([task], held, 10.0, {("n1", "full"): 100.0}, "n1").choices["train"]
    assert choice.sentence == "no machine takes tasks now: all are down, or drained"


@pytest.mark.parametrize(
    "seen",
    [Seen(AttemptState.RELEASED, "n1"), Seen(AttemptState.ENDED, "n1", reason="launch failed")],
    ids=["not in time", "ended before"],
)
def test_a_task_goes_elsewhere_than_where_it_did_not_begin_and_there_again_after_a_pause_or_for_want_of_others(
    seen: Seen,
) -> None:
    # The other machine is the worse one: something runs there.
    runs = Task(TaskOrder("runs", ("true",)), "0a", 1.0, TaskPhase.RUNNING, machine="n2", began_at=1.0, begun=1)
    beside = {runs.attempt_name("ebb"): Seen(AttemptState.RUNNING, "n2", Claim.BEGUN, 1.0)}
    train, now = Task(TaskOrder("train", ("true",)), "0b", 1.0), 10.0

    def next_turn(attempts: dict[str, Seen], before: Turn | None, *names: str) -> Turn:
        look = Look({name: MACHINES[name] for name in names or MACHINES}, {**beside, **attempts})
        missed = before.unbegun if before is not None else {}
        return turn([runs, train], look, {}, Pool(Predictor(now)), now, "ebb", unbegun=missed)

    held = {train.attempt_name("ebb"): Seen(AttemptState.HELD)}
    made = next_turn(held, None)
    assert releases(made) == [("train", "n1")]
    (train,) = made.changed
    now += BEGIN_LIMIT_S + 1.0
    made = next_turn({train.attempt_name("ebb"): seen}, made)
    (train,) = made.changed
    assert (train.stop, made.unbegun) == ("again", {("n1", "train"): now + UNBEGUN_PAUSE_S})
    sealed = {train.attempt_name("ebb"): Seen(AttemptState.ENDED, "n1", Claim.SEALED)}
    assert releases(next_turn(sealed, made)) == [("train", "n2")]
    assert releases(next_turn(sealed, made, "n1")) == [("train", "n1")]
    now += UNBEGUN_PAUSE_S
    made = next_turn(sealed, made)
    assert (releases(made), made.unbegun) == ([("train", "n1")], {})


def test_a_task_leaves_at_once_where_it_can_never_begin_and_has_its_usual_time_there_for_want_of_others() -> None:
    task = released(task_of("train"), "n1", 10.0, "n1: it has room")
    never = {task.attempt_name("ebb"): Seen(AttemptState.RELEASED, "n1", reason="BadConstraints", never=True)}
    made = after([task], never, 11.0, {})
    assert [(one.stop, one.unbegun) for one in made.changed] == [("again", 0)]
    assert made.changed[0].sentence == "n1 cannot begin it (BadConstraints): it is matched again"
    assert made.instructions == (Cancel(task.attempt_name("ebb"), begun_too=False),)
    look, pool = Look(MACHINES, never), Pool(Predictor(12.0))
    made = turn([task], look, {}, pool, 12.0, "ebb", unbegun=made.unbegun)
    assert (made.changed, made.instructions) == ((), ())
    made = turn([task], look, {}, pool, 11.0 + BEGIN_LIMIT_S, "ebb", unbegun=made.unbegun)
    assert [(one.stop, one.unbegun) for one in made.changed] == [("again", 1)]


def test_a_machine_that_did_not_begin_a_task_is_open_to_the_others_and_to_it_where_no_other_is_large_enough() -> None:
    tasks, missed = [task_of("first"), task_of("second")], {("n1", "first"): 100.0, ("n2", "second"): 100.0}
    held = {task.attempt_name("ebb"): Seen(AttemptState.HELD) for task in tasks}
    look, pool = Look(MACHINES, held), Pool(Predictor(10.0))
    assert releases(turn(tasks, look, {}, pool, 10.0, "ebb", unbegun=missed)) == [("first", "n2"), ("second", "n1")]
    small = Look({"n1": MACHINES["n1"], "n2": EngineMachine("n2", 1, 1)}, held)
    made = turn(tasks[:1], small, {}, pool, 10.0, "ebb", unbegun=missed)
    assert releases(made) == [("first", "n1")]


@pytest.mark.parametrize(
    ("state", "cores", "foreign", "begin"),
    [
        (AttemptState.RUNNING, 1, 1, ["small"]),
        (AttemptState.RELEASED, 1, 1, ["small"]),
        (AttemptState.RUNNING, None, 2, []),
        (AttemptState.HELD, None, 0, ["large"]),
        (AttemptState.ENDED, None, 0, ["large"]),
        (AttemptState.GONE, None, 0, ["large"]),
    ],
)
def test_an_attempt_of_ours_that_is_no_tasks_holds_its_cores_as_long_as_it_lives(
    state: AttemptState, cores: int | None, foreign: int, begin: list[str]
) -> None:
    """As after a restore of a backup of before it was submitted. Where its cores are unknown, it may hold all."""
    tasks = [task_of("large"), Task(TaskOrder("small", ("true",)), "0a", 1.0)]
    seen = {task.attempt_name("ebb"): Seen(AttemptState.HELD) for task in tasks}
    for name in ("ebb.since.0b.1", "south.other.0b.1"):
        seen[name] = Seen(state, "n1", Claim.BEGUN, 2.0, cores=cores)
    made = after(tasks, seen, 10.0, {}, "n1")
    assert [name for name, _ in releases(made)] == begin
    assert made.machines["n1"].foreign_cores == foreign
    assert made.orphaned_attempts == ("ebb.since.0b.1",)


def test_an_attempt_of_ours_that_is_no_tasks_keeps_no_machine_on_which_it_will_not_begin() -> None:
    queued = Seen(AttemptState.RELEASED, "n1", cores=1, queued=True)
    assert foreign_cores_where_it_leaves(queued) == 0


def test_an_attempt_of_ours_that_is_no_tasks_keeps_the_machine_where_its_engine_may_have_begun_it() -> None:
    """Dask says no more of one whose record nobody reads, also while it runs."""
    assert foreign_cores_where_it_leaves(Seen(AttemptState.RELEASED, "n1", cores=1)) == 1


def foreign_cores_where_it_leaves(orphan: Seen) -> int:
    """What an attempt that is no task's keeps of a machine that is to be given back."""
    look = Look({"n1": replace(MACHINES["n1"], drained=LEAVING)}, {"ebb.since.0b.1": orphan})
    made = turn([], look, {}, Pool(Predictor(10.0)), 10.0, "ebb", {"n1"})
    return made.machines["n1"].foreign_cores


def test_an_attempt_of_a_task_that_cannot_be_read_is_counted_once() -> None:
    unread = Task(TaskOrder("since", ("?",), cores=1), "?", 1.0, TaskPhase.RUNNING, machine="n1")
    small = Task(TaskOrder("small", ("true",)), "0a", 1.0)
    seen = {small.attempt_name("ebb"): Seen(AttemptState.HELD), "ebb.since.0b.1": Seen(AttemptState.RUNNING, "n1")}
    look = Look({"n1": MACHINES["n1"]}, seen)
    made = turn([small], look, {}, Pool(Predictor(10.0)), 10.0, "ebb", unread=[unread])
    assert (releases(made), made.machines["n1"].foreign_cores) == ([("small", "n1")], 0)


def test_of_a_task_that_was_changed_meanwhile_nothing_of_a_turn_is_stored_or_done() -> None:
    tasks = [Task(TaskOrder(name, ("true",)), "0a", 0.0) for name in ("a", "b")]
    done = replace(task_of("c"), phase=TaskPhase.RUNNING, machine="n1", began_at=6.0, begun=1, began_attempt=1)
    seen = {task.attempt_name("ebb"): Seen(AttemptState.HELD) for task in tasks}
    seen[done.attempt_name("ebb")] = Seen(AttemptState.ENDED, "n1", Claim.BEGUN, 6.0, exit_code=0)
    look = Look({"n1": EngineMachine("n1", 4, 3)}, seen)
    made = turn([*tasks, done], look, {"n1": 4}, Pool(Predictor(10.0)), 10.0, "ebb")
    assert [task.name for task in made.changed] == ["a", "b", "c"]
    left = without(made, {"a", "c"}, "ebb")
    assert [task.name for task in left.changed] == ["b"]
    assert left.instructions == (SetCores("n1", 4), Release(tasks[1].attempt_name("ebb"), "n1"))
    assert set(left.choices) == {"b"}


@pytest.mark.parametrize(
    ("most_held", "held", "refused", "submitted"),
    [
        (5, 0, 0, ["a", "b", "c", "d"]),
        (2, 0, 0, ["a", "b"]),
        # Those that it has count, and those that it has refused: the one that waits longest comes first.
        (3, 2, 0, ["a"]),
        (5, 1, 1, ["a", "b", "c", "r0"]),
        (3, 1, 1, ["a", "r0"]),
        (3, 2, 2, ["r0"]),
        # And beyond that, if it waits for long enough.
        (0, 1, 2, ["r0"]),
        (0, 2, 2, []),
    ],
)
def test_no_more_attempts_wait_in_the_engine_than_its_settings_say_and_the_first_in_turn_come_first(
    most_held: int, held: int, refused: int, submitted: list[str]
) -> None:
    there, new = [task_of(f"h{number}") for number in range(held)], [task_of(name) for name in "abcd"]
    again = [replace(task_of(f"r{n}"), refusals=1, refused_at=n + 9.0 - 1.5 * BEYOND_S) for n in range(refused)]
    look = Look({}, {task.attempt_name("ebb"): Seen(AttemptState.HELD) for task in there})
    made = turn([*new, *again, *there], look, {}, Pool(Predictor(10.0)), 10.0, "ebb", most_held=most_held)
    assert submits(made) == submitted


def test_an_attempt_that_gets_its_machine_is_given_to_the_engine_whatever_waits_there() -> None:
    """The one behind the first, for which there is no room."""
    large, small = (Task(TaskOrder(name, ("true",), cores), "0a", 1.0) for name, cores in (("large", 8), ("small", 1)))
    made = turn([large, small], Look(MACHINES, {}), {}, Pool(Predictor(10.0)), 10.0, "ebb", most_held=0)
    assert (submits(made), [task for task, _ in releases(made)]) == (["small"], ["small"])


def full(tasks: list[Task], made: Turn, most: int, now: float) -> list[Task]:
    """The tasks, after an engine has refused the first new attempts of a turn: those for which there was time."""
    given = [one.order.name for one in in_turn(made.instructions) if isinstance(one, Submit)][:most]
    now_are = {task.name: task for task in (*tasks, *made.changed)}
    return [
        refused(task, "no more for now", now, full=True) if task.name in given else task for task in now_are.values()
    ]


def test_tasks_that_are_refused_keep_a_machine_from_those_behind_them_no_longer_than_it_takes_to_ask() -> None:
    """A user has as many jobs as allowed. Each round there is time for 20, and the machine has room for one."""
    tasks, now = [task_of(f"a{number:03}") for number in range(100)] + [task_of("behind")], 10.0
    for _ in range(6):
        made = turn(tasks, Look({"n1": MACHINES["n1"]}, {}), {}, Pool(Predictor(now)), now, "ebb", most_held=20)
        if releases(made) == [("behind", "n1")]:
            break
        tasks, now = full(tasks, made, 20, now), now + 1.0
    assert releases(made) == [("behind", "n1")]


def test_when_a_full_engine_has_room_again_no_more_is_given_to_it_than_before_but_one_a_minute() -> None:
    tasks, now, beside = [task_of(f"t{number:03}") for number in range(50)], 10.0, (Pool(Predictor(10.0)), 10.0, "ebb")
    tasks = full(tasks, turn(tasks, Look(), {}, *beside), len(tasks), now)
    assert all(task.refusals for task in tasks)
    attempts, waiting = dict[str, Seen](), []
    for _ in range(200):
        now += 1.0
        made = turn(tasks, Look({}, attempts), {}, Pool(Predictor(now)), now, "ebb", most_held=10)
        now_are = {task.name: task for task in made.changed}
        tasks = [now_are.get(task.name, task) for task in tasks]
        attempts |= {one.attempt: Seen(AttemptState.HELD) for one in made.instructions if isinstance(one, Submit)}
        waiting.append(len(attempts))
    assert (waiting[0], waiting[15], waiting[-1]) == (0, 11, 10 + 1 + 3)


def submits(made: Turn) -> list[str]:
    return [one.order.name for one in made.instructions if isinstance(one, Submit)]


def test_signals_come_before_machines_and_new_attempts_last_before_their_releases() -> None:
    order = TaskOrder("t", ("true",))
    first, second, third, held, old = (f"ebb.{name}.0a.1" for name in ("first", "second", "third", "held", "old"))
    new = [Submit(first, order), Submit(second, order)]
    given: list[Instruction] = [
        SetCores("n1", 0),
        Drain("n1", "why"),
        Submit(third, order),
        *new,
        Cancel(old),
        Signal(old, "USR1", "1"),
        *map(_release, (second, held, first)),
    ]
    assert in_turn(given) == [
        Signal(old, "USR1", "1"),
        SetCores("n1", 0),
        Drain("n1", "why"),
        Cancel(old),
        _release(held),
        # One that gets no machine yet comes last.
        *new,
        Submit(third, order),
        _release(second),
        _release(first),
    ]


def _release(attempt: str) -> Release:
    return Release(attempt, "n2")
