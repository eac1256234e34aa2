"""Reading of the history as it is asked for: kept packs and those under way, folded into one grid, with marks."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Collection
from typing import Any, Final

import numpy as np
import structlog

from cluster_manager.errors import RequestError
from cluster_manager.history.ageing import Ageing
from cluster_manager.history.packs import AT, HOST, SEEN, Pack, decoded, folded
from cluster_manager.history.recorder import STEP_S, Recorder
from cluster_manager.history.steps import Grid, grid_of
from cluster_manager.history.tiers import stretches
from cluster_manager.inventory.hosts import Hosts
from cluster_manager.store import queries
from cluster_manager.store.history import HistoryRow
from cluster_manager.store.store import Store
from ebbtide.deflation.errors import InvalidField
from ebbtide.messages.history import Columns, HistoryMark, HostColumns, HostHistory, Series, VMHistory

log = structlog.get_logger()

#: What is answered where nothing else is asked for.
DEFAULT_S: Final = 6 * 3600.0
MOST_MARKS: Final = 500
#: Histories that are read at the same time: a month of a large host is some tenths of a second of work.
READERS: Final = 2


class Histories:
    """Answers the routes.

    :param clock: seconds since the epoch.
    """

    def __init__(
        self, recorder: Recorder, ageing: Ageing, store: Store, hosts: Hosts, clock: Callable[[], float]
    ) -> None:
        self._recorder = recorder
        self._ageing = ageing
        self._store = store
        self._registry = hosts
        self._clock = clock
        self._readers = asyncio.Semaphore(READERS)

    async def of_host(self, host: str, begin: float | None, end: float | None, points: int) -> HostHistory:
        """Raises InvalidField for a time that cannot be, RequestError (404) where nothing is known of the host."""
        grid, asked = await self._grid(begin, end, points)
        figures = await self._figures([host], HOST, grid)
        if figures is None and self._registry.get(host) is None:
            raise RequestError(404, f"there is no host {host}", "id")
        return HostHistory(host=host, **await self._told(figures, HostColumns, grid, asked, host=host))

    async def of_vm(self, vm: str, begin: float | None, end: float | None, points: int) -> VMHistory:
        """As `of_host`, of a VM on whatever hosts it was."""
        grid, asked = await self._grid(begin, end, points)
        hosts = {*await self._store.homes_of(vm)} | ({now} if (now := self._recorder.home_of(vm)) else set())
        figures = await self._figures(sorted(hosts), vm, grid)
        if figures is None and not hosts and not await self._store.vms(vm):
            raise RequestError(404, f"there is no VM named {vm}", "name")
        return VMHistory(vm=vm, **await self._told(figures, Columns, grid, asked, vm=vm))

    async def _told(
        self, figures: Pack | None, columns: type[Columns], grid: Grid, asked: float, **of: str
    ) -> dict[str, Any]:
        """What the answers for hosts and VMs have in common."""
        # As far as the figures reach: steps are not cut to what was asked for.
        to = max(min(float(grid.end), self._clock()), asked)
        return {
            "columns": columns(**_series(figures, columns, grid)),
            "from_": grid.start,
            "to": to,
            "step_s": grid.step_s,
            "times": grid.times(),
            "marks": await self._marks(grid.start, to, **of),
        }

    async def _grid(self, begin: float | None, end: float | None, points: int) -> tuple[Grid, float]:
        """The steps, and where they were asked to end."""
        now = self._clock()
        last = min(end, now) if end is not None else now
        first = begin if begin is not None else max(last - DEFAULT_S, 0.0)
        if first >= last:
            raise InvalidField("from" if begin is not None else "to", "must be before `to`, and before now")
        tiers = stretches(first, last, await self._ageing.folded(), now)
        return grid_of(first, last, points, max((part.tier.step_s for part in tiers), default=STEP_S)), last

    async def _figures(self, hosts: Collection[str], name: str, grid: Grid) -> Pack | None:
        """The figures of one name; None where there are none in that time."""
        rows: list[tuple[HistoryRow, int, int]] = []
        async with self._readers:
            async with self._recorder.lock:
                packs = [pack for host in hosts for pack in self._recorder.held(host)]
                for part in stretches(grid.start, grid.end, await self._ageing.folded(), self._clock()):
                    begin = part.begin - part.tier.longest_s
                    found = await self._store.history(hosts, part.tier.step_s, begin, part.end) if hosts else []
                    rows += [(row, part.begin, part.end) for row in found]
            return await asyncio.to_thread(_figures, packs, rows, name, grid)

    async def _marks(self, begin: float, end: float, **wanted: str) -> tuple[HistoryMark, ...]:
        filters: dict[str, Any] = {"kind": None, "vm": None, "host": None, "since_id": None, **wanted}
        query = queries.events(MOST_MARKS, None, since=begin, until=end, **filters)
        rows = await self._store.rows(query)
        return tuple(
            HistoryMark(time=row.at, event_id=row.id, kind=row.kind, sentence=row.sentence) for row in reversed(rows)
        )


def _figures(held: list[Pack], rows: list[tuple[HistoryRow, int, int]], name: str, grid: Grid) -> Pack | None:
    packs = [mine for pack in held if (mine := pack.only(name)) is not None]
    for row, begin, end in rows:
        try:
            mine = decoded(row.at, row.step_s, row.body).only(name)
        except ValueError as error:
            log.warning("a pack is left out", host=row.host, why=str(error))
            continue
        if mine is not None:
            packs.append(mine.within(begin, end))
    found = folded(packs, (name,), grid.start, grid.step_s, grid.steps)
    return found if found.known else None


def _series(figures: Pack | None, columns: type[Columns], grid: Grid) -> dict[str, Series]:
    """The figures by column; those that are not known are None."""
    if figures is None:
        return dict.fromkeys(columns.model_fields, (None,) * grid.steps)
    rows = figures.values[:, 0].astype(np.float64)
    rows[rows[:, SEEN] <= 0] = math.nan
    # Samples stand for 15 s each, and do not come quite evenly.
    rows[:, SEEN] = np.minimum(rows[:, SEEN], grid.step_s)
    at = {**AT, "known_s": SEEN}
    return {
        name: tuple(None if value != value else round(value, 3) for value in rows[:, at[name]].tolist())
        for name in columns.model_fields
    }
