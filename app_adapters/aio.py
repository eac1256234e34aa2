"""The hook for asyncio services: a small HTTP/1.1 server on the service's own loop, on a Unix socket or on loopback."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import json
import os
import socket
import threading
from http import HTTPStatus
from typing import Callable, TypeVar

from app_adapters import __version__
from app_adapters.adapter import Adapter
from app_adapters.async_adapter import AsyncAdapter, OnLoop
from app_adapters.hook import BODY_BYTES, CONNECTIONS, REQUEST_TIMEOUT_S, TOKEN_FILE, Hook, Reply, require_place
from app_adapters.logs import say
from app_adapters.processes.forks import close_here, released_in_children
from app_adapters.server import make_way, taken, url_of

#: Request line and headers together, in bytes.
HEAD_BYTES = 16384
#: Calls of the adapter at a time; those beyond are told to come again.
CALLS = 8

T = TypeVar("T")


class BadRequest(Exception):
    """A request that is answered without the hook; the connection ends."""

    def __init__(self, status: int, error: str) -> None:
        super().__init__(error)
        self.status = status


class AsyncHook:
    """`Hook` for the running loop, in which it is made: an Adapter's methods block, so each call has a thread; those of
    an AsyncAdapter run on the loop itself."""

    def __init__(self, adapter: Adapter | AsyncAdapter, token_file: str, log: Callable[[str], None] = say) -> None:
        on_threads = adapter if isinstance(adapter, Adapter) else OnLoop(adapter, asyncio.get_running_loop())
        self._hook = Hook(on_threads, token_file, log)
        self._calls = threading.BoundedSemaphore(CALLS)

    async def reply(self, method: str, path: str, authorization: str, body: bytes) -> Reply:
        """As `Hook.reply`, and 503 where too many calls are under way."""
        if not self._calls.acquire(blocking=False):
            return HTTPStatus.SERVICE_UNAVAILABLE, {"error": f"{CALLS} calls are under way; ask again"}

        def call() -> Reply:
            try:
                return self._hook.reply(method, path, authorization, body)
            finally:
                self._calls.release()

        # Not cut off with the connection: the thread goes on in any case, and its place is taken until it ends.
        try:
            answered = _in_thread(call)
        except RuntimeError:  # no thread can be started, and so none gives the place back
            self._calls.release()
            return HTTPStatus.SERVICE_UNAVAILABLE, {"error": "no thread can be started; ask again"}
        return await asyncio.shield(answered)

    async def stop(self) -> None:
        """Cancel what runs, and wait for it for some seconds."""
        await _in_thread(self._hook.stop)


class AsyncHookServer:
    """Serves the hook of one adapter on the running loop, on the Unix socket `path`, which only its user and
    root can hold.

    By choice on a `port` of loopback instead, which any process can hold once this one has ended; 0 takes a free one,
    `address` tells which. `log` is given a sentence for every target, from any thread.

    Raises: ValueError for neither or both, or a host that is not on loopback.
    """

    def __init__(
        self,
        adapter: Adapter | AsyncAdapter,
        path: str = "",
        token_file: str = TOKEN_FILE,
        log: Callable[[str], None] = say,
        *,
        host: str = "127.0.0.1",
        port: int | None = None,
    ) -> None:
        require_place(path, host, port)
        self._path = path
        self._adapter = adapter
        self._host, self._port, self._token_file, self._log = host, port or 0, token_file, log
        self._listening: socket.socket | None = None
        self._server: asyncio.AbstractServer | None = None
        self._hook: AsyncHook | None = None
        self._connections: set[asyncio.Task[None]] = set()

    @property
    def address(self) -> tuple[str, int]:
        """Host and port that are listened on, once it is started. Raises: ValueError on a Unix socket."""
        if self._path:
            raise ValueError(f"it listens on {self.url}, and not on a port")
        return self._host, self._port

    @property
    def url(self) -> str:
        """As a drop-in file names it, once it is started."""
        return f"unix:{self._path}" if self._path else url_of(self._host, self._port)

    async def start(self) -> AsyncHookServer:
        """Begin to serve; returns itself. Raises: OSError where another hook listens."""
        self._hook = AsyncHook(self._adapter, self._token_file, self._log)
        released_in_children(self)
        listening = self._listen()
        try:
            if self._path:
                self._server = await asyncio.start_unix_server(self._connected, sock=listening, limit=HEAD_BYTES)
            else:
                self._server = await asyncio.start_server(self._connected, sock=listening, limit=HEAD_BYTES)
        except BaseException:
            listening.close()
            raise
        return self

    def _listen(self) -> socket.socket:
        """The socket, which asyncio's servers would not show. Raises: OSError."""
        if not self._path:
            family = socket.AF_INET6 if ":" in self._host else socket.AF_INET
            try:
                listening = socket.create_server((self._host, self._port), family=family)
            except OSError as error:
                raise taken(error, self._host, self._port) from None
            self._host, self._port = listening.getsockname()[:2]
        else:
            make_way(self._path)
            listening = socket.socket(socket.AF_UNIX)
            try:
                listening.bind(self._path)
                os.chmod(self._path, 0o600)
            except BaseException:
                listening.close()
                raise
        self._listening = listening
        return listening

    def release_in_child(self) -> None:
        """Listen no more in a child that was forked, and leave what is the parent's, as the loop's poll, alone."""
        if self._listening is not None:
            close_here(self._listening)
        self._server = None

    async def stop(self) -> None:
        """Stop serving, cancel what runs, and give the port back."""
        if self._server is None or self._hook is None:
            return
        self._server.close()
        if self._path:
            with contextlib.suppress(OSError):  # a successor's, or gone
                os.unlink(self._path)
        for task in self._connections:
            task.cancel()
        await asyncio.gather(*self._connections, return_exceptions=True)
        await self._hook.stop()

    async def __aenter__(self) -> AsyncHookServer:
        return await self.start()

    async def __aexit__(self, *error: object) -> None:
        await self.stop()

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        if task is None or len(self._connections) >= CONNECTIONS:
            writer.close()
            return
        self._connections.add(task)
        try:
            with contextlib.suppress(OSError, asyncio.IncompleteReadError, asyncio.TimeoutError):
                while await self._serve(reader, writer):
                    pass
        except asyncio.CancelledError:  # stop(): streams of older Pythons report a cancelled handler as an error
            pass
        finally:
            self._connections.discard(task)
            writer.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        """Answer one request; returns whether the connection goes on."""
        try:
            head, body = await asyncio.wait_for(_read(reader), REQUEST_TIMEOUT_S)
            lasting = head.lasting
            hook = self._hook
            if hook is None:
                return False
            status, reply = await hook.reply(head.method, head.path, head.fields.get("authorization", ""), body)
        except BadRequest as error:
            status, reply, lasting = error.status, {"error": str(error)}, False
        text = json.dumps(reply).encode("ascii")
        lines = [
            f"HTTP/1.1 {int(status)} {HTTPStatus(status).phrase}",
            f"Server: ebbtide-hook/{__version__}",
            "Content-Type: application/json",
            f"Content-Length: {len(text)}",
            f"Connection: {'keep-alive' if lasting else 'close'}",
        ]
        writer.write("\r\n".join([*lines, "", ""]).encode("ascii") + text)
        await asyncio.wait_for(writer.drain(), REQUEST_TIMEOUT_S)
        return lasting


