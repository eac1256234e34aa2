"""Periodic save of what the core changes have taught, so that the next manager goes on with it."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from typing import Any, Final

import structlog

from cluster_manager.store.periodic import Periodic
from cluster_manager.store.store import Store
from cluster_manager.tasks.core_changes import CoreChanges

log = structlog.get_logger()

#: Seconds between two saves. Changes that come after the last one are learned from the store again; outcomes of
#: predictions that became known after it are lost when a manager is killed.
EVERY_S: Final = 300.0
NAME: Final = "matcher"
#: So many members of a list are encoded at a time.
_AT_ONCE: Final = 1000


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
        body = await asyncio.to_thread(lambda: "".join(encoded(document())))
        await self._store.save_knowledge(NAME, body)


def encoded(value: Any) -> Iterator[str]:
    """A document as JSON, in pieces: while one is made, also in a thread, nothing else of this process runs.

    :param value: with texts as names, as JSON has them.
    """
    if isinstance(value, dict):
        for number, (name, item) in enumerate(value.items()):
            yield f"{',' if number else '{'}{json.dumps(name)}:"
            yield from encoded(item)
        yield "}" if value else "{}"
    elif isinstance(value, list) and len(value) > _AT_ONCE:
        for begin in range(0, len(value), _AT_ONCE):
            yield ("," if begin else "[") + _dumps(value[begin : begin + _AT_ONCE])[1:-1]
        yield "]"
    else:
        yield _dumps(value)


def _dumps(value: Any) -> str:
    return json.dumps(value, separators=(",", ":"))
