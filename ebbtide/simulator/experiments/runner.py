"""A sweep from its file to its report: what is there already is kept, the rest is run, all is written."""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import platform
import re
import sys
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final

import psutil

from ebbtide.simulator.errors import ExperimentError, Interrupted, InvalidParameter
from ebbtide.simulator.experiments import code, document, plotting
from ebbtide.simulator.experiments import results as columns
from ebbtide.simulator.experiments.experiment import Case, Experiment, Run, runs
from ebbtide.simulator.experiments.finished import Finished, execute, load, save, write_whole
from ebbtide.simulator.experiments.model import INPUTS, Input, Model, bounds_of, left_out, model_named
from ebbtide.simulator.experiments.processes import Event, Workers, cores
from ebbtide.simulator.experiments.progress import Listener, Status
from ebbtide.simulator.experiments.results import Results
from ebbtide.simulator.experiments.shared import Files, fingerprint

RUNS: Final = "runs"
REPORT: Final = "report.html"
_LOCK: Final = ".lock"
#: What sweeps keep under `RUNS`, also what one that was killed has half written (version 0.1: .part).
_OF_RUNS: Final = re.compile(r"\.?[0-9a-f]{32}\.(npz|counts\.json)(\.[0-9a-f]+(\.part)?)?")
#: Failures whose traces stand in meta.json.
_MOST_FAILURES: Final = 100


@dataclass(slots=True)
class _Sweep:
    """What is known of the runs so far."""

    runs: Sequence[Run]
    found: dict[int, Finished]
    reused: int
    begin_s: float = 0.0
    made: int = 0
    failed: int = 0

    def status(self, stage: str, under_way: float = 0.0) -> Status:
        elapsed_s = time.monotonic() - self.begin_s if self.begin_s else 0.0
        return Status(stage, len(self.runs), self.reused, self.made, self.failed, under_way, elapsed_s)


def run(
    file: str | Path,
    *,
    output: str | Path | None = None,
    overrides: Mapping[str, Any] | None = None,
    inputs: Mapping[str, str | Path] | None = None,
    workers: int | None = None,
    dask: str | None = None,
    fresh: bool = False,
    command: str | None = None,
    listener: Listener | None = None,
) -> Results:
    """Run an experiment and write its results.

    Runs that the output directory has already are kept: an interrupted sweep goes on, a changed one runs what has
    changed. A run that fails is recorded under ``error`` and costs no other.

    :param output: the directory; default: results/NAME.
    :param overrides: values instead of the file's, by key (`document.read`).
    :param inputs: paths of inputs by name.
    :param workers: processes; default: one a core; 0: in this process, where a debugger sees it.
    :param dask: address of a Dask scheduler, to run there instead.
    :param fresh: keep nothing of what the directory has.
    :param command: what stands in the report as the way to get the same; default: this call.
    :raises ExperimentError: the file, a setting, an input or the directory cannot be.
    :raises Interrupted: Ctrl-C; what was done is kept.
    """
    path = Path(file)
    say = listener or (lambda status: None)
    experiment = document.read(path, overrides, inputs)
    directory = Path("results") / experiment.name if output is None else Path(output)
    if command is None:
        command = _call(file, output, overrides, inputs)
    try:
        with _alone(directory):
            return _run(experiment, path, directory, workers, dask, fresh, command, say)
    except KeyboardInterrupt:
        raise Interrupted(
            f"interrupted; what was done is kept in {directory}, and the same command goes on from there"
        ) from None


