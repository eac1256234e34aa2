"""Gates: named points in a daemon where it waits, when a test has closed them, until the test opens them again.

A gate is a file: NAME.closed makes it stop there, NAME.reached says that it stands there; it goes on when NAME.closed
is gone. So a test cuts a network exactly between two steps of another process.
"""

from __future__ import annotations

import asyncio
from pathlib import Path


class Gates:
    def __init__(self, directory: Path) -> None:
        self._directory = directory

    async def pass_through(self, name: str) -> None:
        """In the daemon: wait here while the gate is closed."""
        closed = self._closed(name)
        if not closed.exists():
            return
        self._reached(name).touch()
        while closed.exists():
            await asyncio.sleep(0.01)

    def close(self, name: str) -> None:
        self._closed(name).touch()

    async def reached(self, name: str, limit_s: float = 30.0) -> None:
        """In the test: until somebody stands there."""
        async with asyncio.timeout(limit_s):
            while not self._reached(name).exists():
                await asyncio.sleep(0.01)

    def open(self, name: str) -> None:
        self._closed(name).unlink(missing_ok=True)
        self._reached(name).unlink(missing_ok=True)

    def _closed(self, name: str) -> Path:
        return self._directory / f"{name}.closed"

    def _reached(self, name: str) -> Path:
        return self._directory / f"{name}.reached"
