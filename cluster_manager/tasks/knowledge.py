"""Periodic save of what the core changes have taught, so that the next manager goes on with it."""

from __future__ import annotations

import asyncio
import json
from typing import Final

import structlog

from cluster_manager.store.periodic import Periodic
from cluster_manager.store.store import Store
from cluster_manager.tasks.core_changes import CoreChanges

log = structlog.get_logger()

#: Seconds between two saves. Changes that come after the last one are learned from the store again; outcomes of
#: predictions that became known after it are lost when a manager is killed.
EVERY_S: Final = 300.0
NAME: Final = "matcher"


class Knowledge:
    """Runs from `start` to `stop`."""

    def __init__(self, store: Store, core_changes: CoreChanges, every_s: float = EVERY_S) -> None:
        self._store = store
        self._core_changes = core_changes
        failed = "what was learned was not saved"
        self._task = Periodic("saves what was learned", self.save, every_s, failed, every_s, at_end=self.save)
        self.start, self.stop = self._task.start, self._task.stop

    async def recall(self) -> None:
        """Let the core changes go on with what was saved; what cannot be read is learned again. Raises StoreError."""
        body = await self._store.knowledge(NAME)
        found = None
        if body is not None:
            try:
                found = await asyncio.to_thread(json.loads, body)
            except ValueError as error:
                log.warning("what was learned is damaged, and is learned again", why=str(error))
        await self._core_changes.load(found if isinstance(found, dict) else None)

    async def save(self) -> None:
        """Save what is known now, and nothing of a clock that was ahead. Raises StoreError."""
        await self._core_changes.follow_clock()
        document = self._core_changes.document()
        body = await asyncio.to_thread(lambda: json.dumps(document(), separators=(",", ":")))
        await self._store.save_knowledge(NAME, body)
