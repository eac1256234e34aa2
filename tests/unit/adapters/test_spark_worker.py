"""What the adapter of a worker's VM decides, over a Worker and a cluster that are made of figures."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

import pytest

from app_adapters.adapter import Deadline, Promise
from app_adapters.errors import ApplicationError
from app_adapters.main import main
from app_adapters.spark.policy import Deflation
from app_adapters.spark.relay import Relay
from app_adapters.spark.slots import Nominal
from app_adapters.spark.worker import SparkWorkerAdapter
from app_adapters.spark.worker_process import WorkerProcess

NOMINAL = Nominal(4, 3000.0)


class Worker:
    """A Worker with 700 MiB a core."""

    def __init__(self, cores: int, given_up: bool = False) -> None:
        self.cores, self.given_up = cores, given_up

    @property
    def running(self) -> bool:
        return self.cores > 0

    def start(self, cores: int) -> None:
        self.cores, self.given_up = cores, False

    def stop(self, also: Any = None) -> None:
        self.cores, self.given_up = 0, True

    def pids(self) -> dict[int, int]:
        return {}

    def resident_mib(self) -> float:
        return 700.0 * self.cores


class Silent:
    """A cluster that decides for self-deflation and then answers no more."""

    def ask(self, wanted: Deflation, limit_s: float) -> tuple[bool, str]:
        return True, "self"

    def tell(self, size: Deflation) -> None:
        raise ApplicationError("the service does not answer")

    def decommission(self) -> None:
        raise ApplicationError("the service does not answer")

    def state(self) -> Any:
        raise ApplicationError("the service does not answer")


def adapter(worker: Worker) -> SparkWorkerAdapter:
    return SparkWorkerAdapter(cast(WorkerProcess, worker), cast(Relay, Silent()), NOMINAL, grace_s=0.0)


def reinflated(cores: int, target: dict[str, float]) -> int:
    worker = Worker(cores)
    answer = adapter(worker).reinflate(target, Deadline(0.1))
    assert isinstance(answer, Promise)
    answer.work()
    return worker.cores


def test_a_vm_without_the_memory_gets_no_worker_however_many_cores_it_has() -> None:
    assert reinflated(0, {"cpu_cores": 4.0, "memory_mib": 1200.0}) == 0
    assert reinflated(0, {"cpu_cores": 4.0, "memory_mib": 3000.0}) == 4
    assert reinflated(0, {"memory_mib": 3000.0}) == 4
    assert reinflated(2, {"cpu_cores": 4.0, "memory_mib": 2900.0}) == 4, "it holds its memory already"
    assert reinflated(2, {"memory_mib": 3000.0}) == 2


def test_what_the_master_does_not_know_yet_is_not_released() -> None:
    worker = Worker(4)
    answer = adapter(worker).deflate({"cpu_cores": 2.0, "memory_mib": 3000.0}, "ask", Deadline(0.1))
    assert isinstance(answer, Promise)
    released = answer.work().released
    assert released == {"cpu_cores": 2.0, "memory_mib": 0.0}


def test_a_worker_that_was_given_up_is_not_started_by_a_new_adapter() -> None:
    worker = Worker(0, given_up=True)
    adapter(worker).begin()
    assert worker.cores == 0
    worker = Worker(0)
    adapter(worker).begin()
    assert worker.cores == 4


def test_a_check_starts_no_worker(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    state = tmp_path / "state"
    options = ["--service", "http://127.0.0.1:1", "--host", "h", "--state-file", str(state)]
    options += ["--worker-command", "sleep {cores}00", "--check"]
    assert main(["spark-worker", *options]) == 0
    assert '"current": 0.0' in capsys.readouterr().out
    assert not state.exists(), "it is written before a Worker is started"


def test_that_a_worker_was_given_up_outlives_its_adapter(tmp_path: Path) -> None:
    command = ["sleep", "{cores}00"]
    first = WorkerProcess(command, str(tmp_path / "state"))
    first.start(4)
    assert not WorkerProcess(command, str(tmp_path / "state")).given_up
    first.stop()
    assert WorkerProcess(command, str(tmp_path / "state")).given_up
