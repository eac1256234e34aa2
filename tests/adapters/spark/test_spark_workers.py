"""Workers of Spark as processes, without Spark: what their state file is good for."""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from app_adapters.adapter import Deadline, Promise
from app_adapters.processes.process import arguments, boot_id, families, started
from app_adapters.spark import worker, workers
from app_adapters.spark.relay import Relay
from app_adapters.spark.slots import Nominal
from app_adapters.spark.worker import SparkWorkerAdapter
from app_adapters.spark.workers import Workers
from tests.waiting import until_sync


class Machine:
    """Where Workers run that do nothing, all by one command, which no other test has."""

    def __init__(self, directory: Path) -> None:
        self.state_file = directory / "state.json"
        self.command = [sys.executable, "-c", "import time; time.sleep(600)", str(directory)]
        self._directory = directory

    def workers(self) -> Workers:
        return Workers(self.command, str(self.state_file))

    def adapter(self) -> SparkWorkerAdapter:
        """Of 4 slots; nobody serves its cluster."""
        relay = Relay("http://127.0.0.1:1", str(self._directory / "token"), "localhost")
        return SparkWorkerAdapter(self.workers(), relay, Nominal(4, 4000.0))

    def running(self) -> list[int]:
        """As the kernel says."""
        return [pid for pids in families().values() for pid in pids if str(self._directory) in arguments(pid)]


@pytest.fixture
def machine(tmp_path: Path) -> Iterator[Machine]:
    made = Machine(tmp_path)
    try:
        yield made
    finally:
        left = made.workers()
        left.kill(left.cores)
        lost = made.running()
        for pid in lost:
            os.kill(pid, signal.SIGKILL)
        assert lost == [], "nobody owned them"


def test_a_machine_that_starts_again_at_a_deflated_size_starts_no_more_workers_than_it_has_room_for(
    machine: Machine,
) -> None:
    half = {"cpu_cores": 2.0, "memory_mib": 2000.0}
    other = subprocess.Popen(["sleep", "600"])
    try:
        pids = [[other.pid, started(other.pid)]]  # of the start before they mean Workers
        state = {"boot_id": "of before", "slots": pids, "idle": pids, "sizes": half}
        machine.state_file.write_text(json.dumps(state))
        adapter = machine.adapter()
        adapter.begin()
        assert len(machine.running()) == 2
        answer = adapter.reinflate(half, Deadline(30))
        assert isinstance(answer, Promise)
        answer.work()
        assert len(machine.running()) == 2
    finally:
        other.kill()
        other.wait(30)
    written = json.loads(machine.state_file.read_text())
    assert (written["boot_id"], written["sizes"], len(written["slots"])) == (boot_id(), half, 2)
    # The same start of the machine: they are found again.
    machine.adapter().begin()
    assert len(machine.running()) == 2


def test_a_worker_that_was_started_and_not_remembered_is_found_by_a_new_adapter(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    killed = machine.workers()
    remember = killed._remember

    def until_one_runs() -> None:
        if machine.running():
            raise KeyboardInterrupt  # as an adapter that is killed here: nothing more is written
        remember()

    monkeypatch.setattr(killed, "_remember", until_one_runs)
    with pytest.raises(KeyboardInterrupt):
        killed.start(1)
    assert len(machine.running()) == 1
    found = machine.workers()
    assert found.cores == 1
    found.start(1)
    assert len(machine.running()) == 1


def test_what_that_worker_has_started_is_taken_for_no_other(monkeypatch: pytest.MonkeyPatch, machine: Machine) -> None:
    monkeypatch.setattr(workers, "STOP_S", 0.1)  # its executor would end with it only if it were asked to
    sleep = "[sys.executable, '-c', 'import time; time.sleep(600)', sys.argv[1]]"
    machine.command[2] = f"import subprocess, sys; subprocess.run({sleep}, start_new_session=True)"
    killed = machine.workers()
    remember = killed._remember
    monkeypatch.setattr(killed, "_remember", lambda: None if killed.cores else remember())
    killed.start(1)
    until_sync(lambda: len(machine.running()) == 2, "its executor")
    found = machine.workers()
    assert found.cores == 1
    assert len(found.pids()) == 2


def test_by_default_the_state_is_where_a_start_of_the_machine_leaves_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    new, earlier = tmp_path / "new.json", tmp_path / "earlier.json"
    assert worker.STATE_FILE.startswith("/var/lib/")
    monkeypatch.setattr(worker, "STATE_FILE", str(new))
    monkeypatch.setattr(worker, "EARLIER_STATE_FILE", str(earlier))
    parser = argparse.ArgumentParser()
    worker.READY.options(parser)
    words = ["--service", "http://127.0.0.1:1", "--host", "localhost", "--worker-command", "w --cores 1"]
    options = parser.parse_args(words)
    options.name = "spark-worker"
    sizes = {"cpu_cores": 1.0}
    new.write_text(json.dumps({"slots": [], "idle": [], "sizes": sizes}))
    assert built(options)._workers.sizes == sizes
    # Of an earlier version, whose Workers still run.
    earlier.write_text(json.dumps({"slots": [], "idle": [], "sizes": {}}))
    assert built(options)._workers.sizes == {}
    # Of another cluster's adapter, which is not to take these Workers for its own.
    options.name = "other"
    own = tmp_path / "new-other.json"
    own.write_text(json.dumps({"slots": [], "idle": [], "sizes": {"cpu_cores": 2.0}}))
    assert built(options)._workers.sizes == {"cpu_cores": 2.0}


def built(options: argparse.Namespace) -> SparkWorkerAdapter:
    adapter = worker.READY.build(options)
    assert isinstance(adapter, SparkWorkerAdapter)
    return adapter
