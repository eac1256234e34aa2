"""Waiting for something to become true, with an end."""

from __future__ import annotations

import asyncio
from collections.abc import Callable


async def until(condition: Callable[[], bool], limit_s: float = 20.0) -> None:
    """Look again and again, with a short pause, until it is true.

    :raises TimeoutError: it did not become true in time.
    """
    async with asyncio.timeout(limit_s):
        while not condition():
            await asyncio.sleep(0.02)
