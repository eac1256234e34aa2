"""`top`: what `ebb top` costs a manager and itself with a thousand hosts and 20,000 VMs.

A real manager whose hosts report every two seconds (as in `placement`), and `ebb top` on a terminal of ours that counts
what is written to it. CPU time as the kernel counts it. Without a client and with one in the same run, in turns first.
"""

from __future__ import annotations

import fcntl
import os
import pty
import select
import shutil
import signal
import struct
import subprocess
import sys
import tempfile
import termios
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

import psutil

from benchmarks.figures import BenchmarkFailed, Figure, Figures
from benchmarks.passes import Pass
from benchmarks.placing.placement_hosts import VMS
from benchmarks.placing.placement_manager import (
    CHANGED_THEN,
    EVERY_S,
    RunningAgents,
    RunningManager,
    agents_of,
    manager_on,
)
from benchmarks.placing.placement_store import fill

HOSTS: Final = 1000
WINDOW_S: Final = 20.0
#: All that is there must be shown by then.
FIRST_S: Final = 180.0
#: Columns and lines of a terminal, by what the client shows.
VIEWS: Final[dict[str, tuple[tuple[str, ...], int, int]]] = {"hosts_80": ((), 80, 24), "vms_160": (("--vms",), 160, 48)}


class Shown:
    """`ebb top` on a terminal of ours."""

    def __init__(self, process: subprocess.Popen[bytes], terminal: int, began: float) -> None:
        self._process = process
        self._terminal = terminal
        self.began = began
        self.written = 0
        self._text = b""

    def cpu_s(self) -> float:
        """What the client has used so far."""
        times = psutil.Process(self._process.pid).cpu_times()
        return float(times.user + times.system)

    def memory_mib(self) -> float:
        return float(psutil.Process(self._process.pid).memory_info().rss / 2**20)

    def read(self, seconds: float, until: Callable[[bytes], bool] = lambda text: False) -> None:
        """Take what it writes, for so long or until all of it satisfies."""
        end = time.perf_counter() + seconds
        while (left := end - time.perf_counter()) > 0 and not until(self._text):
            if select.select([self._terminal], [], [], min(left, 0.2))[0]:
                try:
                    chunk = os.read(self._terminal, 65536)
                except OSError:
                    # It has ended, and with it the other side of the terminal.
                    return
                self.written += len(chunk)
                self._text = (self._text + chunk)[-200_000:]

    def first(self, hosts: int) -> float:
        """Wait until all hosts and VMs are counted; returns the seconds since its start."""
        wanted = f"{hosts * VMS} VMs".encode()
        self.read(FIRST_S, lambda text: wanted in text)
        if wanted not in self._text:
            raise BenchmarkFailed(f"not all VMs were shown in {FIRST_S:g} s: {self._text[-300:]!r}")
        return time.perf_counter() - self.began


@contextmanager
def shown(
    manager: RunningManager, token_file: Path, words: tuple[str, ...], width: int, height: int
) -> Iterator[Shown]:
    """The client, which is told to end at the end."""
    ours, its = pty.openpty()
    fcntl.ioctl(its, termios.TIOCSWINSZ, struct.pack("HHHH", height, width, 0, 0))
    argv = [sys.executable, "-m", "ebbtide.cli.main", "top", *words]
    reach = ["--manager", f"http://127.0.0.1:{manager.port}", "--token-file", str(token_file)]
    began = time.perf_counter()
    process = subprocess.Popen(
        [*argv, *reach], stdin=its, stdout=its, stderr=its, env={**os.environ, "TERM": "xterm-256color"}
    )
    os.close(its)
    found = Shown(process, ours, began)
    try:
        yield found
    finally:
        process.send_signal(signal.SIGTERM)
        while process.poll() is None:
            # What it gives the terminal back with.
            found.read(0.1)
        os.close(ours)
        if process.returncode != 0:
            raise BenchmarkFailed(f"the client ended with {process.returncode}: {found._text[-500:]!r}")


def run(how: Pass) -> Figures:
    """Raises BenchmarkFailed."""
    hosts, window_s = (50, 3.0) if how.quick else (HOSTS, WINDOW_S)
    runs: dict[str, list[float]] = {}
    with tempfile.TemporaryDirectory(prefix="ebb-bench-") as path, agents_of(hosts) as agents:
        directory = Path(path)
        how.report(f"filling a store with {hosts} hosts and {hosts * VMS} VMs")
        fill(directory / "full.sqlite", hosts, agents.port)
        for number in range(how.runs):
            database = directory / "top.sqlite"
            shutil.copyfile(directory / "full.sqlite", database)
            with manager_on(directory, database) as manager:
                found = _one(manager, agents, directory / "token", window_s, hosts, number)
            for left in directory.glob("top.sqlite*"):
                left.unlink()
            for key, value in found.items():
                runs.setdefault(key, []).append(value)
            how.report(f"run {number + 1}: " + ", ".join(f"{key} {value:.3g}" for key, value in found.items()))
    where = f"{hosts} hosts of {VMS} VMs that report every {EVERY_S:g} s, {CHANGED_THEN:.0%} of that changed sizes"
    figures: Figures = {}
    for key, values in runs.items():
        unit, of = next(words for part, words in _UNITS.items() if key.endswith(part))
        figures[key] = Figure.over(values, unit, f"{of}; {where}")
    return figures


#: Unit and meaning of each figure, by how its name ends.
_UNITS: Final = {
    "cpu": ("%", "of one core"),
    "first_s": ("s", "from its start until all are shown"),
    "written": ("KiB", "written to the terminal in a step of two seconds"),
    "memory": ("MiB", "resident"),
}


def _one(
    manager: RunningManager, agents: RunningAgents, token_file: Path, window_s: float, hosts: int, number: int
) -> dict[str, float]:
    agents.begin(manager.port, 0.0, 0.0)
    agents.result()
    # A manager takes more CPU the longer it runs, so neither is always first.
    if number % 2:
        found = _watched(manager, agents, token_file, window_s, hosts)
        return found | _alone(manager, agents, window_s)
    found = _alone(manager, agents, window_s)
    return found | _watched(manager, agents, token_file, window_s, hosts)


def _alone(manager: RunningManager, agents: RunningAgents, window_s: float) -> dict[str, float]:
    before_s, began = manager.cpu_s(), time.perf_counter()
    agents.begin(manager.port, window_s, CHANGED_THEN, EVERY_S)
    agents.result()
    return {"manager_alone_cpu": 100 * (manager.cpu_s() - before_s) / (time.perf_counter() - began)}


def _watched(
    manager: RunningManager, agents: RunningAgents, token_file: Path, window_s: float, hosts: int
) -> dict[str, float]:
    found = {}
    for view, (words, width, height) in VIEWS.items():
        # Who looks for the first time finds a manager at work.
        agents.begin(manager.port, window_s, CHANGED_THEN, EVERY_S)
        with shown(manager, token_file, words, width, height) as client:
            found[f"{view}_first_s"] = client.first(hosts)
            agents.result()
            agents.begin(manager.port, window_s, CHANGED_THEN, EVERY_S)
            manager_s, client_s, written, began = manager.cpu_s(), client.cpu_s(), client.written, time.perf_counter()
            client.read(window_s)
            seconds = time.perf_counter() - began
            found[f"{view}_manager_cpu"] = 100 * (manager.cpu_s() - manager_s) / seconds
            found[f"{view}_client_cpu"] = 100 * (client.cpu_s() - client_s) / seconds
            found[f"{view}_written"] = (client.written - written) / 2**10 / (seconds / 2.0)
            found[f"{view}_memory"] = client.memory_mib()
            agents.result()
    return found
