"""`placement`, part two: a real manager process: its start on a large store, and reports over real HTTP.

The agents are another process (`benchmarks.placing.placement_agents`), each of the two on a core of its own where
there are two. While reports come as fast as they are answered, VMs are asked for one after another; the manager's log
says how long each choice of hosts took.

Recovery: the manager is killed with SIGKILL while reports come, and started again on what it left; all its hosts report
as fast as they are answered; a VM that was asked for as soon as the manager answers is placed when they have.
"""

from __future__ import annotations

import json
import os
import re
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Final

import numpy as np
import psutil

from benchmarks.figures import BenchmarkFailed, Figure, Figures
from benchmarks.passes import Pass
from benchmarks.placing.placement_hosts import VMS
from benchmarks.placing.placement_store import fill, upgrade
from ebbtide.lab.state import write_private

HOSTS: Final = 10_000
#: For the rate of reports: what two-second reports of so many hosts come to is beyond one process anyway.
REPORTING: Final = 2000
CONNECTIONS: Final = 128
WINDOW_S: Final = 8.0
STARTS_S: Final = 120.0
#: Between two reports of a host agent (`hostagent.control.reporter`), and how many of them then have other sizes.
EVERY_S: Final = 2.0
CHANGED_THEN: Final = 0.1
#: Share of the reports due in a round without which hosts do not report as often as is said.
ON_TIME: Final = 0.95
#: Shares of reports with other sizes than the host's last one.
SHARES: Final = (0.0, 0.5, 1.0)


def measure_start(how: Pass) -> Figures:
    """A manager's start on a large store. Raises BenchmarkFailed."""
    hosts = 50 if how.quick else HOSTS
    with tempfile.TemporaryDirectory(prefix="ebb-bench-") as directory, agents_of(hosts) as agents:
        how.report(f"filling a store with {hosts} hosts and {hosts * VMS} VMs")
        fill(full := Path(directory) / "full.sqlite", hosts, agents.port)
        # Else the first start, and no recovery, would have the migration in it.
        upgrade(full)
        return _recovery(Path(directory), hosts, agents, how)


def measure_reports(how: Pass) -> Figures:
    """Reports, and placements meanwhile. Raises BenchmarkFailed."""
    hosts, window_s = (50, 0.5) if how.quick else (REPORTING, WINDOW_S)
    with tempfile.TemporaryDirectory(prefix="ebb-bench-") as directory:
        return _reports(Path(directory), hosts, window_s, how)


def _recovery(directory: Path, hosts: int, agents: RunningAgents, how: Pass) -> Figures:
    starts, recoveries, decisions = [], [], []
    for number in range(how.runs):
        database = directory / "recovery.sqlite"
        shutil.copyfile(directory / "full.sqlite", database)
        with manager_on(directory, database) as manager:
            starts.append(manager.started_s)
            agents.begin(manager.port, 2.0, 1.0)
            time.sleep(1.0)
            manager.kill()
            agents.result(lost=True)
        with manager_on(directory, database) as manager:
            recoveries.append(manager.started_s)
            agents.begin(manager.port, 0.0, 0.0)
            manager.place(f"first-{number}")
            decisions.append(time.perf_counter() - manager.began)
            agents.result()
        for left in directory.glob("recovery.sqlite*"):
            left.unlink()
        how.report(
            f"run {number + 1}: start {starts[-1]:.2f} s, after SIGKILL {recoveries[-1]:.2f} s, "
            f"first VM placed after {decisions[-1]:.2f} s"
        )
    store = f"{hosts} hosts, {hosts * VMS} VMs, as many plans, events and core changes in SQLite"
    return {
        "start_s": Figure.over(starts, "s", f"from the process's start to its first answer; {store}"),
        "recovery_s": Figure.over(recoveries, "s", f"the same after SIGKILL amid reports; {store}"),
        "recovery_first_placement_s": Figure.over(
            decisions,
            "s",
            f"from the process's start after SIGKILL to the end of the first placement; all {hosts} hosts report",
        ),
    }


