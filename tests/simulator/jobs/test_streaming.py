"""Ten times as many jobs take no more memory, and inputs that cannot be are refused with their field."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import numpy as np
import pytest

from ebbtide.simulator.errors import InvalidParameter
from ebbtide.simulator.jobs.engine import Engine, Machines
from ebbtide.simulator.jobs.settings import Settings
from tests.simulator.jobs import scenes
from tests.simulator.jobs.scenes import job


def peaks(jobs: int) -> dict[str, Any]:
    command = [sys.executable, "-m", "benchmarks.simulating.simulator_run", "simulate", str(jobs), "225", "1"]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=250)
    found: dict[str, Any] = json.loads(done.stdout)
    assert found["jobs"] == jobs
    return found


def test_memory_is_bounded_by_what_is_alive_and_not_by_the_trace() -> None:
    short, long = peaks(200_000), peaks(2_000_000)
    # The jobs alone would be 90 MiB: submission, runtime, cores.
    assert long["peak_mib"] - short["peak_mib"] < 30


@pytest.mark.parametrize(
    ("jobs", "problem"),
    [
        ([job(5, 1, 1), job(4, 1, 1)], "submit_s must be finite and in order"),
        ([job(5, 1, 1), job(6, 1, 1), job(7, 1, 1), job(4, 1, 1)], "submit_s must be in order, but 4 comes after 7"),
        ([job(np.nan, 1, 1)], "submit_s must be finite"),
        ([job(0, 1, -1.0)], "task_runtime_s must be a number from 0 to below 1.1e\\+12, but is -1"),
        ([job(0, 1, np.nan)], "task_runtime_s must be a number from 0 to below 1.1e\\+12, but is nan"),
        ([job(0, 0, 1)], "cpu_cores must be above 0"),
        ([job(0, np.inf, 1)], "cpu_cores must be a number from 0 to below 1.1e\\+12, but is inf"),
        ([job(0, 1, 1, memory_mib=-5)], "memory_mib must be a number from 0 to below 1.1e\\+12, but is -5"),
    ],
)
def test_jobs_that_cannot_be_are_refused(jobs: list[scenes.Job], problem: str) -> None:
    with pytest.raises(InvalidParameter, match=problem):
        scenes.run(jobs, Machines(1, 4))


@pytest.mark.parametrize(
    ("moves", "problem"),
    [
        ([(5.0, "a", 1.0), (4.0, "a", 2.0)], "at_s must be finite and in order"),
        ([(5.0, "a", -1.0)], "cpu_cores must be a number from 0 to below 1.1e\\+12, but is -1"),
        ([(5.0, "a", np.nan)], "cpu_cores must be a number from 0 to below 1.1e\\+12, but is nan"),
    ],
)
def test_changes_that_cannot_be_are_refused(moves: list[tuple[float, str, float]], problem: str) -> None:
    with pytest.raises(InvalidParameter, match=problem):
        scenes.run([job(0, 1, 1)], None, moves)


@pytest.mark.parametrize(
    ("settings", "problem"),
    [
        ({"discipline": "fifo"}, "discipline must be one of strict, conserving, easy, not 'fifo'"),
        ({"kills": "all"}, "kills must be one of oldest, newest"),
        ({"depth": -1}, "depth must be finite and not negative"),
        ({"from_s": 5.0, "to_s": 5.0}, "from_s must be before to_s"),
    ],
)
def test_settings_that_cannot_be_are_refused(settings: dict[str, Any], problem: str) -> None:
    with pytest.raises(InvalidParameter, match=problem):
        Settings(**settings)


def test_a_run_needs_machines_and_a_policy_that_there_is() -> None:
    with pytest.raises(InvalidParameter, match="machines are missing"):
        Engine([])
    with pytest.raises(InvalidParameter, match=r"policy must be one of best-fit, .*, not 'worst'"):
        Engine([], Machines(1, 1), policy="worst")
    with pytest.raises(InvalidParameter, match="cpu_cores must be at least 1"):
        Machines(1, 0)


def test_a_run_can_be_watched_and_looked_at_in_between() -> None:
    seen: list[float] = []
    engine = Engine(scenes.batches([job(t, 1, 5) for t in range(10)]), Machines(1, 1), compile=False)
    assert not engine.advance(20.0, seen.append)
    # One job after another, 5 s each: by 20 s four are done.
    assert engine.results().jobs_done == 4
    assert engine.now_s == 20
    assert engine.run(seen.append).jobs_done == 10
    assert seen == sorted(seen)
    assert len(seen) > 2
