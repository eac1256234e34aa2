"""A standalone Spark on this machine for `spark`: a master, two workers' VMs that are control groups, one driver."""

from __future__ import annotations

import importlib.util
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from app_adapters.errors import ApplicationError
from app_adapters.processes.process import arguments
from app_adapters.spark.rest import Cluster, SparkRest
from app_adapters.spark.workers import Workers
from benchmarks.figures import BenchmarkFailed
from benchmarks.host.groups import gone
from ebbtide.extras import installing
from ebbtide.lab.cluster import free_ports

#: Two VMs on one machine need two names for what is known by host.
HOSTS = ("127.0.0.1", "localhost")
SLOTS = 4
# The stack is for the lineage of ALS, which is deep.
JVM = "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC -Xss16m"
LIMIT_S = 120.0
LOOK_S = 0.1
#: For the tasks of slots that are given up, and for their blocks to move.
GRACE_S = 30.0
CGROUPS = Path("/sys/fs/cgroup/cpu")
PERIOD_US = 20000
SETTINGS = {
    "spark.decommission.enabled": "true",
    "spark.storage.decommission.enabled": "true",
    "spark.storage.decommission.rddBlocks.enabled": "true",
    "spark.storage.decommission.shuffleBlocks.enabled": "true",
    "spark.storage.decommission.replicationReattemptInterval": "1s",
    "spark.deploy.maxExecutorRetries": "-1",
    "spark.task.maxFailures": "1000",
    "spark.stage.maxConsecutiveAttempts": "100",
    "spark.executor.memory": "700m",
    "spark.driver.host": "127.0.0.1",
    # Work begins when all executors are there, or those that came first would hold most of what is cached. How many
    # they are to be a standalone cluster knows by the most cores only.
    "spark.cores.max": str(len(HOSTS) * SLOTS),
    "spark.scheduler.minRegisteredResourcesRatio": "1.0",
    "spark.scheduler.maxRegisteredResourcesWaitingTime": "60s",
    # Else the VM that came to hold more of what is shuffled is waited for while the other one idles.
    "spark.locality.wait": "0s",
    "spark.sql.shuffle.partitions": "8",
    "spark.ui.showConsoleProgress": "false",
}


