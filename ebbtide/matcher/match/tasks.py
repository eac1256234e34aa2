"""Tasks as a state machine: what an engine shows comes in, instructions for it come out. Pure.

Every instruction follows from a task's stored state and from what the engine shows, and may be given again: a manager
that is killed between storing a state and carrying out an instruction gives it again after the next look.

A task that has begun is begun again only where it is declared restartable. One that is not, and whose machine shrinks
under it, goes on with the cores that are left; one whose machine goes is a failed task, and says so.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Final, Literal

from ebbtide.matcher.match.attempts import NOTHING, AttemptState, Claim, EngineMachine, Seen, attempt_name
from ebbtide.matcher.policies.victims import NEWEST, choose_victims

#: A released attempt that has not begun after so many seconds is taken back and matched again.
BEGIN_LIMIT_S: Final = 15.0
#: Each attempt of a task that did not begin gives the next one twice the time, so often: its user may have enough jobs.
_MOST_WAITS: Final = 6
#: So long a command whose machine was to go, and stays, may go on saving its work if it did not say how long it takes.
_SAVING_S: Final = 600.0
#: An attempt that its engine has lost runs as long as its record is touched at least so often, seconds.
HEARTBEAT_LIMIT_S: Final = 15.0
#: One that its engine has is believed to run for so long without; its machine may be slow.
SILENCE_LIMIT_S: Final = 120.0
LOST: Final = "its engine has lost it, and its command goes on"
#: The same where its engine says that it runs, and its command has not begun: before it may come what nodes prepare.
LAUNCH_LIMIT_S: Final = 45.0
#: So often an engine may end an attempt that has not begun, or refuse one.
MOST_LAUNCHES: Final = 5
#: What an engine has refused is given to it again after so many seconds, which double so often.
REFUSED_PAUSE_S: Final = 15.0
_MOST_DOUBLINGS: Final = 4
#: What a shell says of a command that such a signal has ended. Others send them: who turns its machine off, an engine
#: that has forgotten it, a kernel without memory; no command gets one for what it does itself.
_KILLED: Final = {129: "SIGHUP", 130: "SIGINT", 137: "SIGKILL", 143: "SIGTERM"}


class TaskPhase(StrEnum):
    """Where a task stands."""

    WAITING = "waiting"
    RELEASED = "released"
    RUNNING = "running"
    DONE = "done"
    FAILED = "failed"
    CANCELLED = "cancelled"


FINAL: Final = frozenset({TaskPhase.DONE, TaskPhase.FAILED, TaskPhase.CANCELLED})
#: Why an attempt is being ended: its owner wants no more of it; its cores were taken; it did not begin where it should;
#: its engine knows something else of it than its record.
Stop = Literal["", "cancel", "preempt", "again", "lost"]


@dataclass(frozen=True, slots=True)
class TaskOrder:
    """A task as it is asked for.

    :param cores: whole cores.
    :param duration_s: how long it is expected to run; None: unknown.
    :param restartable: it may be begun again after it was broken off.
    :param max_attempts: so often it is begun at the most.
    """

    name: str
    command: tuple[str, ...]
    cores: int = 1
    duration_s: float | None = None
    restartable: bool = False
    max_attempts: int = 5
    #: Of preemption, 0 to 1, and seconds between two saves of its work (`matcher.match.matching.Demand`).
    preemption_aversion: float = 0.0
    checkpoint_s: float | None = None
    #: As whom its command runs, where the engine has users; None: as its settings say.
    user: str | None = None
    #: What its command gets when its machine's VM is to be preempted, and how long it then needs to save its work, in
    #: seconds (`matcher.match.notices`); None: it gets none, and as long as there is.
    checkpoint_signal: str | None = None
    checkpoint_grace_s: float | None = None


@dataclass(frozen=True, slots=True)
class Task:
    """A task and how far it is. Times are seconds since the epoch."""

    order: TaskOrder
    #: Tells it apart from earlier tasks of its name.
    key: str
    submitted_at: float
    phase: TaskPhase = TaskPhase.WAITING
    attempt: int = 1
    machine: str | None = None
    stop: Stop = ""
    released_at: float | None = None
    #: Of the present attempt, or of the last one.
    began_at: float | None = None
    #: The number of the last attempt that has begun; 0: none.
    began_attempt: int = 0
    ended_at: float | None = None
    exit_code: int | None = None
    #: Attempts that have begun, and those of them that were broken off.
    begun: int = 0
    preemptions: int = 0
    #: Attempts that an engine ended before they began, or refused, one after another.
    launches: int = 0
    sentence: str = "it waits to be matched"
    #: When it was last broken off; None: never.
    broken_off_at: float | None = None
    #: The longest that an attempt ran that was broken off; s.
    ran_s: float = 0.0
    #: P_c of the present attempt when it was released; None where history was silent.
    predicted: float | None = None
    #: When the command of the present attempt last got its checkpoint signal, and until when it may save its work;
    #: None: it never did; its machine is not about to go.
    told_at: float | None = None
    saves_until: float | None = None
    #: So often the engine has refused to take the present attempt, and when it last did. It is not matched meanwhile.
    refusals: int = 0
    refused_at: float | None = None
    #: Attempts that were released and did not begin in time, one after another.
    unbegun: int = 0

    @property
    def name(self) -> str:
        return self.order.name

    @property
    def final(self) -> bool:
        """Whether nothing more will become of it."""
        return self.phase in FINAL

    @property
    def waits_since(self) -> float:
        """Since when it waits for a machine, if it does."""
        return self.submitted_at if self.broken_off_at is None else self.broken_off_at

    @property
    def occupies(self) -> str | None:
        """The machine on which it holds cores."""
        return self.machine if self.phase in (TaskPhase.RELEASED, TaskPhase.RUNNING) else None

    def attempt_name(self, label: str) -> str:
        """Of the present attempt, or the last one."""
        return attempt_name(label, self.name, self.key, self.attempt)

    def begun_name(self, label: str) -> str | None:
        """Of the last attempt that has begun; None: none has."""
        return attempt_name(label, self.name, self.key, self.began_attempt) if self.began_attempt else None


@dataclass(frozen=True, slots=True)
class Submit:
    """Give the engine an attempt, held."""

    attempt: str
    order: TaskOrder


@dataclass(frozen=True, slots=True)
class Release:
    """Let an attempt begin, on this machine and nowhere else."""

    attempt: str
    machine: str


@dataclass(frozen=True, slots=True)
class Cancel:
    """Make sure that an attempt never begins; end it if it has.

    :param begun_too: False: one that has begun goes on.
    """

    attempt: str
    begun_too: bool = True


@dataclass(frozen=True, slots=True)
class Signal:
    """Have the command of an attempt get a signal.

    :param notice: tells the signals that it gets one after another apart: the same one again changes nothing.
    """

    attempt: str
    signal: str
    notice: str


@dataclass(frozen=True, slots=True)
class Forget:
    """The engine need not keep an attempt that has ended."""

    attempt: str


@dataclass(frozen=True, slots=True)
class SetCores:
    """From now on so many whole cores of a machine can be used."""

    machine: str
    cores: int


@dataclass(frozen=True, slots=True)
class Drain:
    """A machine takes no new task; what runs there goes on."""

    machine: str
    reason: str


@dataclass(frozen=True, slots=True)
class Undrain:
    """It takes tasks again."""

    machine: str


Instruction = Submit | Release | Cancel | Signal | Forget | SetCores | Drain | Undrain


def observe(task: Task, seen: Seen | None, now: float, label: str) -> tuple[Task, tuple[Instruction, ...]]:
    """A task after a look at its present attempt.

    :param seen: None: neither the engine nor a record knows it.
    :param now: seconds since the epoch.
    """
    seen = seen or NOTHING
    attempt = task.attempt_name(label)
    if task.final:
        if seen.lives:
            return task, (Cancel(attempt),)
        return task, (Forget(attempt),) if seen.state is AttemptState.ENDED else ()
    if task.phase is TaskPhase.RUNNING and seen.claim is Claim.NONE:
        # What has begun has begun, whatever has become of its record.
        if seen.state is AttemptState.GONE and not task.stop:
            sentence = "neither its engine nor its record knows it any more"
            return replace(task, stop="lost", sentence=sentence), (Cancel(attempt),)
        if seen.state is not AttemptState.GONE:
            seen = replace(seen, claim=Claim.BEGUN)
    if not seen.lives:
        return _over(task, seen, now, attempt)
    if task.refusals:
        # It was taken after all.
        task = replace(task, refusals=0, refused_at=None, launches=0)
    limit_s = BEGIN_LIMIT_S
    if seen.state is AttemptState.RUNNING and seen.claim is Claim.NONE:
        # It has its cores there, and its command has not begun.
        seen, limit_s = replace(seen, state=AttemptState.RELEASED), LAUNCH_LIMIT_S
    if seen.claim is Claim.SEALED:
        # Sealed, and its engine does not know yet.
        return task, (Cancel(attempt),)
    if task.stop == "again" and seen.claim is Claim.BEGUN:
        # It has begun after all.
        task = replace(task, stop="")
    if task.stop:
        if seen.claim is Claim.BEGUN:
            # Also where its engine has forgotten that.
            seen = replace(seen, state=AttemptState.RUNNING)
        return _as_shown(task, seen, now), (Cancel(attempt, begun_too=task.stop != "again"),)
    if seen.claim is Claim.BEGUN and seen.state is not AttemptState.RUNNING:
        # The engine would begin it once more, which its record forbids; and it ends what it does not know.
        task = _as_shown(task, replace(seen, state=AttemptState.RUNNING), now)
        return replace(task, stop="lost", sentence="the engine forgot that it had begun"), (Cancel(attempt),)
    if seen.silent_s is not None and seen.silent_s > SILENCE_LIMIT_S and not seen.suspended:
        sentence = f"its command is gone from {seen.machine}, and the engine does not know"
        return replace(_as_shown(task, seen, now), stop="lost", sentence=sentence), (Cancel(attempt),)
    task = _as_shown(task, seen, now)
    limit_s *= 2.0 ** min(task.unbegun, _MOST_WAITS)
    if task.released_at is not None and now < task.released_at:
        # The clock was set back.
        task = replace(task, released_at=now)
    if task.phase is not TaskPhase.RELEASED or not (seen.never or now - (task.released_at or now) > limit_s):
        return task, ()
    why = f"cannot begin it ({seen.reason})" if seen.never else f"did not begin it within {limit_s:g} s"
    unbegun, sentence = task.unbegun + (not seen.never), f"{task.machine} {why}: it is matched again"
    task = replace(task, stop="again", unbegun=unbegun, sentence=sentence)
    return task, (Cancel(attempt, begun_too=False),)


def _runs(seen: Seen) -> bool:
    return seen.silent_s is not None and seen.silent_s <= HEARTBEAT_LIMIT_S


def machine_of(task: Task, seen: Seen) -> str | None:
    """Where an attempt is. Its record counts where nothing else is known: its command can write there any other."""
    return seen.machine or task.machine or seen.recorded_machine


def _as_shown(task: Task, seen: Seen, now: float) -> Task:
    """The phase that a living attempt has."""
    if seen.state is AttemptState.HELD:
        if task.phase is TaskPhase.WAITING:
            return task
        # The release did not arrive, or its manager was killed before it: it is matched again.
        return replace(task, phase=TaskPhase.WAITING, machine=None, released_at=None)
    machine = machine_of(task, seen)
    if seen.state is AttemptState.RELEASED:
        if task.phase is TaskPhase.RELEASED and task.machine == machine:
            return task
        return replace(task, phase=TaskPhase.RELEASED, machine=machine, released_at=task.released_at or now)
    if task.phase is TaskPhase.RUNNING:
        return task if task.machine == machine else replace(task, machine=machine)
    # Its command can write its record: it is not older than its release by that.
    since = task.waits_since if task.released_at is None else task.released_at
    began_at = min(max(seen.begun_at, since), now) if seen.begun_at is not None else now
    return replace(
        task,
        phase=TaskPhase.RUNNING,
        machine=machine,
        began_at=began_at,
        began_attempt=task.attempt,
        begun=task.begun + 1,
        launches=0,
        unbegun=0,
        sentence=task.sentence if task.stop else f"it runs on {machine}",
    )


def _over(task: Task, seen: Seen, now: float, attempt: str) -> tuple[Task, tuple[Instruction, ...]]:
    """An attempt that its engine is done with, or does not know."""
    forget: tuple[Instruction, ...] = (Forget(attempt),)
    if seen.claim is Claim.BEGUN and (seen.suspended or _runs(seen)) and seen.exit_code is None:
        # The engine has lost it, or thinks so; it is not begun again while its command goes on, or will.
        task = _as_shown(task, replace(seen, state=AttemptState.RUNNING), now)
        return replace(task, sentence=task.sentence if task.stop else LOST), (Cancel(attempt),) if task.stop else ()
    if seen.claim is Claim.BEGUN:
        return _after_run(_as_shown(task, replace(seen, state=AttemptState.RUNNING), now), seen, now), forget
    if seen.claim is Claim.SEALED:
        if task.phase is TaskPhase.RUNNING:
            # What was sealed is a record in the place of the one that was lost.
            return _after_run(task, seen, now), forget
        if task.stop == "cancel":
            return _finished(task, TaskPhase.CANCELLED, "it was cancelled before it began", seen, now), forget
        return _again(task, task.sentence), forget
    if task.stop:
        # Whether it has begun is not known yet: the record will say so, one way or the other.
        return task, (Cancel(attempt, begun_too=task.stop != "again"),)
    if seen.state is AttemptState.GONE:
        # Never given to the engine, or lost by it before it began. The record sees to it that only one begins.
        task = replace(task, phase=TaskPhase.WAITING, machine=None, released_at=None)
        return task, () if _pauses(task, now) else (Submit(attempt, task.order),)
    if seen.unrecorded:
        # That is the machine's fault, or the directory's, and not the task's.
        where = seen.machine or task.machine
        sentence = f"it could not write its record on {where}, and has not begun: it is matched again"
        return replace(task, stop="again", sentence=sentence), (Cancel(attempt, begun_too=False),)
    why = seen.reason or "the engine does not say why"
    if task.launches + 1 >= MOST_LAUNCHES:
        said = f"it was ended {MOST_LAUNCHES} times before it began: {why}"
        return _finished(task, TaskPhase.FAILED, said, seen, now), forget
    sentence = f"it was ended before it began ({why}): it is matched again"
    return replace(task, stop="again", launches=task.launches + 1, sentence=sentence), (
        Cancel(attempt, begun_too=False),
    )


def _after_run(task: Task, seen: Seen, now: float) -> Task:
    """An attempt that has begun, and does not run any more."""
    if task.stop == "again":
        task = replace(task, stop="")
    if seen.exit_code == 0:
        return _finished(task, TaskPhase.DONE, f"it ran to its end on {task.machine}", seen, now)
    if task.stop == "cancel":
        return _finished(task, TaskPhase.CANCELLED, f"it was cancelled while it ran on {task.machine}", seen, now)
    code = seen.exit_code
    ended_at = _ended_at(task, seen, now)
    # Whoever was told that its machine goes, and then ends, has saved its work and wants to be begun again.
    saved = code is not None and task.order.restartable and _may_have_saved(task, ended_at)
    killed = code in _KILLED and task.order.restartable
    if code is not None and task.stop in ("", "lost") and not saved and not killed:
        said = f"its command ended with {code} on {task.machine}"
        return _finished(task, TaskPhase.FAILED, said, seen, now)
    if task.stop:
        why = task.sentence
    elif saved:
        why = f"its command ended with {code} on {task.machine} after {task.order.checkpoint_signal}"
    elif code in _KILLED:
        why = f"its command was ended by {_KILLED[code]} on {task.machine}"
    else:
        why = f"it was broken off on {task.machine}" + (f" ({seen.reason})" if seen.reason else "")
    ran_s = max(ended_at - task.began_at, 0.0) if task.began_at is not None else 0.0
    task = replace(task, preemptions=task.preemptions + 1, ran_s=max(ran_s, task.ran_s), broken_off_at=now)
    if not task.order.restartable:
        return _finished(task, TaskPhase.FAILED, f"{why}; it is not restartable, so it is not begun again", seen, now)
    if task.begun >= task.order.max_attempts:
        return _finished(task, TaskPhase.FAILED, f"{why}; it has been begun {task.begun} times", seen, now)
    return _again(task, f"{why}; it is to be begun again")


def _ended_at(task: Task, seen: Seen, now: float) -> float:
    """By another clock, which may be ahead or behind; so may the manager's be, since the task began."""
    ended_at = min(seen.ended_at, now) if seen.ended_at is not None else now
    return max(ended_at, task.waits_since if task.began_at is None else task.began_at)


