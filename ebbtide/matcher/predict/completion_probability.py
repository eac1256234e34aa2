"""P_c, how likely a machine keeps its cores for a task: Eq. 1 of Agarwal et al. 2023, and its two variants.

The one path from what a pool has shown (`matcher.predict.knowledge`) to a probability. `completion_probability` is the
entry; the manager asks through `matcher.predict.predictor.Predictor`, which keeps machines by name, and the simulator
calls `outlook` and `failure_and_loss`, of which the entry is made.

Kernel functions: each works alike on one machine (compiled, in the simulator) and on arrays over machines (live), so
there is one copy of the policy. Unknown is NaN, and stays NaN through all of them.
"""

from __future__ import annotations

from typing import Final, NamedTuple

import numpy as np

from ebbtide.matcher.predict.ages import FIRST_S, Value, located, stretched
from ebbtide.matcher.predict.knowledge import Knowledge, Lines
from ebbtide.matcher.predict.landmarks import LEAST, beyond, room_lasts
from ebbtide.matcher.predict.landmarks import standing as beginning
from ebbtide.matcher.predict.rolling import MOST_CORES

#: Forms of P_c. Eq. 1: the next change is no shrink, or comes after the task.
NEXT_CHANGE: Final = 0
#: Eq. 3 (App. B.2): the next shrink, whatever lies between, comes after the task.
NEXT_SHRINK: Final = 1
#: Beyond the paper: machines that stood as this one kept the room (`matcher.predict.landmarks`).
LANDMARK: Final = 2


class Standing(NamedTuple):
    """What is known of machines for tasks that leave them so many cores free, whatever their age and the duration."""

    #: How likely it is that what the form asks for, if it comes, takes the room; NaN where nothing has ever followed.
    likely: Value
    #: Of the landmarks: where in the table they begin; else it says nothing.
    place: Value


class Aged(NamedTuple):
    """What a curve says of machines of an age, whatever the task: one machine, or arrays of them."""

    #: The age, stretched.
    age: Value
    #: Cumulative hazard up to it, and e to the power of that.
    lived: Value
    scale: Value
    #: Area under survival up to it; s.
    area: Value


class Outlook(NamedTuple):
    """What is known of machines for tasks that leave them so many cores free, whatever their duration.

    One machine, or arrays of them; what the form of P_c does not use says nothing.
    """

    #: Of the curve that the form goes by.
    aged: Aged
    #: Of the landmarks: where in the table, and how far along to the next class of elapsed time.
    place: Value
    along: Value
    #: How likely it is that what the form asks for, if it comes, takes the room; NaN where history is silent.
    fatal: Value


def completion_probability(
    knowledge: Knowledge,
    form: int,
    sized: bool,
    direction: Value,
    elapsed_s: Value,
    duration_s: Value,
    free: Value,
    cores: Value,
) -> Value:
    """``P_c(x, e, d) = 1 - P_s(x) * (1 - P(X > e + d | X > e))`` (Agarwal et al. 2023, Eq. 1).

    X is the time between two changes of a machine's cores, and ``P_s(x)`` how likely a shrink follows on a change in
    direction x. NaN, and neither 0 nor 1, where history is silent: no interval has ended, nothing has ever followed on
    x, or (where running intervals are not counted) no interval was longer than e.

    :param form: NEXT_CHANGE (Eq. 1), NEXT_SHRINK (Eq. 3) or LANDMARK.
    :param sized: whether a shrink that leaves the task room is survived: one of at most ``free`` cores.
    :param direction: x, of the last change; NONE (-1): no change is known.
    :param elapsed_s: e, the time since the last change.
    :param duration_s: d, how long the task still runs; not below 0.
    """
    machines = outlook(knowledge, form, sized, direction, elapsed_s, free, cores)
    return 1.0 - failure_and_loss(knowledge, form, machines, duration_s)[0]


def outlook(
    knowledge: Knowledge, form: int, sized: bool, direction: Value, elapsed_s: Value, free: Value, cores: Value
) -> Outlook:
    """The part of P_c that the task's duration has nothing to do with, to be asked once for many tasks.

    :param cores: that the machine has; only landmarks look at it. `landmarks.ANY_CORES`: it is not known.
    """
    return outlook_then(knowledge, form, standing(knowledge, form, sized, direction, free, cores), elapsed_s)