def _run(
    experiment: Experiment,
    path: Path,
    directory: Path,
    workers: int | None,
    dask: str | None,
    fresh: bool,
    command: str,
    say: Listener,
) -> Results:
    started = datetime.now(UTC)
    columns.require_pyarrow()
    try:
        model = model_named(experiment.model)
        cases = experiment.cases()
        bounds = _checked(experiment, model, cases)
    except InvalidParameter as error:
        raise ExperimentError(error.field, error.problem, file=str(path)) from error
    say(Status("reading inputs"))
    files = Files({name: one.path for name, one in experiment.inputs.items()})
    prints = {name: fingerprint(one.path) for name, one in experiment.inputs.items()}
    all_runs = runs(experiment, cases, prints, code.model_fingerprint(model, experiment.model))
    if fresh:
        _forget_runs(directory / RUNS)
    found = {number: one for number, run in enumerate(all_runs) if (one := load(_file(directory, run))) is not None}
    sweep = _Sweep(all_runs, found, len(found))
    for one in found.values():
        _fits(experiment, one.outcome.metrics)
    _make(experiment, model, sweep, files, directory, workers, dask, say)
    say(sweep.status("writing"))
    finished = [sweep.found[number] for number in range(len(all_runs))]
    # Runs come case by case.
    of_runs = [one for one in bounds for _ in experiment.seeds]
    values, tables, metrics = columns.collected(
        all_runs, finished, experiment.axis_values(), experiment.metrics, of_runs
    )
    counts = {name: _counts(directory, one, prints[name]) for name, one in experiment.inputs.items()}
    meta = {
        "file": str(path),
        "command": command,
        "started": started.isoformat(timespec="seconds"),
        "ended": datetime.now(UTC).isoformat(timespec="seconds"),
        "dask": dask,
        "workers": None if dask else _count(workers),
        "inputs": {
            name: {"path": str(one.path), "bytes": files.size(name), "sha256": prints[name]}
            | {word: getattr(one, word) for word in columns.READING}
            | {"counts": counts[name]}
            for name, one in experiment.inputs.items()
        },
        **_facts(experiment, sweep, metrics, counts),
    }
    results = Results(values, meta, directory, tables)
    # With what draws, which nothing before the results needs.
    from ebbtide.simulator.experiments import report

    # An old report beside new results would be worse than none.
    (directory / REPORT).unlink(missing_ok=True)
    columns.save(directory, results, tables)
    report.write(directory / REPORT, results, plotting.plots_of(experiment, metrics))
    say(sweep.status("done"))
    return results


def _facts(
    experiment: Experiment, sweep: _Sweep, metrics: Sequence[str], counts: Mapping[str, Mapping[str, Any] | None]
) -> dict[str, Any]:
    """What a report says of an experiment, of the code and of how its runs ended.

    :param counts: by input, what reading it counted.
    """
    ended = [(run, sweep.found[number]) for number, run in enumerate(sweep.runs)]
    failures = [{"run": str(run), "error": one.error, "trace": one.trace} for run, one in ended if one.error]
    return {
        "name": experiment.name,
        "model": experiment.model,
        "description": experiment.description,
        "version": code.version(),
        "commit": code.commit(),
        "code": code.code_fingerprint(),
        "axes": list(experiment.axis_names),
        "metrics": metrics,
        "seeds": list(experiment.seeds),
        "settings": dict(experiment.settings),
        "policies": {policy.name: dict(policy.settings) for policy in experiment.policies},
        "runs": {"total": len(ended), "kept": sweep.reused, "made": sweep.made, "failed": sweep.failed},
        "failures": failures[:_MOST_FAILURES],
        "warnings": [
            *experiment.notes,
            *(said for name, one in counts.items() if one is not None for said in left_out(name, one)),
            *_warnings(ended),
        ],
        "host": host_facts(),
    }


def _counts(directory: Path, given: Input, content: str) -> dict[str, Any] | None:
    """What reading an input counted, kept beside the runs: where they are kept nobody reads it again."""
    key = hashlib.sha256(json.dumps([code.code_fingerprint(), content, given.terms]).encode()).hexdigest()[:32]
    path = directory / RUNS / f"{key}.counts.json"
    counts = given.counts(content)
    if counts is not None:
        write_whole(path, json.dumps(counts).encode())
        return counts
    try:
        kept: dict[str, Any] = json.loads(path.read_bytes())
    except (OSError, ValueError):
        return None
    return kept


