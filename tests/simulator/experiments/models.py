"""A small model for tests: a line with noise, which can be told to fail, to die, or to take its time."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np

from ebbtide.simulator import compiling
from ebbtide.simulator.errors import InvalidParameter
from ebbtide.simulator.experiments.fields import Given
from ebbtide.simulator.experiments.model import Input, Outcome, Progress
from ebbtide.simulator.experiments.shared import SharedArrays, shared_arrays

LINEAR: Final = "tests.simulator.experiments.models:MODEL"


@dataclass(frozen=True)
class Settings:
    slope: float
    x: float
    step: float
    noise: float
    fails_at: float
    dies_at: float
    waits_s: float
    #: Says that it compiles something of this name.
    compiles: str
    #: Says nothing of how far it is.
    silent: bool
    #: A directory that gets a file for each run made.
    log: str
    input: Input | None


class Linear:
    """y = slope * x + noise."""

    name = LINEAR

    def settings(self, given: Mapping[str, Any]) -> Settings:
        fields = Given(given)
        policy = fields.choice("policy", ["flat", "steep"], "flat")
        inputs = fields.table("inputs", {})
        inner = Given(fields.table("inner", {}), "inner.")
        settings = Settings(
            slope=fields.number("slope", 2.0 if policy == "steep" else 1.0),
            x=fields.number("x", 1.0, least=0),
            step=inner.number("step", 0.0),
            noise=fields.number("noise", 0.1, least=0),
            fails_at=fields.number("fails_at", -1.0),
            dies_at=fields.number("dies_at", -1.0),
            compiles=fields.text("compiles", ""),
            waits_s=fields.number("waits_s", 0.0, least=0),
            silent=fields.flag("silent", False),
            log=fields.text("log", ""),
            input=inputs.get("data"),
        )
        inner.end()
        fields.end()
        return settings

    def bounds(self, settings: Settings) -> dict[str, float]:
        return {"line": settings.slope * settings.x, "load": settings.x / 2}

    def prepare(self, settings: Sequence[Settings], progress: Progress) -> SharedArrays:
        progress(1.0)
        return shared_arrays("linear", lambda: {"offset": np.array([10.0])})

    def run(self, settings: Settings, seed: int, prepared: Any, progress: Progress) -> Outcome:
        if settings.log:
            # A name of its own each time: a run that is made twice leaves two.
            (Path(settings.log) / f"{settings.x:g}-{seed}-{os.getpid()}-{time.monotonic_ns()}").touch()
        if settings.compiles:
            for listener in compiling.LISTENERS:
                listener(settings.compiles)
                listener("")
        if settings.x == settings.fails_at:
            raise InvalidParameter("x", "fails\nhere <&>")
        if settings.x == settings.dies_at:
            os.kill(os.getpid(), signal.SIGKILL)
        until_s = time.monotonic() + settings.waits_s
        while (left_s := until_s - time.monotonic()) > 0:
            time.sleep(min(left_s, 0.02))
            if not settings.silent:
                progress(1 - left_s / settings.waits_s)
        rng = np.random.default_rng(seed)
        y = settings.slope * settings.x + settings.step + settings.noise * rng.standard_normal()
        steps = np.arange(3)
        return Outcome(
            {"y": y, "offset": float(prepared["offset"][0]), "nothing": float("nan")},
            {
                "path": {"at": steps, "y": steps * y, "word": np.array(["a", "b", "c"], dtype=object)},
                # Columns that only some runs have, and one with the name of an axis.
                "part": {
                    "x": steps + 0.5,
                    **({"late": steps, "said": np.array(["a", "b", "c"])} if settings.x > 2 else {}),
                },
            },
        )


MODEL: Final = Linear()
