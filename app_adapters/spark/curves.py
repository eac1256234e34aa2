"""Utility curves: the throughput that is left at a deflation, as measured, or linear where nothing was. Pure.

Equations 1 to 3 of Sharma et al. 2019 assume a linear loss: they cannot give less than 1.5 for a job deflated by half
when half of it is done; the paper's own K-means took 1.38 (Fig. 6b).
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from typing import Any

from app_adapters.errors import ApplicationError

FILE_BYTES = 65536


@dataclass(frozen=True)
class Curve:
    """Points (deflation, throughput relative to none), by deflation; between them straight lines from (0, 1) to (1, 0).

    Without points it is 1 - d, as in Eq. 1 and 3.
    """

    points: tuple[tuple[float, float], ...] = ()

    def at(self, deflation: float) -> float:
        """Relative throughput at a deflation in [0, 1]."""
        deflation = min(max(deflation, 0.0), 1.0)
        low = (0.0, 1.0)
        for high in (*self.points, (1.0, 0.0)):
            if deflation <= high[0]:
                width = high[0] - low[0]
                share = (deflation - low[0]) / width if width > 0 else 1.0
                return low[1] + share * (high[1] - low[1])
            low = high
        return 0.0


@dataclass(frozen=True)
class Curves:
    """One curve for VMs that are throttled under a job, one for a job that runs on fewer slots."""

    vm: Curve = Curve()
    self_deflated: Curve = Curve()


LINEAR = Curves()


def read_curves(path: str) -> Curves:
    """A file `{"vm": {"0.25": 0.8, "0.5": 0.55}, "self": {...}}`; a curve that is not there is linear.

    Raises: ApplicationError, which names what is wrong.
    """
    try:
        with open(path, "rb") as file:
            body = json.loads(file.read(FILE_BYTES).decode("utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ApplicationError(f"curves: {path} cannot be read: {error}") from None
    if not isinstance(body, dict) or not set(body) <= {"vm", "self"}:
        raise ApplicationError(f"curves: {path} must hold an object with vm or self, or both, and nothing else")
    return Curves(_curve(body, "vm"), _curve(body, "self"))


def _curve(body: dict[str, Any], name: str) -> Curve:
    table = body.get(name, {})
    if not isinstance(table, dict):
        raise ApplicationError(f"curves: {name}: must be an object of deflation to throughput")
    points = []
    for key, value in table.items():
        try:
            deflation = float(key)
        except ValueError:
            deflation = math.nan
        if not 0 < deflation < 1:
            raise ApplicationError(f"curves: {name}: {key} is no deflation between 0 and 1")
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value <= 1:
            raise ApplicationError(f"curves: {name}: {key}: must be a throughput above 0 and at most 1")
        points.append((deflation, float(value)))
    points.sort()
    if any(low[1] < high[1] for low, high in zip(points, points[1:])):
        raise ApplicationError(f"curves: {name}: throughput must not grow with the deflation")
    if len({deflation for deflation, _ in points}) < len(points):
        raise ApplicationError(f"curves: {name}: a deflation stands there twice")
    return Curve(tuple(points))
