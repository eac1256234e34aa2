"""A service embeds the hook: the marked lines are all it takes, the rest is the service.

Run it, and ask: curl --unix-socket /run/ebbtide/hooks/buffer.sock http://localhost/healthz
"""

from __future__ import annotations

import sys

from app_adapters.adapter import Adapter, Answer, Capabilities, Deadline, Promise, Release, SizeRange
from app_adapters.server import HookServer


class Buffer(Adapter):
    """A service with a buffer of its own, which it can halve or drop."""

    def __init__(self, size_mib: int) -> None:
        self.data = bytearray(size_mib * 1024 * 1024)

    def size_mib(self) -> float:
        """Size of the buffer."""
        return len(self.data) / 1024 / 1024

    def capabilities(self) -> Capabilities:
        """Any size from nothing to 64 MiB."""
        memory = SizeRange(current=self.size_mib(), minimum=0.0, maximum=64.0, step=1.0)
        return Capabilities("buffer", "1", {"memory_mib": memory}, 0.1, True, ["ask", "force"])

    def resize(self, size_mib: float) -> Release:
        """Take the size, and measure what came free."""
        before_mib = self.size_mib()
        self.data = bytearray(int(size_mib) * 1024 * 1024)
        return Release({"memory_mib": max(before_mib - self.size_mib(), 0.0)}, "len(buffer)", "buffer resized")

    def deflate(self, target: dict[str, float], mode: str, deadline: Deadline) -> Answer:
        """Always willing."""
        amount_mib = max(self.size_mib() - int(target["memory_mib"]), 0.0)
        return Promise({"memory_mib": amount_mib}, 0.1, lambda: self.resize(min(target["memory_mib"], self.size_mib())))

    def reinflate(self, target: dict[str, float], deadline: Deadline) -> Answer:
        """At most 64 MiB again."""
        return Promise({}, 0.1, lambda: self.resize(max(min(target["memory_mib"], 64.0), self.size_mib())))


def main(path: str = "/run/ebbtide/hooks/buffer.sock", token_file: str = "/run/ebbtide/token") -> None:
    """Serve until standard input ends."""
    # embedding: begin
    hook = HookServer(Buffer(32), path, token_file).start()
    print(f"hook on {hook.url}", flush=True)
    try:
        sys.stdin.read()
    finally:
        hook.stop()
    # embedding: end


if __name__ == "__main__":
    main(*sys.argv[1:])
