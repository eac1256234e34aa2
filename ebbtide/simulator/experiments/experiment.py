"""An experiment: what varies, what is measured, what is drawn; the cases and runs that follow from it."""

from __future__ import annotations

import hashlib
import itertools
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, TypeAlias

from ebbtide.simulator.experiments.model import INPUTS, POLICY, Input

#: The value of an axis.
Value: TypeAlias = int | float | bool | str

#: Columns of results.parquet that are neither axes nor metrics; bounds begin with `BOUND`.
SEED: Final = "seed"
RUN_S: Final = "run_s"
ERROR: Final = "error"
BOUND: Final = "bound_"
RESERVED: Final = (SEED, RUN_S, ERROR, INPUTS)


@dataclass(frozen=True, slots=True)
class Axis:
    """What varies: a setting (a dotted name for one in a table) and its values, or the policy."""

    name: str
    values: tuple[Value, ...]


@dataclass(frozen=True, slots=True)
class Policy:
    """One arm of an experiment: a name, and the settings that make it up."""

    name: str
    settings: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Mark:
    """A vertical line where a bound reaches a value."""

    bound: str
    at: float
    label: str


@dataclass(frozen=True, slots=True)
class Plot:
    """A picture: metrics over an axis, a line for each value of ``lines``, a panel for each of ``panels``.

    :param where: the values of axes that are drawn; of others all are.
    :param bounds: of the model, in the metric's unit, drawn as dashed lines.
    """

    title: str
    metrics: tuple[str, ...]
    x: str
    lines: tuple[str, ...] = ()
    panels: tuple[str, ...] = ()
    where: Mapping[str, tuple[Value, ...]] = field(default_factory=dict)
    log_x: bool = False
    log_y: bool = False
    percent: bool = False
    bounds: tuple[str, ...] = ()
    marks: tuple[Mark, ...] = ()


@dataclass(frozen=True, slots=True)
class Case:
    """One point of a sweep: the axes' values (the policy's name among them) and all settings with them."""

    axes: Mapping[str, Value]
    given: Mapping[str, Any]

    def __str__(self) -> str:
        return ", ".join(f"{name}={shown(value)}" for name, value in self.axes.items()) or "the only case"


@dataclass(frozen=True, slots=True)
class Run:
    """One case with one seed.

    :param key: of all that its outcome depends on: what was found under the same key need not be run again.
    """

    case: Case
    seed: int
    key: str

    def __str__(self) -> str:
        return f"{self.case}, seed={self.seed}"


@dataclass(frozen=True, slots=True)
class Experiment:
    """What a TOML file says (docs/reference/experiments.md), checked."""

    name: str
    model: str
    description: str
    inputs: Mapping[str, Input]
    settings: Mapping[str, Any]
    axes: tuple[Axis, ...]
    policies: tuple[Policy, ...]
    seeds: tuple[int, ...]
    #: Empty: all that the model gives.
    metrics: tuple[str, ...]
    #: Empty: one for each metric, chosen by the axes.
    plots: tuple[Plot, ...]
    #: What of the file does not count, in sentences.
    notes: tuple[str, ...] = ()

    @property
    def axis_names(self) -> tuple[str, ...]:
        """All that varies, the policy first."""
        return ((POLICY,) if self.policies else ()) + tuple(axis.name for axis in self.axes)

    def axis_values(self) -> dict[str, tuple[Value, ...]]:
        """The values of each, in the order of the file."""
        found: dict[str, tuple[Value, ...]] = {POLICY: tuple(p.name for p in self.policies)} if self.policies else {}
        return found | {axis.name: axis.values for axis in self.axes}

    def cases(self) -> list[Case]:
        """Every combination of policy and axes."""
        found = []
        for policy in self.policies or (None,):
            for values in itertools.product(*(axis.values for axis in self.axes)):
                axes: dict[str, Value] = {} if policy is None else {POLICY: policy.name}
                given = _merged(self.settings, {} if policy is None else policy.settings)
                for axis, value in zip(self.axes, values, strict=True):
                    axes[axis.name] = value
                    _put(given, axis.name, value)
                if self.inputs:
                    given[INPUTS] = dict(self.inputs)
                found.append(Case(axes, given))
        return found


def runs(experiment: Experiment, cases: Sequence[Case], inputs: Mapping[str, str], code: str) -> list[Run]:
    """Each case with each seed.

    :param inputs: fingerprints of the files by the inputs' names.
    :param code: fingerprint of the code that makes the outcomes.
    """
    found = []
    for case in cases:
        given = {name: value for name, value in case.given.items() if name != INPUTS}
        files = {
            name: [inputs[name], one.format, dict(one.options), one.order] for name, one in experiment.inputs.items()
        }
        for seed in experiment.seeds:
            text = json.dumps([experiment.model, code, given, files, seed], sort_keys=True)
            found.append(Run(case, seed, hashlib.sha256(text.encode()).hexdigest()[:32]))
    return found


def shown(value: Any) -> str:
    """A value of an axis in words."""
    if isinstance(value, bool):
        return str(value).lower()
    return f"{value:.12g}" if isinstance(value, float) else str(value)


def _merged(base: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    merged = {name: _merged(value, {}) if isinstance(value, Mapping) else value for name, value in base.items()}
    for name, value in over.items():
        if isinstance(value, Mapping):
            below = merged.get(name)
            merged[name] = _merged(below if isinstance(below, Mapping) else {}, value)
        else:
            merged[name] = value
    return merged


def _put(given: dict[str, Any], name: str, value: Value) -> None:
    *tables, last = name.split(".")
    for table in tables:
        given = given.setdefault(table, {})
    given[last] = value