def _reports(directory: Path, hosts: int, window_s: float, how: Pass) -> Figures:
    rates: dict[float, list[float]] = {share: [] for share in SHARES}
    costs: dict[float, list[float]] = {share: [] for share in SHARES}
    ranked: list[list[float]] = []
    placed: list[list[float]] = []
    at_interval: list[list[float]] = []
    with agents_of(hosts) as agents:
        for number in range(how.runs):
            database = directory / f"reports-{number}.sqlite"
            with manager_on(directory, database) as manager:
                agents.begin(manager.port, 0.0, 0.0)
                agents.result()
                agents.begin(manager.port, window_s, CHANGED_THEN, EVERY_S)
                at_interval.append(manager.place_until(time.perf_counter() + window_s - 0.3, f"due-{number}"))
                agents.result()
                for share in SHARES:
                    cpu_s = manager.cpu_s()
                    agents.begin(manager.port, window_s, share)
                    result = agents.result()
                    rates[share].append(result["answered"] / result["seconds"])
                    costs[share].append(1000 * (manager.cpu_s() - cpu_s) / result["answered"])
                # A window of their own: placements take CPU time, which is none of the reports'.
                agents.begin(manager.port, window_s, 0.5)
                before = len(manager.ranked_ms())
                placed.append(manager.place_until(time.perf_counter() + window_s - 0.3, f"vm-{number}"))
                agents.result()
                ranked.append(manager.ranked_ms()[before:])
            found = ", ".join(f"{rates[share][-1]:.0f}/s with {share:.0%} changed" for share in SHARES)
            how.report(f"run {number + 1}: {found}; {len(placed[-1])} VMs placed meanwhile")
    if not all(ranked):
        raise BenchmarkFailed("the manager's log tells of no choice of hosts")
    where = f"{hosts} hosts of {VMS} VMs, {CONNECTIONS} connections, one manager process"
    figures = {
        f"reports_{share * 100:.0f}_changed_per_s": Figure.over(
            rates[share], "1/s", f"{where}; {share:.0%} of the reports with other sizes than before, which are stored"
        )
        for share in SHARES
    }
    figures |= {
        f"report_{share * 100:.0f}_changed_cpu_ms": Figure.over(
            costs[share], "ms", f"the manager's CPU time a report; {where}; {share:.0%} of the reports changed"
        )
        for share in SHARES
    }
    meanwhile = f"{where}; while half of the reports change"
    return figures | {
        "reported_decision_p50_ms": Figure.over([float(np.median(run)) for run in ranked], "ms", meanwhile),
        "reported_decision_p99_ms": Figure.over([float(np.percentile(run, 99)) for run in ranked], "ms", meanwhile),
        "reported_placement_p50_ms": Figure.over(
            [1000 * float(np.median(run)) for run in placed],
            "ms",
            f"from a client's request over HTTP to the placement's end, with the agents' answers; {meanwhile}",
        ),
        "interval_placement_p50_ms": Figure.over(
            [1000 * float(np.median(run)) for run in at_interval],
            "ms",
            f"the same, while each host reports every {EVERY_S:g} s, {CHANGED_THEN:.0%} of that changed; {where}",
        ),
    }


class RunningManager:
    """One ``ebb-manager`` process."""

    def __init__(self, process: subprocess.Popen[bytes], log: Path, token: str, began: float) -> None:
        self._process = process
        self._log = log
        self.token = token
        self.began = began
        self.port = self._listens()
        self.started_s = time.perf_counter() - began

    def _listens(self) -> int:
        while time.perf_counter() - self.began < STARTS_S:
            if found := re.search(rb"listening.*?http://127\.0\.0\.1:(\d+)", self._log.read_bytes()):
                port = int(found[1])
                with urllib.request.urlopen(f"http://127.0.0.1:{port}/healthz", timeout=STARTS_S):
                    return port
            if self._process.poll() is not None:
                raise BenchmarkFailed(f"the manager ended at its start: {self._log.read_text()[-300:]}")
            time.sleep(0.005)
        raise BenchmarkFailed(f"the manager did not start within {STARTS_S:g} s")

    def kill(self) -> None:
        self._process.send_signal(signal.SIGKILL)
        self._process.wait()

    def cpu_s(self) -> float:
        """What the process has used so far; other processes do not lengthen it."""
        times = psutil.Process(self._process.pid).cpu_times()
        return float(times.user + times.system)

    def resident_mib(self) -> float:
        """What the process has in memory."""
        return float(psutil.Process(self._process.pid).memory_info().rss) / 2**20

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def get(self, path: str) -> bytes:
        """What a client gets, unread."""
        request = urllib.request.Request(self.url + path, headers={"Authorization": f"Bearer {self.token}"})
        with urllib.request.urlopen(request, timeout=60) as response:
            return bytes(response.read())

    def place(self, name: str) -> float:
        """Have a VM placed; returns the seconds."""
        began = time.perf_counter()
        vm = {"name": name, "nominal": {"cpu_cores": 4.0, "memory_mib": 8192.0}}
        self._call("POST", "/v1/vms", {"request_id": name, "vm": vm})
        while (state := self._call("GET", f"/v1/operations/{name}?wait_s=30", None))["state"] == "running":
            if time.perf_counter() - began > STARTS_S:
                raise BenchmarkFailed(f"{name} was not placed: {state['sentence']}")
        if state["state"] != "done":
            raise BenchmarkFailed(f"{name} was not placed: {state['sentence']}")
        return time.perf_counter() - began

    def place_until(self, end: float, name: str) -> list[float]:
        """Have VMs placed one after another until then; returns the seconds of each."""
        seconds: list[float] = []
        while time.perf_counter() < end:
            seconds.append(self.place(f"{name}-{len(seconds)}"))
        return seconds

    def ranked_ms(self) -> list[float]:
        """How long each choice of hosts took, as the manager's log says."""
        return [float(found) for found in re.findall(rb"hosts ranked.*?\bms=([\d.e-]+)", self._log.read_bytes())]

    def metrics(self) -> bytes:
        """What a Prometheus gets."""
        return self.get("/metrics")

    def _call(self, method: str, path: str, body: Any) -> dict[str, Any]:
        request = urllib.request.Request(
            f"http://127.0.0.1:{self.port}{path}",
            data=json.dumps(body).encode() if body is not None else None,
            headers={"Authorization": f"Bearer {self.token}", "Content-Type": "application/json"},
            method=method,
        )
        try:
            with urllib.request.urlopen(request, timeout=60) as response:
                found: dict[str, Any] = json.load(response)
                return found
        except (OSError, urllib.error.HTTPError) as error:
            raise BenchmarkFailed(f"{method} {path} failed: {error}") from error