def _may_have_saved(task: Task, ended_at: float) -> bool:
    """Whether a command that ended then was told that its machine goes: not long ago, if that was withdrawn."""
    if task.told_at is None or task.saves_until is not None:
        return task.told_at is not None
    return ended_at <= task.told_at + (task.order.checkpoint_grace_s or _SAVING_S)


def _again(task: Task, sentence: str) -> Task:
    return replace(
        task,
        phase=TaskPhase.WAITING,
        attempt=task.attempt + 1,
        machine=None,
        stop="",
        released_at=None,
        told_at=None,
        saves_until=None,
        sentence=sentence,
    )


def _finished(task: Task, phase: TaskPhase, sentence: str, seen: Seen, now: float) -> Task:
    ended_at = _ended_at(task, seen, now)
    task = replace(task, phase=phase, stop="", ended_at=ended_at, saves_until=None)
    return replace(task, exit_code=seen.exit_code, sentence=sentence)


def released(task: Task, machine: str, now: float, why: str, predicted: float | None = None) -> Task:
    """A waiting task that has got its machine.

    :param predicted: how likely that keeps its cores for it; None where history is silent.
    """
    return replace(task, phase=TaskPhase.RELEASED, machine=machine, released_at=now, sentence=why, predicted=predicted)


def refused(task: Task, why: str, now: float, full: bool = False) -> Task:
    """A task whose present attempt the engine did not take: it is given to it again after a pause that grows.

    :param why: in the engine's words.
    :param full: the engine takes no more for now, which is no task's fault.
    """
    launches = task.launches + (not full)
    if launches >= MOST_LAUNCHES:
        said = f"it could not be begun {launches} times: {why}"
        return _finished(replace(task, machine=None), TaskPhase.FAILED, said, NOTHING, now)
    return replace(
        task,
        phase=TaskPhase.WAITING,
        machine=None,
        released_at=None,
        launches=launches,
        refusals=task.refusals + 1,
        refused_at=now,
        sentence=f"the engine did not take it: {why}",
    )