def _warnings(ended: Sequence[tuple[Run, Finished]]) -> list[str]:
    """What runs warn of: each sentence once, with the first run that said it and how many did."""
    said: dict[str, list[Run]] = {}
    for run, one in ended:
        for sentence in one.outcome.warnings:
            said.setdefault(sentence, []).append(run)
    return [
        f"{sentence} ({runs[0]}{f'; {len(runs)} runs' if len(runs) > 1 else ''})"
        for sentence, runs in list(said.items())[:_MOST_FAILURES]
    ]


def _make(
    experiment: Experiment,
    model: Model[Any],
    sweep: _Sweep,
    files: Files,
    directory: Path,
    workers: int | None,
    dask: str | None,
    say: Listener,
) -> None:
    """Make the runs that are missing, and keep each as it finishes."""
    missing = [number for number in range(len(sweep.runs)) if number not in sweep.found]
    if not missing:
        return
    todo = [sweep.runs[number] for number in missing]
    say(sweep.status("preparing"))
    settings = [model.settings(case.given) for case in {id(run.case): run.case for run in todo}.values()]
    try:
        prepared = model.prepare(settings, lambda share: say(sweep.status(f"preparing, {share:.0%}")))
    except InvalidParameter as error:
        raise ExperimentError(_key(error), error.problem) from error
    sweep.begin_s = time.monotonic()
    files.check()
    say(sweep.status("running"))
    with _events(experiment.model, model, prepared, todo, workers, dask) as events:
        for event in events:
            if event.number is not None and event.finished is not None:
                # What was made of other content must not be kept under this one's name.
                files.check()
                number = missing[event.number]
                sweep.found[number] = event.finished
                sweep.made += 1
                if event.finished.error:
                    sweep.failed += 1
                else:
                    _fits(experiment, event.finished.outcome.metrics)
                    save(_file(directory, sweep.runs[number]), event.finished)
            stage = f"compiling the loop of {event.compiling} (kept for this code)" if event.compiling else "running"
            say(sweep.status(stage, sum(event.under_way.values())))


@contextmanager
def _events(
    name: str, model: Model[Any], prepared: Any, todo: Sequence[Run], workers: int | None, dask: str | None
) -> Iterator[Iterator[Event]]:
    if dask is not None:
        from ebbtide.simulator.experiments import dask_cluster

        events = dask_cluster.events(dask, name, prepared, todo)
        try:
            yield events
        finally:
            events.close()  # type: ignore[attr-defined]
    elif _count(workers) == 0:
        yield _here(model, prepared, todo)
    else:
        with Workers(name, prepared, _count(workers)) as pool:
            yield pool.events(todo)


def _here(model: Model[Any], prepared: Any, todo: Sequence[Run]) -> Iterator[Event]:
    for number, one in enumerate(todo):
        yield Event(number, execute(model, one.case.given, one.seed, prepared, lambda share: None), {})


def _count(workers: int | None) -> int:
    if workers is None:
        return cores()
    if workers < 0:
        raise ExperimentError("workers", f"must not be negative, but is {workers}")
    return workers


def _key(error: InvalidParameter) -> str:
    """Where in the file what a model refuses stands."""
    return error.field if error.field.startswith(INPUTS) else f"settings.{error.field}"


def _checked(experiment: Experiment, model: Model[Any], cases: Sequence[Case]) -> list[dict[str, float]]:
    """Every case before the first run, so that a slip in the last one costs no hour; the bounds of each."""
    found: list[dict[str, float]] = []
    for case in cases:
        try:
            found.append(bounds_of(model, model.settings(case.given)))
        except InvalidParameter as error:
            raise InvalidParameter(_key(error), f"{error.problem} ({case})" if case.axes else error.problem) from error
    if (metrics := getattr(model, "metrics", None)) is not None:
        _fits(experiment, metrics)
    for number, plot in enumerate(experiment.plots, 1):
        for name in (*plot.bounds, *(mark.bound for mark in plot.marks)):
            if not any(name in bounds for bounds in found):
                known = ", ".join(dict.fromkeys(name for bounds in found for name in bounds)) or "none"
                raise InvalidParameter(f"plots[{number}]", f"has no bound {name!r}; the model has {known}")
    return found


