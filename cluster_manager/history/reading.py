"""Reading of the history as it is asked for: kept packs and those under way, folded into one grid, with marks."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, Final

import numpy as np

from cluster_manager.errors import RequestError
from cluster_manager.history.packs import AT, HOST, SEEN, Pack, folded
from cluster_manager.history.recorder import STEP_S, Recorder
from cluster_manager.history.steps import Grid, grid_of
from cluster_manager.inventory.hosts import Hosts
from cluster_manager.store import queries
from cluster_manager.store.store import Store
from ebbtide.deflation.errors import InvalidField
from ebbtide.messages.history import Columns, HistoryMark, HostColumns, HostHistory, Series, VMHistory

#: What is answered where nothing else is asked for.
DEFAULT_S: Final = 6 * 3600.0
MOST_MARKS: Final = 500


class Histories:
    """Answers the routes.

    :param clock: seconds since the epoch.
    """

    def __init__(self, recorder: Recorder, store: Store, hosts: Hosts, clock: Callable[[], float]) -> None:
        self._recorder = recorder
        self._store = store
        self._registry = hosts
        self._clock = clock

    async def of_host(self, host: str, begin: float | None, end: float | None, points: int) -> HostHistory:
        """Raises InvalidField for a time that cannot be, RequestError (404) where nothing is known of the host."""
        grid, asked = self._grid(begin, end, points)
        if self._registry.get(host) is None:
            raise RequestError(404, f"there is no host {host}", "id")
        figures = self._folded(self._recorder.held([host])[host], HOST, grid)
        marks = await self._marks(grid.start, asked, host=host)
        return HostHistory(
            host=host,
            columns=HostColumns(**_series(figures, HostColumns)),
            from_=grid.start,
            to=asked,
            step_s=grid.step_s,
            times=grid.times(),
            marks=marks,
        )

    async def of_vm(self, vm: str, begin: float | None, end: float | None, points: int) -> VMHistory:
        """As `of_host`, of a VM on whatever hosts it was."""
        grid, asked = self._grid(begin, end, points)
        rows = await self._store.vms(vm)
        if not rows:
            raise RequestError(404, f"there is no VM named {vm}", "name")
        host = rows[0].host
        packs = self._recorder.held([host])[host] if host is not None else []
        marks = await self._marks(grid.start, asked, vm=vm)
        return VMHistory(
            vm=vm,
            columns=Columns(**_series(self._folded(packs, vm, grid), Columns)),
            from_=grid.start,
            to=asked,
            step_s=grid.step_s,
            times=grid.times(),
            marks=marks,
        )

    def _grid(self, begin: float | None, end: float | None, points: int) -> tuple[Grid, float]:
        """The steps, and where they were asked to end."""
        now = self._clock()
        last = min(end, now) if end is not None else now
        first = begin if begin is not None else last - DEFAULT_S
        if begin is not None and begin >= (end if end is not None else now):
            raise InvalidField("from", "must be before `to`, which is now where it is left out")
        return grid_of(min(first, last - 1.0), last, points, STEP_S), last

    @staticmethod
    def _folded(packs: Sequence[Pack], name: str, grid: Grid) -> Pack:
        return folded(packs, (name,), grid.start, grid.step_s, grid.steps)

    async def _marks(self, begin: float, end: float, **wanted: str) -> tuple[HistoryMark, ...]:
        filters: dict[str, Any] = {"kind": None, "vm": None, "host": None, "since_id": None, **wanted}
        query = queries.events(MOST_MARKS, None, since=begin, until=end, **filters)
        rows = await self._store.rows(query)
        return tuple(
            HistoryMark(time=row.at, event_id=row.id, kind=row.kind, sentence=row.sentence) for row in reversed(rows)
        )


def _series(figures: Pack, columns: type[Columns]) -> dict[str, Series]:
    """The figures of one name, by column; figures that are not known are None."""
    rows = figures.values[:, 0].astype(np.float64)
    rows[rows[:, SEEN] <= 0] = math.nan
    return {
        name: tuple(None if value != value else round(value, 3) for value in rows[:, AT[name]].tolist())
        for name in columns.model_fields
    }
