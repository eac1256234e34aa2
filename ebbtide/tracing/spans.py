"""Spans as a daemon writes them down: each once, at its end. Without a recorder all of this does nothing.

A span is recorded only beneath one that is open: what a daemon does by itself, outside any operation, makes none. A
task that outlives the operation which started it finds that operation's span closed.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager
from contextvars import ContextVar, Token
from dataclasses import dataclass
from enum import StrEnum
from types import TracebackType
from typing import Final, Protocol, Self

import structlog

from ebbtide.tracing.context import HEADER, TraceContext, new_trace

#: Of a text in an attribute, in characters; of the attributes of one span; of the spans beneath one, guests' included.
MOST_TEXT: Final = 256
MOST_ATTRIBUTES: Final = 64
MOST_CHILDREN: Final = 200
#: What all our attributes begin with.
PREFIX: Final = "ebbtide."

Value = str | int | float | bool


class Kind(StrEnum):
    """What a span is to the one above it, in OpenTelemetry's words."""

    INTERNAL = "internal"
    SERVER = "server"
    CLIENT = "client"


@dataclass(slots=True)
class Ended:
    """A span that is over. Times are nanoseconds since the epoch."""

    name: str
    context: TraceContext
    parent: TraceContext | None
    kind: Kind
    began_ns: int
    ended_ns: int
    attributes: Mapping[str, Value]
    #: Why it failed; empty: it did not.
    failure: str = ""
    #: Whether it was in a guest, not in this daemon.
    in_guest: bool = False


class Recorder(Protocol):
    """Takes spans, and never waits for anybody."""

    def samples(self, context: TraceContext, name: str) -> bool:
        """Whether a trace that begins here is recorded."""
        ...

    def record(self, span: Ended) -> None:
        """Take a span."""
        ...


@dataclass(slots=True, eq=False)
class _Open:
    """A span that what is done now belongs to, or the one of another program that asked for it."""

    context: TraceContext
    #: How many have been begun beneath it.
    children: int = 0
    closed: bool = False


_recorder: Recorder | None = None
_current: ContextVar[_Open | None] = ContextVar("ebbtide_span", default=None)


def record_to(recorder: Recorder | None) -> None:
    """From now on; None: nowhere, as at the start."""
    global _recorder
    _recorder = recorder


def is_on() -> bool:
    """Whether spans are recorded at all."""
    return _recorder is not None


def current() -> TraceContext | None:
    """The span that is open here."""
    found = _open()
    return found.context if found is not None else None


def headers() -> dict[str, str]:
    """What a request that is sent from here carries; nothing where there is no trace."""
    context = current()
    return {HEADER: context.header()} if context is not None else {}


class Span:
    """A span from its beginning to its end, for ``with``; see `span`. What is not recorded takes everything in vain."""

    __slots__ = ("_attributes", "_began_ns", "_kind", "_name", "_parent", "_tokens", "failure", "opened")

    def __init__(
        self,
        name: str,
        open_: _Open | None,
        parent: TraceContext | None,
        kind: Kind,
        attributes: Mapping[str, Value],
    ) -> None:
        self._name = name
        #: None: it is not recorded.
        self.opened = open_
        self._parent = parent
        self._kind = kind
        self._attributes: dict[str, Value] = {}
        self._began_ns = 0
        self._tokens: list[Token[_Open | None]] = []
        self.failure = ""
        if open_ is not None:
            self._began_ns = time.time_ns()
            self.set(**attributes)

    @property
    def context(self) -> TraceContext | None:
        """Where it stands; None: it is not recorded."""
        return self.opened.context if self.opened is not None else None

    @property
    def is_recorded(self) -> bool:
        """Whether it is worth the while to say something of it."""
        return self.opened is not None and self.opened.context.sampled

    @property
    def trace_id(self) -> str | None:
        """Of its trace, as it is shown; None: it is not recorded."""
        return self.opened.context.trace if self.opened is not None and self.is_recorded else None

    def set(self, **attributes: Value) -> None:
        """More attributes; see `described`."""
        if self.opened is not None:
            self._attributes |= described(attributes, MOST_ATTRIBUTES - len(self._attributes))

    def __enter__(self) -> Self:
        if self.opened is not None:
            self._tokens.append(_current.set(self.opened))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.opened is None:
            return
        _current.reset(self._tokens.pop())
        if isinstance(error, asyncio.CancelledError):
            self.set(called_off=True)
        elif error is not None:
            self.failure = self.failure or str(error) or type(error).__name__
        self.end()

    def end(self, at_ns: int | None = None) -> None:
        """Record it, once.

        :param at_ns: when it ended, nanoseconds since the epoch; None: now.
        """
        if self.opened is None or self.opened.closed:
            return
        self.opened.closed = True
        record(
            Ended(
                self._name,
                self.opened.context,
                self._parent,
                self._kind,
                self._began_ns,
                time.time_ns() if at_ns is None else at_ns,
                self._attributes,
                self.failure,
            )
        )


