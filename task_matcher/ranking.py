"""Machines in the order in which to give them a task of a known duration (seed 000 §3.1.2)."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from task_matcher.prediction import Direction, History, completion_probability


@dataclass(frozen=True, slots=True)
class Machine:
    """A machine that could take a task."""

    name: str
    #: Whole cores it has now.
    cores: int
    #: Whether its cores can be taken away at all; where not, the history of the others says nothing of it.
    variable: bool = True


@dataclass(frozen=True, slots=True)
class RankedMachine:
    """A machine with what its history says of it."""

    name: str
    cores: int
    #: Seconds since the last change of whole cores; None if none is known.
    since_change_s: float | None
    last_change: Direction | None
    #: ``P_c`` for the duration asked; None without history.
    completion_probability: float | None


def rank_machines(machines: Iterable[Machine], history: History, now: float, duration_s: float) -> list[RankedMachine]:
    """Best first: by completion probability, unknown ones last; ties by more cores, then by name.

    :param now: seconds since the epoch, on the clock of the changes.
    :param duration_s: how long the task still runs.
    :raises InvalidField: a duration that is negative or not finite.
    """
    ranked = [_look_up(machine, history, now, duration_s) for machine in machines]
    return sorted(
        ranked,
        key=lambda m: (m.completion_probability is None, -(m.completion_probability or 0.0), -m.cores, m.name),
    )


def _look_up(machine: Machine, history: History, now: float, duration_s: float) -> RankedMachine:
    last = history.last.get(machine.name)
    if last is None or last.gone:
        completion_probability(history.intervals, None, 0.0, duration_s)  # holds the duration to its range
        return RankedMachine(machine.name, machine.cores, None, None, None)
    since_s = max(now - last.at, 0.0)
    shrink_probability = history.shrink_probability(last.direction) if machine.variable else None
    probability = completion_probability(history.intervals, shrink_probability, since_s, duration_s)
    return RankedMachine(machine.name, machine.cores, since_s, last.direction, probability)
