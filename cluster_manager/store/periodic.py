"""Work on the store that is done again and again while this manager leads."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import structlog

from cluster_manager.errors import StoreError

log = structlog.get_logger()


class Periodic:
    """Runs from `start` to `stop`. Work that fails is logged, and done again the next time.

    :param name: of the task.
    :param every_s: seconds between the end of one time and the next.
    :param failed: what the log says of a failure, such as "the store was not pruned".
    :param first_s: seconds until the first time.
    """

    def __init__(
        self, name: str, work: Callable[[], Awaitable[object]], every_s: float, failed: str, first_s: float = 0.0
    ) -> None:
        self._name = name
        self._work = work
        self._every_s = every_s
        self._failed = failed
        self._first_s = first_s
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        self._task = asyncio.create_task(self._run(), name=self._name)

    async def stop(self) -> bool:
        """Returns whether it was running."""
        if self._task is None:
            return False
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)
        self._task = None
        return True

    async def _run(self) -> None:
        await asyncio.sleep(self._first_s)
        while True:
            try:
                await self._work()
            except StoreError as error:
                log.warning(self._failed, why=str(error))
            except Exception:
                log.exception(f"{self._failed}, by a defect of the manager")
            await asyncio.sleep(self._every_s)