@contextmanager
def manager_on(
    directory: Path, database: Path, code: Path | None = None, options: Sequence[str] = ()
) -> Iterator[RunningManager]:
    """A manager on a database, ended at the end.

    :param code: the checkout that it runs from; default: this one.
    :param options: more words of its command line.
    """
    token = secrets.token_hex(16)
    write_private(directory / "token", token)
    write_private(directory / "hosts.key", _HOSTS_KEY)
    log = directory / "manager.log"
    began = time.perf_counter()
    with log.open("wb") as output:
        process = subprocess.Popen(
            [
                sys.executable, "-m", "cluster_manager.main", "--listen", "127.0.0.1:0", "--database", str(database),
                "--token-file", str(directory / "token"), "--hosts-key-file", str(directory / "hosts.key"),
                # A quiet machine places more than one token may ask for.
                "--requests-per-s", "10000", "--burst", "10000", *options,
            ],
            stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT, cwd=code, preexec_fn=lambda: _on_core(0),
        )  # fmt: skip
    try:
        yield RunningManager(process, log, token, began)
    finally:
        _end(process)


_HOSTS_KEY: Final = secrets.token_hex(16)


class RunningAgents:
    """The process of all agents."""

    def __init__(self, process: subprocess.Popen[bytes], hosts: int) -> None:
        self._process = process
        self._hosts = hosts
        self._due = 0.0
        self._say({"hosts": hosts, "connections": CONNECTIONS, "key": _HOSTS_KEY})
        self.port = int(self._hear()["port"])

    def begin(
        self, manager_port: int, seconds: float, changed: float, every_s: float = 0.0, usage_each: int = 0
    ) -> None:
        """Start a round of reports.

        :param seconds: 0: each host once.
        :param every_s: between two of a host; 0: as fast as they are answered.
        :param usage_each: a host tells what its VMs use after so many; 0: never.
        """
        round_ = {"seconds": seconds, "changed": changed, "every_s": every_s, "usage_each": usage_each}
        self._due = self._hosts * seconds / every_s if every_s else 0.0
        self._say({"manager_port": manager_port, **round_})

    def result(self, lost: bool = False) -> dict[str, float]:
        """Wait for the round's end. ``lost``: the manager may have gone meanwhile."""
        result = self._hear()
        if not lost and (result["refused"] or not result["answered"]):
            raise BenchmarkFailed(f"the manager refused reports: {result}")
        if not lost and result["answered"] < ON_TIME * self._due:
            raise BenchmarkFailed(f"only {result['answered']:.0f} of {self._due:.0f} reports came in time: {result}")
        return result

    def _say(self, line: dict[str, Any]) -> None:
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):
            self._process.stdin.write(json.dumps(line).encode() + b"\n")
            self._process.stdin.flush()

    def _hear(self) -> dict[str, float]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise BenchmarkFailed(f"the agents' process ended with {self._process.wait()}")
        found: dict[str, float] = json.loads(line)
        return found


@contextmanager
def agents_of(hosts: int) -> Iterator[RunningAgents]:
    process = subprocess.Popen(
        [sys.executable, "-m", "benchmarks.placing.placement_agents"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        preexec_fn=lambda: _on_core(1),
    )
    try:
        yield RunningAgents(process, hosts)
    finally:
        _end(process)


def _on_core(number: int) -> None:
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cores[number % len(cores)]})


def _end(process: subprocess.Popen[bytes]) -> None:
    process.terminate()
    try:
        process.wait(10)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
    for stream in (process.stdin, process.stdout):
        if stream is not None:
            with suppress(BrokenPipeError):
                stream.close()
