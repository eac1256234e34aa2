"""The guest's part of a trace, where the host asks with a `traceparent`: it goes on to the hooks, and what they took is
told in the answer. Ids are the host's, and it records everything: a guest has nobody else to tell.
"""

from __future__ import annotations

import re
import threading
import time
from typing import Any, Callable, TypeVar

from guestagent.messages import CallTrace, HookCall

#: Calls of hooks in one answer.
MOST_CALLS = 32
_HEADER = re.compile("00-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})")
_here = threading.local()

T = TypeVar("T")


class Trace:
    """Of one request of the host. Calls may come from several threads."""

    def __init__(self, trace_id: str, span_id: int, flags: str) -> None:
        self._trace_id, self._span_id, self._flags = trace_id, span_id, flags
        self._began = time.monotonic()
        self._lock = threading.Lock()
        self._calls: list[HookCall] = []

    def begin(self, hook: str, call: str) -> tuple[dict[str, str], Callable[[int], None]]:
        """A hook is about to be called: headers for it, and what is to be told its HTTP status, 0 for none.

        The hook with number n of a request has the host's id for this guest's part, plus n.
        """
        with self._lock:
            if len(self._calls) >= MOST_CALLS:
                return {}, lambda status: None
            began = time.monotonic()
            made = HookCall(hook, call, round(began - self._began, 6), 0.0, None)
            self._calls.append(made)
            span_id = (self._span_id + len(self._calls)) % 2**64 or 2**64 - 1

        def ended(status: int) -> None:
            made.seconds, made.status = round(time.monotonic() - began, 6), status

        return {"traceparent": f"00-{self._trace_id}-{span_id:016x}-{self._flags}"}, ended

    def told(self) -> CallTrace:
        """For the answer. What has not ended yet has no status."""
        now_s = round(time.monotonic() - self._began, 6)
        with self._lock:
            calls = [
                HookCall(c.hook, c.call, c.at_s, max(now_s - c.at_s, 0.0) if c.status is None else c.seconds, c.status)
                for c in self._calls
            ]
        return CallTrace(now_s, calls)


def trace_of(header: Any) -> Trace | None:
    """The trace that a request of the host belongs to; None: to none."""
    found = _HEADER.fullmatch(header) if isinstance(header, str) else None
    return Trace(found.group(1), int(found.group(2), 16), found.group(3)) if found is not None else None


def here() -> Trace | None:
    """The trace of what this thread does."""
    found: Trace | None = getattr(_here, "trace", None)
    return found


def carried(work: Callable[..., T], trace: Trace | None = None) -> Callable[..., T]:
    """The same work for another thread, in a trace: `trace`, or the one of this thread."""
    trace = trace or here()

    def run(*arguments: Any) -> T:
        _here.trace = trace
        try:
            return work(*arguments)
        finally:
            _here.trace = None

    return run
