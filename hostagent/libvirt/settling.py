"""Waiting for a size that a guest moves by itself: until it is reached, stops moving, or time is up."""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
from collections.abc import Awaitable, Callable
from typing import Final

#: How often a moving balloon or memory device is looked at: at first soon, since small steps are quick, then less
#: often; and after how long without progress we give up.
FIRST_LOOK_S: Final = 0.05
LOOK_S: Final = 0.2
STALLED_S: Final = 4.0
#: The same for a device that tells when it has moved: events can be lost.
TOLD_LOOK_S: Final = 1.2
#: On a machine whose CPUs are wanted by more than there are, a guest gets to it later: at the most so many times that.
MOST_LOAD_FACTOR: Final = 4.0


def load_factor() -> float:
    """How many times as long as on an idle machine to wait: tasks that want to run, by CPU. Blocks for a small file."""
    return min(max(os.getloadavg()[0] / (os.cpu_count() or 1), 1.0), MOST_LOAD_FACTOR)


async def settled(
    size_of: Callable[[], Awaitable[float]],
    goal_mib: float,
    device: str,
    limit_s: float,
    told: asyncio.Event | None = None,
    from_mib: float | None = None,
) -> str:
    """Wait for ``size_of`` to reach the goal within half a MiB.

    :param device: what moves, in words.
    :param told: set whenever the device is said to have moved; it is looked at seldom besides.
    :param from_mib: what it was just before it was asked to move, so that it need not be looked at first.
    :returns: why it did not get there; empty if it did.
    """
    began, pause_s = time.monotonic(), FIRST_LOOK_S if told is None else TOLD_LOOK_S
    stalled_s = STALLED_S * await asyncio.to_thread(load_factor)
    if told is None:
        # It has just been asked to move.
        await asyncio.sleep(pause_s)
    size = await size_of() if from_mib is None else from_mib
    # From the first reading on: one that takes long says nothing of the device.
    moved_at = time.monotonic()
    while abs(size - goal_mib) >= 0.5:
        now = time.monotonic()
        if now - moved_at > stalled_s:
            return f"{device} stopped at {size:g} MiB instead of {goal_mib:g}"
        if now - began > limit_s:
            return f"{device} was at {size:g} MiB instead of {goal_mib:g} when its time was up"
        if told is None:
            await asyncio.sleep(pause_s)
            pause_s = min(pause_s * 1.5, LOOK_S)
        else:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(min(pause_s, max(began + limit_s - now, LOOK_S))):
                    await told.wait()
            told.clear()
        latest = await size_of()
        if latest != size:
            size, moved_at = latest, time.monotonic()
    return ""
