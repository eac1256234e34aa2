"""Experiments: a TOML file each; sweeps over all cores or a Dask cluster, results, reports, comparison.

`run` makes a sweep, `load` reads what one has left, `compare` puts runs side by side (docs/experiments.md).
"""

from simulator.experiments.comparison import Comparison, Difference, compare
from simulator.experiments.model import Input, Model, Outcome
from simulator.experiments.results import Results, load
from simulator.experiments.runner import run

__all__ = ["Comparison", "Difference", "Input", "Model", "Outcome", "Results", "compare", "load", "run"]
