"""A service whose cache is limited by a command of its own, `LIMIT MIB`; it knows of no hook.

Usage: limited_service.py PID_FILE
"""

from __future__ import annotations

import hashlib
import os
import socketserver
import sys
import threading
from collections import OrderedDict

from app_adapters.processes.python_memory import find_malloc_trim

VALUE_BYTES = 4096
MIB = 1024 * 1024
values: OrderedDict[str, bytes] = OrderedDict()
lock = threading.Lock()
limit_mib = 200.0
trim = find_malloc_trim()


class Handler(socketserver.StreamRequestHandler):
    def handle(self) -> None:
        global limit_mib
        for line in self.rfile:
            verb, _, word = line.decode().strip().partition(" ")
            if verb == "LIMIT":
                limit_mib = float(word)
                self.evict()
                if trim is not None:
                    trim(0)
                self.wfile.write(b"OK\n")
                continue
            with lock:
                found = values.get(word)
            if found is None:
                found = hashlib.sha256(word.encode()).digest() * (VALUE_BYTES // 32)
                with lock:
                    values[word] = found
                self.evict()
            self.wfile.write(found)

    def evict(self) -> None:
        with lock:
            while len(values) * VALUE_BYTES > limit_mib * MIB:
                values.popitem(last=False)


class Server(socketserver.ThreadingTCPServer):
    daemon_threads = True
    allow_reuse_address = True


server = Server(("127.0.0.1", 0), Handler)
with open(sys.argv[1], "w") as file:
    file.write(f"{os.getpid()}\n")
print(f"service on 127.0.0.1:{server.server_address[1]}", flush=True)
server.serve_forever()
