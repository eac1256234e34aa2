"""Threads for work that may take long, and for the watch that must not wait for it.

asyncio's own threads are few, a handful more than there are CPUs: with as many VMs whose memory is being reclaimed the
watch of memory limits stood still, and so did the journal. And asyncio's are waited for when the agent ends, for the
journal's sake; these are not: what is under way in them is cut off anywhere, as by a kill.
"""

from __future__ import annotations

import asyncio
import contextvars
from collections.abc import Callable
from functools import partial
from typing import Final, ParamSpec, TypeVar

from ebbtide.threads import DaemonThreads

P = ParamSpec("P")
T = TypeVar("T")


class Threads:
    """As `asyncio.to_thread`, in threads of their own, which are made when they are needed first."""

    def __init__(self, name: str, most: int) -> None:
        self._pool = DaemonThreads(most, name)

    async def run(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        work = partial(contextvars.copy_context().run, function, *args, **kwargs)
        return await asyncio.get_running_loop().run_in_executor(self._pool, work)


#: Where the kernel brings memory into swap: one for each VM that is worked on at once.
RECLAIM: Final = Threads("reclaim", 64)
#: qemu-img, and the removal of large files.
DISKS: Final = Threads("disks", 8)
#: Programs that answer soon, if at all.
COMMANDS: Final = Threads("commands", 16)
#: Small files by which limits are watched and lifted, and what memory the host has: nothing that waits.
LIMITS: Final = Threads("limits", 4)
