"""Machines in the order in which to give them a task of a known duration (Agarwal et al. 2023, §3.1.2)."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

from ebbtide.matcher.predict.changes import Direction, LastChange


class Knowing(Protocol):
    """What knows the machines' past: a History, or a Predictor."""

    def last_of(self, machine: str) -> LastChange | None:
        """The last change of a machine."""

    def probabilities_of(self, machines: Sequence[str], now: float, duration_s: float) -> list[float | None]:
        """P_c of each. Raises InvalidField for a bad duration."""


@dataclass(frozen=True, slots=True)
class Machine:
    """A machine that could take a task."""

    name: str
    #: Whole cores it has now.
    cores: int
    #: Whether its cores can be taken away at all; where not, the history of the others says nothing of it.
    variable: bool = True


#: The place of a machine among all: a cursor of lists.
Rank = tuple[int, float, int, str]


def rank_of(name: str, cores: int, completion_probability: float | None) -> Rank:
    """The order of machines, best first: by P_c, unknown ones last; ties by more cores, then by name.

    Probabilities move between two pages of a list, names do not.
    """
    return int(completion_probability is None), -(completion_probability or 0.0), -cores, name


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

    @property
    def rank(self) -> Rank:
        return rank_of(self.name, self.cores, self.completion_probability)


def rank_machines(machines: Iterable[Machine], history: Knowing, now: float, duration_s: float) -> list[RankedMachine]:
    """The machines with what their history says of them, in the order of `rank_of`.

    :param now: seconds since the epoch, on the clock of the changes.
    :param duration_s: how long the task still runs.
    :raises InvalidField: a duration that is negative or not finite.
    """
    given = list(machines)
    found = history.probabilities_of([machine.name for machine in given], now, duration_s)
    ranked = []
    for machine, probability in zip(given, found, strict=True):
        last = history.last_of(machine.name)
        if last is None or last.gone:
            ranked.append(RankedMachine(machine.name, machine.cores, None, None, None))
            continue
        known = probability if machine.variable else None
        ranked.append(RankedMachine(machine.name, machine.cores, max(now - last.at, 0.0), last.direction, known))
    return sorted(ranked, key=lambda machine: machine.rank)
