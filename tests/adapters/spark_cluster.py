"""A real standalone Spark on loopback: master, the cluster's service, and two workers' VMs of two host names."""

from __future__ import annotations

import importlib.util
import json
import os
import signal
import subprocess
import sys
import urllib.request
from collections import Counter
from pathlib import Path
from typing import Any

from app_adapters.processes.process import started
from app_adapters.server import HookServer
from app_adapters.spark.curves import LINEAR, Curves
from app_adapters.spark.relay import Relay
from app_adapters.spark.rest import SparkRest
from app_adapters.spark.service import SparkService
from app_adapters.spark.slots import Nominal
from app_adapters.spark.worker import SparkWorkerAdapter
from app_adapters.spark.workers import Workers
from tests.adapters.cache import free_port
from tests.adapters.load import Load
from tests.adapters.proc import pss_mib, tree
from tests.adapters.rest import Rest
from tests.waiting import until_sync

HOSTS = ("127.0.0.1", "localhost")
JVM = "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC"
LIMIT_S = 60.0
SETTINGS = {
    "spark.decommission.enabled": "true",
    "spark.storage.decommission.enabled": "true",
    "spark.storage.decommission.rddBlocks.enabled": "true",
    "spark.storage.decommission.shuffleBlocks.enabled": "true",
    "spark.storage.decommission.replicationReattemptInterval": "1s",
    "spark.deploy.maxExecutorRetries": "-1",
    "spark.task.maxFailures": "100",
}


def spark_home() -> str:
    spec = importlib.util.find_spec("pyspark")
    assert spec is not None, "pyspark is not installed: it is in the dependency group dev"
    assert spec.submodule_search_locations
    return next(iter(spec.submodule_search_locations))


class Vm:
    """What runs in one worker's VM: the adapter with its Workers, and its hook."""

    def __init__(self, cluster: Cluster, host: str, cores: int, memory_mib: float, grace_s: float) -> None:
        self.host = host
        name = host.replace(".", "-")
        self.state_file = str(cluster.directory / f"{name}.json")
        command = ["env", f"JAVA_TOOL_OPTIONS={JVM}", "SPARK_DAEMON_MEMORY=128m", f"{spark_home()}/bin/spark-class"]
        command += ["org.apache.spark.deploy.worker.Worker", "--host", host]
        command += ["--webui-port", "0", "--cores", "1", "--memory", "600m", "--work-dir"]
        command += [str(cluster.directory / name), "--properties-file", str(cluster.settings), cluster.url]
        self.workers = Workers(command, self.state_file, str(cluster.directory / f"{name}.log"))
        address = f"http://127.0.0.1:{cluster.service.address[1]}"
        self.relay = Relay(address, str(cluster.token), host)
        self.adapter = SparkWorkerAdapter(self.workers, self.relay, Nominal(cores, memory_mib), grace_s)
        self.adapter.begin()
        self.server = HookServer(self.adapter, port=0, token_file=str(cluster.token)).start()
        self.rest = Rest(self.server.address, "t")

    def roots(self, *kinds: str) -> list[int]:
        """Its Workers: those of the slots and those that were given up, or one kind."""
        state = json.loads(Path(self.state_file).read_text())
        return [pid for kind in kinds or ("slots", "idle") for pid, _ in state[kind]]

    def pids(self) -> list[int]:
        """Its Workers and all that they started."""
        return [pid for root in self.roots() for pid in tree(root)]

    def pss_mib(self) -> float:
        return pss_mib(self.pids())

    def stop(self) -> None:
        self.server.stop()
        self.workers.kill(self.workers.cores)


