"""One run made, with what became of it, and its file: whole or not there."""

from __future__ import annotations

import importlib
import io
import json
import time
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from ebbtide.files import replacing
from ebbtide.simulator import archives
from ebbtide.simulator.errors import ExperimentError, SimulatorError
from ebbtide.simulator.experiments import code
from ebbtide.simulator.experiments.model import Model, Outcome, Progress, checked, model_named

#: The form of the files; another is run again.
_VERSION: Final = 1
_HEAD: Final = "head"


@dataclass(frozen=True, slots=True)
class Finished:
    """What became of a run.

    :param error: why it failed, one sentence; empty where it did not.
    :param trace: where it failed, for the author of the model.
    """

    outcome: Outcome = field(default_factory=lambda: Outcome({}))
    run_s: float = 0.0
    error: str = ""
    trace: str = ""


def failed(error: BaseException) -> Finished:
    """A run that ended with this."""
    sentence = str(error) or type(error).__name__
    if not isinstance(error, SimulatorError):
        sentence = f"{type(error).__name__}: {sentence}"
    return Finished(error=" ".join(sentence.split()), trace="".join(traceback.format_exception(error)))


def execute(model: Model[Any], given: Mapping[str, Any], seed: int, prepared: Any, progress: Progress) -> Finished:
    """Make one run; what it raises is its outcome."""
    begin_s = time.perf_counter()
    try:
        settings = model.settings(given)
        outcome = checked(model.run(settings, seed, prepared, progress))
    except Exception as error:
        # Whatever it is, it must not end the other runs.
        return failed(error)
    return Finished(outcome, time.perf_counter() - begin_s)


def code_of(model: str, modules: Sequence[str]) -> list[str]:
    """What makes a model's outcomes in this process (`code.fingerprints`). Raises what that and `model_named` raise."""
    found = model_named(model)
    for module in modules:
        # What elsewhere is imported by now may here not be yet.
        importlib.import_module(module)
    return code.fingerprints(found, modules)


def save(path: Path, finished: Finished) -> None:
    """Write a run's file.

    :raises ExperimentError: it cannot be written.
    """
    arrays: dict[str, NDArray[Any]] = {}
    tables: dict[str, list[str]] = {}
    for table, columns in finished.outcome.tables.items():
        tables[table] = list(columns)
        for number, values in enumerate(columns.values()):
            arrays[f"{len(tables)}.{number}"] = values
    head = {
        "version": _VERSION,
        "metrics": dict(finished.outcome.metrics),
        "run_s": finished.run_s,
        "tables": tables,
        "warnings": list(finished.outcome.warnings),
    }
    buffer = io.BytesIO()
    np.savez_compressed(buffer, **{_HEAD: np.array(json.dumps(head))}, **arrays)  # type: ignore[arg-type]
    write_whole(path, buffer.getvalue())


def load(path: Path) -> Finished | None:
    """What a run's file says; None where there is none that is whole."""
    try:
        arrays = archives.read(path)
        head = json.loads(str(arrays[_HEAD]))
        if head["version"] != _VERSION:
            return None
        tables = {
            table: {name: arrays[f"{place}.{number}"] for number, name in enumerate(names)}
            for place, (table, names) in enumerate(head["tables"].items(), 1)
        }
    except (OSError, KeyError, TypeError, ValueError):
        return None
    return Finished(Outcome(head["metrics"], tables, tuple(head.get("warnings", ()))), head["run_s"])


def write_whole(path: Path, content: bytes) -> None:
    """Write a file so that a reader finds all of it or what was there before.

    :raises ExperimentError: it cannot be written.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with replacing(path, 0o666) as file:
            file.write(content)
    except OSError as error:
        raise ExperimentError("output", f"{path} cannot be written: {error.strerror}") from error
