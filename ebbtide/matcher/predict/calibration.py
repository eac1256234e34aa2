"""Calibration of predictions: the reliability curve and the Brier score, kept up as outcomes become known."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from ebbtide.deflation.errors import InvalidField
from ebbtide.matcher.predict.ages import Floats

#: Classes of predicted probability: deciles.
CLASSES: Final = 10
_VERSION: Final = 1


@dataclass(frozen=True, slots=True)
class Reliability:
    """One class of predictions: what was predicted on average, and what came true."""

    #: Predictions from ``low`` to below ``low + 0.1`` (the last class with 1).
    low: float
    count: int
    predicted: float
    observed: float

    @property
    def error(self) -> float:
        """Observed less predicted: below 0, predictions promise too much."""
        return self.observed - self.predicted


class Calibration:
    """Counts of predictions and outcomes."""

    def __init__(self) -> None:
        self._counts = np.zeros(CLASSES)
        self._predicted = np.zeros(CLASSES)
        self._observed = np.zeros(CLASSES)
        self._squares = 0.0

    def add(self, predicted: float, completed: bool, count: int = 1) -> None:
        """A prediction whose outcome is known. NaN, no prediction, is passed over.

        :raises InvalidField: a probability outside [0, 1].
        """
        if math.isnan(predicted):
            return
        if not 0.0 <= predicted <= 1.0:
            raise InvalidField("predicted", f"must be within [0, 1], but is {predicted!r}")
        index = min(int(predicted * CLASSES), CLASSES - 1)
        self._counts[index] += count
        self._predicted[index] += predicted * count
        self._observed[index] += count * completed
        self._squares += count * (predicted - completed) ** 2

    def add_all(self, predicted: Floats, completed: np.ndarray[Any, np.dtype[np.bool_]]) -> None:
        """Many at once; shapes (n,)."""
        known = ~np.isnan(predicted)
        values, outcomes = predicted[known], completed[known]
        if len(values) and not (values.min() >= 0.0 and values.max() <= 1.0):
            raise InvalidField("predicted", "must be within [0, 1]")
        index = np.minimum((values * CLASSES).astype(np.int64), CLASSES - 1)
        self._counts += np.bincount(index, minlength=CLASSES)
        self._predicted += np.bincount(index, values, CLASSES)
        self._observed += np.bincount(index, outcomes.astype(np.float64), CLASSES)
        self._squares += float(((values - outcomes) ** 2).sum())

    @property
    def count(self) -> int:
        """How many outcomes are known."""
        return int(self._counts.sum())

    @property
    def brier(self) -> float | None:
        """The mean squared error, 0 at best; None without outcomes."""
        return self._squares / self.count if self.count else None

    def curve(self, least: int = 1) -> list[Reliability]:
        """The classes with at least so many predictions, in ascending order."""
        return [
            Reliability(
                index / CLASSES,
                int(self._counts[index]),
                float(self._predicted[index] / self._counts[index]),
                float(self._observed[index] / self._counts[index]),
            )
            for index in range(CLASSES)
            if self._counts[index] >= max(least, 1)
        ]

    def worst_error(self, least: int = 1) -> float | None:
        """The largest error of the classes with at least so many predictions; None where there is none."""
        return max((abs(row.error) for row in self.curve(least)), default=None)

    def document(self) -> dict[str, Any]:
        """What can be written as JSON and read by `of`."""
        return {
            "version": _VERSION,
            "counts": self._counts.tolist(),
            "predicted": self._predicted.tolist(),
            "observed": self._observed.tolist(),
            "squares": self._squares,
        }

    @classmethod
    def of(cls, document: Mapping[str, Any]) -> Calibration:
        """What `document` wrote.

        :raises InvalidField: another version or shape.
        """
        if document.get("version") != _VERSION:
            raise InvalidField("version", f"must be {_VERSION}, but is {document.get('version')!r}")
        made = cls()
        for name in ("counts", "predicted", "observed"):
            values = np.asarray(document.get(name), np.float64)
            if values.shape != (CLASSES,):
                raise InvalidField(name, f"must be {CLASSES} numbers")
            setattr(made, f"_{name}", values)
        made._squares = float(document["squares"])
        return made
