"""Threads for files on what may hang, such as a network's file system: few, waited for no longer than a limit.

asyncio's own threads look up names and do much else for the whole manager. And they are waited for when it ends; these
are not.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import Executor, Future
from functools import partial
from queue import SimpleQueue
from typing import Any, Final, TypeVar

T = TypeVar("T")


class FileThreads(Executor):
    """At most so many, made when they are needed first."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._made = 0
        self._queue: SimpleQueue[tuple[Future[Any], Callable[[], Any]]] = SimpleQueue()
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

    def submit(self, work: Callable[..., T], /, *args: Any, **kwargs: Any) -> Future[T]:
        """Called by the loop."""
        future: Future[T] = Future()
        self._queue.put((future, partial(work, *args, **kwargs)))
        if self._made < self._most:
            self._made += 1
            threading.Thread(target=self._serve, name=f"files-{self._made}", daemon=True).start()
        return future

    def _serve(self) -> None:
        while True:
            _do(*self._queue.get())


def _do(future: Future[T], work: Callable[[], T]) -> None:
    # Nobody may wait for it any more.
    if future.set_running_or_notify_cancel():
        try:
            found = work()
        except BaseException as error:
            future.set_exception(error)
        else:
            future.set_result(found)


#: Those of the records of attempts.
RECORDS: Final = FileThreads(4)
