"""Rule for tasks whose machine is about to go, since its VM is being preempted and has some time to end its work. Pure.

Nothing new begins there. Who may be begun again is ended in time and begun elsewhere, at its place in the line; before
that a command that asked for a signal gets it, and time to save its work. Who may not goes on until the machine goes.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Final

from ebbtide.matcher.match.tasks import Cancel, Instruction, Signal, Task, TaskOrder, TaskPhase

#: What a machine is drained with whose VM is being preempted.
PREEMPTED: Final = "ebbtide: its VM is being preempted"
#: How much of that time tasks may take to save their work; what is left is for ending them.
TASKS_SHARE: Final = 0.75


@dataclass(frozen=True, slots=True)
class Notice:
    """That a machine is about to go.

    :param at: since when that is known, seconds since the epoch.
    :param seconds: how long what runs on the machine has from then on.
    :param passed_s: how much of that has passed, by a clock that nobody sets.
    """

    at: float
    seconds: float
    passed_s: float = 0.0


def saving_s(order: TaskOrder, notice: Notice) -> float:
    """For how long a command may still save its work: one that gets no signal would not know."""
    if order.checkpoint_signal is None:
        return 0.0
    grace_s = math.inf if order.checkpoint_grace_s is None else order.checkpoint_grace_s
    return max(min(grace_s, notice.seconds * TASKS_SHARE) - notice.passed_s, 0.0)


def noticed(
    task: Task, notice: Notice | None, gone: bool, now: float, label: str
) -> tuple[Task, tuple[Instruction, ...]]:
    """A task after a look at whether its machine is about to go.

    :param notice: None: it is not, or not any more.
    :param gone: whether the machine has no cores any more: then it was not withdrawn.
    :param now: seconds since the epoch: for what is shown only, as it may be set at any time.
    """
    if task.final or task.stop:
        return task, ()
    if notice is None:
        if task.saves_until is None or gone:
            return task, ()
        sentence = f"{task.machine} is not preempted after all: it goes on there"
        return replace(task, saves_until=None, sentence=sentence), ()
    attempt = task.attempt_name(label)
    why = f"the VM {task.machine} is being preempted"
    if task.phase is TaskPhase.RELEASED:
        return replace(task, stop="again", sentence=f"{why}: it is matched again"), (Cancel(attempt, begun_too=False),)
    if task.phase is not TaskPhase.RUNNING:
        return task, ()
    left_s, signal = saving_s(task.order, notice), task.order.checkpoint_signal
    if task.order.restartable and left_s <= 0.0:
        return replace(task, stop="preempt", saves_until=None, sentence=why), (Cancel(attempt),)
    if signal is None:
        return task, ()
    if task.told_at is None or task.saves_until is None or task.told_at < notice.at:
        sentence = f"{why}: its command got {signal}, and has {left_s:.0f} s to save its work"
        task = replace(task, told_at=max(now, notice.at), saves_until=now + left_s, sentence=sentence)
    # Again and again, until the engine has done it: it knows by the notice what it has done.
    return task, (Signal(attempt, signal, f"{notice.at:.3f}"),)
