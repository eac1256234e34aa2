"""Work on the store that is done again and again while this manager leads."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import structlog

from cluster_manager.errors import LostLeadership, StoreError

log = structlog.get_logger()


def due_after(due: float, now: float, every_s: float, on_the_beat: bool) -> float:
    """When the next time is due after one that was due then and has ended now. What is late is not made up for."""
    return max(due + every_s, now) if on_the_beat else now + every_s


class Periodic:
    """Runs from `start` to `stop`. Work that fails is logged, and done again the next time.

    :param name: of the task.
    :param every_s: seconds between the end of one time and the next; with ``on_the_beat`` from begin to begin, unless
        one takes longer.
    :param failed: what the log says of a failure, such as "the store was not pruned".
    :param first_s: seconds until the first time.
    :param at_end: what is done at the end, if this manager still leads.
    """

    def __init__(
        self,
        name: str,
        work: Callable[[], Awaitable[object]],
        every_s: float,
        failed: str,
        first_s: float = 0.0,
        at_end: Callable[[], Awaitable[object]] | None = None,
        on_the_beat: bool = False,
    ) -> None:
        self._name = name
        self._work = work
        self._every_s = every_s
        self._failed = failed
        self._first_s = first_s
        self._at_end = at_end
        self._on_the_beat = on_the_beat
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
        if self._at_end is not None:
            await self._once(self._at_end)
        return True

    async def _run(self) -> None:
        loop = asyncio.get_running_loop()
        await asyncio.sleep(self._first_s)
        due = loop.time()
        while True:
            await self._once(self._work)
            due = due_after(due, loop.time(), self._every_s, self._on_the_beat)
            await asyncio.sleep(due - loop.time())

    async def _once(self, work: Callable[[], Awaitable[object]]) -> None:
        try:
            await work()
        except StoreError as error:
            (log.info if isinstance(error, LostLeadership) else log.warning)(self._failed, why=str(error))
        except Exception:
            log.exception(f"{self._failed}, by a defect of the manager")
