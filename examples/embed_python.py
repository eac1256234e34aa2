"""A Python service with caches of its own gives their memory back: the marked lines are all it takes.

The service answers `GET KEY` on a line of a TCP connection with a value that is dear to make, so it keeps values while
there is room. Run it: python3 embed_python.py /run/ebbtide/hooks/cache.sock /run/ebbtide/token
"""

from __future__ import annotations

import functools
import socketserver
import sys
import threading
from collections import OrderedDict

from app_adapters.processes.process import own_proportional_mib
from app_adapters.processes.python_memory import PythonAdapter
from app_adapters.server import HookServer

MIB = 1024 * 1024
VALUE_BYTES = 4096


class Cache:
    """Values by key, the least used of them dropped first."""

    def __init__(self, limit_mib: float) -> None:
        self._lock = threading.Lock()
        self._values: OrderedDict[str, bytes] = OrderedDict()
        self._full_mib = limit_mib
        self._limit = int(limit_mib * MIB / VALUE_BYTES)
        self._baseline_mib = own_proportional_mib()

    def get(self, key: str) -> bytes:
        """The value, made if it is not there."""
        with self._lock:
            if key in self._values:
                self._values.move_to_end(key)
                return self._values[key]
        value = digest(key) * (VALUE_BYTES // 32)
        with self._lock:
            self._values[key] = value
            while len(self._values) > self._limit:
                self._values.popitem(last=False)
        return value

    def shrink(self, process_mib: float) -> None:
        """Drop values until the process can be so small."""
        with self._lock:
            self._limit = int(max(process_mib - self._baseline_mib, 1.0) * MIB / VALUE_BYTES)
            while len(self._values) > self._limit:
                self._values.popitem(last=False)

    def grow(self, process_mib: float) -> None:
        """Keep more from now on."""
        with self._lock:
            self._limit = int(max(min(process_mib - self._baseline_mib, self._full_mib), 1.0) * MIB / VALUE_BYTES)


@functools.lru_cache(maxsize=10000)
def digest(key: str) -> bytes:
    """The dear part."""
    import hashlib

    return hashlib.sha256(key.encode()).digest()


cache = Cache(192)


class Service(socketserver.StreamRequestHandler):
    """One connection."""

    def handle(self) -> None:
        """Answer line by line."""
        for line in self.rfile:
            self.wfile.write(cache.get(line.decode().partition(" ")[2].strip()))


class Server(socketserver.ThreadingTCPServer):
    """One thread for each connection."""

    daemon_threads = True
    allow_reuse_address = True


def main(path: str = "/run/ebbtide/hooks/cache.sock", token_file: str = "/run/ebbtide/token") -> None:
    """Serve until standard input ends."""
    server = Server(("127.0.0.1", 0), Service)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    print(f"service on 127.0.0.1:{server.server_address[1]}", flush=True)
    # embedding: begin
    adapter = PythonAdapter(maximum_mib=256, minimum_mib=32, shrink=cache.shrink, grow=cache.grow)
    adapter.drops(digest.cache_clear)
    hook = HookServer(adapter, path, token_file).start()
    print(f"hook on {hook.url}", flush=True)
    # embedding: end
    sys.stdin.read()
    hook.stop()
    server.shutdown()


if __name__ == "__main__":
    main(*sys.argv[1:])
