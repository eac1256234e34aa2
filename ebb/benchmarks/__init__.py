"""`ebb bench`: medians of several runs, as ratios to something measured in the same run (docs/benchmarks.md)."""

from ebb.benchmarks.passes import LEAST_RUNS, Pass
from ebb.benchmarks.runner import ALL, run, write

__all__ = ["ALL", "LEAST_RUNS", "Pass", "run", "write"]
