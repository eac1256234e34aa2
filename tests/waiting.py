"""Waiting for something to become true, with an end; what a test that took too long was waiting for."""

from __future__ import annotations

import asyncio
import inspect
import time
from collections.abc import Callable, Iterator
from typing import Any

#: For requests that are under way when a server of a test ends. 0 would be no limit at all: a request that is held
#: would be waited for until its client gives it up.
AT_ONCE_S = 0.01


async def until(condition: Callable[[], Any], what: str = "", limit_s: float = 60.0, pause_s: float = 0.02) -> Any:
    """Look again and again until a function or a coroutine function says yes, and return what it said.

    :raises TimeoutError: it did not in time.
    """
    try:
        async with asyncio.timeout(limit_s) as limit:
            while True:
                found = condition()
                if found := await found if inspect.isawaitable(found) else found:
                    return found
                await asyncio.sleep(pause_s)
    except TimeoutError:
        if not limit.expired():
            raise
        raise TimeoutError(f"not within {limit_s:g} s: {what or condition}") from None


def until_sync(condition: Callable[[], Any], what: str = "", limit_s: float = 60.0, pause_s: float = 0.02) -> Any:
    """As `until`, without a loop."""
    end_s = time.monotonic() + limit_s
    while not (found := condition()):
        if time.monotonic() >= end_s:
            raise TimeoutError(f"not within {limit_s:g} s: {what or condition}")
        time.sleep(pause_s)
    return found


def tasks_under_way() -> str:
    """Each task of this thread's loop that has not ended, with every place on its way to what it waits for."""
    try:
        tasks = asyncio.all_tasks(asyncio.get_event_loop_policy().get_event_loop())
    except RuntimeError:
        return ""
    return "\n".join(f"{task.get_name()}\n    " + "\n    ".join(_places(task)) for task in tasks)


def _places(task: asyncio.Task[Any]) -> Iterator[str]:
    """``cr_await`` of a coroutine is what it waits for: another coroutine, a generator, in the end a future."""
    at: Any = task.get_coro()
    while at is not None:
        frame = getattr(at, "cr_frame", None) or getattr(at, "gi_frame", None)
        if frame is None:
            yield repr(at)
            return
        yield f"{frame.f_code.co_filename}:{frame.f_lineno} in {frame.f_code.co_qualname}"
        at = getattr(at, "cr_await", None) or getattr(at, "gi_yieldfrom", None)
