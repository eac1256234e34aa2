"""Calls to libvirt from asyncio: a bounded pool, a time limit for each, one modifying call per domain at a time.

libvirtd works on few calls of one connection at once (max_client_requests), so more connections are opened as they are
needed: many domains are then worked on side by side, and one whose monitor hangs holds up its own connection only.

libvirt's event loop runs in a thread of its own (the default implementation, registered before the first connection);
its callbacks are handed to asyncio by ``call_soon_threadsafe``. The loop's own thread never calls libvirt.
Source: https://libvirt.org/html/libvirt-libvirt-event.html; docs/internals/contracts.md, concurrency with libvirt.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections.abc import Callable
from typing import Any, Final, TypeVar

import libvirt
import structlog

from ebbtide.rest.metrics.totals import Calls
from ebbtide.threads import DaemonThreads
from hostagent.errors import DomainGone, HypervisorError, HypervisorTimeout

#: Calls in flight on one connection (docs/internals/contracts.md), and connections at most.
IN_FLIGHT: Final = 4
CONNECTIONS: Final = 16
CALL_LIMIT_S: Final = 15.0
#: For how long the end of the connections is waited for, in seconds: libvirt tells its daemon of it, which may hang.
CLOSE_S: Final = 2.0
#: For so long a domain that was looked up by name is read as the one of that name, in seconds.
KNOWN_S: Final = 10.0
#: How calls that fail are counted; others are errors.
_OUTCOMES: Final = {HypervisorTimeout: "timeout", DomainGone: "gone"}

T = TypeVar("T")

log = structlog.get_logger()
_events_running = threading.Event()


def _run_events() -> None:
    while True:
        if libvirt.virEventRunDefaultImpl() < 0:
            log.warning("libvirt's event loop reported an error and goes on")


def _quiet(_context: object, _error: object) -> None:
    """libvirt would print every error to stderr; ours are raised and logged where they matter."""


def start_event_thread() -> None:
    """Register libvirt's default event loop once per process and run it in a thread of its own."""
    if _events_running.is_set():
        return
    _events_running.set()
    libvirt.registerErrorHandler(_quiet, None)
    libvirt.virEventRegisterDefaultImpl()
    threading.Thread(target=_run_events, name="libvirt-events", daemon=True).start()


class _Opened:
    """A libvirt connection, with the domains that were looked up on it lately."""

    def __init__(self, connection: Any) -> None:
        self._connection = connection
        self._domains: dict[str, tuple[float, Any]] = {}

    def __getattr__(self, name: str) -> Any:
        return getattr(self._connection, name)

    def read(self, name: str, function: Callable[[Any], T]) -> T:
        """See `LibvirtConnection.read`. libvirt finds a domain by its UUID, and says so where that is gone."""
        since, domain = self._domains.get(name, (0.0, None))
        if domain is not None and time.monotonic() - since <= KNOWN_S:
            try:
                return function(domain)
            except libvirt.libvirtError as error:
                if error.get_error_code() != libvirt.VIR_ERR_NO_DOMAIN:
                    raise
        self._domains.pop(name, None)
        domain = self._connection.lookupByName(name)
        self._domains[name] = time.monotonic(), domain
        return function(domain)


class _Connection:
    """One connection of the pool; opened again when libvirtd was restarted."""

    def __init__(self, opener: Callable[[], Any], on_open: Callable[[Any], None]) -> None:
        self._opener = opener
        self._on_open = on_open
        self._opened: Any = None
        self._opening = threading.Lock()
        #: Calls under way.
        self.in_flight = 0

    def use(self) -> Any:
        """The connection, alive. Runs in a pool thread."""
        with self._opening:
            if self._opened is None or not self._opened.isAlive():
                connection = self._opener()
                with contextlib.suppress(libvirt.libvirtError):  # drivers without a network have nothing to keep alive
                    connection.setKeepAlive(5, 3)
                self._on_open(connection)
                self._opened = _Opened(connection)
            return self._opened

    def close(self) -> None:
        opened, self._opened = self._opened, None
        if opened is not None:
            opened.close()


