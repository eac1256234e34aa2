"""Settings of one run of a benchmark: how often, how long, on how many cores, and where its progress goes."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from benchmarks.figures import BenchmarkFailed, Figure

#: DESIGN: medians of at least five runs.
LEAST_RUNS = 5
#: How often work may begin again because the kernel killed the confined process: it does so now and then when its own
#: swapping out makes no progress for a moment, however much swap is free.
TRIES = 3
T = TypeVar("T")


@dataclass(frozen=True)
class Pass:
    """One pass over a benchmark.

    runs: how often each thing is measured. quick: shorter and smaller, to see whether it works; what it measures is
    marked and not to be quoted. report: takes a sentence a step. output: where a benchmark may leave more than its
    figures (tables, pictures), if anywhere. vm_mib: size of the large VM of a benchmark that has one; None: its own
    choice. parts: of a benchmark that is measured in parts; empty: all of them.
    """

    runs: int = LEAST_RUNS
    quick: bool = False
    report: Callable[[str], None] = lambda sentence: None
    output: Path | None = None
    vm_mib: float | None = None
    parts: tuple[str, ...] = ()


class Killed(BenchmarkFailed):
    """The confined process is gone."""


def begun_again_when_killed(work: Callable[[], T], name: str, how: Pass) -> tuple[T, int]:
    """What the work returns, and how often it was begun again, since it raised Killed. Raises the last of TRIES."""
    for again in range(TRIES):
        try:
            return work(), again
        except Killed as error:
            if again == TRIES - 1:
                raise
            how.report(f"{name} begins again: {error}")
    raise AssertionError("TRIES is positive")


def again_figure(counts: Iterable[float], what: str) -> Figure:
    """How often a run's measurements of this were begun again."""
    return Figure.over(counts, "times", f"{what} began again in the run, since the kernel had killed the process")


@contextmanager
def one_core() -> Iterator[None]:
    """Nothing is spread over more cores than one, neither ours nor NumPy's."""
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {max(before)})
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)
