"""A predictor held against what happens: predictions for every machine at regular times, and their outcomes."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

from ebbtide.deflation.errors import InvalidField
from ebbtide.matcher.predict.calibration import Calibration
from ebbtide.matcher.predict.changes import Change, Direction, whole_cores
from ebbtide.matcher.predict.predictor import Predictor

#: Seconds: durations for which predictions are checked.
DURATIONS_S: Final = (600.0, 3600.0)


class SelfCheck:
    """Feeds a `Calibration`: ask it before the predictor learns of a change.

    A prediction came true if no shrink came within the duration, or, where the predictor counts the size of shrinks or
    goes by landmarks, if the machine kept the cores that it had. One whose machine its owner took away has no outcome.

    :param every_s: at least so long between two predictions for one machine and duration.
    """

    def __init__(
        self, predictor: Predictor, durations_s: Sequence[float] = DURATIONS_S, every_s: float = 900.0
    ) -> None:
        self.calibration = Calibration()
        self._predictor = predictor
        self._durations_s = durations_s
        self._every_s = every_s
        self._next_at = predictor.now
        #: By machine: (made at, duration, predicted, cores then).
        self._open: dict[str, list[tuple[float, float, float, int]]] = {}

    def document(self) -> dict[str, Any]:
        """What can be written as JSON and read by `resume`; predictions without an outcome yet are part of it."""
        return {
            "calibration": self.calibration.document(),
            "next_at": self._next_at,
            "open": {machine: [list(one) for one in waiting] for machine, waiting in self._open.items() if waiting},
        }

    def resume(self, found: Mapping[str, Any]) -> None:
        """Go on where `document` was written.

        :raises InvalidField: it is damaged; nothing is changed.
        """
        try:
            calibration = Calibration.of(found["calibration"])
            waiting = {
                str(machine): [(float(at), float(lasts), float(p), int(had)) for at, lasts, p, had in rows]
                for machine, rows in found["open"].items()
            }
            next_at = float(found["next_at"])
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise InvalidField("document", f"is damaged: {error}") from error
        self.calibration, self._open, self._next_at = calibration, waiting, next_at

    def observe(self, change: Change) -> None:
        """A change is about to be learned; it settles the predictions that it refutes."""
        if change.direction is None:
            return
        if change.by_owner or change.starts:
            self._open.pop(change.machine, None)
            return
        if change.direction is not Direction.SHRINK:
            return
        cores = whole_cores(change.cores_after)
        left = []
        for prediction in self._open.pop(change.machine, []):
            made_at, duration_s, predicted, had = prediction
            if change.at >= made_at + duration_s:
                self.calibration.add(predicted, True)
            elif cores < had or not self._predictor.options.of_cores:
                self.calibration.add(predicted, False)
            else:
                left.append(prediction)
        if left:
            self._open[change.machine] = left

    def advance(self, now: float, known_until: Callable[[], Mapping[str, float]] | None = None) -> None:
        """Settle what has come true by now, and predict again where it is time.

        :param known_until: up to when each machine's changes are known; one that is not in there stays open, as does
            what ends later. None: up to now, for all.
        """
        if now < self._next_at:
            return
        self._next_at = now + self._every_s
        known = known_until() if known_until is not None else None
        for machine, predictions in list(self._open.items()):
            if machine not in self._predictor.rows:
                # It is gone, and nobody will tell of it.
                del self._open[machine]
                continue
            until = now if known is None else min(known.get(machine, -math.inf), now)
            left = []
            for prediction in predictions:
                if until >= prediction[0] + prediction[1]:
                    self.calibration.add(prediction[2], True)
                else:
                    left.append(prediction)
            if left:
                self._open[machine] = left
            else:
                del self._open[machine]
        machines = list(self._predictor.rows)
        for duration_s in self._durations_s:
            found = self._predictor.probabilities_of(machines, now, duration_s)
            for machine, predicted in zip(machines, found, strict=True):
                last = self._predictor.last_of(machine)
                waiting = self._open.setdefault(machine, [])
                if predicted is None or last is None or any(other[1] == duration_s for other in waiting):
                    continue
                waiting.append((now, duration_s, predicted, last.cores))
