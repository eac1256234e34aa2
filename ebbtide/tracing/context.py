"""Trace contexts as they travel: the header ``traceparent`` of W3C Trace Context, read strictly."""

from __future__ import annotations

import random
import re
from dataclasses import dataclass
from typing import Final

HEADER: Final = "traceparent"
#: Of version 00; a later one may say more behind these fields.
_FORM: Final = re.compile(r"([0-9a-f]{2})-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})(-[\x21-\x7e]{0,400})?")
_SPANS: Final = 2**64


@dataclass(frozen=True, slots=True)
class TraceContext:
    """Where a span stands: its trace, its own id, and whether it is recorded."""

    trace_id: int
    span_id: int
    sampled: bool = True

    @property
    def trace(self) -> str:
        """The trace's id as logs and answers show it."""
        return f"{self.trace_id:032x}"

    def header(self) -> str:
        """The value of ``traceparent`` for what is called from here."""
        return f"00-{self.trace}-{self.span_id:016x}-{int(self.sampled):02x}"

    def child(self) -> TraceContext:
        """A span beneath this one."""
        return TraceContext(self.trace_id, _span_id(), self.sampled)

    def numbered(self, number: int) -> TraceContext:
        """The span beneath this one that another program has numbered, from 1 on: both sides know its id.

        Ids are random, so one that is so close by is no other span's.
        """
        return TraceContext(self.trace_id, (self.span_id + number) % _SPANS or _SPANS - 1, self.sampled)


def new_trace(sampled: bool = True) -> TraceContext:
    """The first span of a trace of its own."""
    return TraceContext(random.getrandbits(128) or 1, _span_id(), sampled)


def read_context(value: str | None) -> TraceContext | None:
    """What a ``traceparent`` says; None: nothing that can be gone by, which is no error of the request's."""
    found = _FORM.fullmatch(value or "")
    if found is None or found[1] == "ff" or (found[1] == "00" and found[5]):
        return None
    trace_id, span_id = int(found[2], 16), int(found[3], 16)
    return TraceContext(trace_id, span_id, bool(int(found[4], 16) & 1)) if trace_id and span_id else None


def _span_id() -> int:
    return random.getrandbits(64) or 1
