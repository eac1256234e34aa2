"""Record of how stable machines have been while they were held: P_c of the median task, the last hours weighing most.

P_c at one moment says little of a machine: most of it is how long ago its last change was. Its mean over some hours
says how the machine has been.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping

from ebbtide.deflation.errors import InvalidField


def median_duration_s(durations_s: Iterable[float | None], fallback_s: float) -> float:
    """The median of what tasks are said to run; ``fallback_s`` where nothing that makes sense is said of any."""
    known = sorted(value for value in durations_s if value is not None and math.isfinite(value) and value > 0)
    if not known:
        return fallback_s
    middle = len(known) // 2
    return known[middle] if len(known) % 2 else (known[middle - 1] + known[middle]) / 2.0


class StabilityRecord:
    """Means of P_c by machine, with weights that fall by e in ``evidence_s``.

    :raises InvalidField: ``evidence_s`` is not above 0.
    """

    def __init__(self, evidence_s: float) -> None:
        if not evidence_s > 0:
            raise InvalidField("evidence_s", f"must be above 0, but is {evidence_s!r}")
        self._evidence_s = evidence_s
        #: By machine: when it was seen last, sum of weights, sum of weighted P_c.
        self._seen: dict[str, tuple[float, float, float]] = {}

    def observe(self, now: float, found: Mapping[str, float | None]) -> None:
        """Take in P_c of the machines that are held; all others are forgotten. None: history is silent of it."""
        kept: dict[str, tuple[float, float, float]] = {}
        for machine, probability in found.items():
            at, weight, total = self._seen.get(machine, (now, 0.0, 0.0))
            passed_s = max(now - at, 0.0)
            fades = math.exp(-passed_s / self._evidence_s)
            # What is seen stands for the time since the last look, and the first look for as good as none.
            gained = max(1.0 - fades, 1e-6)
            if probability is not None:
                weight, total = weight * fades + gained, total * fades + gained * probability
            kept[machine] = (now, weight, total)
        self._seen = kept

    def of(self, machine: str) -> float | None:
        """Mean P_c of a machine; None where nothing is known."""
        _, weight, total = self._seen.get(machine, (0.0, 0.0, 0.0))
        return total / weight if weight > 0 else None
