"""Experiments: a TOML file each; sweeps over all cores or a Dask cluster, results, reports, comparison.

`run` makes a sweep, `load` reads what one has left, `compare` puts runs side by side (docs/reference/experiments.md).
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from ebbtide.simulator.experiments.comparison import Comparison, Difference, compare
    from ebbtide.simulator.experiments.model import Input, Model, Outcome
    from ebbtide.simulator.experiments.results import Results, load
    from ebbtide.simulator.experiments.runner import run

__all__ = ["Comparison", "Difference", "Input", "Model", "Outcome", "Results", "compare", "load", "run"]

_PLACES: Final = {
    "Comparison": "comparison",
    "Difference": "comparison",
    "compare": "comparison",
    "Input": "model",
    "Model": "model",
    "Outcome": "model",
    "Results": "results",
    "load": "results",
    "run": "runner",
}


def __getattr__(name: str) -> Any:
    """Loaded when it is asked for: worker processes start with what makes runs, and no more."""
    if name not in _PLACES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_PLACES[name]}"), name)
