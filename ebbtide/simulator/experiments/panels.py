"""Numbers that a plot shows: lines of means with intervals, bounds, marks. The tables behind plots are these."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from ebbtide.simulator.experiments.experiment import BOUND, Mark, Plot, Value, shown
from ebbtide.simulator.experiments.results import Results
from ebbtide.simulator.experiments.statistics import Interval, interval


@dataclass(frozen=True, slots=True)
class Point:
    """One case of a line.

    :param bounds: what analysis says of it, by name.
    """

    x: Value
    found: Interval
    bounds: Mapping[str, float]


@dataclass(frozen=True, slots=True)
class Line:
    """The points of one value of the lines' axes.

    :param marks: where a bound reaches its value along the line; only those that do.
    """

    case: Mapping[str, Value]
    points: tuple[Point, ...]
    marks: tuple[tuple[Mark, float], ...]

    @property
    def label(self) -> str:
        return label(self.case)


@dataclass(frozen=True, slots=True)
class Panel:
    """One metric at one value of the panels' axes."""

    metric: str
    case: Mapping[str, Value]
    lines: tuple[Line, ...]


def label(case: Mapping[str, Value]) -> str:
    """Values of axes in words: a text says by itself what it is, a number does not."""
    return ", ".join(value if isinstance(value, str) else f"{name} = {shown(value)}" for name, value in case.items())


def panels(results: Results, plot: Plot) -> list[Panel]:
    """The panels of a plot, by metric and then by the panels' axes; empty ones are left out."""
    found = []
    for metric in plot.metrics:
        for case in combinations(results, plot, plot.panels):
            lines = []
            for line_case in combinations(results, plot, plot.lines):
                line = _line(results, plot, metric, case | line_case, line_case)
                if line.points:
                    lines.append(line)
            if lines:
                found.append(Panel(metric, case, tuple(lines)))
    return found


def combinations(results: Results, plot: Plot, axes: Sequence[str]) -> list[dict[str, Value]]:
    """Every combination of the values of some axes that the plot draws."""
    drawn = [plot.where.get(axis, tuple(results.values(axis))) for axis in axes]
    return [dict(zip(axes, values, strict=True)) for values in itertools.product(*drawn)]


def _line(results: Results, plot: Plot, metric: str, case: Mapping[str, Value], line_case: Mapping[str, Value]) -> Line:
    rest = {axis: values for axis, values in plot.where.items() if axis not in case and axis != plot.x}
    points = []
    for x in plot.where.get(plot.x, tuple(results.values(plot.x))):
        columns = results.select({**case, plot.x: x})
        kept = np.ones(len(columns[metric]), bool)
        for axis, values in rest.items():
            kept &= np.isin(columns[axis], np.array(values))
        if not kept.any():
            continue
        names = dict.fromkeys((*plot.bounds, *(mark.bound for mark in plot.marks)))
        bounds = {
            name: interval(columns[BOUND + name][kept]).mean if BOUND + name in columns else math.nan for name in names
        }
        points.append(Point(x, interval(columns[metric][kept]), bounds))
    marks = [(mark, at) for mark in plot.marks if (at := _crossing(points, mark)) is not None]
    return Line(line_case, tuple(points), tuple(marks))


def _crossing(points: Sequence[Point], mark: Mark) -> float | None:
    """Where along x a bound first reaches a value, straight between neighbours; None where it never does."""
    if not points or any(isinstance(point.x, str | bool) for point in points):
        return None
    along = sorted((float(point.x), point.bounds[mark.bound]) for point in points)
    for (x, value), (next_x, next_value) in itertools.pairwise(along):
        if (value - mark.at) * (next_value - mark.at) <= 0 and value != next_value:
            return x + (mark.at - value) / (next_value - value) * (next_x - x)
    return None