def _pauses(task: Task, now: float) -> bool:
    """Whether it is too early to give the engine once more what it has refused."""
    if task.refused_at is None:
        return False
    return 0.0 <= now - task.refused_at < REFUSED_PAUSE_S * 2.0 ** min(task.refusals - 1, _MOST_DOUBLINGS)


def outcome(before: Task, after: Task) -> tuple[float, bool] | None:
    """What was predicted of an attempt that has ended with this step, and whether it came true; None: neither.

    Only tasks that may be begun again say anything: the others go on when their machine shrinks under them.
    """
    if after.predicted is None or not after.order.restartable or before.final:
        return None
    if after.preemptions > before.preemptions:
        return after.predicted, False
    ended = after.final and after.phase is not TaskPhase.CANCELLED and after.exit_code is not None
    return (after.predicted, True) if ended else None


def cancelled(task: Task) -> Task:
    """A task that its owner wants no more; what has ended stays as it is."""
    return task if task.final else replace(task, stop="cancel", sentence="it is being cancelled")


def preempted(tasks: Iterable[Task], machines: Mapping[str, EngineMachine]) -> list[Task]:
    """Tasks that must make room since their machines have shrunk under them, by `matcher.policies.victims`.

    :param tasks: in the order in which they got their turn.
    """
    running: dict[str, list[Task]] = {}
    for task in tasks:
        if task.occupies is not None:
            running.setdefault(task.occupies, []).append(task)
    changed = []
    for machine in machines.values():
        # Those that are being ended make room already.
        here = [task for task in running.get(machine.name, []) if not task.stop]
        here.sort(key=_came_at)
        cores = [task.order.cores for task in here]
        goes = [int(task.order.restartable) for task in here]
        over = sum(cores) - machine.usable_cores
        # What each loses plays no part in this order.
        choose_victims(cores, [0] * len(here), [0.0] * len(here), goes, len(here), over, 0, NEWEST)
        sentence = f"{machine.name} shrank to {machine.usable_cores} cores, which are too few for what ran there"
        victims = [task for task, gone in zip(here, goes, strict=True) if gone]
        changed += [replace(task, stop="preempt", sentence=sentence) for task in reversed(victims)]
    return changed


def _came_at(task: Task) -> float:
    """Since when this attempt is on its machine; ``began_at`` of one that does not run yet is of an attempt before."""
    began = task.began_at if task.phase is TaskPhase.RUNNING else None
    return began or task.released_at or 0.0
