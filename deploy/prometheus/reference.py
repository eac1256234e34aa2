"""Writer of the tables in docs/reference/metrics.md, from what the daemons declare (`make metrics`)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Final

from cluster_manager.api import metric_families as of_manager
from ebbtide.rest.metrics.sheet import COMMON, Metric
from hostagent.api import metric_families as of_agent

PAGE: Final = Path(__file__).parents[2] / "docs" / "reference" / "metrics.md"
MARK: Final = "<!-- from here on: written by `make metrics` -->\n"


def page() -> str:
    """The whole page: its own text, and the tables behind the mark."""
    own, _, _ = PAGE.read_text(encoding="utf-8").partition(MARK)
    parts = [
        own + MARK,
        "## Of a host agent\n",
        _metrics(of_agent.declared()),
        _labels(of_agent.LABELS),
        "## Of the manager\n",
        _metrics(of_manager.declared()),
        _labels(of_manager.LABELS),
        "## Of both\n",
        _metrics(COMMON),
        "With these come `process_cpu_seconds_total`, `process_resident_memory_bytes` and others of the process, by\n"
        "prometheus_client.\n",
    ]
    return "\n".join(parts)


def _metrics(metrics: Iterable[Metric]) -> str:
    rows = (f"| `{metric.name}` | {metric.kind} | {', '.join(metric.labels)} | {metric.help} |" for metric in metrics)
    return "\n".join(["| metric | kind | labels | meaning |", "|---|---|---|---|", *rows, ""])


def _labels(labels: Mapping[str, str]) -> str:
    rows = (f"| `{name}` | {bound} |" for name, bound in labels.items())
    return "\n".join(["| label | values |", "|---|---|", *rows, ""])


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