def standing(knowledge: Knowledge, form: int, sized: bool, direction: Value, free: Value, cores: Value) -> Standing:
    """The part of `outlook` that time has nothing to do with, to be asked once for many moments."""
    if form == LANDMARK:
        place = beginning(knowledge.classes, free if sized else free * 0.0, cores)
        return Standing(knowledge.certain[direction], place)
    # Eq. 1: the next change is a shrink; certain by Eq. 3.
    likely = knowledge.certain[direction] if form == NEXT_SHRINK else knowledge.shrink[direction]
    if sized:
        likely = likely * knowledge.larger[np.int64(np.minimum(np.maximum(free, 0.0), MOST_CORES + 0.0))]
    return Standing(likely, direction)


def outlook_then(knowledge: Knowledge, form: int, machines: Standing, elapsed_s: Value) -> Outlook:
    """`outlook` of machines that stand so, when their last change is ``elapsed_s`` ago."""
    if form == LANDMARK:
        further, along = beyond(elapsed_s)
        # Every form has the same fields: kernels are of one type.
        nothing = along * 0.0
        older = Aged(nothing, nothing, nothing, nothing)
        return Outlook(older, machines.place + further, along, machines.likely + nothing)
    older, known = aged(knowledge.open_lines if form == NEXT_SHRINK else knowledge.lines, elapsed_s)
    return Outlook(older, machines.place, older.area, machines.likely + known)


def failure_and_loss(knowledge: Knowledge, form: int, machines: Outlook, duration_s: Value) -> tuple[Value, Value]:
    """``1 - P_c``, NaN where history is silent, and w of Eq. 2: how long a task runs that does not complete, seconds.

    :param duration_s: not below 0.
    """
    if form == LANDMARK:
        lasts = room_lasts(knowledge.lasts, knowledge.totals[3], machines.place, machines.along, duration_s)
        failure = failure_probability(machines.fatal, lasts)
        return failure, wasted_evenly_s(1.0 - failure, duration_s)
    lines = knowledge.open_lines if form == NEXT_SHRINK else knowledge.lines
    lives, wasted = survival_and_loss(lines, machines.aged, duration_s)
    return failure_probability(machines.fatal, lives), wasted


def failure_probability(shrink_probability: Value, lives: Value) -> Value:
    """Eq. 1: ``1 - P_c = P_s(x) * (1 - P(X > e + d | X > e))``."""
    return shrink_probability * (1.0 - lives)


def form_now(knowledge: Knowledge, form: int) -> int:
    """The form by which it is answered: Eq. 1 until there are landmarks enough."""
    return NEXT_CHANGE if form == LANDMARK and knowledge.totals[2] < LEAST else form


def aged(lines: Lines, elapsed_s: Value) -> tuple[Aged, Value]:
    """What `survival_and_loss` goes by that the task has nothing to do with; and 0, NaN where nothing is known."""
    age = stretched(elapsed_s)
    begin = located(age)
    first = np.int64(begin)
    lived = lines.hazard[first] + begin * lines.hazard_rises[first]
    area = lines.area[first] + begin * lines.area_rises[first]
    return Aged(age, lived, np.exp(lived), area), lines.known[first]


def survival_and_loss(lines: Lines, machines: Aged, duration_s: Value) -> tuple[Value, Value]:
    """``P(X > e + d | X > e)``, and w of Eq. 2: ``E(X - e | e < X < e + d)``, half of d where no change can come.

    Also where nothing is known, which `aged` has said.

    :param duration_s: not below 0.
    """
    end = located(machines.age + duration_s / FIRST_S)
    last = np.int64(end)
    lived = lines.hazard_rises[last]
    lived *= end
    lived += lines.hazard[last]
    lives = np.exp(machines.lived - lived)
    # ( area(e + d) - area(e) ) / survival(e) - d * lives, and a little of one half of d: where hardly any change can
    # come, the difference of nearly equal numbers says nothing. Of what is to be divided d times the divisor is taken
    # off beforehand.
    wasted = lines.area_rises[last]
    wasted *= end
    wasted += lines.area[last]
    wasted -= machines.area
    wasted *= machines.scale
    wasted -= 1.0005 * duration_s
    wasted /= 1.001 - lives
    wasted += duration_s
    return lives, np.minimum(np.maximum(wasted, 0.0), duration_s)


def wasted_evenly_s(probability: Value, duration_s: Value) -> Value:
    """w where only P_c is known: a task that fails does so at an even rate."""
    rate = np.minimum(np.maximum(-np.log(np.fmax(probability, 1e-250)), 1e-4), 600.0)
    return duration_s * (1.0 / rate - 1.0 / np.expm1(rate))