class Head:
    """Request line and headers. Raises: BadRequest."""

    def __init__(self, text: bytes) -> None:
        lines = text.decode("latin-1").split("\r\n")
        words = lines[0].split(" ")
        if len(words) != 3 or words[2] not in ("HTTP/1.1", "HTTP/1.0") or not words[1].startswith("/"):
            raise BadRequest(HTTPStatus.BAD_REQUEST, "the request line is not METHOD /PATH HTTP/1.1")
        self.method, self.path, version = words
        self.fields: dict[str, str] = {}
        for line in lines[1:]:
            if not line:
                continue
            name, colon, value = line.partition(":")
            if not colon or not name or name != name.strip() or name.lower() in self.fields:
                raise BadRequest(HTTPStatus.BAD_REQUEST, "a header is malformed or comes twice")
            self.fields[name.lower()] = value.strip()
        length = self.fields.get("content-length", "" if self.method == "POST" else "0")
        if "transfer-encoding" in self.fields or not (length.isascii() and length.isdigit()):
            raise BadRequest(HTTPStatus.LENGTH_REQUIRED, "Content-Length: must be a number")
        if len(length) > 20 or int(length) > BODY_BYTES:
            raise BadRequest(HTTPStatus.REQUEST_ENTITY_TOO_LARGE, f"body: longer than {BODY_BYTES} bytes")
        self.length = int(length)
        self.lasting = version == "HTTP/1.1" and self.fields.get("connection", "").lower() != "close"


async def _read(reader: asyncio.StreamReader) -> tuple[Head, bytes]:
    try:
        text = await reader.readuntil(b"\r\n\r\n")
    except asyncio.LimitOverrunError:
        raise BadRequest(
            HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE, f"headers: longer than {HEAD_BYTES} bytes"
        ) from None
    head = Head(text)
    return head, await reader.readexactly(head.length)


def _in_thread(call: Callable[[], T]) -> asyncio.Future[T]:
    """The call's result, from a thread of its own: an adapter that hangs must not keep the service from ending, as a
    pool's threads would."""
    loop = asyncio.get_running_loop()
    future: asyncio.Future[T] = loop.create_future()

    def settle(outcome: concurrent.futures.Future[T]) -> None:
        if future.done():
            return
        error = outcome.exception()
        if error is not None:
            future.set_exception(error)
        else:
            future.set_result(outcome.result())

    def run() -> None:
        outcome: concurrent.futures.Future[T] = concurrent.futures.Future()
        try:
            outcome.set_result(call())
        except Exception as error:
            outcome.set_exception(error)
        with contextlib.suppress(RuntimeError):  # the loop has ended
            loop.call_soon_threadsafe(settle, outcome)

    threading.Thread(target=run, name="hook-call", daemon=True).start()
    return future
