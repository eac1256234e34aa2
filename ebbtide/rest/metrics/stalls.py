"""Watch of an event loop: how late it comes to what is due, and how often it stalls."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Final

from ebbtide.rest.metrics.totals import Distribution

#: Between two looks, seconds: a look costs some 30 us.
PERIOD_S: Final = 1.0
#: From here on being late is a stall, seconds.
STALL_S: Final = 0.1
_BOUNDS: Final = (0.001, 0.005, 0.02, STALL_S, 0.5, 2.0, 10.0)


class LoopWatch:
    """One loop's."""

    def __init__(self) -> None:
        self.lag = Distribution(_BOUNDS)
        self.stalls = 0

    def late(self, seconds: float) -> None:
        """The loop came so much too late."""
        self.lag.add(max(seconds, 0.0))
        self.stalls += seconds > STALL_S

    @contextlib.asynccontextmanager
    async def watching(self) -> AsyncIterator[None]:
        """Watch the running loop during the block."""
        task = asyncio.create_task(self._watch(), name="watch of the event loop")
        try:
            yield
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    async def _watch(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            due = loop.time() + PERIOD_S
            await asyncio.sleep(PERIOD_S)
            self.late(loop.time() - due)
