"""Benchmarks: medians of several runs, as ratios to something measured in the same run."""

from __future__ import annotations

import datetime
import importlib.metadata
import json
import os
import platform
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import psutil

from deflation.allocations import Allocation, Priority
from deflation.proportional import split_need
from deflation.resources import ResourceVector

RUNS = 7
VMS = 1000


def policies() -> dict[str, Any]:
    """How long `split_need` takes over 1000 VMs, beside one plain NumPy pass of the same formula."""
    generator = np.random.default_rng(7)
    nominal = np.column_stack([generator.integers(1, 16, VMS), generator.integers(4, 64, VMS) * 256]).astype(float)
    minimum = np.round(nominal * 0.25, 2)
    allocations = [
        Allocation(f"vm-{row}", Priority.DEFLATABLE, size := _vector(nominal[row]), _vector(minimum[row]), size)
        for row in range(VMS)
    ]
    need = 0.3 * (nominal - minimum).sum(axis=0)
    wanted = _vector(need)

    def plain() -> None:
        alpha = 1.0 - need / (nominal - minimum).sum(axis=0)
        nominal - (nominal - minimum) * (1.0 - alpha)

    runs = []
    for _ in range(RUNS):
        ours_s = _median_s(lambda: split_need(allocations, wanted), 5)
        runs.append(ours_s / _median_s(plain, 200))
    figure = {
        "value": statistics.median(runs),
        "unit": "ratio",
        "of": "one NumPy pass of x = (M - m)(1 - alpha) over the same VMs, without grid, floors and names",
        "runs": runs,
    }
    return {f"split_need_{VMS}_vms": figure}


ALL: dict[str, Callable[[], dict[str, Any]]] = {"policies": policies}


def run(name: str) -> dict[str, Any]:
    """Run one benchmark; returns what its file holds. Raises KeyError for an unknown name."""
    return {
        "name": name,
        "machine": {
            "cpu": platform.processor() or platform.machine(),
            "cpus": os.cpu_count(),
            "memory_mib": psutil.virtual_memory().total // 2**20,
            "kernel": platform.release(),
            "python": platform.python_version(),
        },
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "version": importlib.metadata.version("ebbtide"),
        "figures": ALL[name](),
    }


def write(result: dict[str, Any], directory: Path) -> Path:
    """Write NAME.json into the directory, which is made if need be."""
    directory.mkdir(parents=True, exist_ok=True)
    path = directory / f"{result['name']}.json"
    path.write_text(json.dumps(result, indent=2) + "\n")
    return path


def _vector(row: Any) -> ResourceVector:
    return ResourceVector(cpu_cores=float(row[0]), memory_mib=float(row[1]))


def _median_s(function: Callable[[], object], repeats: int) -> float:
    times = []
    for _ in range(repeats):
        begin = time.perf_counter()
        function()
        times.append(time.perf_counter() - begin)
    return statistics.median(times)
