"""Results of a sweep as columns: results.parquet, tables/*.parquet and meta.json of a directory."""

from __future__ import annotations

import io
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from ebbtide.extras import installing
from ebbtide.simulator.errors import ExperimentError
from ebbtide.simulator.experiments.experiment import BOUND, ERROR, RUN_S, SEED, Run, Value
from ebbtide.simulator.experiments.finished import Finished, write_whole
from ebbtide.simulator.experiments.statistics import Interval, by_seed, interval
from ebbtide.simulator.extras import Later

RESULTS: Final = "results.parquet"
META: Final = "meta.json"
TABLES: Final = "tables"

Column = NDArray[Any]

#: What meta.json says of how an input is read, as `Input` has it.
READING: Final = ("format", "options", "order")
#: Of meta.json, which reading relies on.
_KEYS: Final = ("name", "axes", "metrics", "seeds", "settings", "runs")


class Results:
    """The runs of a sweep: columns of one length, a row a run.

    :param columns: axes, ``seed``, metrics, bounds, ``run_s`` and ``error``, in this order.
    :param meta: what meta.json says.
    :param directory: where the tables are; None: `tables` has them.
    """

    def __init__(
        self,
        columns: Mapping[str, Column],
        meta: Mapping[str, Any],
        directory: Path | None = None,
        tables: Mapping[str, Mapping[str, Column]] | None = None,
    ) -> None:
        self.columns = dict(columns)
        self.meta = dict(meta)
        self.directory = directory
        self._tables = tables or {}

    @property
    def axes(self) -> tuple[str, ...]:
        """What varied, the policy first."""
        return tuple(self.meta["axes"])

    @property
    def metrics(self) -> tuple[str, ...]:
        """What was measured."""
        return tuple(self.meta["metrics"])

    @property
    def bounds(self) -> tuple[str, ...]:
        """What analysis says, without the `BOUND` before the columns' names."""
        return tuple(name.removeprefix(BOUND) for name in self.columns if name.startswith(BOUND))

    def __len__(self) -> int:
        return len(self.columns[SEED])

    def values(self, axis: str) -> list[Value]:
        """The values of an axis, in the order of the experiment."""
        return list(dict.fromkeys(self.columns[axis].tolist()))

    def select(self, case: Mapping[str, Value]) -> dict[str, Column]:
        """The columns of the runs at these values of axes.

        :raises ExperimentError: an axis that is none.
        """
        chosen = self._chosen(case)
        return {name: column[chosen] for name, column in self.columns.items()}

    def cases(self) -> list[dict[str, Value]]:
        """Every case once, in the order of the experiment."""
        names = self.axes
        rows = zip(*(self.columns[name].tolist() for name in names), strict=True) if names else [()]
        return [dict(zip(names, row, strict=True)) for row in dict.fromkeys(rows)]

    def mean(self, metric: str, case: Mapping[str, Value] | None = None) -> Interval:
        """Mean over seeds, with its confidence interval; what ``case`` leaves open is averaged seed by seed before.

        :raises ExperimentError: no such metric or axis.
        """
        return self.means([metric], case)[metric]

    def means(self, metrics: Sequence[str], case: Mapping[str, Value] | None = None) -> dict[str, Interval]:
        """`mean` of several metrics."""
        for metric in metrics:
            if metric not in self.columns or metric in self.axes:
                raise ExperimentError(metric, f"is no metric; there are {', '.join(self.metrics)}")
        chosen = self._chosen(case or {})
        seeds = self.columns[SEED][chosen]
        return {metric: interval(by_seed(self.columns[metric][chosen], seeds)) for metric in metrics}

    def table(self, name: str) -> dict[str, Column]:
        """A table of all runs: axes, seed, and its own columns.

        :raises ExperimentError: there is none of that name.
        """
        if name in self._tables:
            return dict(self._tables[name])
        path = None if self.directory is None else self.directory / TABLES / f"{name}.parquet"
        if path is None or not path.is_file():
            raise ExperimentError("table", f"{name!r} is not there")
        return _read(path)

    def export(self, name: str, path: Path) -> None:
        """Write a table of all runs as Parquet. Raises ExperimentError: there is none, or it cannot be written."""
        _write(path, self.table(name))

    def _chosen(self, case: Mapping[str, Value]) -> NDArray[np.bool_]:
        """Which runs are at these values of axes. Raises ExperimentError."""
        chosen = np.ones(len(self), np.bool_)
        for name, value in case.items():
            if name not in self.axes:
                raise ExperimentError(name, f"is no axis; there are {', '.join(self.axes) or 'none'}")
            chosen &= self.columns[name] == value
        return chosen

    def arrow(self) -> Any:
        """A pyarrow table of the runs; `.to_pandas()` for those who have pandas."""
        return _arrow(self.columns)


