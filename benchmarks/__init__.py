"""Benchmarks: medians of several runs, as ratios to something measured in the same run.

See docs/research/benchmarks.md.
"""

from benchmarks.passes import LEAST_RUNS, Pass
from benchmarks.runner import ALL, run, write

__all__ = ["ALL", "LEAST_RUNS", "Pass", "run", "write"]
