"""Runs benchmarks by name and writes what they found."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks.caches import memcached
from benchmarks.deflating import burst, cascade, cold, cpu, idle, latency, levels, steady, throughput, together
from benchmarks.engines import jvm, spark
from benchmarks.figures import Figures, document, origin_now
from benchmarks.host.alone import BEARS, alone
from benchmarks.host.bench_host import terminable
from benchmarks.host.beside import watching
from benchmarks.matching import matcher, tasks, tasks_twin
from benchmarks.passes import LEAST_RUNS, Pass
from benchmarks.placing import placement, policies
from benchmarks.simulating import simulator
from benchmarks.watching import history, history_cost, metrics, page, top

#: In the order in which all are run.
ALL: Mapping[str, Callable[[Pass], Figures]] = {
    "policies": policies.run,
    "placement": placement.run,
    "decisions": placement.decisions,
    "matcher": matcher.run,
    "simulator": simulator.run,
    "cascade": cascade.run,
    "cpu": cpu.run,
    "burst": burst.run,
    "throughput": throughput.run,
    "together": together.run,
    "latency": latency.run,
    "levels": levels.run,
    "cold": cold.run,
    "idle": idle.run,
    "steady": steady.run,
    "metrics-manager": metrics.manager,
    "metrics-agent": metrics.agent,
    "top": top.run,
    "history-cost": history_cost.run,
    "page": page.run,
    "history": history.run,
    "memcached": memcached.run,
    "jvm": jvm.run,
    "spark": spark.run,
    "tasks": tasks.run,
    "tasks-simulated": tasks_twin.run,
}

#: Benchmarks that are read more easily as a table: what NAME.csv holds.
TABLES: Mapping[str, Callable[[Mapping[str, Any]], str]] = {"spark": spark.table}

#: Benchmarks that keep each run of theirs: where and when those that NAME.json is made of were measured.
KEPT: Mapping[str, Callable[[Pass], Mapping[str, Any]]] = {"spark": spark.origin}


def run(name: str, how: Pass | None = None) -> dict[str, Any]:
    """Run one benchmark; returns what its file holds. Raises KeyError for an unknown name."""
    how = still_reporting(how or Pass())
    work = ALL[name]
    with terminable(), alone(how.report) as mine, watching(f"{BEARS}={mine}") as beside:
        figures = work(how)
    made = document(name, figures, KEPT[name](how) if name in KEPT else origin_now(), beside)
    # Runs that are kept are measured one at a time.
    few = how.runs < LEAST_RUNS and name not in KEPT
    return {**made, "quick": True} if how.quick or few else made


def still_reporting(how: Pass) -> Pass:
    """The same, whose reports go nowhere once the terminal is gone: what is put back at the end must not fail of it."""

    def report(sentence: str) -> None:
        with contextlib.suppress(OSError):
            how.report(sentence)

    return replace(how, report=report)


def write(result: dict[str, Any], directory: Path) -> Path:
    """Write NAME.json, and NAME.csv where it is a table, into the directory, which is made if need be."""
    directory.mkdir(parents=True, exist_ok=True)
    path = directory / f"{result['name']}.json"
    path.write_text(json.dumps(result, indent=2) + "\n")
    if result["name"] in TABLES:
        path.with_suffix(".csv").write_text(TABLES[result["name"]](result))
    return path
