"""The table of seconds by room."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.room_times import RoomTimes


def report(nodeid: str, when: str, duration: float) -> pytest.TestReport:
    return pytest.TestReport(nodeid, ("", 0, ""), {}, "passed", None, when, duration=duration)  # type: ignore[arg-type]


def test_every_phase_counts_and_the_longest_room_stands_first(tmp_path: Path) -> None:
    times = RoomTimes(tmp_path / "times.json")
    times.pytest_runtest_logreport(report("tests/rest/test_a.py::one", "call", 1.0))
    times.pytest_runtest_logreport(report("tests/cli/test_b.py::two", "setup", 2.5))
    times.pytest_runtest_logreport(report("tests/cli/test_b.py::two", "call", 0.5))
    assert times.rooms() == [
        {"room": "cli", "tests": 1, "seconds": 3.0, "setup_s": 2.5},
        {"room": "rest", "tests": 1, "seconds": 1.0, "setup_s": 0.0},
    ]