def _fits(experiment: Experiment, metrics: Iterable[str]) -> None:
    """What the file wants, the model gives; a model that does not say what it gives shows it by the first run."""
    metrics = list(metrics)
    clash = columns.clash(experiment.axis_names, metrics)
    if clash is not None:
        raise ExperimentError(clash, "is a metric of the model, and so no name for an axis")
    wanted = [("experiment.metrics", experiment.metrics)]
    wanted += [(f"plots[{number}].metrics", plot.metrics) for number, plot in enumerate(experiment.plots, 1)]
    for where, names in wanted:
        for name in names:
            if name not in metrics:
                raise ExperimentError(
                    where, f"has {name!r}, which the model does not give; it gives {', '.join(metrics)}"
                )


def _file(directory: Path, one: Run) -> Path:
    return directory / RUNS / f"{one.key}.npz"


@contextmanager
def _alone(directory: Path) -> Iterator[None]:
    """Two sweeps into one directory would write over each other's results."""
    _refuse_others_directory(directory)
    try:
        directory.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(directory / _LOCK, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o644)
    except OSError as error:
        raise ExperimentError("output", f"{directory} cannot be written: {error.strerror}") from error
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ExperimentError("output", f"{directory} is in use by another sweep") from None
        yield
    finally:
        os.close(descriptor)


def _refuse_others_directory(directory: Path) -> None:
    """Files without a sweep's are not ours: what is called like results would be replaced or removed.

    A sweep that was broken off has left runs, or nothing; one that has ended has what describes its results.
    """
    # Where one cannot be read, writing there says what is wrong.
    names, in_runs = _names_in(directory), _names_in(directory / RUNS)
    others = [name for name in names if name != _LOCK and (name != RUNS or in_runs)]
    if not others or any(map(_OF_RUNS.fullmatch, in_runs)):
        return
    with suppress(ExperimentError):
        columns.read_meta(directory)
        return
    raise ExperimentError(
        "output",
        f"{directory} has no results of a sweep, and is not empty ({others[0]} is there): name an empty directory, or "
        "one that is not there yet",
    )


def _forget_runs(directory: Path) -> None:
    """Remove what sweeps keep there, and nothing else."""
    for name in filter(_OF_RUNS.fullmatch, _names_in(directory)):
        with suppress(OSError):
            (directory / name).unlink()


def _names_in(directory: Path) -> list[str]:
    """Sorted; none where it is not there, or cannot be read."""
    try:
        return sorted(os.listdir(directory))
    except OSError:
        return []


def _call(
    file: str | Path,
    output: str | Path | None,
    overrides: Mapping[str, Any] | None,
    inputs: Mapping[str, str | Path] | None,
) -> str:
    words = [repr(str(file))]
    words += [] if output is None else [f"output={str(output)!r}"]
    words += [f"overrides={dict(overrides)!r}"] if overrides else []
    words += [f"inputs={ ({name: str(path) for name, path in inputs.items()})!r}"] if inputs else []
    return f"ebbtide.simulator.experiments.run({', '.join(words)})"


def host_facts() -> dict[str, Any]:
    """The machine that the runs were made on; without its name."""
    model = platform.processor() or platform.machine()
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
        model = next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), model)
    except OSError:
        pass
    return {
        "system": platform.platform(),
        "processor": model,
        "cores": os.cpu_count(),
        "memory_mib": round(psutil.virtual_memory().total / 2**20),
        "python": sys.version.split()[0],
        **code.libraries(),
    }
