"""Names of metrics in expressions, held against those that the daemons declare and the rules record."""

from __future__ import annotations

import re
from pathlib import Path

from cluster_manager.api import metric_families as of_manager
from ebbtide.rest.metrics.sheet import COMMON, Metric
from hostagent.api import metric_families as of_agent

RULES = Path(__file__).resolve().parents[2] / "deploy" / "prometheus" / "ebbtide.rules.yml"


def declared() -> list[Metric]:
    """All metrics of both daemons."""
    return [*COMMON, *of_agent.declared(), *of_manager.declared()]


def unknown_names(text: str) -> set[str]:
    """What looks like a metric of ours, or a series that is recorded, and is none."""
    known = {metric.name for metric in declared() if metric.kind != "histogram"}
    for metric in declared():
        if metric.kind == "histogram":
            known |= {f"{metric.name}_{part}" for part in ("bucket", "sum", "count")}
    known |= set(re.findall(r"record: (\S+)", RULES.read_text()))
    return set(re.findall(r"[a-z:]*\bebbtide[_:]\w+(?::\w+)*", text)) - known
