"""Calls to libvirt from asyncio: a bounded pool, a time limit for each, one modifying call per domain at a time.

libvirt's event loop runs in a thread of its own (the default implementation, registered before the first connection);
its callbacks are handed to asyncio by ``call_soon_threadsafe``. The loop's own thread never calls libvirt.
Source: https://libvirt.org/html/libvirt-libvirt-event.html; docs/contracts.md, concurrency with libvirt.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final, TypeVar

import libvirt
import structlog

from hostagent.errors import DomainGone, HypervisorError, HypervisorTimeout

#: Calls in flight on one connection (docs/contracts.md).
IN_FLIGHT: Final = 4
CALL_LIMIT_S: Final = 15.0

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


class LibvirtConnection:
    """One connection and its pool. Reconnects when libvirtd was restarted."""

    def __init__(self, uri: str) -> None:
        self.uri = uri
        self._pool = ThreadPoolExecutor(IN_FLIGHT, thread_name_prefix="libvirt")
        self._slots = asyncio.Semaphore(IN_FLIGHT)
        self._locks: dict[str, asyncio.Lock] = {}
        self._connection: Any = None
        self._opening = threading.Lock()
        self._on_open: list[Callable[[Any], None]] = []

    def on_open(self, callback: Callable[[Any], None]) -> None:
        """Call back (in a pool thread) with every new connection, to register for events."""
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
        future = asyncio.get_running_loop().run_in_executor(self._pool, self._run, function)
        future.add_done_callback(lambda done: _give_back(done, held))
        try:
            return await asyncio.wait_for(asyncio.shield(future), limit_s)
        except TimeoutError:
            raise HypervisorTimeout(f"libvirt did not answer within {limit_s:g} s") from None

    def _run(self, function: Callable[[Any], T]) -> T:
        try:
            return function(self._open())
        except libvirt.libvirtError as error:
            if error.get_error_code() == libvirt.VIR_ERR_NO_DOMAIN:
                raise DomainGone(str(error)) from error
            raise HypervisorError(str(error)) from error

    def _open(self) -> Any:
        with self._opening:
            if self._connection is None or not self._connection.isAlive():
                connection = libvirt.open(self.uri)
                with contextlib.suppress(libvirt.libvirtError):  # drivers without a network have nothing to keep alive
                    connection.setKeepAlive(5, 3)
                for callback in self._on_open:
                    callback(connection)
                self._connection = connection
            return self._connection

    async def close(self) -> None:
        """Close the connection; calls that hang are left to their threads."""
        self._pool.shutdown(wait=False, cancel_futures=True)
        connection, self._connection = self._connection, None
        if connection is not None:
            await asyncio.to_thread(connection.close)


def _give_back(done: asyncio.Future[Any], held: list[Callable[[], None]]) -> None:
    for release in held:
        release()
    if not done.cancelled():
        done.exception()  # seen here, so that a call given up does not warn of an exception nobody fetched
