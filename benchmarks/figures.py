"""The figures of a benchmark: medians of several runs, and the document that they are written to.

Pure but for `machine`. The format is the same for all benchmarks: docs/research/benchmarks.md.
"""

from __future__ import annotations

import datetime
import importlib.metadata
import os
import platform
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import psutil

from ebbtide.errors import EbbError


class BenchmarkFailed(EbbError):
    """A benchmark could not measure what it is there for."""


@dataclass(frozen=True)
class Figure:
    """One figure. ``of``: what it is a ratio to, measured in the same run, or under which conditions it was taken."""

    runs: tuple[float, ...]
    unit: str
    of: str

    @classmethod
    def over(cls, runs: Iterable[float], unit: str, of: str) -> Figure:
        """Raises ValueError where there is no run."""
        values = tuple(round(float(run), 6) for run in runs)
        if not values:
            raise ValueError(f"a figure in {unit} has no runs")
        return cls(values, unit, of)

    @property
    def value(self) -> float:
        """The median."""
        return statistics.median(self.runs)

    def as_dict(self) -> dict[str, Any]:
        return {"value": self.value, "unit": self.unit, "of": self.of, "runs": list(self.runs)}


Figures = dict[str, Figure]


def ratios(ours: Sequence[float], theirs: Sequence[float]) -> list[float]:
    """Each run's own ratio: a median of ratios, not a ratio of medians, since runs differ more than what is compared.

    Raises ValueError where they do not belong together.
    """
    return [mine / other for mine, other in zip(ours, theirs, strict=True)]


def medians(rows: Iterable[Mapping[str, float]]) -> dict[str, float]:
    """The median of each key over all rows; a row without a key counts as 0 there."""
    rows = list(rows)
    names = {name: None for row in rows for name in row}
    return {name: statistics.median(row.get(name, 0.0) for row in rows) for name in names}


def document(
    name: str, figures: Mapping[str, Figure], origin: Mapping[str, Any], beside: Mapping[str, Any]
) -> dict[str, Any]:
    """What NAME.json holds. ``beside``: what else ran on the machine."""
    return {
        "name": name,
        **origin,
        "beside": dict(beside),
        "figures": {key: figure.as_dict() for key, figure in figures.items()},
    }


def origin_now() -> dict[str, Any]:
    """On what, when and by which version something is measured now."""
    date = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    return {"machine": machine(), "date": date, "version": importlib.metadata.version("ebbtide")}


def machine() -> dict[str, Any]:
    """What the figures were measured on."""
    return {
        "cpu": _cpu_model() or platform.processor() or platform.machine(),
        "cpus": os.cpu_count(),
        "memory_mib": psutil.virtual_memory().total // 2**20,
        "kernel": platform.release(),
        "python": platform.python_version(),
    }


def _cpu_model() -> str:
    """The processor by its own name: platform.processor() is empty on Debian."""
    try:
        with open("/proc/cpuinfo") as file:
            for line in file:
                name, _, value = line.partition(":")
                if name.strip() == "model name":
                    return value.strip()
    except OSError:
        pass
    return ""
