"""Tasks that are meant to run until they are cancelled: one that ends is a defect, and is logged."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

import structlog

log = structlog.get_logger()


async def guarded(work: Callable[[], Coroutine[Any, Any, None]]) -> None:
    """Call and run what should never end; log it if it ends by itself or breaks.

    :param work: makes the coroutine here, so that a task that is cancelled before its first step leaves none unawaited.
    """
    task = asyncio.current_task()
    name = task.get_name() if task is not None else "?"
    try:
        await work()
    except Exception:
        log.exception("a task that should never end broke", task=name)
        raise
    log.error("a task that should never end has ended", task=name)
