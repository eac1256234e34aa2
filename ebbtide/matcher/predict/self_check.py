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
    goes by landmarks, if the machine kept the cores that it had. One whose machine its owner took away in that time has
    no outcome, also where a shrink had refuted it: else those that an owner ends early would count by how they ended.
    So it counts when its time is over, or when its machine is preempted.

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
        #: By machine: (made at, duration, predicted, cores then, whether it is refuted).
        self._open: dict[str, list[tuple[float, float, float, int, bool]]] = {}

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
            # Earlier versions counted at once what was refuted.
            waiting = {
                str(machine): [
                    (float(at), float(lasts), float(p), int(had), any(refuted)) for at, lasts, p, had, *refuted in rows
                ]
                for machine, rows in found["open"].items()
            }
            next_at = float(found["next_at"])
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise InvalidField("document", f"is damaged: {error}") from error
        self.calibration, self._open, self._next_at = calibration, waiting, next_at

    def observe(self, change: Change) -> None:
        """A change is about to be learned: it refutes predictions, or ends them."""
        if change.direction is None:
            return
        shrinks = change.direction is Direction.SHRINK
        left = []
        for made_at, duration_s, predicted, had, refuted in self._open.pop(change.machine, ()):
            if change.starts:
                # Nobody has told how it ended before.
                continue
            over = change.at >= made_at + duration_s
            if shrinks and not over:
                refuted |= whole_cores(change.cores_after) < had or not self._predictor.options.of_cores
            if over or (change.ends and refuted and not change.by_owner):
                self.calibration.add(predicted, not refuted)
            elif not (change.ends or change.by_owner):
                left.append((made_at, duration_s, predicted, had, refuted))
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
                    self.calibration.add(prediction[2], not prediction[4])
                else:
                    left.append(prediction)
            if left:
                self._open[machine] = left
            else:
                del self._open[machine]
        # Where nobody has been heard of, nothing is known of what would be predicted from.
        heard = self._predictor.known_until() if self._predictor.known_until is not None else {}
        machines = [machine for machine in self._predictor.rows if heard.get(machine, now) >= now]
        for duration_s in self._durations_s:
            found = self._predictor.probabilities_of(machines, now, duration_s)
            for machine, predicted in zip(machines, found, strict=True):
                last = self._predictor.last_of(machine)
                waiting = self._open.setdefault(machine, [])
                if predicted is None or last is None or any(other[1] == duration_s for other in waiting):
                    continue
                waiting.append((now, duration_s, predicted, last.cores, False))
