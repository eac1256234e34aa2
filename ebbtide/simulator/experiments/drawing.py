"""Plots as SVG, drawn by matplotlib (an extra)."""

from __future__ import annotations

import io
import math
from collections.abc import Mapping, Sequence
from typing import Any, Final, Literal

from ebbtide.simulator.experiments.experiment import Plot, Value, shown
from ebbtide.simulator.experiments.panels import Line, Panel, combinations, label, panels
from ebbtide.simulator.experiments.results import Results

#: Inches of a report's width, which a window of 1280 px shows whole.
_WIDTH: Final = 11.6
_ONE_PANEL: Final = (8.0, 4.6)
_PANEL_HEIGHT: Final = 3.3
_MOST_COLUMNS: Final = 3
#: Okabe and Ito: told apart also by who sees few colours.
_COLOURS: Final = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000", "#8B6508")
_MARKERS: Final = ("o", "s", "^", "D", "v", "P", "X", "*")
_STYLES: Final = ("-", "--", ":", "-.")
#: Of a legend's size of type.
_LETTERS_PER_INCH: Final = 13.5
_GREY: Final = "#555555"
#: Of a line that stands for several.
_ALL: Final = "#000000"
#: An axis reaches this far, of the largest mean.
_ROOM: Final = 1.6
#: A dollar in a name is no formula.
_FONT: Final[dict[Any, Any]] = {
    "font.size": 10,
    "axes.titlesize": 10,
    "svg.fonttype": "path",
    "text.parse_math": False,
}


def svg(results: Results, plot: Plot) -> str | None:
    """The picture as an SVG document; None where there is nothing to draw. Raises ImportError without matplotlib."""
    import matplotlib
    from matplotlib.backends.backend_svg import FigureCanvasSVG
    from matplotlib.figure import Figure

    found = panels(results, plot)
    if not found:
        return None
    styles, names = _styles(results, plot), _names(plot, found)
    columns, rows, shared = _grid(plot, found)
    drawn = {point.x for panel in found for line in panel.lines for point in line.points}
    xs = [x for x in results.values(plot.x) if x in drawn]
    with matplotlib.rc_context({**_FONT, "svg.hashsalt": plot.title}):
        size = _ONE_PANEL if len(found) == 1 else (_WIDTH, _PANEL_HEIGHT * rows + 0.6)
        figure = Figure(figsize=size, layout="constrained")
        FigureCanvasSVG(figure)
        grid = figure.subplots(rows, columns, squeeze=False, sharex=True, sharey=shared)
        places = [axes for row in grid for axes in row]
        for place, panel in zip(places, found, strict=False):
            _draw(place, plot, panel, styles, names, xs)
        for number, place in enumerate(places):
            if number >= len(found):
                place.set_visible(False)
            elif number + columns >= len(found):
                # Below it there is no panel that would show the numbers of the shared axis.
                place.tick_params(labelbottom=True)
                place.set_xlabel(plot.x)
            if number < len(found) and (number % columns == 0 or not shared):
                place.set_ylabel(found[number].metric)
        _from_zero(plot, list(zip(places, found, strict=False)), bool(shared))
        _legend(figure, places[: len(found)])
        content = io.StringIO()
        figure.savefig(content, format="svg", metadata={"Date": None, "Creator": None})
    return content.getvalue()


def _grid(plot: Plot, found: Sequence[Panel]) -> tuple[int, int, bool | Literal["row"]]:
    """Columns, rows, and which panels have one y axis, so that they can be compared.

    A row a metric where there are several, or a row for each value of the first of two axes.
    """
    metrics = len({panel.metric for panel in found})
    each = len(found) // metrics
    if metrics > 1 and 1 < each <= _MOST_COLUMNS + 1 and each * metrics == len(found):
        return each, metrics, "row"
    columns = 2 if len(found) == 4 else min(len(found), _MOST_COLUMNS)
    if metrics == 1 and len(plot.panels) == 2:
        second = len({panel.case[plot.panels[1]] for panel in found})
        if second <= _MOST_COLUMNS + 1 and len(found) % second == 0:
            columns = second
    return columns, math.ceil(len(found) / columns), metrics == 1


