"""Checks of what an adapter answers, before anybody is told: its types, and figures that are finite and not negative.

A figure may be anything that float() takes but a text: Decimal, Fraction, numpy's. All raise BadAnswer.
"""

from __future__ import annotations

import math
from typing import Any

from app_adapters.adapter import Answer, Capabilities, Promise, Refusal, Release, SizeRange
from app_adapters.errors import BadAnswer
from app_adapters.messages import COMPONENTS, MODES


def number(value: Any, field: str) -> float:
    """A finite figure >= 0."""
    try:
        if not isinstance(value, bool) and hasattr(value, "__float__"):
            figure = float(value)
            if math.isfinite(figure) and figure >= 0:
                return figure
    except (TypeError, ValueError, ArithmeticError):
        pass
    raise BadAnswer(field, f"{repr(value)[:80]} is no finite number >= 0")


def vector(value: Any, field: str) -> dict[str, float]:
    """Figures of some components."""
    return {name: number(figure, f"{field}.{name}") for name, figure in _components(value, field)}


def capabilities(value: Any) -> Capabilities:
    """What an application offers, its figures as floats."""
    _require(value, Capabilities, "capabilities")
    ranges = {}
    for name, sizes in _components(value.resources, "resources"):
        field = f"resources.{name}"
        _require(sizes, SizeRange, field)
        figures = ("current", "minimum", "maximum", "step")
        ranges[name] = SizeRange(*(number(getattr(sizes, figure), f"{field}.{figure}") for figure in figures))
    if isinstance(value.modes, str) or not set(value.modes) <= set(MODES):
        raise BadAnswer("modes", f"{value.modes!r} is no list of {' and '.join(MODES)}")
    expected_s = number(value.expected_s, "expected_s")
    return Capabilities(
        str(value.name), str(value.version), ranges, expected_s, bool(value.reversible), list(value.modes)
    )


def answer(value: Any, method: str) -> Answer:
    """A decision about a target."""
    if isinstance(value, Refusal):
        retry_s = None if value.retry_after_s is None else number(value.retry_after_s, "retry_after_s")
        return Refusal(str(value.reason), retry_s, vector(value.floor, "floor"), bool(value.for_good))
    if not isinstance(value, Promise):
        raise BadAnswer(method, f"{type(value).__name__} was returned, and neither a Promise nor a Refusal")
    if not callable(value.work):
        raise BadAnswer("work", f"{repr(value.work)[:80]} cannot be called")
    promised, expected_s = vector(value.promised, "promised"), number(value.expected_s, "expected_s")
    return Promise(promised, expected_s, value.work, str(value.reason))


def release(value: Any) -> Release:
    """What `work` has measured."""
    _require(value, Release, "work")
    released = vector(value.released, "released")
    return Release(released, str(value.measured_by), str(value.reason), bool(value.complete))


def _require(value: Any, kind: type, field: str) -> None:
    if not isinstance(value, kind):
        raise BadAnswer(field, f"{type(value).__name__} was returned, and no {kind.__name__}")


def _components(value: Any, field: str) -> list[tuple[str, Any]]:
    if not isinstance(value, dict):
        raise BadAnswer(field, f"{repr(value)[:80]} is no dictionary of figures by component")
    for name in value:
        if name not in COMPONENTS:
            raise BadAnswer(f"{field}.{name}", f"there is {' and '.join(COMPONENTS)} only")
    return list(value.items())


__all__ = ["answer", "capabilities", "number", "release", "vector"]
