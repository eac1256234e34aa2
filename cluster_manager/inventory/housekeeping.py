"""Prunes the store in the background, in small transactions, while this manager leads."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import structlog

from cluster_manager.defaults import Retention
from cluster_manager.errors import StoreError
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
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        self._task = asyncio.create_task(self._run(), name="housekeeping of the store")

    async def stop(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
            self._task = None

    async def _run(self) -> None:
        while True:
            try:
                await self.prune()
            except StoreError as error:
                log.warning("the store was not pruned", why=str(error))
            except Exception:
                log.exception("the store was not pruned, by a defect of the manager")
            await asyncio.sleep(self._retention.every_s)

    async def prune(self) -> dict[str, int]:
        """Delete whatever is old enough now. Returns how many rows of each kind."""
        gone: dict[str, int] = {}
        now = self._clock()
        for kind, statement in statements(self._retention, now).items():
            while count := await self._store.prune(statement):
                gone[kind] = gone.get(kind, 0) + count
                await asyncio.sleep(self._retention.pause_s)
        if gone:
            log.info("old rows were pruned", **{kind.replace(" ", "_"): count for kind, count in gone.items()})
        return gone
