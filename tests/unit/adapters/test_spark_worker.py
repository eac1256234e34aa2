"""What the adapter of a worker's VM decides, over Workers and a cluster that are made of figures."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any, cast

import pytest

from app_adapters.adapter import Deadline, Promise
from app_adapters.errors import ApplicationError
from app_adapters.main import main
from app_adapters.messages import RefusalBody, TargetRequest
from app_adapters.operations import Operations
from app_adapters.processes.process import arguments
from app_adapters.spark.policy import Deflation
from app_adapters.spark.relay import Relay
from app_adapters.spark.slots import Nominal
from app_adapters.spark.worker import SparkWorkerAdapter
from app_adapters.spark.workers import EXECUTOR, Workers
from ebbtide.deflation.cascade.asking import Refusal, mode_of_asking
from ebbtide.deflation.cascade.instructions import Mode
from tests.unit.adapters.test_spark_window import Stage, relay, serving

NOMINAL = Nominal(4, 3000.0)
#: As a Worker does it: SIGPWR ends nothing, SIGTERM its executor and itself.
FAKE = """
import signal, subprocess, sys
signal.signal(signal.SIGPWR, signal.SIG_IGN)
signal.signal(signal.SIGTERM, lambda *_: (child.kill(), sys.exit()))
child = subprocess.Popen(["sleep", "400"])
while True:
    signal.pause()
"""
#: As without spark.decommission.enabled: the signal would end both.
DEAF = f"""
import signal, subprocess, sys
signal.signal(signal.SIGTERM, lambda *_: sys.exit())
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(400)", "{EXECUTOR}"])
while True:
    signal.pause()
