"""A network inside an event loop: real HTTP between programs that share the loop, cut off where one is killed."""

from __future__ import annotations

import asyncio
from collections import deque
from contextvars import Context, ContextVar, copy_context
from dataclasses import dataclass
from typing import Any
from weakref import WeakSet

import aiohttp
from aiohttp import web
from aiohttp.client_proto import ResponseHandler

#: The program that a task belongs to.
PROGRAM: ContextVar[str] = ContextVar("program", default="test")
#: How long anything is under way, in seconds.
LATENCY_S = 0.001


class End(asyncio.Transport):
    """One end of a connection."""

    peer: End

    def __init__(self, protocol: Any, program: str, context: Context) -> None:
        super().__init__()
        self.program = program
        self.protocol = protocol
        self.context = context
        self._loop = asyncio.get_running_loop()
        #: What arrives: pieces in order, then None.
        self._arriving: deque[bytes | None] = deque()
        self._paused = False
        self._closing = False
        self._lost = False

    def write(self, data: Any) -> None:
        if not self._closing:
            self.peer._send(bytes(data))

    def close(self) -> None:
        if not self._closing:
            self._closing = True
            self.peer._send(None)
            self._loop.call_soon(self._lose, None, context=self.context)

    def abort(self) -> None:
        self.close()

    def is_closing(self) -> bool:
        return self._closing

    def pause_reading(self) -> None:
        self._paused = True

    def resume_reading(self) -> None:
        self._paused = False
        self._loop.call_soon(self._receive, context=self.context)

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        return ("127.0.0.1", 1) if name in ("peername", "sockname") else default

    def get_write_buffer_size(self) -> int:
        return 0

    def cut(self) -> None:
        """As the kernel does when a process ends: nothing more comes or goes."""
        self._closing = True
        self._arriving.clear()
        self._loop.call_soon(self._lose, ConnectionResetError("its process has ended"), context=self.context)

    def _send(self, data: bytes | None) -> None:
        self._arriving.append(data)
        self._loop.call_later(LATENCY_S, self._receive, context=self.context)

    def _receive(self) -> None:
        if self._arriving and not self._paused and not self._lost:
            if (data := self._arriving.popleft()) is not None:
                self.protocol.data_received(data)
                if self._arriving:
                    self._loop.call_soon(self._receive, context=self.context)
            else:
                self._closing = True
                self._lose(None)

    def _lose(self, error: Exception | None) -> None:
        if not self._lost:
            self._lost = True
            self.protocol.connection_lost(error)


@dataclass
class _Listener:
    program: str
    context: Context
    server: web.Server


class Wire:
    """Who listens at which port, and all connections."""

    def __init__(self) -> None:
        self._listeners: dict[int, _Listener] = {}
        self._ends: WeakSet[End] = WeakSet()
        self._gone: set[str] = set()

    def listen(self, port: int, server: web.Server) -> None:
        """The present program takes connections there."""
        self._listeners[port] = _Listener(PROGRAM.get(), copy_context(), server)

    def begin(self, program: str) -> None:
        """A program of this name runs (again)."""
        self._gone.discard(program)

    def cut(self, program: str) -> None:
        """Nothing that a program does or says from here on reaches anybody."""
        self._gone.add(program)
        self._listeners = {port: one for port, one in self._listeners.items() if one.program != program}
        for end in [end for end in self._ends if program in (end.program, end.peer.program)]:
            end.cut()
            self._ends.discard(end)

    async def connect(self, protocol: ResponseHandler, port: int) -> None:
        """:raises ConnectionRefusedError: nobody listens there."""
        await asyncio.sleep(LATENCY_S)
        program, listener = PROGRAM.get(), self._listeners.get(port)
        if listener is None or program in self._gone:
            raise ConnectionRefusedError(f"nobody listens at {port}")
        ours = End(protocol, program, copy_context())
        theirs = End(listener.server(), listener.program, listener.context)
        ours.peer, theirs.peer = theirs, ours
        self._ends |= {ours, theirs}
        asyncio.get_running_loop().call_soon(theirs.protocol.connection_made, theirs, context=theirs.context)
        protocol.connection_made(ours)


class Connector(aiohttp.BaseConnector):
    """In the place of ``aiohttp.TCPConnector``."""

    def __init__(self, wire: Wire) -> None:
        super().__init__()
        self._wire = wire

    async def _create_connection(self, req: Any, traces: Any, timeout: Any) -> ResponseHandler:
        protocol: ResponseHandler = self._factory()
        try:
            await self._wire.connect(protocol, req.url.port)
        except OSError as error:
            raise aiohttp.ClientConnectorError(req.connection_key, error) from error
        return protocol
