"""Tasks that are meant to run until they are cancelled: one that ends is a defect, and is said so."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any

import structlog

log = structlog.get_logger()


async def guarded(work: Coroutine[Any, Any, None]) -> None:
    """Run an eternal coroutine; log it if it ends by itself or breaks."""
    task = asyncio.current_task()
    name = task.get_name() if task is not None else "?"
    try:
        await work
    except Exception:
        log.exception("a task that should never end broke", task=name)
        raise
    log.error("a task that should never end has ended", task=name)
