"""`cascade`: where the time of a deflation goes, how VMs are deflated beside others, and how fast memory comes."""

from __future__ import annotations

from benchmarks.deflating import neighbours, overhead, side_by_side, speed
from benchmarks.figures import Figures
from benchmarks.host.bench_host import bench, run_async
from benchmarks.passes import Pass
from ebbtide.deflation.resources import ResourceVector

CAPACITY = ResourceVector(cpu_cores=6, memory_mib=4096)


def run(how: Pass) -> Figures:
    """Raises BenchmarkFailed, EbbError or LabError."""
    with bench(CAPACITY, how.report) as ground:
        figures = run_async(overhead.measure(ground, how))
        figures |= run_async(neighbours.measure(ground, how))
        figures |= run_async(speed.measure(ground, how))
    return figures | side_by_side.measure(how, figures["calls_per_deflation"].value)
