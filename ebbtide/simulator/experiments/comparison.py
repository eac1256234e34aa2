"""Runs side by side: what differs, with confidence intervals over the seeds that both have."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from ebbtide.simulator.errors import ExperimentError
from ebbtide.simulator.experiments.experiment import SEED, Value, shown
from ebbtide.simulator.experiments.results import READING, Column, Results, load
from ebbtide.simulator.experiments.statistics import Interval, interval


@dataclass(frozen=True, slots=True)
class Difference:
    """One metric of one case, in the baseline and in another run. All over the seeds that both have.

    :param difference: other - baseline, of each seed; its interval does not count what both have in common.
    """

    case: Mapping[str, Value]
    metric: str
    other: str
    baseline: Interval
    found: Interval
    difference: Interval

    @property
    def relative(self) -> float:
        """The difference as a share of the baseline; NaN where that is 0."""
        return self.difference.mean / abs(self.baseline.mean) if self.baseline.mean else math.nan

    @property
    def clear(self) -> bool:
        """Whether the interval leaves no difference out. Of many comparisons one in twenty does so by chance."""
        return self.difference.low > 0 or self.difference.high < 0

    def as_json(self) -> dict[str, Any]:
        """The difference as JSON knows it: what is no number is null."""
        parts = {"baseline": self.baseline.mean, "found": self.found.mean, "difference": self.difference.mean}
        parts |= {"low": self.difference.low, "high": self.difference.high, "relative": self.relative}
        numbers = {name: value if math.isfinite(value) else None for name, value in parts.items()}
        return {
            "case": dict(self.case),
            "metric": self.metric,
            "other": self.other,
            **numbers,
            "seeds": self.difference.count,
            "clear": self.clear,
        }


@dataclass(frozen=True, slots=True)
class Comparison:
    """What was compared, what differs, and what could not be compared.

    :param notes: sentences: settings that differ, cases and seeds that only one has.
    """

    baseline: str
    others: tuple[str, ...]
    differences: tuple[Difference, ...]
    notes: tuple[str, ...]

    def as_json(self) -> dict[str, Any]:
        """All of it as JSON knows it."""
        return {
            "baseline": self.baseline,
            "others": list(self.others),
            "differences": [one.as_json() for one in self.differences],
            "notes": list(self.notes),
        }


@dataclass(frozen=True, slots=True)
class _Side:
    name: str
    axes: tuple[str, ...]
    metrics: tuple[str, ...]
    columns: Mapping[str, Column]
    #: What else a run depends on, by name: settings, model, code, contents of inputs.
    terms: Mapping[str, Any]
    #: The same, compared where both say it: what policies stand for, and how inputs are read. Older runs do not say.
    more: Mapping[str, Any] = field(default_factory=dict)

    def cases(self, axes: Sequence[str]) -> dict[tuple[Value, ...], Column]:
        """Rows of each case of these axes."""
        found: dict[tuple[Value, ...], list[int]] = {}
        columns = [self.columns[axis].tolist() for axis in axes]
        for i in range(len(self.columns[SEED])):
            found.setdefault(tuple(column[i] for column in columns), []).append(i)
        return {case: np.array(rows) for case, rows in found.items()}


def compare(
    *runs: str | Path | Results,
    metrics: Sequence[str] = (),
    axis: str | None = None,
    baseline: Value | None = None,
) -> Comparison:
    """Compare runs with the first of them, or the values of one axis of a single run with each other.

    :param runs: directories, or what `run` and `load` returned.
    :param metrics: which; default: all that all have.
    :param axis: of a single run: what to compare, as ``policy``.
    :param baseline: the value of ``axis`` that others are compared with; default: the first.
    :raises ExperimentError: nothing can be compared; says why.
    """
    results = [one if isinstance(one, Results) else load(one) for one in runs]
    if axis is None:
        if len(results) < 2:
            raise ExperimentError("compare", "needs two runs, or one and an axis, as policy")
        if baseline is not None:
            raise ExperimentError("baseline", "is a value of an axis: name the axis, too")
        sides = [_side(_name(one, number, results), one) for number, one in enumerate(results, 1)]
    else:
        if len(results) != 1:
            raise ExperimentError("compare", "along an axis needs a single run")
        sides = _along(results[0], axis, baseline)
    wanted = [metric for metric in sides[0].metrics if all(metric in side.metrics for side in sides)]
    for metric in metrics:
        if metric not in wanted:
            raise ExperimentError(metric, f"is no metric of all; they have {', '.join(wanted)}")
    if not wanted:
        raise ExperimentError("metrics", "have none in common")
    notes: list[str] = []
    differences: list[Difference] = []
    for side in sides[1:]:
        differences += _differences(sides[0], side, list(metrics) or wanted, notes)
    if not differences:
        raise ExperimentError("compare", f"finds no case with a seed in common; {'; '.join(notes)}")
    return Comparison(sides[0].name, tuple(side.name for side in sides[1:]), tuple(differences), tuple(notes))


def _name(one: Results, number: int, results: Sequence[Results]) -> str:
    """Short where that tells it from the others: a directory's own name, else its path, else its number, too."""
    for names in (
        [str(other.meta["name"]) if other.directory is None else other.directory.name for other in results],
        [str(other.directory) for other in results],
    ):
        if len(set(names)) == len(names):
            return names[number - 1]
    return f"{names[number - 1]} ({number})"


