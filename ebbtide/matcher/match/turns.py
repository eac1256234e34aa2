"""One turn of the service: from all tasks and one look at the engine to new states and instructions. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Final, TypeAlias

from ebbtide.matcher.match.attempts import (
    DEFAULT_LABEL,
    RECOUNTED,
    AttemptState,
    Claim,
    EngineMachine,
    Look,
    task_of,
)
from ebbtide.matcher.match.notices import PREEMPTED, Notice, noticed
from ebbtide.matcher.match.rounds import Choice, Pool, choose
from ebbtide.matcher.match.tasks import (
    Cancel,
    Drain,
    Instruction,
    Release,
    SetCores,
    Signal,
    Submit,
    Task,
    TaskPhase,
    Undrain,
    machine_of,
    observe,
    preempted,
    released,
)

#: What one of our machines without a usable core is drained with; what has another reason was drained by an operator.
NO_CORES: Final = "ebbtide: no core is left"
#: And one that the acquirer gives back.
LEAVING: Final = "ebbtide: it is to be given back"
#: And one whose VM is to be stopped, and started on another host.
MOVING: Final = "ebbtide: its VM is to be stopped and moved"
#: And one whose VM is on a host that an operator empties.
DRAINING: Final = "ebbtide: its VM's host is draining"
#: For so long a machine takes no task of a user whose attempt could not write its record there, seconds.
UNRECORDED_PAUSE_S: Final = 240.0
_OURS: Final = (NO_CORES, LEAVING, MOVING, DRAINING, PREEMPTED)
#: Why a machine takes no task of this manager; it is not drained, since others' work may run there.
FOREIGN: Final = "it is called as this manager's acquirer calls its machines, and was not opened by it"

#: Machines where attempts of a user could not write their records, and until when they get none of that user's: what
#: is wrong may be the machine, or all that the user may write.
Unrecorded: TypeAlias = Mapping[tuple[str, str | None], float]
#: For so long a task does not go where its attempt did not begin, if it can go elsewhere, seconds.
UNBEGUN_PAUSE_S: Final = 240.0
#: So many attempts wait in the engine, unless its settings say otherwise: Slurm has room for 10 000 jobs of all users,
#: unless slurm.conf says otherwise (MaxJobCount).
MOST_HELD: Final = 1000
#: What it has refused is given to it beyond that, too: one more for each so many seconds since then.
BEYOND_S: Final = 60.0
#: Machines where an attempt of a task did not begin, or whose engine refused to release it there, by the task's name;
#: and until when it rather goes elsewhere: what is wrong may be the task, too.
Unbegun: TypeAlias = Mapping[tuple[str, str], float]


@dataclass(frozen=True, slots=True)
class Turn:
    """What follows from one look.

    :param changed: tasks with new states, to be stored before any instruction is carried out.
    :param choices: of the tasks that waited, by name: where to, or why not.
    :param orphaned_attempts: attempts with our label that are no unfinished task's present or later ones.
    :param machines: as they are when the instructions have been carried out.
    :param unrecorded: for the next turn, as is ``unbegun``.
    """

    changed: tuple[Task, ...]
    instructions: tuple[Instruction, ...]
    choices: Mapping[str, Choice]
    orphaned_attempts: tuple[str, ...]
    machines: Mapping[str, EngineMachine]
    unrecorded: Unrecorded
    unbegun: Unbegun


def turn(
    tasks: Sequence[Task],
    look: Look,
    cores: Mapping[str, int],
    pool: Pool,
    now: float,
    label: str,
    leaving: Set[str] = frozenset(),
    notices: Mapping[str, Notice] = MappingProxyType({}),
    closing: Mapping[str, str] = MappingProxyType({}),
    paused: Set[str] = frozenset(),
    foreign: Set[str] = frozenset(),
    unrecorded: Unrecorded = MappingProxyType({}),
    unread: Sequence[Task] = (),
    unbegun: Unbegun = MappingProxyType({}),
    most_held: int = MOST_HELD,
) -> Turn:
    """The next step of everything.

    :param tasks: those that have not ended, in the order in which they get their turn.
    :param cores: whole usable cores of the machines that the manager knows; the others keep what the engine says.
    :param pool: what is known of the machines; its predictor is brought up to now.
    :param now: seconds since the epoch.
    :param leaving: machines that take no new task, since they are to be given back.
    :param notices: machines that are about to go, since their VMs are being preempted.
    :param closing: machines that take no new task for what is to become of their VMs (`MOVING`, `DRAINING`), and why.
    :param paused: machines whose VMs stand still, or did so a moment ago: what runs there cannot be heard of.
    :param foreign: machines of somebody else that take no task of ours, and are left as they are.
    :param unrecorded: of the turn before.
    :param unread: tasks of which nothing is known but the cores that they hold.
    :param unbegun: of the turn before, and of releases since.
    :param most_held: so many attempts wait in the engine at the most, but for those that get their machine now, and
        now and then one that it has refused.
    """
    closed = {**closing, **dict.fromkeys(leaving, LEAVING), **dict.fromkeys(notices, PREEMPTED)}
    machines, instructions = _with_cores(look.machines, cores, closed, label, foreign)
    shut = {where: until for where, until in unrecorded.items() if 0.0 < until - now <= UNRECORDED_PAUSE_S}
    missed = {where: until for where, until in unbegun.items() if 0.0 < until - now <= UNBEGUN_PAUSE_S}
    states = {task.name: task for task in tasks}
    for task in tasks:
        seen = look.attempts.get(task.attempt_name(label))
        if seen is not None and seen.unrecorded and seen.claim is Claim.NONE and not task.stop:
            shut[seen.machine or task.machine or "", task.order.user] = now + UNRECORDED_PAUSE_S
        if seen is not None and machine_of(task, seen) in paused:
            seen = replace(seen, suspended=True)
        if seen is not None and seen.never and (machine_of(task, seen) or "", task.name) in missed:
            # As there is nowhere else for it: it has its usual time, which grows.
            seen = replace(seen, never=False)
        after, steps = observe(task, seen, now, label)
        instructions += steps
        if after.stop == "again" and not task.stop and after.machine is not None:
            missed[after.machine, task.name] = now + UNBEGUN_PAUSE_S
        if after.attempt != task.attempt:
            # It is to be begun again: by an attempt that is given to the engine now, and may be released now.
            after, steps = observe(after, look.attempts.get(after.attempt_name(label)), now, label)
            instructions += steps
        where = machines.get(after.occupies or "")
        gone = where is None or where.usable_cores == 0
        states[task.name], steps = noticed(after, notices.get(after.occupies or ""), gone, now, label)
        instructions += steps
    for task in preempted(states.values(), machines):
        states[task.name] = task
        instructions.append(Cancel(task.attempt_name(label)))
    machines = _with_strangers(machines, look, (*states.values(), *unread), {task.name for task in unread}, label)
    # What the engine has refused takes no cores from those behind it.
    waiting = [
        task for task in states.values() if task.phase is TaskPhase.WAITING and not task.stop and not task.refusals
    ]
    # All of them together, in their order: what one does not get is open to those behind it.
    by_user: dict[str | None, set[str]] = {}
    for name, user in shut:
        by_user.setdefault(user, set()).add(name)
    closed_to = {task.name: by_user[task.order.user] for task in waiting if task.order.user in by_user}
    avoided: dict[str, set[str]] = {}
    for name, of_task in missed:
        avoided.setdefault(of_task, set()).add(name)
    choices = choose(waiting, (*states.values(), *unread), machines, pool, now, closed_to, avoided)
    for task in waiting:
        choice = choices[task.name]
        if choice.machine is not None:
            states[task.name] = released(task, choice.machine, now, choice.sentence, choice.completion_probability)
            instructions.append(Release(task.attempt_name(label), choice.machine))
    instructions = _bounded(instructions, states, look, now, most_held)
    for name, user in shut:
        if name in machines and not machines[name].drained:
            whose = f"attempts of {user}" if user is not None else "attempts"
            reason = f"{whose} could not write their records there: it is tried again after {UNRECORDED_PAUSE_S:g} s"
            machines[name] = replace(machines[name], drained=reason)
    changed = tuple(states[task.name] for task in tasks if states[task.name] != task)
    return Turn(changed, tuple(instructions), choices, _orphaned_attempts(tasks, look, label), machines, shut, missed)


def _bounded(
    instructions: Sequence[Instruction], states: Mapping[str, Task], look: Look, now: float, most_held: int
) -> list[Instruction]:
    """Without new attempts beyond the bound, which fall to the last tasks in their order.

    What the engine refused longest ago comes first, and now and then beyond the bound: it is not matched, so that
    nothing else would have it tried.
    """
    over = sum(seen.state is AttemptState.HELD for seen in look.attempts.values()) - most_held
    ahead = [
        one for one in instructions if isinstance(one, Submit) and states[one.order.name].phase is TaskPhase.WAITING
    ]
    refused = {one.attempt: task.refused_at or 0.0 for one in ahead if (task := states[one.order.name]).refusals}
    again = min(refused, key=refused.__getitem__, default="")
    passes = again in refused and over * BEYOND_S <= max(now - refused[again], 0.0)
    names = sorted((one.attempt for one in ahead), key=lambda attempt: attempt != again)
    late = set(names[max(-over, int(passes)) :])
    return [one for one in instructions if not (isinstance(one, Submit) and one.attempt in late)]


def without(made: Turn, names: Set[str], label: str) -> Turn:
    """A turn without these tasks: they have changed since it began, so that nothing of it may be stored or done.

    The next turn sees to them, by what they are then.
    """
    if not names:
        return made
    return replace(
        made,
        changed=tuple(task for task in made.changed if task.name not in names),
        instructions=tuple(one for one in made.instructions if _whose(one, label) not in names),
        choices={name: choice for name, choice in made.choices.items() if name not in names},
    )


def in_turn(instructions: Iterable[Instruction]) -> list[Instruction]:
    """Instructions in the order in which they are carried out: signals first, since who saves its work has little time
    and a machine that is gone may not answer; then machines; attempts that the engine does not have yet last, first
    those that get their machine now, and then their releases: Slurm takes none for a moment after a submission.
    """
    given = list(instructions)
    new = {one.attempt for one in given if isinstance(one, Submit)}
    chosen = {one.attempt for one in given if isinstance(one, Release)}

    def place(one: Instruction) -> int:
        if isinstance(one, Submit):
            return 4 - (one.attempt in chosen)
        if isinstance(one, Release) and one.attempt in new:
            return 5
        if isinstance(one, Signal):
            return 0
        return 1 if isinstance(one, SetCores | Drain | Undrain) else 2

    return sorted(given, key=place)


def _whose(instruction: Instruction, label: str) -> str | None:
    """The task that an instruction is about; None: a machine."""
    if isinstance(instruction, SetCores | Drain | Undrain):
        return None
    found = task_of(instruction.attempt, label)
    assert found is not None, "named by us"
    return found[0]


def said_by(label: str, reason: str) -> str:
    """Words of a drain that tell managers with one engine apart; those of the default label have always had none."""
    return reason if label == DEFAULT_LABEL else reason.replace("ebbtide", f"ebbtide {label}", 1)


def _with_cores(
    machines: Mapping[str, EngineMachine],
    cores: Mapping[str, int],
    closed: Mapping[str, str],
    label: str,
    foreign: Set[str],
) -> tuple[dict[str, EngineMachine], list[Instruction]]:
    """The machines with the cores that they have by now, and what tells the engine.

    Machines of others, and of other managers, are neither drained nor is their drain taken away.

    :param closed: those that take no new task, and why.
    :param foreign: those that take none either, but are somebody else's.
    """
    instructions: list[Instruction] = []
    after = {}
    ours = {RECOUNTED, *(said_by(label, reason) for reason in _OURS)}
    for name, machine in machines.items():
        if name in foreign:
            if machine.drained == said_by(label, LEAVING) and (not machine.up or label != DEFAULT_LABEL):
                # We drained it when it was ours, or when names alone counted. Of managers that share a label the words
                # do not say which one it was; where it is down nothing is lost.
                instructions.append(Undrain(name))
                machine = replace(machine, drained="")
            after[name] = replace(machine, drained=machine.drained or FOREIGN)
            continue
        wanted = max(min(cores.get(name, machine.usable_cores), machine.most_cores), 0)
        if wanted != machine.usable_cores:
            instructions.append(SetCores(name, wanted))
        drained = machine.drained
        reason = closed.get(name) or (NO_CORES if wanted == 0 and name in cores else "")
        if reason and not drained:
            drained = said_by(label, reason)
            instructions.append(Drain(name, drained))
        elif not reason and (drained in ours or (name in cores and drained in _OURS)):
            # Earlier versions said nothing of a label.
            drained = ""
            instructions.append(Undrain(name))
        after[name] = replace(machine, usable_cores=wanted, drained=drained)
    return after, instructions


def _with_strangers(
    machines: Mapping[str, EngineMachine], look: Look, tasks: Iterable[Task], unread: Set[str], label: str
) -> dict[str, EngineMachine]:
    """The machines with the cores of living attempts of ours that are no task's: of one that was submitted after the
    backup from which the store was restored, or that is being ended.

    :param unread: tasks with any attempts.
    """
    present, held = {task.attempt_name(label) for task in tasks}, dict[str, int]()
    for attempt, seen in look.attempts.items():
        machine = machines.get(seen.machine or "")
        if machine is None or not seen.lives or seen.state is AttemptState.HELD or attempt in present:
            continue
        named = task_of(attempt, label)
        if named is None or named[0] in unread:
            continue
        if seen.queued and machine.drained:
            continue  # it does not begin there
        # Where nobody says how many, it may be all that others leave; and it is one at least.
        cores = seen.cores or max(machine.usable_cores - machine.foreign_cores, 1)
        held[machine.name] = held.get(machine.name, 0) + cores
    return {
        name: replace(machine, foreign_cores=machine.foreign_cores + held[name]) if name in held else machine
        for name, machine in machines.items()
    }


def _orphaned_attempts(tasks: Sequence[Task], look: Look, label: str) -> tuple[str, ...]:
    """Of an unfinished task those before the present one. Later ones are none: the store was restored from a backup of
    before they began, and the task comes to them by the records of those in between.
    """
    present = {(task.name, task.key): task.attempt for task in tasks}
    found = []
    for attempt in look.attempts:
        if (named := task_of(attempt, label)) is not None:
            name, key, number = named
            if (name, key) not in present or number < present[name, key]:
                found.append(attempt)
    return tuple(found)