def collected(
    runs: Sequence[Run],
    finished: Sequence[Finished],
    axes: Mapping[str, Sequence[Value]],
    wanted: Sequence[str],
    bounds: Sequence[Mapping[str, float]],
) -> tuple[dict[str, Column], dict[str, dict[str, Column]], list[str]]:
    """Columns of all runs, their tables, and the names of the metrics.

    A run that failed has its sentence under ``error`` and NaN for metrics.

    :param bounds: what analysis says of each run's case.
    """
    found = list(dict.fromkeys(name for one in finished for name in one.outcome.metrics))
    metrics = [name for name in wanted if name in found] if wanted else found
    columns: dict[str, Column] = {}
    for name in axes:
        columns[name] = _axis([run.case.axes[name] for run in runs])
    columns[SEED] = np.array([run.seed for run in runs], np.int64)
    for name in metrics:
        columns[name] = np.array([one.outcome.metrics.get(name, np.nan) for one in finished], np.float64)
    for name in dict.fromkeys(name for one in bounds for name in one):
        columns[BOUND + name] = np.array([one.get(name, np.nan) for one in bounds], np.float64)
    columns[RUN_S] = np.array([one.run_s for one in finished], np.float64)
    columns[ERROR] = np.array([one.error for one in finished], np.str_)
    tables: dict[str, dict[str, Column]] = {}
    for table in dict.fromkeys(name for one in finished for name in one.outcome.tables):
        tables[table] = _stacked(table, runs, finished, axes)
    return columns, tables, metrics


def clash(axes: Sequence[str], outcome_names: Sequence[str]) -> str | None:
    """A metric that has the name of an axis or of a column of our own."""
    for name in outcome_names:
        if name in axes or name in (SEED, RUN_S, ERROR) or name.startswith(BOUND):
            return name
    return None


def save(directory: Path, results: Results, tables: Mapping[str, Mapping[str, Column]]) -> None:
    """Write results.parquet, the tables and meta.json; the last is there only when the others are.

    :raises ExperimentError: pyarrow is missing, or a file cannot be written.
    """
    # New columns under an old description would be worse than none.
    (directory / META).unlink(missing_ok=True)
    for name, columns in tables.items():
        _write(directory / TABLES / f"{name}.parquet", columns)
    for path in (directory / TABLES).glob("*.parquet"):
        if path.stem not in tables:
            path.unlink()
    _write(directory / RESULTS, results.columns)
    write_whole(directory / META, json.dumps(results.meta, indent=2).encode())