def _side(name: str, results: Results) -> _Side:
    meta = results.meta
    terms = {f"settings.{key}": value for key, value in meta["settings"].items()}
    terms |= {key: meta[key] for key in ("model", "code") if key in meta}
    terms |= {f"inputs.{key} (sha256)": one["sha256"] for key, one in meta.get("inputs", {}).items()}
    more = {f"policies.{key}": value for key, value in meta.get("policies", {}).items()}
    for key, one in meta.get("inputs", {}).items():
        more |= {f"inputs.{key}.{word}": one[word] for word in READING if word in one}
    return _Side(name, results.axes, results.metrics, results.columns, terms, more)


def _along(results: Results, axis: str, baseline: Value | None) -> list[_Side]:
    if axis not in results.axes:
        raise ExperimentError("axis", f"{axis!r} is none; there are {', '.join(results.axes) or 'none'}")
    values = results.values(axis)
    if baseline is not None:
        same = [value for value in values if value == baseline or shown(value) == shown(baseline)]
        if not same:
            raise ExperimentError("baseline", f"{baseline!r} is no value of {axis}; it has {_words(values)}")
        values = [same[0], *(value for value in values if value != same[0])]
    if len(values) < 2:
        raise ExperimentError("axis", f"{axis!r} has one value only")
    rest = tuple(name for name in results.axes if name != axis)
    return [_Side(shown(value), rest, results.metrics, results.select({axis: value}), {}) for value in values]


def _differences(baseline: _Side, other: _Side, metrics: Sequence[str], notes: list[str]) -> list[Difference]:
    axes = [axis for axis in baseline.axes if axis in other.axes]
    for one, two in ((baseline, other), (other, baseline)):
        for axis in one.axes:
            if axis not in axes and len(set(one.columns[axis].tolist())) > 1:
                raise ExperimentError("compare", f"cannot: {one.name} varies {axis}, and {two.name} has no such axis")
    both_say = [name for name in baseline.more if name in other.more]
    all_mine, all_theirs = {**baseline.terms, **baseline.more}, {**other.terms, **other.more}
    for name in dict.fromkeys((*baseline.terms, *other.terms, *both_say)):
        if (mine := all_mine.get(name)) != (theirs := all_theirs.get(name)):
            notes.append(f"{name} is {mine} in {baseline.name} and {theirs} in {other.name}")
    ours, yours = baseline.cases(axes), other.cases(axes)
    for one, mine_, theirs_ in ((baseline, ours, yours), (other, yours, ours)):
        if lacking := [case for case in mine_ if case not in theirs_]:
            notes.append(f"{len(lacking)} cases are in {one.name} only, the first at {_case(axes, lacking[0])}")
    found = []
    unpaired = same = 0
    lacking_numbers = {baseline.name: 0, other.name: 0}
    measured = [metric for metric in baseline.metrics if metric in other.metrics]
    for case, rows in ours.items():
        if case not in yours:
            continue
        seeds, mine, theirs = np.intersect1d(
            baseline.columns[SEED][rows], other.columns[SEED][yours[case]], return_indices=True
        )
        unpaired += len(rows) + len(yours[case]) - 2 * len(seeds)
        sides = ((baseline, rows[mine]), (other, yours[case][theirs]))
        # One metric may be the same by what it is; all of them are where chance has no part.
        drawn = any(_varies(side.columns[metric][chosen]) for side, chosen in sides for metric in measured)
        same += len(seeds) > 1 and not drawn
        lacks = {side.name: np.zeros(len(seeds), np.bool_) for side, _ in sides}
        for metric in metrics:
            a, b = (side.columns[metric][chosen] for side, chosen in sides)
            finite = np.isfinite(a), np.isfinite(b)
            if finite[0].any() or finite[1].any():
                lacks[baseline.name] |= ~finite[0]
                lacks[other.name] |= ~finite[1]
            if (both := finite[0] & finite[1]).any():
                a, b = a[both], b[both]
                named = dict(zip(axes, case, strict=True))
                of = [interval(one) for one in (a, b, b - a)]
                if not drawn:
                    of = [replace(one, low=math.nan, high=math.nan) for one in of]
                found.append(Difference(named, metric, other.name, *of))
        for name, none in lacks.items():
            lacking_numbers[name] += int(none.sum())
    if same:
        notes.append(
            f"seeds draw nothing here: no interval ({same} cases of {other.name}, all metrics of which are equal)"
        )
    for name, count in lacking_numbers.items():
        if count:
            notes.append(f"{count} pairs have no number in {name}, and are left out where they have none")
    if unpaired:
        notes.append(f"{unpaired} runs of {baseline.name} or {other.name} have a seed that the other has not")
    return found


def _varies(values: Column) -> bool:
    known = values[~np.isnan(values)]
    return bool((known != known[:1]).any())


def _case(axes: Sequence[str], case: Sequence[Value]) -> str:
    return ", ".join(f"{axis}={shown(value)}" for axis, value in zip(axes, case, strict=True)) or "the only case"


def _words(values: Sequence[Value]) -> str:
    return ", ".join(shown(value) for value in values)
