"""`policies`: how long the proportional split takes, beside one plain NumPy pass of the same formula."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from benchmarks.figures import Figure, Figures
from benchmarks.passes import Pass
from ebbtide.deflation.allocations import Allocation, Priority
from ebbtide.deflation.resources import ResourceVector
from ebbtide.deflation.sharing.proportional import split_need

VMS = 1000


def run(how: Pass) -> Figures:
    """`split_need` over 1000 VMs."""
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
    for _ in range(how.runs):
        ours_s = _median_s(lambda: split_need(allocations, wanted), 5)
        runs.append(ours_s / _median_s(plain, 200))
    of = "one NumPy pass of x = (M - m)(1 - alpha) over the same VMs, without grid, floors and names"
    return {f"split_need_{VMS}_vms": Figure.over(runs, "ratio", of)}


def _vector(row: Any) -> ResourceVector:
    return ResourceVector(cpu_cores=float(row[0]), memory_mib=float(row[1]))


def _median_s(function: Callable[[], object], repeats: int) -> float:
    times = []
    for _ in range(repeats):
        begin = time.perf_counter()
        function()
        times.append(time.perf_counter() - begin)
    return statistics.median(times)