class SparkHost:
    """The cluster. `cores`: host cores that each VM has at full size."""

    def __init__(self, directory: Path, cores: float) -> None:
        found = importlib.util.find_spec("pyspark")
        if found is None or not found.submodule_search_locations:
            raise BenchmarkFailed(f"pyspark is not installed: {installing('spark')}")
        if not CGROUPS.is_dir():
            raise BenchmarkFailed(f"{CGROUPS} is not there: this benchmark throttles by control groups of version 1")
        self.cores = cores
        self._directory = directory
        self._class = f"{found.submodule_search_locations[0]}/bin/spark-class"
        # All that Spark leaves behind is gone with the directory.
        java = {"JAVA_TOOL_OPTIONS": f"{JVM} -Djava.io.tmpdir={directory}", "SPARK_LOCAL_DIRS": str(directory)}
        self._java = [f"{name}={value}" for name, value in java.items()]
        self._environment = {**os.environ, **java, "SPARK_LOCAL_IP": "127.0.0.1", "PYSPARK_PYTHON": sys.executable}
        self._settings = directory / "spark.conf"
        self._settings.write_text("".join(f"{name} {value}\n" for name, value in SETTINGS.items()))
        port, ui_port, self._driver_port = free_ports(3)
        self._master = f"spark://127.0.0.1:{port}"
        self.rest = SparkRest(f"http://127.0.0.1:{ui_port}", (f"http://127.0.0.1:{self._driver_port}",), 10.0)
        self._log = open(directory / "spark.log", "ab")  # noqa: SIM115 - as long as the processes
        self._processes: list[subprocess.Popen[Any]] = []
        self._workers: dict[str, Workers] = {}
        self._driver: subprocess.Popen[str] | None = None
        command = [self._class, "org.apache.spark.deploy.master.Master", "--host", "127.0.0.1", "--port", str(port)]
        command += ["--webui-port", str(ui_port), "--properties-file", str(self._settings)]
        self._master_command = command

    def start(self) -> None:
        """Start the master and make the workers' groups. `close` undoes it, however far it got.

        What a killed benchmark left in the groups goes first.
        """
        gone(*map(self._group, HOSTS))
        self._processes.append(
            subprocess.Popen(
                self._master_command,
                stdout=self._log,
                stderr=self._log,
                env=self._environment,
                start_new_session=True,
            )
        )
        for host in HOSTS:
            self._group(host).mkdir(exist_ok=True)
            self.throttle(host, 0.0)
            self._workers[host] = self._worker(host)

    def cluster(self) -> Cluster:
        """What the master knows; nothing where it does not answer yet."""
        try:
            return self.rest.cluster()
        except ApplicationError:
            return Cluster((), ())

    def throttle(self, host: str, deflation: float) -> None:
        """Leave a VM this much less of its CPU time."""
        quota = int(PERIOD_US * self.cores * (1 - deflation))
        (self._group(host) / "cpu.cfs_period_us").write_text(str(PERIOD_US))
        (self._group(host) / "cpu.cfs_quota_us").write_text(str(quota))

    def fresh(self) -> None:
        """All VMs unthrottled, with all their slots and no Worker of another run's."""
        for host in HOSTS:
            self.throttle(host, 0.0)
            self._workers[host].end_idle()
            self._workers[host].start(SLOTS)
        wanted = dict.fromkeys(HOSTS, SLOTS)
        _until(lambda: self.cluster().hosts() == wanted, f"the master has {wanted}")

    def give_up(self, hosts: Sequence[str], slots: int) -> None:
        """Have each VM give slots up as its adapter does it."""
        for host in hosts:
            self._workers[host].decommission(slots)
        end = time.monotonic() + GRACE_S
        while time.monotonic() < end and any(self._workers[host].executors() for host in hosts):
            time.sleep(LOOK_S)
        for host in hosts:
            self._workers[host].end_executors()

    def preempt(self, host: str) -> None:
        """End all that runs in a VM."""
        self._workers[host].kill(SLOTS)

    def begin(self, workload: str, rows: int, rounds: int, stages: int) -> None:
        """Give the driver an application; `stages`: how many it will have had."""
        if self._driver is None:
            self._driver = subprocess.Popen(
                [sys.executable, "-m", "benchmarks.engines.spark_driver"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._log,
                text=True,
                env=self._environment,
                start_new_session=True,
            )
        settings = {**SETTINGS, "spark.master": self._master, "spark.ui.port": str(self._driver_port)}
        settings["spark.ebbtide.stages"] = str(stages)
        self._send({"workload": workload, "rows": rows, "rounds": rounds, "settings": settings})

    def done(self) -> float:
        """Wait for the application's work: its seconds."""
        return float(self._receive()["seconds"])

    def end(self) -> None:
        """End the application."""
        self._send({})
        self._receive()
        _until(lambda: not self.cluster().applications, "the application is gone")

    def close(self) -> None:
        for workers in self._workers.values():
            with suppress(ApplicationError):
                workers.kill(SLOTS)
        if self._driver is not None:
            self._processes.append(self._driver)
        for number in (signal.SIGTERM, signal.SIGKILL):
            for process in self._processes:
                with suppress(ProcessLookupError):
                    os.killpg(process.pid, number)  # sessions of their own: the driver's JVM goes with it
            for process in self._processes:
                with suppress(subprocess.TimeoutExpired):
                    process.wait(5)
        self._log.close()
        gone(*map(self._group, HOSTS))

    def _worker(self, host: str) -> Workers:
        inside = f'echo $$ > {self._group(host)}/cgroup.procs && exec "$@"'
        command = ["sh", "-c", inside, "sh", "env", *self._java]
        command += ["SPARK_DAEMON_MEMORY=128m", self._class, "org.apache.spark.deploy.worker.Worker", "--host", host]
        command += ["--webui-port", "0", "--cores", "1", "--memory", "1g", "--work-dir"]
        command += [str(self._directory / host), "--properties-file", str(self._settings), self._master]
        return Workers(command, str(self._directory / f"{host}.json"), str(self._directory / f"{host}.log"))

    def _group(self, host: str) -> Path:
        return CGROUPS / f"ebb-bench-spark-{HOSTS.index(host)}"

    def _send(self, body: dict[str, Any]) -> None:
        assert self._driver is not None
        assert self._driver.stdin is not None
        self._driver.stdin.write(json.dumps(body) + "\n")
        self._driver.stdin.flush()

    def _receive(self) -> dict[str, Any]:
        assert self._driver is not None
        assert self._driver.stdout is not None
        line = self._driver.stdout.readline()
        if not line:
            log = (self._directory / "spark.log").read_text(errors="replace")[-1500:]
            raise BenchmarkFailed(f"the driver {arguments(self._driver.pid)} has ended: {log}")
        body: dict[str, Any] = json.loads(line)
        return body


@contextmanager
def spark_host(cores: float) -> Iterator[SparkHost]:
    """A cluster that is gone afterwards."""
    if os.geteuid() != 0:
        raise BenchmarkFailed("needs root: it makes control groups")
    with tempfile.TemporaryDirectory(prefix="ebb-spark-") as directory:
        bench = SparkHost(Path(directory), cores)
        try:
            bench.start()
            _until(lambda: _answers(bench), "the master answers")
            bench.fresh()
            yield bench
        finally:
            bench.close()


def _answers(bench: SparkHost) -> bool:
    try:
        bench.rest.cluster()
    except ApplicationError:
        return False
    return True


def _until(condition: Callable[[], bool], what: str) -> None:
    end = time.monotonic() + LIMIT_S
    while not condition():
        if time.monotonic() > end:
            raise BenchmarkFailed(f"not within {LIMIT_S:g} s: {what}")
        time.sleep(LOOK_S)
