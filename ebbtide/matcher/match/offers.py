"""Offers of machines to a task: the figures of Eq. 2 (Agarwal et al. 2023, §3.1.2) machine by machine, best first."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from ebbtide.matcher.predict.ages import Floats
from ebbtide.matcher.predict.rolling import Integers


@dataclass(frozen=True, slots=True)
class Offer:
    """What one machine offers one task."""

    machine: str
    #: Until it has room: ``a``; s.
    wait_s: float
    #: ``P_c``; None where history is silent, and where the machine's cores cannot be taken.
    completion_probability: float | None
    #: From now to the task's end, with the wait: ``E_wc``; s.
    expected_s: float
    #: By what machines are compared: that, and what a preemption counts beyond the time that it costs; s.
    compared_s: float
    #: Nobody can take the machine's cores.
    lasting: bool = False

    @property
    def in_words(self) -> str:
        """What follows on its name."""
        if self.lasting:
            kept = "its cores cannot be taken"
        elif self.completion_probability is None:
            kept = "nothing is known of its cores"
        else:
            kept = f"it keeps its cores with {self.completion_probability:.0%}"
        averse_s = self.compared_s - self.expected_s
        counted = f", and a preemption counts {averse_s:.0f} s more" if averse_s >= 1.0 else ""
        return f"expected to be done in {self.expected_s:.0f} s ({kept}{counted})"


@dataclass(slots=True)
class Weighed:
    """A task against machines. Arrays of shape (n,); s."""

    #: The predictor's; -1: of no machine, and never with room.
    rows: Integers
    waits: Floats
    #: How likely they fail the task; of those of which history is silent it is assumed.
    failure: Floats
    expected: Floats
    compared: Floats
    #: NaN for those.
    fatal: Floats

    def probability(self, place: int) -> float | None:
        """P_c; None where history is silent."""
        return None if math.isnan(self.fatal.item(place)) else 1.0 - self.failure.item(place)

    def offers(
        self, name: Callable[[int], str], lasting: Callable[[int], bool], most: int, chosen: int
    ) -> tuple[Offer, ...]:
        """The best machines that will ever have room: ``most``, with the chosen one and the best that has room now.

        :param name: of the machine of a row.
        :param lasting: whether the cores of the machine of a row cannot be taken.
        :param chosen: its place; -1: none.
        """
        order = np.argsort(self.compared, kind="stable")
        places = [place for place in order[:most].tolist() if self.compared[place] < np.inf]
        ready = np.flatnonzero((self.waits == 0.0) & (self.compared < np.inf))
        wanted = [chosen] if chosen >= 0 else []
        if len(ready):
            wanted.append(int(ready[np.argmin(self.compared[ready])]))
        places += [place for place in dict.fromkeys(wanted) if place not in places]
        found = []
        for place in places:
            row = int(self.rows[place])
            probability = None if (lasts := lasting(row)) else self.probability(place)
            wait_s, expected_s, compared_s = (
                float(values[place]) for values in (self.waits, self.expected, self.compared)
            )
            found.append(Offer(name(row), wait_s, probability, expected_s, compared_s, lasts))
        return tuple(found)