def read_meta(directory: Path) -> dict[str, Any]:
    """What meta.json says.

    :raises ExperimentError: it is not there, cannot be read, or is none of ours.
    """
    try:
        meta = json.loads((directory / META).read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise ExperimentError("results", f"are not in {directory}: there is no {META}") from error
    except (OSError, ValueError, RecursionError) as error:
        raise ExperimentError("results", f"of {directory} cannot be read: {error}") from error
    lacks = [key for key in _KEYS if key not in meta] if isinstance(meta, dict) else ["a table"]
    if lacks:
        raise ExperimentError("results", f"of {directory} are none of ours: {META} has no {', '.join(lacks)}")
    return dict(meta)


def load(directory: str | Path) -> Results:
    """The results of a directory.

    :raises ExperimentError: there are none, or they cannot be read.
    """
    directory = Path(directory)
    meta = read_meta(directory)
    columns = _read(directory / RESULTS)
    for name in (*meta["axes"], SEED, *meta["metrics"], RUN_S, ERROR):
        if name not in columns:
            raise ExperimentError("results", f"of {directory} do not fit together: {RESULTS} has no column {name!r}")
    return Results(columns, meta, directory)


def require_pyarrow() -> None:
    """:raises ExperimentError: it is missing; better said before the first run than after the last."""
    if not Later("pyarrow"):
        raise ExperimentError("results", f"need pyarrow: {installing('sim')}")


def _axis(values: list[Value]) -> Column:
    if all(isinstance(value, bool) for value in values):
        return np.array(values, np.bool_)
    if any(isinstance(value, str | bool) for value in values):
        return np.array([str(value) for value in values], np.str_)
    return np.array(values, np.int64 if all(isinstance(value, int) for value in values) else np.float64)


def _stacked(
    table: str, runs: Sequence[Run], finished: Sequence[Finished], axes: Mapping[str, Sequence[Value]]
) -> dict[str, Column]:
    """One table of all runs that have it: axes, seed, own columns, empty in runs that lack one.

    An axis, or the seed, whose name a column of the table has, stands as ``axis_NAME``.
    """
    have = [
        (run, columns)
        for run, one in zip(runs, finished, strict=True)
        if (columns := one.outcome.tables.get(table)) is not None
    ]
    lengths = [len(next(iter(columns.values()), ())) for _, columns in have]
    own = dict.fromkeys(name for _, columns in have for name in columns)
    stacked: dict[str, Column] = {}
    for name in axes:
        values = _axis([run.case.axes[name] for run, _ in have])
        stacked[f"axis_{name}" if name in own else name] = np.repeat(values, lengths)
    seeds = np.array([run.seed for run, _ in have], np.int64)
    stacked[f"axis_{SEED}" if SEED in own else SEED] = np.repeat(seeds, lengths)
    for name in own:
        words = any(columns[name].dtype.kind == "U" for _, columns in have if name in columns)
        empty = "" if words else np.nan
        parts = [columns.get(name, np.full(length, empty)) for (_, columns), length in zip(have, lengths, strict=True)]
        stacked[name] = np.concatenate(parts)
    return stacked


def _arrow(columns: Mapping[str, Column]) -> Any:
    try:
        import pyarrow
    except ImportError as error:
        raise ExperimentError("results", f"need pyarrow: {installing('sim')}") from error
    arrays = {}
    for name, values in columns.items():
        arrays[name] = pyarrow.array(values.tolist(), pyarrow.string()) if values.dtype.kind == "U" else values
    return pyarrow.table(arrays)


def _write(path: Path, columns: Mapping[str, Column]) -> None:
    table = _arrow(columns)
    import pyarrow.parquet

    buffer = io.BytesIO()
    pyarrow.parquet.write_table(table, buffer, compression="zstd")
    write_whole(path, buffer.getvalue())


def _read(path: Path) -> dict[str, Column]:
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError as error:
        raise ExperimentError("results", f"need pyarrow: {installing('sim')}") from error
    try:
        table = pyarrow.parquet.read_table(path)
    except (OSError, pyarrow.ArrowException) as error:
        raise ExperimentError("results", f"cannot be read: {error}", file=str(path)) from error
    columns: dict[str, Column] = {}
    for name in table.column_names:
        column = table.column(name)
        texts = pyarrow.types.is_string(column.type)
        columns[name] = np.array(column.to_pylist(), np.str_) if texts else column.to_numpy()
    return columns
