"""Listener for connections: a cap for each address and in all, and a limit of time for all that may be dragged out.

aiohttp closes a connection that has not sent the whole head of a request ``idle_s`` after it was made or after its last
answer. What comes before and after that is bounded here: the TLS handshake, and answers that are not read.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import resource
import socket
import ssl
from collections import Counter
from collections.abc import AsyncIterator, Callable, Sequence
from functools import partial
from typing import Any, Final, cast

import structlog
from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError

from ebbtide.rest.rates import Buckets, ConnectionLimits, Rate, counted

log = structlog.get_logger()

_BACKLOG: Final = 1024
#: File descriptors besides those of connections: the store, the log, calls of our own, as a manager's to its hosts.
_OTHER_FILES: Final = 2048
#: Refused connections are told in the log, but they cannot fill a disk.
_TOLD: Final = Rate(1.0, 10.0)
#: A pause where none can be accepted, since the waiting connection is offered again at once.
_FULL_S: Final = 0.5


@contextlib.asynccontextmanager
async def serving(
    app: web.Application,
    host: str,
    port: int,
    tls: ssl.SSLContext | None = None,
    limits: ConnectionLimits = ConnectionLimits(),  # noqa: B008 - frozen
    shutdown_timeout_s: float = 60.0,
    held: Sequence[socket.socket] = (),
) -> AsyncIterator[Listener]:
    """Serve an application from here to the end of the block; the application starts and stops with it.

    It starts once the address is held, and is listened for when it has.

    :param port: 0 takes a free one.
    :param shutdown_timeout_s: for requests that are under way at the end; 0 is no limit (aiohttp's rule).
    :param held: the sockets of `holding`, where the caller has the address already.
    :raises OSError: the address cannot be had.
    """
    runner = web.AppRunner(
        app,
        handle_signals=False,
        access_log=None,
        logger=_http_log(),
        shutdown_timeout=shutdown_timeout_s,
        keepalive_timeout=limits.idle_s,
        lingering_time=limits.lingering_s,
    )
    listener = Listener(tls, limits)
    async with holding(host, None if held else port) as own:
        try:
            await runner.setup()
            assert runner.server is not None
            listener.start(runner.server, held or own)
            yield listener
        finally:
            await listener.stop()
            await runner.cleanup()
            await listener.close()


@contextlib.asynccontextmanager
async def holding(host: str, port: int | None) -> AsyncIterator[Sequence[socket.socket]]:
    """Hold every address that ``host`` stands for to the end of the block, so that nothing is begun without them.

    Nobody listens there yet: clients are refused, and do not wait.

    :param port: 0 takes a free one; None: nothing is held.
    :raises OSError: there is no such address, or it is taken.
    """
    found = []
    if port is not None:
        loop = asyncio.get_running_loop()
        found = await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    with contextlib.ExitStack() as stack:
        held = []
        for family, _, _, _, address in dict.fromkeys(found):
            held.append(stack.enter_context(socket.socket(family, socket.SOCK_STREAM)))
            _bind(held[-1], address)
        yield held


def _bind(place: socket.socket, address: Any) -> None:
    """As `socket.create_server` does, which listens at once."""
    place.setblocking(False)
    place.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    if place.family == socket.AF_INET6:
        place.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
    try:
        place.bind(address)
    except OSError as error:
        raise OSError(error.errno, f"{error.strerror} (while attempting to bind on address {address!r})") from None


class Listener:
    """Accepts connections for one server."""

    def __init__(self, tls: ssl.SSLContext | None, limits: ConnectionLimits) -> None:
        self._tls = tls
        self._limits = limits
        self._sockets: Sequence[socket.socket] = ()
        self._accepting: list[asyncio.Task[None]] = []
        self._connections: set[asyncio.Task[None]] = set()
        #: Those from which nothing has come yet but a part of a handshake, the oldest first, with their addresses.
        self._silent: dict[asyncio.Task[None], str] = {}
        self._by_address: Counter[str] = Counter()
        self._told = Buckets()
        self.port = 0

    @property
    def open_connections(self) -> int:
        """How many there are, those in their handshake too."""
        return len(self._connections)

    def start(self, server: Callable[[], asyncio.BaseProtocol], held: Sequence[socket.socket]) -> None:
        """Listen on the addresses that are held.

        :param server: makes the protocol of a connection.
        :raises OSError: another process listens there since.
        """
        _allow_files(self._limits.in_all + _OTHER_FILES)
        self._sockets = held
        for listening in held:
            listening.listen(_BACKLOG)
        self.port = held[0].getsockname()[1]
        self._accepting = [
            asyncio.create_task(self._accept(listening, server), name=f"accept on port {self.port}")
            for listening in self._sockets
        ]

    async def stop(self) -> None:
        """Take no new connections; those that are there go on."""
        for task in self._accepting:
            task.cancel()
        await asyncio.gather(*self._accepting, return_exceptions=True)
        for listening in self._sockets:
            listening.close()

    async def close(self) -> None:
        """End what is still connected."""
        for task in self._connections:
            task.cancel()
        await asyncio.gather(*self._connections, return_exceptions=True)

    async def _accept(self, listening: socket.socket, server: Callable[[], asyncio.BaseProtocol]) -> None:
        loop = asyncio.get_running_loop()
        while True:
            try:
                accepted, peer = await loop.sock_accept(listening)
            except OSError as error:
                # Of a client that is gone already, or for want of file descriptors or memory.
                if error.errno != errno.ECONNABORTED:
                    self._tell("this machine", f"cannot accept: {error.strerror}")
                    await asyncio.sleep(_FULL_S)
                continue
            address = counted(peer[0] if isinstance(peer, tuple) else None)
            if (why := self._full(address)) and not self._makes_way(address):
                self._tell(address, why)
                accepted.close()
                continue
            self._by_address[address] += 1
            task = asyncio.create_task(self._connection(accepted, address, server), name=f"connection from {address}")
            self._connections.add(task)
            task.add_done_callback(self._connections.discard)

    def _full(self, address: str) -> str | None:
        if len(self._connections) >= self._limits.in_all:
            return f"there are {self._limits.in_all} connections already"
        if self._by_address[address] >= self._limits.per_address:
            return f"there are {self._limits.per_address} connections from there already"
        return None

    def _makes_way(self, address: str) -> bool:
        """Whether the oldest connection that has said nothing ends for one more: strangers without a certificate, who
        come no further than into a handshake, are not to keep out those who have one. Of an address that has its share
        one of its own does.
        """
        share = self._by_address[address] >= self._limits.per_address
        oldest = next((task for task, of in self._silent.items() if of == address or not share), None)
        if oldest is None:
            return False
        del self._silent[oldest]
        oldest.cancel()
        return True

    async def _connection(
        self, accepted: socket.socket, address: str, server: Callable[[], asyncio.BaseProtocol]
    ) -> None:
        """From the handshake to the end."""
        loop = asyncio.get_running_loop()
        task = asyncio.current_task()
        assert task is not None, "in the loop"
        # Not before it has begun: one that is cancelled before that would count for ever.
        self._silent[task] = address
        speaks = partial(self._silent.pop, task, None)
        guarded = _Guarded(cast(asyncio.Protocol, server()), self._limits.unread_s, speaks)
        seconds = {"ssl_handshake_timeout": self._limits.handshake_s, "ssl_shutdown_timeout": self._limits.lingering_s}
        options: dict[str, Any] = {"ssl": self._tls, **seconds} if self._tls is not None else {}
        try:
            await loop.connect_accepted_socket(lambda: guarded, accepted, **options)
            await guarded.lost.wait()
        except OSError as error:
            self._tell(address, f"no TLS connection: {str(error) or type(error).__name__}")
        finally:
            speaks()
            guarded.abort()
            self._by_address[address] -= 1
            if not self._by_address[address]:
                del self._by_address[address]

    def _tell(self, address: str, why: str) -> None:
        if not self._told.take("log", _TOLD, asyncio.get_running_loop().time()):
            log.warning("connection refused", address=address, why=why)


class _Guarded(asyncio.Protocol):
    """aiohttp's protocol of one connection: tells when it is lost, and ends it where answers are not read."""

    def __init__(self, inner: asyncio.Protocol, unread_s: float, speaks: Callable[[], object]) -> None:
        self.lost = asyncio.Event()
        self._inner = inner
        self._unread_s = unread_s
        self._speaks = speaks
        self._transport: asyncio.WriteTransport | None = None
        self._giving_up: asyncio.TimerHandle | None = None

    def abort(self) -> None:
        if self._transport is not None and not self.lost.is_set():
            self._transport.abort()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.WriteTransport, transport)
        if transport.get_extra_info("sslcontext") is None:
            # Even a single byte that is not taken is seen: a connection is not closed before its last one is. With TLS
            # the end has a limit of its own (ssl_shutdown_timeout), and 0 would mean full when empty.
            self._transport.set_write_buffer_limits(high=0)
        self._inner.connection_made(transport)

    def connection_lost(self, exc: Exception | None) -> None:
        self._read_again()
        self.lost.set()
        self._inner.connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        self._speaks()
        self._inner.data_received(data)

    def eof_received(self) -> bool | None:
        return self._inner.eof_received()

    def pause_writing(self) -> None:
        self._giving_up = asyncio.get_running_loop().call_later(self._unread_s, self.abort)
        self._inner.pause_writing()

    def resume_writing(self) -> None:
        self._read_again()
        self._inner.resume_writing()

    def _read_again(self) -> None:
        if self._giving_up is not None:
            self._giving_up.cancel()
            self._giving_up = None


class _Wordless(logging.Handler):
    """aiohttp's own log without its texts: they quote what a client sent, and that may be a token."""

    def emit(self, record: logging.LogRecord) -> None:
        error = record.exc_info[1] if record.exc_info else None
        if isinstance(error, HttpProcessingError):
            log.debug("no HTTP", error=type(error).__name__)
        else:
            log.error("a connection failed", error=type(error).__name__)


def _http_log() -> logging.Logger:
    logger = logging.Logger("rest.http", logging.WARNING)
    logger.addHandler(_Wordless())
    return logger


def _allow_files(number: int) -> None:
    """As many open files as connections may need; said in the log where the system does not give them."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY or soft >= number:
        return
    allowed = number if hard == resource.RLIM_INFINITY else min(number, hard)
    resource.setrlimit(resource.RLIMIT_NOFILE, (allowed, hard))
    if allowed < number:
        log.warning("fewer connections than configured: too few open files are allowed", allowed=allowed, needed=number)
