"""Files of experiments for tests."""

from __future__ import annotations

from pathlib import Path

from tests.simulator.experiments.models import LINEAR

SWEEP = f"""
[experiment]
name = "lines"
model = "{LINEAR}"
description = "Two slopes"
policies = ["flat", "steep"]
seeds = 3

[settings]
noise = 0.5

[sweep]
x = {{ from = 1, to = 3, step = 1 }}
inner.step = [0.5, 1.0]

[[plots]]
title = "y over x"
metric = "y"
x = "x"
bounds = ["line"]
marks = [{{ bound = "load", at = 1.25, label = "half full" }}]
"""

#: A module with a model of one's own.
OWN = """
from ebbtide.simulator.experiments.model import Outcome
class Own:
    name = "own"
    def settings(self, given): return dict(given)
    def prepare(self, settings, progress): return None
    def run(self, settings, seed, prepared, progress): return Outcome({"m": float(seed)})
MODEL = Own()
"""


def put(directory: Path, text: str = SWEEP, name: str = "lines.toml") -> Path:
    """The text as a file."""
    path = directory / name
    path.write_text(text, encoding="utf-8")
    return path
