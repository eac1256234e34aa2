"""What a sheet of metrics says, in a form that a test can write down."""

from __future__ import annotations

from collections.abc import Iterable

from ebbtide.rest.metrics.sheet import MIB, Metric, Sheet

UNITS = ("cpu_cores", "memory_bytes", "disk_bytes_per_second", "network_bytes_per_second")


def said_by(sheet: Sheet) -> dict[str, float]:
    """All that is not 0, as "name label label"; bytes in MiB. Distributions are left out."""
    return {
        " ".join((name.removeprefix("ebbtide_").removesuffix("_total"), *labels)): value / MIB
        if "_bytes" in name
        else value
        for name, rows in sheet.values().items()
        for labels, value in rows.items()
        if value
    }


def amount(name: str, labels: str, *values: float) -> dict[str, float]:
    """A vector, as `said_by` has it."""
    return {f"{name}_{unit} {labels}".strip(): value for unit, value in zip(UNITS, values, strict=True)}


def unsaid(declared: Iterable[Metric], said: Iterable[str]) -> set[str]:
    """Metrics, but distributions, of which nothing is said."""
    names = {
        metric.name.removeprefix("ebbtide_").removesuffix("_total") for metric in declared if metric.kind != "histogram"
    }
    return names - {row.partition(" ")[0] for row in said}
