"""A plain WSGI service passes on what is the hook's: the marked lines are all it takes.

Run it: python3 embed_wsgi.py 0 /run/ebbtide/token
"""

from __future__ import annotations

import socketserver
import sys
import threading
from collections.abc import Callable, Iterable
from typing import Any
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer

from embed_hook import Buffer

from app_adapters.hook import TOKEN_FILE, default_port
from app_adapters.wsgi import hook_application

buffer = Buffer(32)


def service(environ: dict[str, Any], start_response: Callable[..., Any]) -> Iterable[bytes]:
    """What the service is for."""
    start_response("200 OK", [("Content-Type", "text/plain")])
    return [f"{buffer.size_mib():g} MiB\n".encode()]


class Threaded(socketserver.ThreadingMixIn, WSGIServer):
    """The hook must be able to answer while a request of the service runs."""

    daemon_threads = True


class Quiet(WSGIRequestHandler):
    """Without a line for each request."""

    def log_message(self, *args: object) -> None:
        """Nothing."""


def main(port: int = default_port("wsgi"), token_file: str = TOKEN_FILE) -> None:
    """Serve until standard input ends."""
    # embedding: begin
    hook = hook_application(buffer, token_file)

    def application(environ: dict[str, Any], start_response: Callable[..., Any]) -> Iterable[bytes]:
        chosen = hook if environ["PATH_INFO"].startswith("/deflation/") else service
        return chosen(environ, start_response)

    # embedding: end
    server = Threaded(("127.0.0.1", port), Quiet)
    server.set_app(application)
    print(f"hook on 127.0.0.1:{server.server_address[1]}", flush=True)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    sys.stdin.read()
    server.shutdown()
    hook.stop()


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2])