def described(attributes: Mapping[str, Value], most: int = MOST_ATTRIBUTES) -> dict[str, Value]:
    """Attributes with their prefix, ``__`` in a name as a dot; texts are cut, empty ones left out."""
    said = [(name, value) for name, value in attributes.items() if value != ""]
    return {
        PREFIX + name.replace("__", "."): value[:MOST_TEXT] if isinstance(value, str) else value
        for name, value in said[:most]
    }


#: What is not recorded.
NO_SPAN: Final = Span("", None, None, Kind.INTERNAL, {})


def span(name: str, kind: Kind = Kind.INTERNAL, **attributes: Value) -> Span:
    """A span beneath the one that is open here; none where none is, or where it has too many already.

    :param name: one of few: what differs from VM to VM is an attribute.
    """
    return _beneath(_open(), name, kind, attributes)


def beneath(above: Span, name: str, kind: Kind = Kind.INTERNAL, **attributes: Value) -> Span:
    """As `span`, beneath one that is not the open one here."""
    return _beneath(above.opened, name, kind, attributes)


def _beneath(above: _Open | None, name: str, kind: Kind, attributes: Mapping[str, Value]) -> Span:
    if above is None or above.closed or not above.context.sampled:
        return NO_SPAN
    above.children += 1
    if above.children > MOST_CHILDREN:
        return NO_SPAN
    return Span(name, _Open(above.context.child()), above.context, kind, attributes)


def operation(name: str, **attributes: Value) -> Span:
    """The span of an operation: beneath the one that is open here, or the first of a trace."""
    if _recorder is None:
        return NO_SPAN
    context, parent = begin_trace(name)
    return Span(name, _Open(context), parent, Kind.SERVER, attributes)


def begin_trace(name: str) -> tuple[TraceContext, TraceContext | None]:
    """Where a new operation stands, and what is above it. Only while there is a recorder."""
    assert _recorder is not None, "spans are recorded"
    above = current()
    if above is not None:
        return above.child(), above
    first = new_trace()
    return (first if _recorder.samples(first, name) else new_trace(sampled=False)), None


@contextlib.contextmanager
def within(context: TraceContext | None) -> Iterator[None]:
    """What is done in this block belongs to a span that another program, or an earlier run, has begun.

    :param context: None: to none.
    """
    if _recorder is None or context is None:
        yield
        return
    opened = _Open(context)
    token = _current.set(opened)
    try:
        yield
    finally:
        opened.closed = True
        _current.reset(token)


def logged() -> AbstractContextManager[None]:
    """Log lines of the block name the trace that it belongs to, if it is recorded."""
    context = current()
    if context is None or not context.sampled:
        return contextlib.nullcontext()
    return structlog.contextvars.bound_contextvars(trace_id=context.trace)


def record(ended: Ended) -> None:
    """Hand a span over, if it is of a trace that is recorded."""
    if _recorder is not None and ended.context.sampled:
        _recorder.record(ended)


def _open() -> _Open | None:
    if _recorder is None:
        return None
    found = _current.get()
    return found if found is not None and not found.closed else None
