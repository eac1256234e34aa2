"""The clock of deadlines and pauses."""

from __future__ import annotations

import asyncio


def now() -> float:
    """The event loop's seconds: monotonic, and faked in tests."""
    return asyncio.get_running_loop().time()
