"""Threads for files on what may hang, such as a network's file system: few, waited for no longer than a limit.

asyncio's own threads look up names and do much else for the whole manager. And they are waited for when it ends; these
are not.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial
from typing import Final, TypeVar

from ebbtide.threads import DaemonThreads

T = TypeVar("T")


class FileThreads(DaemonThreads):
    """At most so many, made when they are needed first."""

    def __init__(self, most: int) -> None:
        super().__init__(most, "files")
        #: When the limits of the work in the threads pass, by the loops' time.
        self._limits: dict[object, float] = {}

    async def run(self, work: Callable[[], T], limit_s: float) -> T:
        """What it returns. What is not over in time goes on in its thread, if it has begun.

        :raises TimeoutError: it is not over within ``limit_s``; at once where all threads have such work.
        """
        loop = asyncio.get_running_loop()
        limits = list(self._limits.values())
        if len(limits) >= self._most and max(limits) <= loop.time():
            raise TimeoutError
        timed = partial(self._timed, work, loop.time() + limit_s)
        async with asyncio.timeout(limit_s):
            return await loop.run_in_executor(self, timed)

    def _timed(self, work: Callable[[], T], until: float) -> T:
        one = object()
        self._limits[one] = until
        try:
            return work()
        finally:
            del self._limits[one]


#: Those of the records of attempts.
RECORDS: Final = FileThreads(4)
