"""Table of the seconds that each room of tests took: printed at the end of a run and kept in build/test-times.json."""

from __future__ import annotations

import contextlib
import json
import time
from collections import Counter, defaultdict
from pathlib import Path

import pytest

KEPT = Path(__file__).resolve().parents[1] / "build" / "test-times.json"
SLOWEST = 20


class RoomTimes:
    """Counts every phase of every test where its report arrives: in the one process, or in the one that leads xdist's
    workers."""

    def __init__(self, kept: Path = KEPT) -> None:
        self._kept = kept
        self._began = time.monotonic()
        self._seconds: dict[str, float] = defaultdict(float)
        self._setup: dict[str, float] = defaultdict(float)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self._seconds[report.nodeid] += report.duration
        if report.when != "call":
            self._setup[room_of(report.nodeid)] += report.duration

    def rooms(self) -> list[dict[str, str | float]]:
        """A row for each room, the longest first."""
        tests = Counter(room_of(nodeid) for nodeid in self._seconds)
        seconds: dict[str, float] = defaultdict(float)
        for nodeid, duration in self._seconds.items():
            seconds[room_of(nodeid)] += duration
        return [
            {"room": room, "tests": tests[room], "seconds": round(total, 1), "setup_s": round(self._setup[room], 1)}
            for room, total in longest(seconds)
        ]

    @pytest.hookimpl(trylast=True)
    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        rooms = self.rooms()
        wall_s = round(time.monotonic() - self._began, 1)
        if len(rooms) < 2:
            return
        terminalreporter.section("seconds by room (of them setup and teardown)")
        for row in rooms:
            terminalreporter.write_line(
                f"{row['room']:<14}{row['tests']:>6} tests {row['seconds']:>8.1f} ({row['setup_s']:.1f})"
            )
        terminalreporter.write_line(f"{'wall clock':<26} {wall_s:>8.1f}")
        slowest = {nodeid: round(duration, 1) for nodeid, duration in longest(self._seconds)[:SLOWEST]}
        text = json.dumps({"wall_s": wall_s, "rooms": rooms, "slowest": slowest}, indent=1)
        # A run as root may have left a file that this user must not write.
        with contextlib.suppress(OSError):
            self._kept.parent.mkdir(exist_ok=True)
            self._kept.write_text(text + "\n")


def room_of(nodeid: str) -> str:
    return nodeid.removeprefix("tests/").partition("/")[0]


def longest(seconds: dict[str, float]) -> list[tuple[str, float]]:
    return sorted(seconds.items(), key=lambda row: -row[1])
