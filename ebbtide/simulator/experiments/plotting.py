"""Plots of an experiment: as its file states them, or one for each metric."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, Final

from ebbtide.simulator.errors import InvalidParameter
from ebbtide.simulator.experiments.experiment import Experiment, Mark, Plot, Value
from ebbtide.simulator.experiments.fields import Given
from ebbtide.simulator.experiments.model import POLICY

#: Plots that are made unasked.
MOST_PLOTS: Final = 12


def with_plots(experiment: Experiment, given: Any) -> Experiment:
    """The experiment with the plots of its [[plots]], axes put in their places.

    :raises InvalidParameter: names the key.
    """
    if not isinstance(given, list) or not all(isinstance(entry, Mapping) for entry in given):
        raise InvalidParameter("plots", "must be tables: [[plots]]")
    plots = tuple(_plot(entry, f"plots[{number}].", experiment) for number, entry in enumerate(given, 1))
    if experiment.metrics:
        for number, plot in enumerate(plots, 1):
            for metric in plot.metrics:
                if metric not in experiment.metrics:
                    raise InvalidParameter(f"plots[{number}].metrics", f"has {metric!r}, which is not in metrics")
    return replace(experiment, plots=plots)


def plots_of(experiment: Experiment, metrics: Sequence[str]) -> tuple[Plot, ...]:
    """The plots to draw.

    :param metrics: all that were found.
    """
    if experiment.plots:
        return experiment.plots
    axes = experiment.axis_values()
    x = _main_axis(axes)
    if x is None:
        return ()
    lines, panels = _places(axes, x, {}, None, None)
    return tuple(Plot(metric, (metric,), x, lines, panels) for metric in metrics[:MOST_PLOTS])


def _plot(entry: Mapping[str, Any], where: str, experiment: Experiment) -> Plot:
    fields = Given(entry, where)
    axes = experiment.axis_values()
    metrics = fields.texts("metrics", fields.texts("metric", ()))
    if not metrics:
        raise fields.wrong("metric", "is missing")
    x = fields.text("x", _main_axis(axes) or "")
    where_values = dict(_where(fields, axes))
    lines = fields.texts("lines") if "lines" in fields else None
    panels = fields.texts("panels") if "panels" in fields else None
    for name, chosen in (("x", (x,)), ("lines", lines or ()), ("panels", panels or ())):
        for axis in chosen:
            if axis not in axes:
                known = f"there are {', '.join(axes)}" if axes else "there are none"
                raise fields.wrong(name, f"must be an axis, but is {axis!r}; {known}")
    used = [x, *(lines or ()), *(panels or ())]
    if len(set(used)) < len(used):
        raise fields.wrong("x", "and lines and panels must be different axes")
    lines, panels = _places(axes, x, where_values, lines, panels)
    log_x = fields.choice("x_scale", ("linear", "log"), "linear") == "log"
    if log_x and any(not isinstance(one, str) and one <= 0 for one in where_values.get(x, axes[x])):
        raise fields.wrong(
            "x_scale", f"is log, which cannot show that {x} is 0 or below: leave such values out by where"
        )
    plot = Plot(
        title=fields.text("title", ", ".join(metrics)),
        metrics=metrics,
        x=x,
        lines=lines,
        panels=panels,
        where=where_values,
        log_x=log_x,
        log_y=fields.choice("y_scale", ("linear", "log"), "linear") == "log",
        percent=fields.flag("percent", False),
        bounds=fields.texts("bounds", ()),
        marks=tuple(_marks(fields, where)),
    )
    fields.texts("lines", ())
    fields.texts("panels", ())
    fields.end()
    return plot


def _where(fields: Given, axes: Mapping[str, tuple[Value, ...]]) -> Iterator[tuple[str, tuple[Value, ...]]]:
    for name, wanted in fields.table("where", {}).items():
        if name not in axes:
            raise fields.wrong(f"where.{name}", f"must be an axis; there are {', '.join(axes)}")
        values = tuple(wanted) if isinstance(wanted, list) else (wanted,)
        for value in values:
            if value not in axes[name]:
                allowed = ", ".join(str(one) for one in axes[name])
                raise fields.wrong(f"where.{name}", f"has {value!r}, which the axis has not; it has {allowed}")
        yield name, values


def _marks(fields: Given, where: str) -> Iterator[Mark]:
    marks = fields.value("marks", [])
    if not isinstance(marks, list) or not all(isinstance(mark, Mapping) for mark in marks):
        raise fields.wrong("marks", "must be a list of tables")
    for entry in marks:
        mark = Given(entry, f"{where}marks.")
        bound, at = mark.text("bound"), mark.number("at")
        yield Mark(bound, at, mark.text("label", f"{bound} = {at:g}"))
        mark.end()


def _main_axis(axes: Mapping[str, tuple[Value, ...]]) -> str | None:
    """The first that varies in numbers, else the first that varies, else any."""
    varying = {name: values for name, values in axes.items() if len(values) > 1}
    for name, values in varying.items():
        if isinstance(values[0], int | float) and not isinstance(values[0], bool):
            return name
    return next(iter(varying or axes), None)


def _places(
    axes: Mapping[str, tuple[Value, ...]],
    x: str,
    where: Mapping[str, tuple[Value, ...]],
    lines: tuple[str, ...] | None,
    panels: tuple[str, ...] | None,
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Axes that the file does not place: the policy, or the first of them, makes lines, the others make panels."""
    taken = {x, *(lines or ()), *(panels or ())}
    left = [name for name, values in axes.items() if name not in taken and len(where.get(name, values)) > 1]
    if lines is None:
        first = POLICY if POLICY in left else next(iter(left), None)
        lines = () if first is None else (first,)
        left = [name for name in left if name != first]
    return lines, (panels or ()) + tuple(left)
