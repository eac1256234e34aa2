"""`simulator`, part two: the same jobs on one wide machine by `ebb sim run` and by AccaSim, first come, first served.

Both read the same SWF log and must find the same mean wait. What counts is the CPU time of the whole command, from the
start of its process to its end, its compiled loop kept from before as for any user after the first run.
"""

from __future__ import annotations

import importlib.util
import json
import math
import resource
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Final

import numpy as np

from benchmarks.figures import BenchmarkFailed, Figure, Figures, ratios
from benchmarks.passes import Pass
from benchmarks.simulating.simulator_run import JOB_CORES
from ebbtide.extras import installing
from ebbtide.simulator.generators.quantiles import SURF_HALF_YEAR

CORES: Final = 240
LOAD: Final = 0.8
SIZES: Final = (10_000, 100_000)
_LIMIT_S: Final = 600.0
_EXPERIMENT: Final = """\
[experiment]
name = "peer"
model = "jobs"
seeds = [1]

[settings]
machines = 1
cpu_cores = {cores}
memory = false
discipline = "strict"
"""


def measure(how: Pass) -> Figures:
    """Empty, and said so, where AccaSim is not installed. Raises BenchmarkFailed."""
    if importlib.util.find_spec("accasim") is None:
        how.report(f"no peer: AccaSim is not installed ({installing('bench')})")
        return {}
    figures: Figures = {}
    with tempfile.TemporaryDirectory() as place:
        for count in SIZES[:1] if how.quick else SIZES:
            figures |= _compared(count, how, Path(place))
    return figures


def _compared(count: int, how: Pass, place: Path) -> Figures:
    ours, theirs, told = [], [], []
    # Whatever is not compiled yet; of another log, since what is known of a log is kept.
    first = place / f"{count}-first.swf"
    first.write_text(swf(count, how.runs))
    _ours(first)
    for number in range(how.runs):
        log = place / f"{count}-{number}.swf"
        log.write_text(swf(count, number))
        peer = log.with_suffix(".accasim")
        peer.mkdir()
        wait_s, seconds = _ours(log)
        command = ["-m", "benchmarks.simulating.peer_run", str(log), str(CORES), str(peer)]
        found, peer_s = _cpu_s([sys.executable, *command])
        said = json.loads(found.splitlines()[-1])
        if not math.isclose(wait_s, said["wait_s"], rel_tol=1e-4, abs_tol=0.01):
            raise BenchmarkFailed(f"the mean wait is {wait_s:.2f} s here and {said['wait_s']:.2f} s by AccaSim")
        ours.append(seconds)
        theirs.append(peer_s)
        told.append(said["seconds"])
        how.report(f"run {number + 1}: {count} jobs: {seconds:.2f} s here, {peer_s:.2f} s by AccaSim")
    what = f"CPU time of the whole command over {count} jobs on one machine of {CORES} cores, load {LOAD:g}"
    return {
        f"command_{count}_s": Figure.over(ours, "s", f"`ebb sim run`: {what}"),
        f"accasim_command_{count}_s": Figure.over(theirs, "s", f"AccaSim: {what}"),
        f"accasim_run_{count}_s": Figure.over(told, "s", "of that the run itself, by its own clock"),
        f"accasim_to_command_{count}": Figure.over(ratios(theirs, ours), "ratio", f"AccaSim to `ebb sim run`: {what}"),
    }


def swf(count: int, seed: int) -> str:
    """A log of jobs as in the other parts, in whole seconds."""
    rng = np.random.default_rng([seed, count])
    runtime_s = np.maximum(np.ceil(SURF_HALF_YEAR.draw(rng, count)), 1).astype(int)
    cores = rng.choice(np.array(JOB_CORES), count).astype(int)
    gap_s = float(np.mean(runtime_s * cores)) / (LOAD * CORES)
    submit_s = np.cumsum(rng.exponential(gap_s, count)).astype(int)
    rows = zip(range(1, count + 1), submit_s, runtime_s, cores, strict=True)
    return "".join(f"{n} {at} 0 {took} {c} -1 -1 {c} {took} -1 1 1 1 1 1 1 -1 -1\n" for n, at, took, c in rows)


def _ours(log: Path) -> tuple[float, float]:
    """Mean wait, s, and CPU seconds."""
    experiment = log.with_suffix(".toml")
    experiment.write_text(_EXPERIMENT.format(cores=CORES))
    command = [sys.executable, "-m", "ebbtide.cli.main", "sim", "run", str(experiment), "--input", f"jobs={log}"]
    text, seconds = _cpu_s([*command, "--results", str(log.with_suffix(".ours")), "-o", "json"])
    return float(json.loads(text)["cases"][0]["metrics"]["wait_mean_s"]["mean"]), seconds


def _cpu_s(command: list[str]) -> tuple[str, float]:
    """What a command printed, and the CPU seconds that it and its children took."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_LIMIT_S, check=True)
    except subprocess.CalledProcessError as error:
        raise BenchmarkFailed(f"{' '.join(command[1:4])} failed: {error.stderr.strip()[-500:]}") from error
    except subprocess.TimeoutExpired as error:
        raise BenchmarkFailed(f"{' '.join(command[1:4])} took longer than {_LIMIT_S:g} s") from error
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return done.stdout, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
