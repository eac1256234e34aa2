"""An asyncio service embeds the hook on its own loop: the marked lines are all it takes.

Run it: python3 embed_asyncio.py /run/ebbtide/hooks/buffer.sock /run/ebbtide/token
"""

from __future__ import annotations

import asyncio
import sys

from app_adapters.adapter import Capabilities, Deadline, Release, SizeRange
from app_adapters.aio import AsyncHookServer
from app_adapters.async_adapter import AsyncAdapter, AsyncAnswer, AsyncPromise

MIB = 1024 * 1024


class Buffer(AsyncAdapter):
    """A service with a buffer of its own; only the loop touches it, so that nothing needs a lock."""

    def __init__(self, size_mib: int) -> None:
        self.data = bytearray(size_mib * MIB)

    async def capabilities(self) -> Capabilities:
        """Any size from nothing to 64 MiB."""
        memory = SizeRange(current=len(self.data) / MIB, minimum=0.0, maximum=64.0, step=1.0)
        return Capabilities("buffer", "1", {"memory_mib": memory}, 0.1, True, ["ask", "force"])

    async def deflate(self, target: dict[str, float], mode: str, deadline: Deadline) -> AsyncAnswer:
        """Always willing."""
        size_mib = min(int(target["memory_mib"]), len(self.data) // MIB)
        amount_mib = len(self.data) / MIB - size_mib
        return AsyncPromise({"memory_mib": amount_mib}, 0.1, lambda: self.resize(size_mib))

    async def reinflate(self, target: dict[str, float], deadline: Deadline) -> AsyncAnswer:
        """At most 64 MiB again."""
        size_mib = max(min(int(target["memory_mib"]), 64), len(self.data) // MIB)
        return AsyncPromise({}, 0.1, lambda: self.resize(size_mib))

    async def resize(self, size_mib: int) -> Release:
        """Take the size, and measure what came free."""
        before = len(self.data)
        self.data = bytearray(size_mib * MIB)
        await asyncio.sleep(0)  # a real service waits here for what uses the buffer
        return Release({"memory_mib": max(before - len(self.data), 0) / MIB}, "len(buffer)", "buffer resized")


async def main(path: str = "/run/ebbtide/hooks/buffer.sock", token_file: str = "/run/ebbtide/token") -> None:
    """Serve until standard input ends."""
    # embedding: begin
    async with AsyncHookServer(Buffer(32), path, token_file) as hook:
        print(f"hook on {hook.url}", flush=True)
        await asyncio.get_running_loop().run_in_executor(None, sys.stdin.read)
    # embedding: end


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