class Cluster:
    def __init__(self, directory: Path, curves: Curves = LINEAR, window_s: float = 2.0) -> None:
        self.directory = directory
        self.environment = {**os.environ, "JAVA_TOOL_OPTIONS": JVM, "SPARK_LOCAL_IP": "127.0.0.1"}
        self.environment["PYSPARK_PYTHON"] = sys.executable
        self.settings = directory / "spark.conf"
        self.settings.write_text("".join(f"{name} {value}\n" for name, value in SETTINGS.items()))
        self.token = directory / "token"
        self.token.write_text("t\n")
        port, ui_port, self.driver_port = free_port(), free_port(), free_port()
        self.url = f"spark://127.0.0.1:{port}"
        self.master_ui = f"http://127.0.0.1:{ui_port}"
        self.driver_ui = f"http://127.0.0.1:{self.driver_port}"
        self._started: list[subprocess.Popen[bytes]] = []
        self.vms: list[Vm] = []
        command = [f"{spark_home()}/bin/spark-class", "org.apache.spark.deploy.master.Master", "--host", "127.0.0.1"]
        command += ["--port", str(port), "--webui-port", str(ui_port), "--properties-file", str(self.settings)]
        self.spawn(command, "master.log")
        rest = SparkRest(self.master_ui, (self.driver_ui,), timeout_s=5.0)
        self.service = SparkService(rest, str(self.token), "127.0.0.1", 0, window_s, curves).start()

    def spawn(self, command: list[str], log: str, **more: Any) -> subprocess.Popen[bytes]:
        with open(self.directory / log, "ab") as file:
            process = subprocess.Popen(
                command,
                stdout=file,
                stderr=file,
                env={**self.environment, **more},
                start_new_session=True,
            )
        self._started.append(process)
        return process

    def add_vm(self, host: str, cores: int = 2, memory_mib: float = 1400.0, grace_s: float = 5.0) -> Vm:
        vm = Vm(self, host, cores, memory_mib, grace_s)
        self.vms.append(vm)
        until_sync(lambda: self.cores().get(host) == cores, f"the Workers of {host} register")
        return vm

    def get(self, address: str, limit_s: float = 5.0) -> Any:
        try:
            with urllib.request.urlopen(address, timeout=limit_s) as response:
                return json.loads(response.read())
        except (OSError, ValueError):
            return None

    def cores(self) -> dict[str, int]:
        body = self.get(self.master_ui + "/json/") or {"workers": []}
        return dict(Counter(row["host"] for row in body["workers"] if row["state"] == "ALIVE"))

    def driver(self, what: str) -> Any:
        """What the running application's driver says of its executors, stages or jobs."""
        applications = self.get(self.driver_ui + "/api/v1/applications") or []
        return self.get(f"{self.driver_ui}/api/v1/applications/{applications[0]['id']}/{what}") if applications else []

    def executors(self) -> dict[str, list[str]]:
        """Ids of the running application's executors by host, as its driver says."""
        found: dict[str, list[str]] = {}
        for row in self.driver("executors") or []:
            if row["isActive"] and row["id"] != "driver":
                found.setdefault(row["hostPort"].rpartition(":")[0], []).append(row["id"])
        return {host: sorted(ids) for host, ids in found.items()}

    def slots(self) -> dict[str, int]:
        return {host: len(ids) for host, ids in self.executors().items()}

    def run_job(self, script: str, *arguments: str, **settings: str) -> Job:
        every = {**SETTINGS, "spark.ui.port": str(self.driver_port), "spark.driver.host": "127.0.0.1", **settings}
        every["spark.executor.memory"] = "512m"
        path = self.directory / "job.py"
        path.write_text(script)
        text = json.dumps(every)
        return Job(self.spawn([sys.executable, str(path), self.url, text, *arguments], "job.log"), self.directory)

    def stop(self) -> None:
        for vm in self.vms:
            vm.stop()
        self.service.stop()
        for process in reversed(self._started):
            begun = {pid: started(pid) for pid in tree(process.pid)} if process.poll() is None else {}
            process.terminate()
            try:
                process.wait(20)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait(20)
            for pid, at in begun.items():
                if pid != process.pid and at is not None and started(pid) == at:
                    os.kill(pid, signal.SIGKILL)


class Job:
    """A driver that runs beside the test. It writes its answer to the file `answer` when it is done."""

    def __init__(self, process: subprocess.Popen[bytes], directory: Path) -> None:
        self.process = process
        self._answer = directory / "answer"

    def answer(self, limit_s: float = 120.0) -> str:
        self.process.wait(limit_s)
        assert self.process.returncode == 0, (self._answer.parent / "job.log").read_text()[-3000:]
        return self._answer.read_text()


class Watch(Load):
    """Asks the driver how the job does, all the time: a service that must not fail while workers come and go."""

    pause_s = 0.1

    def __init__(self, address: str) -> None:
        super().__init__()
        self._address = address

    def ask(self, number: int) -> None:
        try:
            with self.timed(), urllib.request.urlopen(self._address + "/api/v1/applications", timeout=20) as response:
                json.loads(response.read())
        except (OSError, ValueError) as error:
            self.errors.append(str(error))