def _styles(results: Results, plot: Plot) -> Mapping[str, tuple[Any, str, str]]:
    """Colour, marker and stroke of each line. Two axes: strokes for the first, colours for the others."""
    import matplotlib

    cases = combinations(results, plot, plot.lines)
    coloured = plot.lines[1:] if len(plot.lines) > 1 else plot.lines
    keys = list(dict.fromkeys(tuple(case[axis] for axis in coloured) for case in cases))
    strokes = list(dict.fromkeys(case[plot.lines[0]] for case in cases)) if len(plot.lines) > 1 else []
    ordered = len(coloured) == 1 and len(keys) > 2 and not isinstance(keys[0][0], str | bool)
    # Many names, as of policies: strokes tell apart those of one colour, where they say nothing else.
    many = len(keys) > len(_COLOURS)
    ordered = ordered or (many and (bool(strokes) or len(keys) > len(_COLOURS) * len(_STYLES)))
    found = {}
    for case in cases:
        number = keys.index(tuple(case[axis] for axis in coloured))
        stroke = strokes.index(case[plot.lines[0]]) if strokes else 0 if ordered else number // len(_COLOURS)
        shade = matplotlib.colormaps["viridis"](0.88 * number / max(len(keys) - 1, 1))
        colour = shade if ordered else _COLOURS[number % len(_COLOURS)]
        marker = _MARKERS[(stroke if strokes else number) % len(_MARKERS)]
        found[label(case)] = (colour, marker, _STYLES[stroke % len(_STYLES)])
    return found


def _names(plot: Plot, found: Sequence[Panel]) -> Mapping[str, str | None]:
    """Lines of one stroke that lie on each other in every panel: one stands for all under a name that says so.

    :returns: by label; None: not drawn. Other lines are not in it.
    """
    if len(plot.lines) < 2:
        return {}
    first, *others = plot.lines
    seen: dict[Value, dict[str, list[str]]] = {}
    for number, panel in enumerate(found):
        for line in panel.lines:
            points = [f"{number} {point.x!r} {point.found!r}" for point in line.points]
            seen.setdefault(line.case[first], {}).setdefault(line.label, []).extend(points)
    names: dict[str, str | None] = {}
    for value, lines in seen.items():
        if len(lines) > 1 and len({tuple(points) for points in lines.values()}) == 1:
            one, *rest = lines
            names |= {one: f"{label({first: value})}, any {' and '.join(others)}"} | dict.fromkeys(rest)
    return names


def _line(
    place: Any,
    panel: Panel,
    number: int,
    style: tuple[Any, str, str],
    names: Mapping[str, str | None],
    xs: Sequence[Value],
) -> None:
    """One line with its intervals; beside the others where names stand for numbers."""
    line, (colour, marker, stroke) = panel.lines[number], style
    words = _are_words(xs)
    # Beside each other, where they would stand on one another.
    shift = (number - (len(panel.lines) - 1) / 2) * 0.12 if words else 0.0
    at = [xs.index(point.x) + shift if words else float(point.x) for point in line.points]
    means = [point.found.mean for point in line.points]
    spread = [[_half(p.found.mean - p.found.low) for p in line.points]]
    spread.append([_half(p.found.high - p.found.mean) for p in line.points])
    name = names.get(line.label, line.label)
    # What has no numbers at all has no place in the legend.
    if name is not None and not all(math.isnan(mean) for mean in means):
        place.errorbar(
            at,
            means,
            yerr=spread,
            label=_in_legend(name or panel.metric),
            color=_ALL if line.label in names else colour,
            marker=marker,
            markersize=5,
            linestyle="none" if words else stroke,
            linewidth=1.6,
            capsize=3,
        )


def _marks(place: Any, panel: Panel, number: int, colour: Any) -> None:
    """Marks of a line; one in grey for all lines that have it."""
    line = panel.lines[number]
    for mark, x in line.marks:
        alike = all((mark, x) in other.marks for other in panel.lines)
        if not alike or number == 0:
            place.axvline(x, color=_GREY if alike else colour, linestyle=":", linewidth=1.2)
            if alike:
                place.plot([], [], color=_GREY, linestyle=":", linewidth=1.2, label=mark.label)


def _are_words(xs: Sequence[Value]) -> bool:
    return any(isinstance(x, str | bool) for x in xs)


