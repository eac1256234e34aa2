"""A policy from outside of the engine: it learns how often machines shrink, and lets tasks wait.

It is no good policy: it takes the machine that has shrunk least, and delays a task until the 10th second has come.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ebbtide.simulator.jobs.columns import MACHINE, SUM, TIME, State
from ebbtide.simulator.jobs.machines import fits
from ebbtide.simulator.jobs.policy import Policy


class Learned(NamedTuple):
    #: Shrinks of each machine.
    shrinks: NDArray[np.int64]
    #: (passes, starts, ends, kills).
    seen: NDArray[np.int64]


def begin(s: State, p: Learned, now_s: float) -> None:
    p.seen[0] += 1


def choose(s: State, p: Learned, task: int, now_s: float) -> int:
    if now_s < 10.0:
        s.sums[SUM.wake] = min(s.sums[SUM.wake], 10.0)
        return -1
    best = -1
    for machine in range(len(s.machines)):
        if fits(s, machine, task) and (best < 0 or p.shrinks[machine] < p.shrinks[best]):
            best = machine
    return best


def changed(s: State, p: Learned, machine: int, now_s: float, cores_before: int) -> None:
    if s.machines[machine, MACHINE.direction] < 0:
        p.shrinks[machine] += 1


def started(s: State, p: Learned, task: int, machine: int, now_s: float) -> None:
    p.seen[1] += 1
    s.times[task, TIME.note] = p.shrinks[machine]


def ended(s: State, p: Learned, task: int, machine: int, now_s: float, completed: bool) -> None:
    if completed:
        p.seen[2] += 1
    else:
        p.seen[3] += 1


def resized(s: State, p: Any, most_cores: int, seed: int) -> Learned:
    shrinks = np.zeros(len(s.machines), np.int64)
    if p is not None:
        shrinks[: len(p.shrinks)] = p.shrinks
    return Learned(shrinks, np.zeros(4, np.int64) if p is None else p.seen)


DELAYING = Policy(
    name="delaying",
    kernels={"begin": begin, "choose": choose, "changed": changed, "started": started, "ended": ended},
    state=Learned,
    resized=resized,
    by_demand=False,
)
