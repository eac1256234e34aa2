"""The hook in a thread of its own: the simplest way to embed it. On a Unix socket, or on loopback by choice."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import socket
import socketserver
import stat
import threading
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from io import FileIO
from typing import Any, Callable

from app_adapters import __version__
from app_adapters.adapter import Adapter
from app_adapters.hook import BODY_BYTES, CONNECTIONS, REQUEST_TIMEOUT_S, TOKEN_FILE, Hook, require_place
from app_adapters.logs import say
from app_adapters.processes.forks import close_here, released_in_children

# How often the serving thread looks whether it is to stop: seldom, since a guest pays for every wake-up.
STOP_LOOK_S = 0.5


class HookServer:
    """Serves the hook of one adapter in a thread of its own, on the Unix socket `path`, which only its user and
    root can hold.

    By choice on a `port` of loopback instead, which any process can hold once this one has ended; 0 takes a free one,
    `address` tells which. `log` is given a sentence for every target.

    Raises: ValueError for neither or both, or a host that is not on loopback; OSError where it cannot listen, also
    because another hook does.
    """

    def __init__(
        self,
        adapter: Adapter,
        path: str = "",
        token_file: str = TOKEN_FILE,
        log: Callable[[str], None] = say,
        *,
        host: str = "127.0.0.1",
        port: int | None = None,
    ) -> None:
        require_place(path, host, port)
        self._hook = Hook(adapter, token_file, log)
        self._server = JsonServer((host, port), self._hook) if port is not None else UnixJsonServer(path, self._hook)
        self._thread = threading.Thread(
            target=self._server.serve_forever, args=(STOP_LOOK_S,), name="hook-server", daemon=True
        )

    @property
    def address(self) -> tuple[str, int]:
        """Host and port that are listened on. Raises: ValueError on a Unix socket, which `url` names."""
        if self._server.address_family == socket.AF_UNIX:
            raise ValueError(f"it listens on {self.url}, and not on a port")
        return self._server.server_address[0], self._server.server_address[1]  # type: ignore[return-value]

    @property
    def url(self) -> str:
        """As a drop-in file names it."""
        return self._server.url

    def start(self) -> HookServer:
        """Begin to serve; returns itself."""
        # From now on: a child that was forked before, as a worker or a daemon, may be the one that serves.
        released_in_children(self._server)
        self._thread.start()
        return self

    def stop(self) -> None:
        """Stop serving, cancel what runs, and give the port back."""
        if self._thread.is_alive():  # of a server that was never started, shutdown() waits for ever
            self._server.shutdown()
        self._server.server_close()
        self._hook.stop()


class JsonServer(ThreadingHTTPServer):
    """Serves what `replier.reply(method, path, authorization, body)` says, to so many connections at once. Those that
    are open when it is closed end with their next answer."""

    daemon_threads = True
    block_on_close = False
    closed = False

    def __init__(self, address: tuple[str, int], replier: Any, connections: int = CONNECTIONS) -> None:
        self.replier = replier
        self._places = threading.BoundedSemaphore(connections)
        if isinstance(address, tuple) and ":" in address[0]:
            self.address_family = socket.AF_INET6
        super().__init__(address, _Handler)

    def server_bind(self) -> None:
        # Not HTTPServer's: it asks the name service for the host's name, which may take seconds.
        try:
            socketserver.TCPServer.server_bind(self)
        except OSError as error:
            raise taken(error, *self.server_address[:2]) from None
        self.server_name, self.server_port = self.server_address[0], self.server_address[1]  # type: ignore[assignment]

    @property
    def url(self) -> str:
        """Where it serves."""
        return url_of(*self.server_address[:2])

    def process_request(self, request: Any, client_address: Any) -> None:
        if self._places.acquire(blocking=False):
            try:
                super().process_request(request, client_address)
            except BaseException:  # no thread can be started; without one the place is never given back
                self._places.release()
                raise
        else:
            self.shutdown_request(request)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._places.release()

    def server_close(self) -> None:
        self.closed = True
        super().server_close()

    def release_in_child(self) -> None:
        """Listen no more in a child that was forked: no thread of it would answer."""
        close_here(self.socket)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that went away is not logged."""