def _draw(
    place: Any,
    plot: Plot,
    panel: Panel,
    styles: Mapping[str, tuple[Any, str, str]],
    names: Mapping[str, str | None],
    xs: Sequence[Value],
) -> None:
    words = _are_words(xs)
    for number, line in enumerate(panel.lines):
        _line(place, panel, number, styles[line.label], names, xs)
        _marks(place, panel, number, styles[line.label][0])
    _bounds(place, plot, panel, styles, words, xs)
    if words:
        place.set_xticks(range(len(xs)), [shown(x) for x in xs])
        place.set_xlim(-0.5, len(xs) - 0.5)
    if plot.log_x and not words:
        place.set_xscale("log")
    if plot.log_y:
        place.set_yscale("log")
    if plot.percent:
        from matplotlib.ticker import PercentFormatter

        place.yaxis.set_major_formatter(PercentFormatter(xmax=1))
    place.grid(alpha=0.3)
    place.set_title(label(panel.case))
    marks = dict.fromkeys(mark.label for line in panel.lines for mark, _ in line.marks)
    for text in marks:
        if text not in place.get_legend_handles_labels()[1]:
            place.plot([], [], color=_GREY, linestyle=":", linewidth=1.2, label=f"{text} (colour of its line)")


def _from_zero(plot: Plot, drawn: Sequence[tuple[Any, Panel]], shared: bool) -> None:
    """Axes of what is never negative begin with 0. When all is drawn: it ends the choice of the other limit.

    They end where the means and bounds have room: an interval of few seeds may be many times as long.
    """
    if plot.log_y:
        return
    for place, panel in drawn:
        alike = [other for _, other in drawn if other is panel or (shared and other.metric == panel.metric)]
        points = [point for other in alike for line in other.lines for point in line.points]
        if not any(point.found.mean < 0 for point in points):
            low, high = place.get_ylim()
            shown = [point.found.mean * _ROOM for point in points]
            shown += [point.bounds[name] * 1.05 for point in points for name in plot.bounds]
            enough = max((value for value in shown if math.isfinite(value)), default=0.0)
            # The margin above is a part of what was seen, which may be far from 0.
            high = high * 1.03 if low != 0 else high
            place.set_ylim(0, min(high, enough) if enough > 0 else high)


def _bounds(
    place: Any, plot: Plot, panel: Panel, styles: Mapping[str, tuple[Any, str, str]], words: bool, xs: Sequence[Value]
) -> None:
    """Dashed: one grey line where all lines have the same bound, else one for each in its colour."""
    for name in plot.bounds:
        curves: dict[tuple[tuple[float, float], ...], Line] = {}
        for line in panel.lines:
            points = tuple(
                (float(xs.index(p.x)) if words else float(p.x), p.bounds[name])
                for p in line.points
                if not math.isnan(p.bounds[name])
            )
            curves.setdefault(points, line)
        for number, (points, line) in enumerate(curves.items()):
            colour = _GREY if len(curves) == 1 else styles[line.label][0]
            text = name if len(curves) == 1 else f"{name} (colour of its line)" if number == 0 else None
            x, y = [point[0] for point in points], [point[1] for point in points]
            place.plot(x, y, color=colour, linestyle=(0, (6, 2)), linewidth=1.1, label=text)


def _in_legend(text: str) -> str:
    """Matplotlib leaves out of a legend what begins with an underscore."""
    return f" {text}" if text.startswith("_") else text


def _half(value: float) -> float:
    """Half of an interval; none where there is no interval."""
    return max(value, 0.0) if math.isfinite(value) else 0.0


def _legend(figure: Any, places: Sequence[Any]) -> None:
    """One for all panels: lines of what was found, then bounds and marks."""
    from matplotlib.container import ErrorbarContainer

    entries: dict[str, Any] = {}
    for place in places:
        for handle, text in zip(*place.get_legend_handles_labels(), strict=True):
            entries.setdefault(text, handle)
    texts = sorted(entries, key=lambda text: not isinstance(entries[text], ErrorbarContainer))
    if len(texts) > 1:
        room = figure.get_figwidth() * _LETTERS_PER_INCH
        columns = max(1, min(len(texts), int(room / (max(len(text) for text in texts) + 6))))
        figure.legend(
            [entries[text] for text in texts],
            texts,
            loc="outside lower center",
            ncols=columns,
            fontsize=9,
            # Long enough that a stroke is seen beside its marker.
            handlelength=3.5,
            frameon=False,
        )
