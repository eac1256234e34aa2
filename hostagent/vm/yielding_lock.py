"""Lock of one VM whose holder hears that somebody waits: a step that is in nobody's way otherwise ends early."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Iterator
from typing import Literal


class YieldingLock(asyncio.Lock):
    """A lock.

    :param tell: called where one has to wait for it.
    """

    def __init__(self, tell: Callable[[], None]) -> None:
        super().__init__()
        self._tell = tell
        self._queued = self._watching = 0
        #: Set whenever it may have become free.
        self._changed = asyncio.Event()

    @property
    def is_wanted(self) -> bool:
        """Whether somebody waits for it."""
        return self._queued + self._watching > 0

    @property
    def is_free(self) -> bool:
        """Whether it can be had at once: nobody holds it, and nobody is about to, which `locked` does not say."""
        return not self.locked() and not self._queued

    async def acquire(self) -> Literal[True]:
        """Acquire it."""
        if self.is_free:
            return await super().acquire()
        self._queued += 1
        try:
            self._tell()
            return await super().acquire()
        finally:
            self._queued -= 1
            self._changed.set()

    def release(self) -> None:
        """Release it."""
        super().release()
        self._changed.set()

    @contextlib.contextmanager
    def wanted(self) -> Iterator[None]:
        """Want it, without a place in the queue: whoever holds it or takes it meanwhile hears of that."""
        self._watching += 1
        try:
            if not self.is_free:
                self._tell()
            yield
        finally:
            self._watching -= 1

    async def wait_until_free(self) -> None:
        """Wait until it is free, without a place in the queue: several who wait so are not in each other's way."""
        with self.wanted():
            while not self.is_free:
                self._changed.clear()
                await self._changed.wait()
                if not self.is_free:
                    self._tell()
