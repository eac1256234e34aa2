"""Spans that are kept in memory."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from ebbtide.tracing.context import TraceContext
from ebbtide.tracing.spans import Ended, record_to


class Kept:
    """Keeps what it is given."""

    def __init__(self, samples: bool = True) -> None:
        self.spans: list[Ended] = []
        self._samples = samples

    def samples(self, context: TraceContext, name: str) -> bool:
        return self._samples

    def record(self, span: Ended) -> None:
        self.spans.append(span)


@pytest.fixture
def kept() -> Iterator[Kept]:
    made = Kept()
    record_to(made)
    yield made
    record_to(None)
