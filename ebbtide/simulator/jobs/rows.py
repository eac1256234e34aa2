"""Rows of jobs of a run: what became of each, as a table of its outcome."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ebbtide.simulator.inputs.batches import JobBatch
from ebbtide.simulator.jobs import columns as c
from ebbtide.simulator.jobs.columns import Floats


class JobRowsTable:
    """The jobs of an engine that were done, in the order in which they came."""

    def __init__(self) -> None:
        self._ids: list[NDArray[Any]] = []
        self._cores: list[Floats] = []
        self._parts: list[Floats] = [np.empty((0, len(c.DONE_COLUMNS)))]

    def named(self, batches: Iterable[JobBatch]) -> Iterator[JobBatch]:
        """The same jobs, whose names and sizes are kept."""
        for batch in batches:
            self._ids.append(batch.id.astype(np.str_))
            self._cores.append(np.asarray(batch.cpu_cores, np.float64))
            yield batch

    def take(self, rows: Floats) -> None:
        """Jobs that are done; a sink of the engine."""
        self._parts.append(rows)

    def columns(self) -> dict[str, NDArray[Any]]:
        """Columns by name: the number of each job (its place in the trace, from 0 on), its name, what became of it."""
        rows = np.concatenate(self._parts)
        rows = rows[np.argsort(rows[:, 0], kind="stable")]
        number = rows[:, 0].astype(np.int64)
        found: dict[str, NDArray[Any]] = {"job": number}
        if self._ids:
            found["id"] = np.concatenate(self._ids)[number]
            found["cpu_cores"] = np.concatenate(self._cores)[number]
        whole = ("tasks", "kills")
        for place, name in enumerate(c.DONE_COLUMNS[1:], 1):
            found[name] = rows[:, place].astype(np.int64) if name in whole else rows[:, place]
        return found