"""


class Made:
    """Workers with 700 MiB each, those of given-up slots with 150."""

    def __init__(self, cores: int, sizes: dict[str, float] | None = None, idle: int = 0) -> None:
        self.cores, self.sizes, self.idle = cores, sizes or {}, idle
        self.at_work: dict[int, int] = {}

    def fit(self, sizes: dict[str, float]) -> None:
        self.sizes = sizes

    def start(self, count: int) -> None:
        self.cores = max(self.cores, count)

    def decommission(self, count: int) -> str:
        self.cores -= count
        self.idle += count
        return ""

    def end_deaf(self) -> None:
        pass

    def take_deaf_back(self) -> None:
        pass

    def executors(self) -> dict[int, int]:
        return self.at_work

    def end_executors(self) -> None:
        self.at_work = {}

    def end_idle(self, keep: int = 0) -> None:
        self.idle = min(self.idle, keep)

    def resident_mib(self) -> float:
        return 700.0 * self.cores + 150.0 * self.idle


class Silent:
    """A cluster that decides for self-deflation and then answers no more."""

    def ask(self, wanted: Deflation, limit_s: float) -> tuple[bool, str]:
        return True, "self"

    def tell(self, size: Deflation) -> None:
        raise ApplicationError("the service does not answer")

    def state(self) -> Any:
        raise ApplicationError("the service does not answer")


def adapter(workers: Made, relay: Relay | None = None) -> SparkWorkerAdapter:
    return SparkWorkerAdapter(cast(Workers, workers), relay or cast(Relay, Silent()), NOMINAL, grace_s=0.0)


def reinflated(cores: int, target: dict[str, float], sizes: dict[str, float] | None = None) -> int:
    workers = Made(cores, sizes)
    answer = adapter(workers).reinflate(target, Deadline(0.1))
    assert isinstance(answer, Promise)
    answer.work()
    return workers.cores


def test_each_slot_comes_back_when_both_its_core_and_its_memory_have() -> None:
    assert reinflated(0, {"cpu_cores": 4.0, "memory_mib": 700.0}) == 0
    assert reinflated(0, {"cpu_cores": 4.0, "memory_mib": 1500.0}) == 2
    assert reinflated(2, {"cpu_cores": 4.0, "memory_mib": 2900.0}) == 3
    assert reinflated(2, {"cpu_cores": 4.0}, {"cpu_cores": 2.0, "memory_mib": 2400.0}) == 3
    assert reinflated(2, {"memory_mib": 3000.0}, {"cpu_cores": 2.0, "memory_mib": 1500.0}) == 2
    assert reinflated(2, {"memory_mib": 3000.0}, {"memory_mib": 1500.0}) == 4


def test_without_the_master_what_is_released_is_read_from_the_vm() -> None:
    workers = Made(4)
    answer = adapter(workers).deflate({"cpu_cores": 4.0, "memory_mib": 1500.0}, "ask", Deadline(0.1))
    assert isinstance(answer, Promise)
    assert answer.promised == {"cpu_cores": 2.0, "memory_mib": 1400.0}
    release = answer.work()
    assert release.released == {"cpu_cores": 2.0, "memory_mib": 1400.0}
    assert "could not be asked" in release.measured_by


def test_idle_workers_stay_until_memory_is_asked_for() -> None:
    workers = Made(4)
    for target, idle, released in (
        ({"cpu_cores": 2.0}, 2, {"cpu_cores": 2.0}),
        ({"memory_mib": 1800.0}, 2, {"memory_mib": 0.0}),
        ({"memory_mib": 1500.0}, 0, {"memory_mib": 300.0}),
    ):
        answer = adapter(workers).deflate(target, "ask", Deadline(0.1))
        assert isinstance(answer, Promise)
        assert answer.work().released == released
        assert (workers.cores, workers.idle) == (2, idle)


@pytest.mark.parametrize("called_off", [True, False])
def test_executors_with_tasks_are_ended_after_their_grace_but_not_for_a_deflation_that_is_called_off(
    called_off: bool,
) -> None:
    workers, deadline = Made(4), Deadline(5.0)
    answer = adapter(workers).deflate({"cpu_cores": 2.0, "memory_mib": 1500.0}, "ask", deadline)
    assert isinstance(answer, Promise)
    workers.at_work = {1: 1}
    if called_off:
        deadline.cancel()
    release = answer.work()
    assert bool(workers.at_work) is called_off
    assert workers.idle == (2 if called_off else 0)
    assert ("called off" if called_off else "were ended") in release.reason


def test_a_cluster_that_is_undecided_is_not_forced_by_the_next_deflation(tmp_path: Path) -> None:
    with serving(tmp_path, Stage([]), window_s=30.0) as service:
        operations = Operations(adapter(Made(4), relay(tmp_path, service, "a")), lambda sentence: None)
        answer = operations.submit(TargetRequest("r1", 0.5, "ask", "deflate", {"cpu_cores": 2.0}, ""))
    assert isinstance(answer, RefusalBody)
    assert mode_of_asking(2.0, Mode.ASK, Refusal(0.0, answer.retry_after_s)) is Mode.ASK


def test_slots_that_were_given_up_are_not_started_by_a_new_adapter() -> None:
    for sizes, cores in (({"cpu_cores": 0.0}, 0), ({"memory_mib": 1500.0}, 2), ({}, 4)):
        workers = Made(0, dict(sizes))
        adapter(workers).begin()
        assert workers.cores == cores


def test_a_check_starts_no_worker(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    state = tmp_path / "state"
    options = ["--service", "http://127.0.0.1:1", "--host", "h", "--state-file", str(state)]
    options += ["--worker-command", "sleep 400 --cores 1", "--check"]
    assert main(["spark-worker", *options]) == 0
    assert '"current": 0.0' in capsys.readouterr().out
    assert not state.exists(), "it is written before a Worker is started"


def test_a_new_adapter_finds_the_slots_and_those_that_were_given_up(tmp_path: Path) -> None:
    path = str(tmp_path / "state")
    first = Workers([sys.executable, "-c", FAKE], path)
    try:
        first.start(3)
        assert Workers(["true"], path).cores == 3
        end = time.monotonic() + 30
        while len(first.pids()) < 6:
            assert time.monotonic() < end
        first.fit({"cpu_cores": 2.0})
        first.decommission(1)
        found = Workers(["true"], path)
        assert (found.cores, found.sizes, len(found.executors())) == (2, {"cpu_cores": 2.0}, 1)
        found.end_executors()
        assert found.executors() == {}
        found.kill(1)
        assert (found.cores, len(found.pids())) == (1, 2)
    finally:
        first.kill(3)
    assert Workers(["true"], path).pids() == {}


def test_processes_that_sigpwr_would_end_are_spared_it(tmp_path: Path) -> None:
    workers = Workers([sys.executable, "-c", DEAF], str(tmp_path / "state"))
    try:
        workers.start(1)
        end = time.monotonic() + 30
        # Right after its fork a child still looks like its parent.
        while not any(EXECUTOR in arguments(pid) for pid in workers.pids()):
            assert time.monotonic() < end
        assert workers.decommission(1).startswith("2 processes do not handle SIGPWR")
        assert (len(workers.executors()), workers.cores, workers.idle) == (1, 0, 1)
        workers.take_deaf_back()
        assert (workers.cores, workers.idle) == (1, 0)
        workers.decommission(1)
        workers.end_executors()
        assert workers.executors() == {}
        workers.end_deaf()
        assert workers.pids() == {}
    finally:
        workers.kill(1)


@pytest.mark.parametrize("text", ['{"slots": 3}', '{"slots": [], "sizes": []}', '{"idle": [["a", 1]]}', "[]", "{"])
def test_a_damaged_state_file_is_named(tmp_path: Path, text: str) -> None:
    (tmp_path / "state").write_text(text)
    with pytest.raises(ApplicationError, match="damaged"):
        Workers(["true"], str(tmp_path / "state"))


def test_a_worker_of_an_older_version_is_not_forgotten_beside_new_ones(tmp_path: Path) -> None:
    (tmp_path / "state").write_text('{"pid": 7, "began": 1, "cores": 2, "given_up": false}')
    with pytest.raises(ApplicationError, match="another version's: end its Worker, then remove it"):
        Workers(["true"], str(tmp_path / "state"))