class UnixJsonServer(JsonServer):
    """The same on a Unix socket. One that no process listens on is replaced; the directory lets its owner in only.

    Raises: OSError where the socket cannot be made.
    """

    address_family = socket.AF_UNIX

    def __init__(self, path: str, replier: Any, connections: int = CONNECTIONS) -> None:
        self._path = path
        self._bound = False
        super().__init__(path, replier, connections)  # type: ignore[arg-type]

    @property
    def url(self) -> str:
        return "unix:" + self._path

    def server_bind(self) -> None:
        make_way(self._path)
        self.socket.bind(self._path)
        self._bound = True
        os.chmod(self._path, 0o600)
        self.server_address = self._path  # type: ignore[assignment]
        self.server_name, self.server_port = "localhost", 0

    def server_close(self) -> None:
        super().server_close()
        if self._bound:  # not that of another hook, which kept this one from listening
            with contextlib.suppress(OSError):
                os.unlink(self._path)

    def release_in_child(self) -> None:
        super().release_in_child()
        self._bound = False  # the parent's: stop() in the child leaves it there


def make_way(path: str) -> None:
    """A directory for a socket, and no old socket in it.

    Raises: OSError where something else is there, or a socket on which a process listens.
    """
    os.makedirs(os.path.dirname(path) or ".", mode=0o700, exist_ok=True)
    with contextlib.suppress(FileNotFoundError):
        if not stat.S_ISSOCK(os.lstat(path).st_mode):
            raise OSError(f"{path} is there and is no socket")
        with socket.socket(socket.AF_UNIX) as probe:
            probe.setblocking(False)
            try:
                probe.connect(path)
            except ConnectionRefusedError:
                os.unlink(path)
                return
            except BlockingIOError:  # one whose queue is full
                pass
        raise OSError(
            errno.EADDRINUSE,
            f"{path} is taken by another hook that listens there; give this one another, or a SharedHookServer "
            "to each process of a service whose next one starts before the last has ended",
        )


def private(path: str) -> FileIO:
    """A file to lock, which no other user can open: whoever can may keep this one from the lock.

    Raises: OSError, also where it is another user's.
    """
    file = os.fdopen(os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600), "r+b", 0)
    if os.fstat(file.fileno()).st_uid != os.geteuid():
        file.close()
        raise OSError(f"{path} is another user's; remove it")
    os.fchmod(file.fileno(), 0o600)  # one of an earlier version could be opened by all
    return file


def url_of(host: Any, port: Any) -> str:
    """Of what serves there; an address of version 6 stands in brackets."""
    return f"http://[{host}]:{port}" if ":" in str(host) else f"http://{host}:{port}"


def taken(error: OSError, host: Any, port: Any) -> OSError:
    """The error of a port on which it cannot be listened, for a person."""
    if error.errno != errno.EADDRINUSE:
        return error
    return OSError(error.errno, f"port {port} of {host} is taken by another process; give this hook another")


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server_version = f"ebbtide-hook/{__version__}"
    sys_version = ""
    timeout = REQUEST_TIMEOUT_S
    server: JsonServer

    def do_GET(self) -> None:
        self._serve()

    do_POST = do_PUT = do_PATCH = do_DELETE = do_GET

    def _serve(self) -> None:
        length_text = self.headers.get("Content-Length", "" if self.command == "POST" else "0")
        if "Transfer-Encoding" in self.headers or not (length_text.isascii() and length_text.isdigit()):
            self._send(HTTPStatus.LENGTH_REQUIRED, {"error": "Content-Length: must be a number"}, close=True)
            return
        if len(length_text) > 20 or int(length_text) > BODY_BYTES:
            error = {"error": f"body: longer than {BODY_BYTES} bytes"}
            self._send(HTTPStatus.REQUEST_ENTITY_TOO_LARGE, error, close=True)
            return
        body = self.rfile.read(int(length_text))
        authorization = self.headers.get("Authorization", "")
        try:
            status, reply = self.server.replier.reply(self.command, self.path, authorization, body)
        except Exception as error:  # of a replier that is no Hook, which answers for its faults
            status, reply = HTTPStatus.INTERNAL_SERVER_ERROR, {"error": f"{type(error).__name__}: {error}"}
        self._send(status, reply, close=self.server.closed)

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
