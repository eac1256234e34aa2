"""One address in front of whatever manager leads, as a balancer is: it can be cut, led elsewhere, or fall silent."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from urllib.parse import urlsplit


class Address:
    """Passes connections on.

    :param target: the URL of the manager that is asked now; "" while there is none.
    """

    def __init__(self, target: Callable[[], str]) -> None:
        self.target = target
        self.cut = False
        self.stalled = False
        self.url = ""
        self._open: set[asyncio.StreamWriter] = set()
        self._dead: set[asyncio.StreamWriter] = set()

    def hang_up(self) -> None:
        """End all connections; later ones are refused while ``cut`` is set."""
        for writer in self._open:
            writer.transport.abort()

    def stall(self) -> None:
        """As where a network dies without a word: all connections stay open, later ones too, and none passes anything.

        They are never heard of again; those that are opened once ``stalled`` is put back are passed on.
        """
        self.stalled = True
        self._dead |= self._open

    async def pass_on(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        there = urlsplit(self.target())
        if self.cut or there.port is None:
            writer.transport.abort()
            return
        with contextlib.suppress(OSError):
            far, near = await asyncio.open_connection(there.hostname, there.port)
            ends = {writer, near}
            self._open |= ends
            try:
                await asyncio.gather(self._copy(reader, near), self._copy(far, writer))
            finally:
                self._open -= ends
                self._dead -= ends
        writer.transport.abort()

    async def _copy(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while data := await reader.read(65_536):
                if self.stalled:
                    self._dead.add(writer)
                if writer not in self._dead:
                    writer.write(data)
                    await writer.drain()
        except OSError:
            pass
        finally:
            writer.transport.abort()


@contextlib.asynccontextmanager
async def address_of(target: Callable[[], str]) -> AsyncIterator[Address]:
    made = Address(target)
    server = await asyncio.start_server(made.pass_on, "127.0.0.1", 0)
    made.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    try:
        yield made
    finally:
        made.hang_up()
        server.close()
