"""First fit that knows of machine intervals, as the engine's hooks (Wijayawardana 2025 §6.1, Algorithms 1 to 5)."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

import numpy as np

from ebbtide.matcher.policies.intervals import aligned, fill_tails, is_big, mean_remaining_s, next_change_s, risk
from ebbtide.simulator.errors import InvalidParameter
from ebbtide.simulator.jobs.columns import COUNT, MACHINE, MACHINE_TIME, QUEUE, SUM, TASK, TIME, Floats, Ints, State
from ebbtide.simulator.jobs.intake import CLASS_GROWTH, CLASSES
from ebbtide.simulator.jobs.machines import free_cores, free_mib
from ebbtide.simulator.jobs.passes import rewind
from ebbtide.simulator.jobs.policy import Policy
from ebbtide.simulator.jobs.running import start
from ebbtide.simulator.nodes import tree as node_tree
from ebbtide.simulator.nodes.tree import change as change_tree
from ebbtide.simulator.nodes.tree import first_at_least

#: What is heeded: big jobs on the stable machines; small ones after changes; the mean of what is left; its chance.
H1: Final = 1
H2: Final = 2
H3: Final = 4
H4: Final = 8
#: By name, as the thesis compares them (Fig. 6.1 and 6.2).
HEURISTICS: Final = {
    "first-fit": 0,
    "h1": H1,
    "h2": H2,
    "h3": H3,
    "h4": H4,
    "h1-h2": H1 | H2,
    "h1-h3": H1 | H3,
    "h1-h4": H1 | H4,
    "h1-h2-h3": H1 | H2 | H3,
    "ias": H1 | H2 | H4,
}

_HEEDS = 0
_STABLE = 1
_NEWS = 2
_LEARNS = 3
_EVERY_S = 0
_BIG_CORE_S = 1
_LONG_S = 2
_AGGRESSIVENESS = 3
#: Tasks that ask for the same in one look: on stable machines, on others, on others under a condition.
_STABLE_ONES = 0
_OTHERS = 1
_ON_CONDITION = 2


class Intervals(NamedTuple):
    """All that it keeps."""

    #: (heuristics, stable machines, 1 if intervals ended since the last look, 1 if it learns from those).
    facts: Ints
    #: (step in s, core-seconds from which a job is big, seconds from which it is long for H3, A).
    numbers: Floats
    #: By band of machines and length in steps; see `fill_tails`.
    ended: Floats
    tails: Floats
    sums: Floats
    #: The shortest runtime that found no machine in this look, by what was asked and by cores; s.
    hopeless: Floats
    tree: Ints
    known: Ints
    spare: Ints
    #: The band of each machine.
    bands: Ints
    #: Where each class of core-time begins (`intake.length_class`); one more than there are.
    edges: Floats


@dataclass(frozen=True)
class Options:
    """What the policy goes by.

    :param heuristics: a name of `HEURISTICS`.
    :param stable: machines that are never switched off: the first so many.
    :param every_s: time between two instants at which machines may be switched.
    :param big_core_s: work from which a job is big (H1), in core-seconds.
    :param long_s: runtime from which it is long (H3).
    :param aggressiveness: A: the risk that is taken is below it (H4).
    :param ended: of past intervals, how many had which length in steps, by band: shape (bands, steps); longer ones
        count as steps - 1. More bands tell machines apart by their numbers; the thesis has one.
    :param learns: whether intervals that end count, too.
    :raises InvalidParameter: names the field.
    """

    heuristics: str
    stable: int
    every_s: float
    big_core_s: float
    long_s: float
    aggressiveness: float
    ended: Floats
    learns: bool = True

    def __post_init__(self) -> None:
        if self.heuristics not in HEURISTICS:
            raise InvalidParameter("policy", f"must be one of {', '.join(HEURISTICS)}, not {self.heuristics!r}")
        if not (math.isfinite(self.every_s) and self.every_s > 0):
            raise InvalidParameter("every_s", f"must be above 0 and finite, but is {self.every_s:g}")
        if not 0 <= self.aggressiveness <= 1:
            raise InvalidParameter("aggressiveness", f"must be a share, but is {self.aggressiveness:g}")
        if self.ended.ndim != 2 or self.ended.shape[0] < 1 or self.ended.shape[1] < 2:
            raise InvalidParameter("ended", f"must have shape (bands, steps), not {self.ended.shape}")


def band(machine: int, stable: int, machines: int, bands: int) -> int:
    """The band of a machine: those that may be switched off, in so many parts by their numbers."""
    share = (machine - stable) / max(machines - stable, 1)
    return min(max(int(share * bands + 1e-9), 0), bands - 1)


def begin(s: State, p: Intervals, now_s: float) -> None:
    """A look begins: nothing is hopeless yet, and what has ended since is taken in."""
    for what in range(len(p.hopeless)):
        for cores in range(p.hopeless.shape[1]):
            p.hopeless[what, cores] = math.inf
    if p.facts[_NEWS] != 0:
        p.facts[_NEWS] = 0
        for row in range(len(p.ended)):
            fill_tails(p.ended[row], p.tails[row], p.sums[row])


def changed(s: State, p: Intervals, machine: int, now_s: float, cores_before: int) -> None:
    """A machine that goes off ends an interval."""
    if p.facts[_LEARNS] == 0 or cores_before == 0 or s.machines[machine, MACHINE.cores] != 0:
        return
    steps = int((now_s - s.machine_times[machine, MACHINE_TIME.changed]) / p.numbers[_EVERY_S] + 0.5)
    p.ended[p.bands[machine], min(max(steps, 0), p.ended.shape[1] - 1)] += 1.0
    p.facts[_NEWS] = 1


def moved(s: State, p: Intervals, machine: int) -> None:
    """Take in what a machine has free now."""
    p.spare[machine] = free_mib(s, machine)
    free = free_cores(s, machine)
    if free != p.known[machine]:
        p.known[machine] = free
        change_tree(p.tree, machine, free)


def outlasts(s: State, p: Intervals, machine: int, runtime_s: float, now_s: float) -> bool:
    """Whether a machine may be trusted with a job that is asked about (Algorithms 3 and 4)."""
    every_s = p.numbers[_EVERY_S]
    row = p.bands[machine]
    uptime_s = now_s - s.machine_times[machine, MACHINE_TIME.changed]
    if p.facts[_HEEDS] & H3 != 0 and mean_remaining_s(p.tails[row], p.sums[row], every_s, uptime_s) < runtime_s:
        return False
    if p.facts[_HEEDS] & H4 != 0:
        return bool(risk(p.tails[row], every_s, uptime_s, runtime_s) < p.numbers[_AGGRESSIVENESS])
    return True


def choose(s: State, p: Intervals, task: int, now_s: float) -> int:
    """The first machine that fits and is not ruled out; -1 if there is none (Algorithm 5)."""
    heeds = p.facts[_HEEDS]
    cores = s.tasks[task, TASK.cores]
    memory_mib = s.tasks[task, TASK.memory]
    runtime_s = s.times[task, TIME.estimate]
    every_s = p.numbers[_EVERY_S]
    first = 0
    end = len(s.machines)
    what = _OTHERS
    if heeds & H1 != 0 and is_big(runtime_s, cores, p.numbers[_BIG_CORE_S]):
        what = _STABLE_ONES
        end = p.facts[_STABLE]
    else:
        if heeds & H1 != 0:
            first = p.facts[_STABLE]
        asked = heeds & H4 != 0 and (heeds & H2 == 0 or runtime_s > every_s)
        if asked or (heeds & H3 != 0 and runtime_s > p.numbers[_LONG_S]):
            what = _ON_CONDITION
        if heeds & (H2 | H4) != 0 and (
            s.counts[COUNT.more_changes] != 0 or s.counts[COUNT.next_change] < len(s.change_at)
        ):
            # Time alone may let it start; after the last change of all it does not.
            s.sums[SUM.wake] = min(s.sums[SUM.wake], next_change_s(now_s, every_s))
        if heeds & H2 != 0 and not aligned(runtime_s, now_s, every_s):
            return -1
    if runtime_s >= p.hopeless[what, cores]:
        return -1
    machine = first_at_least(p.tree, first, cores)
    while 0 <= machine < end:
        # Stable machines are never switched off: nothing is asked about them.
        if p.spare[machine] >= memory_mib and (
            what != _ON_CONDITION or machine < p.facts[_STABLE] or outlasts(s, p, machine, runtime_s, now_s)
        ):
            return machine
        machine = first_at_least(p.tree, machine + 1, cores)
    if memory_mib == 0:
        # Room only shrinks within a look, and a longer job is not easier to place.
        p.hopeless[what, cores] = runtime_s if what == _ON_CONDITION else -1.0
    return -1


def hopeless_queue(s: State, p: Intervals, queue: int) -> bool:
    """Whether no task of a queue can start in this look: all of it would be asked the same, and is too long.

    A queue holds tasks of one class of core-time (`Settings.by_length`).
    """
    heeds = p.facts[_HEEDS]
    cores = s.queues[queue, QUEUE.cores]
    low = p.edges[s.queues[queue, QUEUE.rank]]
    high = p.edges[s.queues[queue, QUEUE.rank] + 1]
    what = _OTHERS
    if heeds & H1 != 0 and low >= p.numbers[_BIG_CORE_S]:
        what = _STABLE_ONES
    elif heeds & H1 != 0 and high >= p.numbers[_BIG_CORE_S]:
        return False
    elif heeds & H4 != 0:
        if heeds & H2 == 0 or low / cores > p.numbers[_EVERY_S]:
            what = _ON_CONDITION
        elif high / cores > p.numbers[_EVERY_S]:
            return False
    elif heeds & H3 != 0:
        if low / cores > p.numbers[_LONG_S]:
            what = _ON_CONDITION
        elif high / cores > p.numbers[_LONG_S]:
            return False
    return bool(low / cores >= p.hopeless[what, cores])


def earliest(s: State, p: Intervals) -> int:
    """The queue of the task that has waited longest of all that are still to be asked; -1: there is none."""
    best = -1
    best_order = 0
    for i in range(s.counts[COUNT.active]):
        queue = s.active[i]
        task = s.queues[queue, QUEUE.cursor]
        if task < 0:
            continue
        order = s.tasks[task, TASK.order]
        if best >= 0 and order >= best_order:
            continue
        if hopeless_queue(s, p, queue):
            s.queues[queue, QUEUE.cursor] = -1
            continue
        best = queue
        best_order = order
    return best


def schedule(s: State, p: Intervals, now_s: float) -> None:
    """One look: first come, first served, and who cannot start is passed over; what class a task has plays no part."""
    if s.counts[COUNT.active] == 0:
        return
    begin(s, p, now_s)
    rewind(s)
    while True:
        queue = earliest(s, p)
        if queue < 0:
            break
        task = s.queues[queue, QUEUE.cursor]
        s.queues[queue, QUEUE.cursor] = s.tasks[task, TASK.next]
        machine = choose(s, p, task, now_s)
        if machine >= 0:
            start(s, p, task, machine, now_s)


def policy(options: Options) -> Policy:
    """The policy for the engine."""

    def resized(s: State, p: Any, most_cores: int, seed: int) -> Intervals:
        machines, bands = len(s.machines), len(options.ended)
        ended = np.array(options.ended, np.float64) if p is None else p.ended
        return Intervals(
            facts=np.array([HEURISTICS[options.heuristics], options.stable, 1, options.learns], np.int64),
            numbers=np.array([options.every_s, options.big_core_s, options.long_s, options.aggressiveness]),
            ended=ended,
            tails=np.zeros(options.ended.shape),
            sums=np.zeros(options.ended.shape),
            hopeless=np.full((3, most_cores + 1), np.inf),
            tree=node_tree.tree_of(machines),
            known=np.full(machines, -1, np.int64),
            spare=np.zeros(machines, np.int64),
            edges=np.concatenate([[0.0], CLASS_GROWTH ** np.arange(1.0, CLASSES) * (1 - 1e-9), [np.inf]]),
            bands=np.array([band(i, options.stable, machines, bands) for i in range(machines)], np.int64),
        )

    kernels: dict[str, Any] = {
        "begin": begin,
        "choose": choose,
        "moved": moved,
        "changed": changed,
        "schedule": schedule,
    }
    return Policy("intervals", kernels, Intervals, resized, by_demand=False)
