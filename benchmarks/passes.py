"""Settings of one run of a benchmark: how often, how long, and where its progress goes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

#: DESIGN: medians of at least five runs.
LEAST_RUNS = 5


@dataclass(frozen=True)
class Pass:
    """One pass over a benchmark.

    runs: how often each thing is measured. quick: shorter and smaller, to see whether it works; what it measures is
    marked and not to be quoted. report: takes a sentence a step. output: where a benchmark may leave more than its
    figures (tables, pictures), if anywhere.
    """

    runs: int = LEAST_RUNS
    quick: bool = False
    report: Callable[[str], None] = lambda sentence: None
    output: Path | None = None
