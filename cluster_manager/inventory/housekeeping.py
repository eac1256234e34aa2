"""Prunes the store in the background, in small transactions, while this manager leads."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import structlog

from cluster_manager.defaults import Retention
from cluster_manager.store.caution import Caution
from cluster_manager.store.periodic import Periodic
from cluster_manager.store.pruning import statements
from cluster_manager.store.store import Store

log = structlog.get_logger()


class Housekeeping:
    """Runs from `start` to `stop`.

    :param clock: seconds since the epoch.
    """

    def __init__(self, store: Store, retention: Retention, clock: Callable[[], float]) -> None:
        self._store = store
        self._retention = retention
        self._clock = clock
        self._caution = Caution(store, "nothing of the store")
        self._task = Periodic("housekeeping of the store", self.prune, retention.every_s, "the store was not pruned")
        self.start, self.stop = self._task.start, self._task.stop

    async def prune(self) -> dict[str, int]:
        """Delete whatever is old enough now, if the clock is believed. Returns how many rows of each kind."""
        gone: dict[str, int] = {}
        now = self._clock()
        if not await self._caution.allows(now):
            return gone
        for kind, statement in statements(self._retention, now).items():
            while count := await self._store.prune(statement):
                gone[kind] = gone.get(kind, 0) + count
                await asyncio.sleep(self._retention.pause_s)
        if gone:
            log.info("old rows were pruned", **{kind.replace(" ", "_"): count for kind, count in gone.items()})
        return gone
