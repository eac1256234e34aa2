"""`cascade`: what the agent adds to a deflation, how VMs are deflated side by side, and how fast memory comes."""

from __future__ import annotations

from deflation.resources import ResourceVector
from ebb.benchmarks import overhead, side_by_side, speed
from ebb.benchmarks.bed import bed, run_async
from ebb.benchmarks.figures import Figures
from ebb.benchmarks.passes import Pass

CAPACITY = ResourceVector(cpu_cores=4, memory_mib=4096)


def run(how: Pass) -> Figures:
    """Raises BenchmarkFailed, EbbError or LabError."""
    with bed(CAPACITY, how.report) as ground:
        figures = run_async(overhead.measure(ground, how))
        figures |= run_async(speed.measure(ground, how))
    return figures | side_by_side.measure(how, figures["calls_per_deflation"].value)