class LibvirtConnection:
    """The pool of connections to one libvirt. Reconnects when libvirtd was restarted.

    :param opener: opens one connection; tests put something else in libvirt's place.
    """

    def __init__(self, uri: str, opener: Callable[[str], Any] = libvirt.open) -> None:
        self.uri = uri
        self._pool = DaemonThreads(IN_FLIGHT * CONNECTIONS, "libvirt")
        self._slots = asyncio.Semaphore(IN_FLIGHT * CONNECTIONS)
        self._locks: dict[str, asyncio.Lock] = {}
        self._opener = opener
        self._connections: list[_Connection] = []
        self._on_open: list[Callable[[Any], None]] = []
        self.calls = Calls()
        #: Set when a memory device of the domain has moved.
        self._told: dict[str, asyncio.Event] = {}
        self._loop: asyncio.AbstractEventLoop | None = None
        self.on_open(self._listen)

    def told_of(self, domain: str) -> asyncio.Event:
        """Set whenever libvirt tells that a memory device of the domain has moved."""
        self._loop = asyncio.get_running_loop()
        return self._told.setdefault(domain, asyncio.Event())

    def _listen(self, connection: Any) -> None:
        """Runs in a pool thread; the callback runs in libvirt's event thread."""

        def tell(_connection: Any, domain: Any, *_details: Any) -> None:
            told = self._told.get(domain.name())
            if told is not None and self._loop is not None:
                with contextlib.suppress(RuntimeError):  # the loop has ended
                    self._loop.call_soon_threadsafe(told.set)

        with contextlib.suppress(libvirt.libvirtError, AttributeError):  # a driver without events is looked at
            connection.domainEventRegisterAny(None, libvirt.VIR_DOMAIN_EVENT_ID_MEMORY_DEVICE_SIZE_CHANGE, tell, None)

    def on_open(self, callback: Callable[[Any], None]) -> None:
        """Call back (in a pool thread) with the first connection whenever it is opened, to register for events."""
        self._on_open.append(callback)

    async def call(
        self, function: Callable[[Any], T], *, modifies: str | None = None, limit_s: float = CALL_LIMIT_S
    ) -> T:
        """Run ``function(connection)`` in the pool.

        :param modifies: the domain that the call changes; such calls wait for one another.
        :raises HypervisorTimeout: not back within ``limit_s``; the thread and the lock stay taken until it is.
        :raises DomainGone: libvirt knows no such domain.
        :raises HypervisorError: any other error of libvirt.
        """
        loop = asyncio.get_running_loop()
        began = loop.time()
        try:
            result = await self._call(function, modifies, limit_s)
        except HypervisorError as error:
            self.calls.add(_OUTCOMES.get(type(error), "error"), loop.time() - began)
            raise
        self.calls.add("ok", loop.time() - began)
        return result

    async def _call(self, function: Callable[[Any], T], modifies: str | None, limit_s: float) -> T:
        held: list[Callable[[], None]] = []
        try:
            async with asyncio.timeout(limit_s):
                if modifies is not None:
                    lock = self._locks.setdefault(modifies, asyncio.Lock())
                    await lock.acquire()
                    held.append(lock.release)
                await self._slots.acquire()
                held.append(self._slots.release)
        except BaseException as error:
            for release in held:
                release()
            if isinstance(error, TimeoutError):
                raise HypervisorTimeout(f"an earlier libvirt call has not returned within {limit_s:g} s") from None
            raise
        connection = self._least_busy()
        connection.in_flight += 1
        future = asyncio.get_running_loop().run_in_executor(self._pool, self._run, connection, function)
        future.add_done_callback(lambda done: _give_back(done, connection, held))
        try:
            # Not wait_for: until Python 3.12 it forgets a cancellation that comes together with the answer.
            async with asyncio.timeout(limit_s):
                return await asyncio.shield(future)
        except TimeoutError:
            raise HypervisorTimeout(f"libvirt did not answer within {limit_s:g} s") from None

    async def read(self, domain: str, function: Callable[[Any], T]) -> T:
        """Run ``function(domain)``, which changes nothing, in the pool. Raises as `call`.

        It may be of a domain that had this name up to `KNOWN_S` ago: half of all calls would be to look names up.
        """
        return await self.call(lambda c: c.read(domain, function))

    async def change(self, domain: str, function: Callable[[Any], T], limit_s: float = CALL_LIMIT_S) -> T:
        """Run ``function(domain)``, which changes it, in the pool. Raises as `call`."""
        return await self.call(lambda c: function(c.lookupByName(domain)), modifies=domain, limit_s=limit_s)

    async def adjust(self, domain: str, function: Callable[[Any], T]) -> T:
        """As `change`, for what is about a running domain only, whose name is not looked up again within `KNOWN_S`.

        One that runs cannot be renamed; one that is gone by its UUID is looked up anew, as `change` does.
        """
        return await self.call(lambda c: c.read(domain, function), modifies=domain)

    async def ended(self, domain: str) -> None:
        """Wait until no call changes the domain any more, also none that was given up but goes on in its thread."""
        if (lock := self._locks.get(domain)) is not None:
            async with lock:
                pass

    def forget(self, domain: str) -> None:
        """Keep no lock for a domain that is gone."""
        lock = self._locks.get(domain)
        if lock is not None and not lock.locked():
            del self._locks[domain]
        self._told.pop(domain, None)

    def _least_busy(self) -> _Connection:
        """A connection with room, the earlier ones first, so that no more are open than are needed."""
        for connection in self._connections:
            if connection.in_flight < IN_FLIGHT:
                return connection
        first = not self._connections
        connection = _Connection(lambda: self._opener(self.uri), self._opened_first if first else _nothing)
        self._connections.append(connection)
        return connection

    def _opened_first(self, connection: Any) -> None:
        for callback in self._on_open:
            callback(connection)

    def _run(self, connection: _Connection, function: Callable[[Any], T]) -> T:
        try:
            return function(connection.use())
        except libvirt.libvirtError as error:
            if error.get_error_code() == libvirt.VIR_ERR_NO_DOMAIN:
                raise DomainGone(str(error)) from error
            raise HypervisorError(str(error)) from error

    async def close(self) -> None:
        """Close the connections; calls that hang are left to their threads, and with them their connections.

        What libvirtd has begun for such a call it ends without us, a move to another host too.
        """
        connections, self._connections = self._connections, []
        loop = asyncio.get_running_loop()
        # One that is closed under a call is freed under it.
        idle = [connection for connection in connections if not connection.in_flight]
        closing = [loop.run_in_executor(self._pool, connection.close) for connection in idle]
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(CLOSE_S):
                await asyncio.gather(*closing, return_exceptions=True)
        self._pool.shutdown(wait=False, cancel_futures=True)


def _nothing(_connection: Any) -> None:
    """Further connections need no events: the first one has them all."""


def _give_back(done: asyncio.Future[Any], connection: _Connection, held: list[Callable[[], None]]) -> None:
    connection.in_flight -= 1
    for release in held:
        release()
    if not done.cancelled():
        done.exception()  # seen here, so that a call given up does not warn of an exception that was not fetched
