"""The embeddable HTTP server of the application hook. Loopback only; every request but /healthz carries the token."""

from __future__ import annotations

import hmac
import json
import os
import re
import socket
import socketserver
import threading
from dataclasses import asdict
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Dict, Tuple
from urllib.parse import unquote

from app_adapters import __version__
from app_adapters.adapter import Adapter
from app_adapters.errors import ApplicationError, BadBody, Conflict
from app_adapters.messages import RefusalBody, parse_target
from app_adapters.operations import Operations

BODY_BYTES = 65536
REQUEST_TIMEOUT_S = 10.0
CONNECTIONS = 16
# How often the serving thread looks whether it is to stop: seldom, since a guest pays for every wake-up.
STOP_LOOK_S = 0.5
CAPABILITIES = "/deflation/v1/capabilities"
STATUS = "/deflation/v1/status"
TARGETS = "/deflation/v1/targets"

Reply = Tuple[int, Dict[str, Any]]
_LOOPBACK = re.compile(r"localhost|::1|127(?:\.[0-9]{1,3}){3}")


class TokenFile:
    """A token that may be replaced at any time; the file is read again when it changes."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._seen: tuple[int, int, int] | None = None
        self._token = b""

    def matches(self, authorization: str) -> bool:
        """Whether the header carries the token, compared in constant time. No file, or an empty one: never."""
        token = self._read()
        return bool(token) and hmac.compare_digest(b"Bearer " + token, authorization.encode("utf-8", "replace"))

    def _read(self) -> bytes:
        try:
            info = os.stat(self._path)
            seen = (info.st_ino, info.st_mtime_ns, info.st_size)
            if seen != self._seen:
                with open(self._path, "rb") as file:
                    self._token = file.read(4096).strip()
                self._seen = seen
        except OSError:
            self._seen, self._token = None, b""
        return self._token


class HookServer:
    """Serves the hook of one adapter in a thread of its own. `port` 0 takes a free one; `address` tells which.

    Raises: ValueError for a host that is not on loopback, OSError where the port is taken.
    """

    def __init__(self, adapter: Adapter, host: str = "127.0.0.1", port: int = 7070, token_file: str = "") -> None:
        if not _LOOPBACK.fullmatch(host):
            raise ValueError(f"host: {host} is not on loopback")
        self._adapter = adapter
        self._token = TokenFile(token_file)
        self._operations = Operations(adapter)
        self._server = _Server((host, port), self)
        self._thread = threading.Thread(
            target=self._server.serve_forever, args=(STOP_LOOK_S,), name="hook-server", daemon=True
        )

    @property
    def address(self) -> tuple[str, int]:
        """Host and port that are listened on."""
        return self._server.server_address[0], self._server.server_address[1]  # type: ignore[return-value]

    def start(self) -> HookServer:
        """Begin to serve; returns itself."""
        self._thread.start()
        return self

    def stop(self) -> None:
        """Stop serving, cancel what runs, and give the port back."""
        self._server.shutdown()
        self._server.server_close()
        self._operations.stop()

    def reply(self, method: str, path: str, authorization: str, body: bytes) -> Reply:
        """Status and body for a request."""
        if path == "/healthz" and method == "GET":
            return HTTPStatus.OK, {"status": "ok", "version": __version__}
        if not self._token.matches(authorization):
            return HTTPStatus.UNAUTHORIZED, {"error": "Authorization: needs the token of this VM as Bearer"}
        if path == CAPABILITIES and method == "GET":
            try:
                return HTTPStatus.OK, asdict(self._adapter.capabilities())
            except ApplicationError as error:
                return HTTPStatus.SERVICE_UNAVAILABLE, {"error": str(error)}
        if path == STATUS and method == "GET":
            try:
                return HTTPStatus.OK, {"sizes": self._adapter.status()}
            except ApplicationError as error:
                return HTTPStatus.SERVICE_UNAVAILABLE, {"error": str(error)}
        if path == TARGETS and method == "POST":
            return self._target(body)
        if path.startswith(TARGETS + "/") and method == "GET":
            request_id = unquote(path[len(TARGETS) + 1 :])
            status = self._operations.status(request_id)
            if status is None:
                return HTTPStatus.NOT_FOUND, {"error": f"request_id: {request_id} is unknown"}
            return HTTPStatus.OK, asdict(status)
        if path in (CAPABILITIES, TARGETS, "/healthz") or path.startswith(TARGETS + "/"):
            return HTTPStatus.METHOD_NOT_ALLOWED, {"error": f"{method} does not go with {path}"}
        return HTTPStatus.NOT_FOUND, {"error": f"there is no {path}"}

    def _target(self, body: bytes) -> Reply:
        try:
            answer = self._operations.submit(parse_target(body))
        except BadBody as error:
            return HTTPStatus.BAD_REQUEST, {"error": str(error)}
        except Conflict as error:
            return HTTPStatus.CONFLICT, {"state": "conflict", "error": str(error)}
        return HTTPStatus.CONFLICT if isinstance(answer, RefusalBody) else HTTPStatus.ACCEPTED, asdict(answer)


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    block_on_close = False

    def __init__(self, address: tuple[str, int], hook: HookServer) -> None:
        self.hook = hook
        self._places = threading.BoundedSemaphore(CONNECTIONS)
        if ":" in address[0]:
            self.address_family = socket.AF_INET6
        super().__init__(address, _Handler)

    def server_bind(self) -> None:
        # Not HTTPServer's: it asks the name service for the host's name, which may take seconds.
        socketserver.TCPServer.server_bind(self)
        self.server_name, self.server_port = self.server_address[0], self.server_address[1]  # type: ignore[assignment]

    def process_request(self, request: Any, client_address: Any) -> None:
        if self._places.acquire(blocking=False):
            super().process_request(request, client_address)
        else:
            self.shutdown_request(request)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._places.release()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that went away is no news."""


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server_version = f"ebbtide-hook/{__version__}"
    sys_version = ""
    timeout = REQUEST_TIMEOUT_S
    server: _Server

    def do_GET(self) -> None:
        self._serve()

    def do_POST(self) -> None:
        self._serve()

    def _serve(self) -> None:
        length_text = self.headers.get("Content-Length", "0")
        if "Transfer-Encoding" in self.headers or not (length_text.isascii() and length_text.isdigit()):
            self._send(HTTPStatus.LENGTH_REQUIRED, {"error": "Content-Length: must be a number"}, close=True)
            return
        if int(length_text[:20]) > BODY_BYTES:
            error = {"error": f"body: longer than {BODY_BYTES} bytes"}
            self._send(HTTPStatus.REQUEST_ENTITY_TOO_LARGE, error, close=True)
            return
        body = self.rfile.read(int(length_text))
        authorization = self.headers.get("Authorization", "")
        try:
            status, reply = self.server.hook.reply(self.command, self.path, authorization, body)
        except Exception as error:  # an adapter's fault must not look like a hook that hangs
            status, reply = HTTPStatus.INTERNAL_SERVER_ERROR, {"error": f"{type(error).__name__}: {error}"}
        self._send(status, reply)

    def _send(self, status: int, reply: dict[str, Any], close: bool = False) -> None:
        text = json.dumps(reply).encode("ascii")
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(text)))
        if close:
            self.send_header("Connection", "close")
            self.close_connection = True
        self.end_headers()
        self.wfile.write(text)

    def log_message(self, format: str, *args: Any) -> None:
        """Requests are not logged: the guest agent asks every few seconds."""
