"""Lock of one VM whose holder hears that somebody waits: a step that is in nobody's way otherwise ends early."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Literal


class YieldingLock(asyncio.Lock):
    """A lock.

    :param tell: called where one has to wait for it.
    """

    def __init__(self, tell: Callable[[], None]) -> None:
        super().__init__()
        self._tell = tell
        self._waiting = 0

    @property
    def is_wanted(self) -> bool:
        """Whether somebody waits for it."""
        return self._waiting > 0

    async def acquire(self) -> Literal[True]:
        """Acquire it."""
        if not self.locked():
            return await super().acquire()
        self._waiting += 1
        try:
            self._tell()
            return await super().acquire()
        finally:
            self._waiting -= 1
