"""What machines offer a task: the figures of Eq. 2 (seed 000 §3.1.2) machine by machine, best first."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from task_matcher.ages import Floats


@dataclass(frozen=True, slots=True)
class Offer:
    """What one machine offers one task."""

    machine: str
    #: Until it has room: ``a``; s.
    wait_s: float
    #: ``P_c``; None where history is silent, and where nobody can take the machine's cores.
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
            kept = "nobody can take its cores"
        elif self.completion_probability is None:
            kept = "nothing is known of its cores"
        else:
            kept = f"it keeps its cores with {self.completion_probability:.0%}"
        disliked_s = self.compared_s - self.expected_s
        counted = f", and a preemption counts {disliked_s:.0f} s more" if disliked_s >= 1.0 else ""
        return f"expected to be done in {self.expected_s:.0f} s ({kept}{counted})"


@dataclass(frozen=True, slots=True)
class Weighed:
    """A task against all machines. Arrays by the predictor's rows, shape (n,); s."""

    waits: Floats
    #: NaN where history is silent; 1 for machines whose cores nobody can take.
    probability: Floats
    expected: Floats
    compared: Floats
    lasting: Floats

    def probability_of(self, row: int) -> float | None:
        """P_c as it is told."""
        found = float(self.probability[row])
        return None if math.isnan(found) or self.lasting[row] > 0.0 else found

    def offers(self, name: Callable[[int], str], most: int, chosen: int) -> tuple[Offer, ...]:
        """The best machines that will ever have room: ``most``, with the chosen one and the best that has room now.

        :param chosen: its row; -1: none.
        """
        order = np.argsort(self.compared, kind="stable")
        rows = [row for row in order[:most].tolist() if self.compared[row] < np.inf]
        ready = np.flatnonzero((self.waits == 0.0) & (self.compared < np.inf))
        wanted = [chosen] if chosen >= 0 else []
        if len(ready):
            wanted.append(int(ready[np.argmin(self.compared[ready])]))
        rows += [row for row in dict.fromkeys(wanted) if row not in rows]
        return tuple(
            Offer(
                name(row),
                float(self.waits[row]),
                self.probability_of(row),
                float(self.expected[row]),
                float(self.compared[row]),
                bool(self.lasting[row] > 0.0),
            )
            for row in rows
        )
