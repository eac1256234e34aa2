"""Model of an experiment, which turns settings and a seed into an outcome; the models by name."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, Protocol, TypeAlias, TypeVar, cast

import numpy as np
from numpy.typing import NDArray

from ebbtide.extras import installing
from ebbtide.simulator.errors import InvalidParameter
from ebbtide.simulator.experiments.shared import keep_reading, reading
from ebbtide.simulator.inputs.batches import Batch
from ebbtide.simulator.inputs.sources import Progress as ReadingProgress
from ebbtide.simulator.inputs.traces import Trace

S = TypeVar("S")
B = TypeVar("B", bound=Batch)

#: Called with the share that is done, 0 to 1.
Progress: TypeAlias = Callable[[float], None]

#: The key under which `Model.settings` finds the inputs: a mapping of name to `Input`.
INPUTS: Final = "inputs"
#: The key under which it finds the policy, where the experiment states policies.
POLICY: Final = "policy"

#: How jobs are made (docs/internals/jobs.md), but for how many.
_DURATIONS: Final = (
    *("durations", "least_s", "most_s", "centre_s", "spread_s", "shape", "exponent"),
    *("job_cores", "least_tasks", "most_tasks"),
)
#: Where the models are: module and name of an instance in it. Imported when an experiment asks for it.
MODELS: Final[dict[str, str]] = {
    "harvest-series": "ebbtide.simulator.experiments.harvest_series:MODEL",
    "coaster": "ebbtide.simulator.coaster.model:MODEL",
    "deflation-cluster": "ebbtide.simulator.cluster.model:MODEL",
    "preemption": "ebbtide.simulator.cluster.preemption_model:MODEL",
    "jobs": "ebbtide.simulator.jobs.model:MODEL",
    "matching": "ebbtide.simulator.matching.model:MODEL",
    "intervals": "ebbtide.simulator.intervals.model:MODEL",
    "waiting": "ebbtide.simulator.waiting.model:MODEL",
    "steady": "ebbtide.simulator.steady.model:MODEL",
}

#: Of the report of a reading, what results keep.
_COUNTS: Final = (
    "place",
    "lines",
    "comments",
    "read",
    "malformed",
    "given",
    "longer",
    "skipped",
    "reordered",
    "examples",
)
#: Share of rows that are left out which is told.
_MUCH: Final = 0.05

#: Models that have jobs, and so the setting ``rows``, a row for each of them.
WITH_JOBS: Final = ("jobs", "waiting", "intervals", "coaster", "matching")

#: Settings that say how a model makes what an input brings, by model and input: they count for nothing beside it.
MADE: Final[dict[str, dict[str, tuple[str, ...]]]] = {
    "harvest-series": {"vms": ("arrivals_per_h", "lifetime_shape", "lifetime_least_s", "lifetime_most_s")},
    "jobs": {
        "jobs": ("load", "days", *_DURATIONS),
        "capacity": (
            *("machines", "cpu_cores", "memory_mib", "capacity", "capacity_interval_s"),
            *("capacity_step", "capacity_least", "capacity_most", "capacity_start", "capacity_stays"),
        ),
    },
    "waiting": {"jobs": ("load", "days", "sized_for", *_DURATIONS)},
    "intervals": {"jobs": ("load", *_DURATIONS)},
    "coaster": {"jobs": ("load", "hours", "long_share", "long_mean_s")},
}

#: Settings that say of a trace what is so in one format only: they count for nothing beside a trace in another.
OF_FORMAT: Final[dict[str, tuple[str, ...]]] = {
    "azure-derived": ("followed_until_s", "grid_s"),
    "azure-vmtable": ("grid_s",),
}


@dataclass(frozen=True, slots=True)
class Input:
    """A file that goes in; `Path(input)` and `open(input)` work on it.

    :param path: absolute.
    :param format: of a trace (docs/reference/traces.md); None: by its content.
    :param options: of the format.
    :param order: ``buffer`` or ``sort``; None: what the format needs.
    """

    path: Path
    format: str | None = None
    options: Mapping[str, float | str] = field(default_factory=dict)
    order: str | None = None

    def __fspath__(self) -> str:
        return str(self.path)

    def trace(self, progress: ReadingProgress | None = None, *, from_first: bool = False) -> Trace:
        """The file as a trace. Raises what `Trace` raises."""
        return Trace(
            self.path, self.format, options=self.options, order=self.order, from_first=from_first, progress=progress
        )

    def batches(
        self, kind: type[B], name: str, progress: ReadingProgress | None = None, *, from_first: bool = False
    ) -> Iterator[B]:
        """The rows of a trace of one kind. Raises what `Trace` raises.

        :param name: of the input.
        :raises InvalidParameter: it is a trace of another kind.
        """
        trace = self.trace(progress, from_first=from_first)
        if trace.kind != kind.KIND:
            problem = f"must be a trace of {kind.KIND}, but {self.path} is one of {trace.kind}"
            raise InvalidParameter(f"{INPUTS}.{name}", problem)
        return self._counted(cast(Iterator[B], iter(trace)), trace)

    def _counted(self, batches: Iterator[B], trace: Trace) -> Iterator[B]:
        yield from batches
        keep_reading(self.path, self.terms, trace.report.as_json())

    @property
    def terms(self) -> list[Any]:
        """How it is read, as JSON knows it."""
        return [self.format, dict(self.options), self.order]

    def counts(self, content: str) -> dict[str, Any] | None:
        """What the report of a reading (`inputs.report`) counts; None: it was not read as a trace.

        :param content: the file's `fingerprint`.
        """
        found = reading(content, self.terms)
        return None if found is None else {word: found[word] for word in _COUNTS}


def left_out(name: str, counts: Mapping[str, Any]) -> tuple[str, ...]:
    """What is to be said of an input's lines that are malformed, and of rows that are none.

    :param counts: as of `Input.counts`.
    """
    said = []
    place, rows = counts["place"], counts["given"] + sum(counts["skipped"].values())
    if counts["malformed"]:
        first = counts["examples"][0]
        said.append(
            f"{INPUTS}.{name}: {counts['malformed']} of {counts['malformed'] + counts['read']} {place}s are malformed "
            f"and left out; the first is {place} {first['line']}: {first['field']} {first['problem']}"
        )
    if counts["given"] < (1.0 - _MUCH) * rows:
        reasons = ", ".join(f"{count} {reason}" for reason, count in sorted(counts["skipped"].items()))
        said.append(f"{INPUTS}.{name}: of {rows} rows {counts['given']} are taken; left out: {reasons}")
    return tuple(said)


@dataclass(frozen=True, slots=True)
class Outcome:
    """What one run gives.

    :param metrics: a number by name, with the unit in the name; NaN where there is none.
    :param tables: by name; each is columns by name, 1-d arrays of one length, of numbers, flags or texts.
    :param warnings: what one should know before one believes the metrics; sentences.
    """

    metrics: Mapping[str, float]
    tables: Mapping[str, Mapping[str, NDArray[Any]]] = field(default_factory=dict)
    warnings: tuple[str, ...] = ()


class Model(Protocol[S]):
    """A model. One run is a pure function of settings, seed and prepared data: the same in, the same out.

    May have ``bounds(settings) -> dict[str, float]`` too: what analysis says of a case, drawn beside what was found,
    ``version: int``, which rises when runs of an earlier one do not hold any more, and ``metrics``, the names of all
    that it gives, so that an axis or a plot that does not go with them is refused before the first run.
    """

    @property
    def name(self) -> str:
        """As in `MODELS`."""

    def settings(self, given: Mapping[str, Any]) -> S:
        """Settings of one case, checked, with all defaults.

        :param given: the [settings] of the experiment, with the axes' values in their places, ``policy`` where policies
            are stated, and ``inputs``, a mapping of name to `Input`, where there are any. `fields.Given` reads it.
        :raises InvalidParameter: names the field; also of a key that the model does not know.
        """

    def prepare(self, settings: Sequence[S], progress: Progress) -> Any:
        """What the runs of these cases share, made once and given to all of them, also in other processes.

        It is pickled: keep it small, with large arrays in `shared.SharedArrays`. None is fine.
        """

    def run(self, settings: S, seed: int, prepared: Any, progress: Progress) -> Outcome:
        """One run; the generator of its chance is made of ``seed`` alone."""


#: A program of the path has no directory of one's own to look in.
_WHERE: Final = "; where modules are, PYTHONPATH says, as in PYTHONPATH=. ebb sim run FILE"


def model_named(name: str) -> Model[Any]:
    """The model of a name, or of ``module:attribute`` for models outside of this project.

    :raises InvalidParameter: there is none.
    """
    place = name if ":" in name else MODELS.get(name)
    if place is None:
        raise InvalidParameter("model", f"{name!r} is unknown; there are {', '.join(MODELS)}, or MODULE:ATTRIBUTE")
    module_name, _, attribute = place.partition(":")
    if not all(part.isidentifier() for part in module_name.split(".")):
        raise InvalidParameter("model", f"{name!r} is not there: MODULE:ATTRIBUTE has a module's full name")
    try:
        found: Model[Any] = getattr(importlib.import_module(module_name), attribute)
    except ModuleNotFoundError as error:
        missing = error.name or module_name
        if module_name == missing or module_name.startswith(f"{missing}."):
            raise InvalidParameter("model", f"{name!r} is not there: there is no module {missing}{_WHERE}") from error
        raise InvalidParameter("model", f"{name!r} needs {missing}: {installing('sim')}") from error
    except AttributeError as error:
        raise InvalidParameter("model", f"{name!r} is not there: {error}") from error
    return found


def bounds_of(model: Model[Any], settings: Any) -> dict[str, float]:
    """What the model's analysis says of a case; nothing where it has none."""
    bounds = getattr(model, "bounds", None)
    return {} if bounds is None else {name: float(value) for name, value in bounds(settings).items()}


def checked(outcome: Outcome) -> Outcome:
    """The outcome with plain floats and arrays.

    :raises InvalidParameter: a metric that is no number, a table whose columns are not 1-d and of one length, or whose
        name is none for a file.
    """
    metrics: dict[str, float] = {}
    for name, value in outcome.metrics.items():
        try:
            metrics[name] = float(value)
        except (TypeError, ValueError):
            raise InvalidParameter(f"metric {name}", f"must be a number, but is {value!r}") from None
    tables: dict[str, dict[str, NDArray[Any]]] = {}
    for table, columns in outcome.tables.items():
        if not table.replace("_", "").replace("-", "").isalnum():
            raise InvalidParameter(f"table {table!r}", "must have a name of letters, digits, '-' and '_'")
        tables[table] = {name: _column(values) for name, values in columns.items()}
        shapes = {values.shape for values in tables[table].values()}
        if len(shapes) > 1 or any(len(shape) != 1 for shape in shapes):
            raise InvalidParameter(f"table {table}", "must have 1-d columns of one length")
    return Outcome(metrics, tables, tuple(map(str, outcome.warnings)))


def _column(values: Any) -> NDArray[Any]:
    array = np.asarray(values)
    return array.astype(np.str_) if array.dtype == object else array
