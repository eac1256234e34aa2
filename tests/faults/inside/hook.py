"""Runs inside a guest: the hook of an application that holds memory and behaves badly.

Usage: hook.py hang|refuse|crash|lie MIB
"""

from __future__ import annotations

import json
import mmap
import os
import socketserver
import sys
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import unquote

PORT = 7071
mode, size_mib = sys.argv[1], int(sys.argv[2])
held = mmap.mmap(-1, max(size_mib, 1) << 20)
for offset in range(0, len(held), mmap.PAGESIZE):
    held[offset] = 1


class Handler(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        if self.path.endswith("/capabilities"):
            sizes = {"current": size_mib, "minimum": 0, "maximum": 4096, "step": 1}
            offer = {"name": "hook", "version": "1", "resources": {"memory_mib": sizes}}
            self.answer(200, {**offer, "expected_s": 1, "reversible": True, "modes": ["ask", "force"]})
        else:
            request_id = unquote(self.path.rpartition("/")[2])
            status = {"request_id": request_id, "state": "released", "measured_by": "say-so", "reason": "all of it"}
            self.answer(200, {**status, "released": {"memory_mib": 4096}})

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if mode == "hang":
            time.sleep(3600)
        if mode == "refuse":
            refusal = {"request_id": body["request_id"], "state": "refused", "reason": "in the middle of a checkpoint"}
            self.answer(409, {**refusal, "retry_after_s": 60, "floor": {"memory_mib": size_mib}})
            return
        promise = {"request_id": body["request_id"], "state": "promised", "promised": {"memory_mib": size_mib}}
        self.answer(202, {**promise, "expected_s": 1, "reason": ""})
        if mode == "crash":
            self.wfile.flush()
            os._exit(1)

    def answer(self, status: int, body: object) -> None:
        text = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)

    def log_message(self, format: str, *args: object) -> None:
        pass


class Server(ThreadingHTTPServer):
    allow_reuse_address = True
    daemon_threads = True

    def server_bind(self) -> None:
        """Not HTTPServer's: it asks the name service for the host's name, which may take seconds."""
        socketserver.TCPServer.server_bind(self)


server = Server(("127.0.0.1", PORT), Handler)
print("ready", flush=True)
server.serve_forever()
