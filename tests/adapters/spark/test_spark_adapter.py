"""The adapters of Spark against a real standalone cluster, through the hooks of two workers' VMs."""

from __future__ import annotations

import contextlib
import http.server
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from app_adapters.processes.process import started
from app_adapters.spark.curves import Curve, Curves
from app_adapters.spark.rest import SparkRest
from tests.adapters.spark_cluster import HOSTS, Cluster, Vm, Watch, tree, until

pytestmark = pytest.mark.service

#: A VM-level deflation costs almost everything, a self-deflation what it takes: the policy picks self.
PREFER_SELF = Curves(vm=Curve(((0.01, 0.02),)))

#: Sums of 400 parts, each of which takes a moment, for as long as the file `go` is there; the answer is their sum.
SUMS = """
import json, os, sys, time
from pathlib import Path
from pyspark import SparkConf, SparkContext
directory = Path(__file__).parent
conf = SparkConf().setAll(json.loads(sys.argv[2]).items()).setMaster(sys.argv[1]).setAppName("sums")
context = SparkContext(conf=conf)
def work(part):
    time.sleep(0.15)
    yield sum(part)
total, rounds = 0, 0
data = context.parallelize(range(16000), 16)
while rounds < 2 or (directory / "go").exists():
    total += data.mapPartitions(work).sum()
    rounds += 1
(directory / "answer").write_text("right" if total == rounds * sum(range(16000)) else f"{total} of {rounds}")
context.stop()
"""


@contextlib.contextmanager
def cluster(directory: Path, **more: Any) -> Iterator[Cluster]:
    found = Cluster(directory, **more)
    try:
        yield found
    finally:
        found.stop()


def finished(vm: Vm, request_id: str) -> dict[str, Any]:
    def look() -> dict[str, Any] | None:
        status, body = vm.rest.send("GET", f"/deflation/v1/targets/{request_id}")
        assert status == 200, body
        return None if body["state"] == "running" else body

    done: dict[str, Any] = until(look, f"{request_id} ends", 90)
    return done


def zombie(pid: int) -> bool:
    """Dead, and only not yet taken from the table by its parent."""
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] in ("Z", "X")
    return True


def settled_mib(vm: Vm) -> float:
    """PSS once the heap of a young executor has stopped growing."""
    sizes = [0.0]

    def settled() -> bool:
        time.sleep(0.5)
        sizes.append(vm.pss_mib())
        return len(sizes) > 5 and max(sizes[-4:]) - min(sizes[-4:]) < 0.02 * sizes[-1]

    until(settled, "the executor's heap stops growing")
    return sizes[-1]


def size(vm: Vm, request_id: str, direction: str, target: dict[str, float], mode: str = "ask") -> tuple[int, Any]:
    return vm.rest.target(request_id, direction, 0, target=target, mode=mode)


def ask_both(
    vms: list[Vm], request_id: str, target: dict[str, float], mode: str = "ask"
) -> list[tuple[int, dict[str, Any]]]:
    with ThreadPoolExecutor(2) as pool:
        return list(pool.map(lambda vm: size(vm, request_id, "deflate", target, mode), vms))


def test_a_cluster_with_a_running_job_gives_workers_up_and_takes_them_back(
    tmp_path: Path, record_property: Callable[[str, object], None]
) -> None:
    with cluster(tmp_path, curves=PREFER_SELF) as spark:
        vms = [spark.add_vm(host) for host in HOSTS]
        (tmp_path / "go").touch()
        job = spark.run_job(SUMS)
        until(lambda: spark.executors() == dict.fromkeys(HOSTS, 2), "both executors work")
        with Watch(spark.driver_ui) as watch:
            # One VM gives its Worker and all memory.
            first, second = vms
            pid = first.root_pid()
            until(lambda: len(tree(pid)) > 2, "the executor's Python works")
            before_mib = settled_mib(first)
            began = {p: started(p) for p in tree(pid)}
            assert before_mib > 300
            assert first.rest.capabilities()["resources"]["memory_mib"]["current"] == pytest.approx(before_mib, rel=0.1)
            status, answer = size(first, "down", "deflate", {"cpu_cores": 0.0, "memory_mib": 0.0})
            assert status == 202, answer
            assert answer["promised"]["cpu_cores"] == 2
            done = finished(first, "down")
            assert done["state"] == "released", done
            assert not [p for p, at in began.items() if started(p) == at and not zombie(p)]
            after_mib = first.pss_mib()
            assert done["released"]["memory_mib"] == pytest.approx(before_mib - after_mib, rel=0.1, abs=8)
            assert done["released"]["cpu_cores"] == 2
            assert spark.cores() == {HOSTS[1]: 2}

            # It is there again, in full.
            assert size(first, "up", "reinflate", {"cpu_cores": 2.0, "memory_mib": 700.0})[0] == 202
            assert finished(first, "up")["state"] == "released"
            until(lambda: spark.executors() == dict.fromkeys(HOSTS, 2), "the executor is back with full cores")

            # Both are halved at once, by one decision.
            answers = ask_both(vms, "half", {"cpu_cores": 1.0})
            assert [status for status, _ in answers] == [202, 202], answers
            assert answers[0][1]["reason"] == answers[1][1]["reason"]
            assert "2 of 2 VMs deflated" in answers[0][1]["reason"]
            for vm in vms:
                done = finished(vm, "half")
                assert (done["state"], done["released"]) == ("released", {"cpu_cores": 1}), done
            assert spark.cores() == dict.fromkeys(HOSTS, 1)
            until(lambda: spark.executors() == dict.fromkeys(HOSTS, 1), "executors with one core each")

            # Forced: at once, without asking the cluster.
            asked_s = time.monotonic()
            status, answer = size(second, "force", "deflate", {"cpu_cores": 0.0}, mode="force")
            assert status == 202, answer
            assert "forced" in answer["reason"]
            done = finished(second, "force")
            record_property("forced_s", round(time.monotonic() - asked_s, 2))
            assert done["released"] == {"cpu_cores": 1}
            assert second.pss_mib() == 0
            for vm in vms:
                assert size(vm, "full", "reinflate", {"cpu_cores": 2.0})[0] == 202
            for vm in vms:
                assert finished(vm, "full")["state"] == "released"
            until(lambda: spark.executors() == dict.fromkeys(HOSTS, 2), "all is back")
        assert watch.errors == []
        record_property("driver_answers", len(watch.latencies_s))
        record_property("driver_p99_ms", round(watch.p99_ms()))
        (tmp_path / "go").unlink()
        assert job.answer() == "right"


def test_a_cluster_decides_for_the_vm_level_and_says_why(tmp_path: Path) -> None:
    with cluster(tmp_path) as spark:
        vm = spark.add_vm(HOSTS[0])
        # Nobody runs anything: giving up costs nothing.
        status, answer = size(vm, "idle", "deflate", {"cpu_cores": 1.0})
        assert (status, "no application is running" in answer["reason"]) == (202, True), answer
        assert finished(vm, "idle")["released"] == {"cpu_cores": 1}
        assert size(vm, "back", "reinflate", {"cpu_cores": 2.0})[0] == 202
        assert finished(vm, "back")["state"] == "released"

        # All VMs alike, with a job: throttling loses nothing that was computed.
        (tmp_path / "go").touch()
        job = spark.run_job(SUMS)
        until(lambda: spark.executors() == {HOSTS[0]: 2}, "the executor works")
        before = tree(vm.root_pid())
        status, answer = size(vm, "down", "deflate", {"cpu_cores": 1.0})
        assert (status, answer["state"]) == (409, "refused"), answer
        assert answer["reason"].startswith("VM-level deflation: T_self"), answer
        assert answer["floor"]["cpu_cores"] == 2
        assert set(before) <= set(tree(vm.root_pid()))
        (tmp_path / "go").unlink()
        assert job.answer() == "right"

        # A driver that cannot be asked is no reason to kill its tasks.
        spark.service._rest.drivers = ("http://127.0.0.1:1",)
        (tmp_path / "go").touch()
        job = spark.run_job(SUMS)
        until(lambda: spark.executors() == {HOSTS[0]: 2}, "the executor works")
        status, answer = size(vm, "blind", "deflate", {"cpu_cores": 1.0})
        assert (status, answer["state"]) == (409, "refused"), answer
        assert "to be safe" in answer["reason"]
        (tmp_path / "go").unlink()
        assert job.answer() == "right"


@pytest.mark.parametrize("cycles", [4, pytest.param(10, marks=pytest.mark.deep)])
def test_cycles_leave_nothing_behind_and_a_new_adapter_finds_the_worker(tmp_path: Path, cycles: int) -> None:
    with cluster(tmp_path, window_s=0.3) as spark:
        vm = spark.add_vm(HOSTS[0], grace_s=1.0)
        sizes, descriptors = [], []
        for i in range(cycles):
            assert size(vm, f"down{i}", "deflate", {"cpu_cores": 0.0, "memory_mib": 0.0}, "force")[0] == 202
            done = finished(vm, f"down{i}")
            assert done["released"]["memory_mib"] > 80, done
            assert vm.pss_mib() == 0
            assert size(vm, f"up{i}", "reinflate", {"cpu_cores": 2.0})[0] == 202
            assert finished(vm, f"up{i}")["state"] == "released"
            sizes.append(vm.pss_mib())
            descriptors.append(len(list(Path("/proc/self/fd").iterdir())))
        assert max(sizes[cycles // 2 :]) < 1.25 * max(sizes[: cycles // 2]) + 10, sizes
        assert descriptors[-1] <= descriptors[1] + 5, descriptors
        from app_adapters.spark.worker_process import WorkerProcess

        found = WorkerProcess(["true", "{cores}"], vm.state_file)
        assert (found.running, found.cores) == (True, 2)
        assert found.resident_mib() == pytest.approx(vm.pss_mib(), rel=0.1, abs=5)


def test_spark_that_lies_or_hangs_is_told_apart_within_its_limit() -> None:
    answers: dict[str, tuple[int, bytes, float]] = {}
    ended = threading.Event()

    class Liar(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            status, body, pause_s = answers.get(self.path, (404, b"", 0.0))
            self.send_response(status)
            self.end_headers()
            for byte in (body[i : i + 8] for i in range(0, len(body), 8)):
                if ended.wait(pause_s):
                    return
                with contextlib.suppress(OSError):
                    self.wfile.write(byte)

        def log_message(self, format: str, *args: object) -> None:
            """Quiet."""

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Liar)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        rest = SparkRest(f"http://127.0.0.1:{server.server_port}", timeout_s=0.5)
        for body in (b"", b"[]", b"{", b'{"workers": 3}', b'{"workers": [1], "activeapps": []}', b"[" * 100000):
            answers["/json/"] = 200, body, 0.0
            with pytest.raises(Exception, match=r"master|JSON") as caught:
                rest.cluster()
            assert type(caught.value).__name__ == "ApplicationError"
        lie = b'{"workers": [{"id": "w", "host": "h", "state": "ALIVE", "cores": -4}], "activeapps": []}'
        answers["/json/"] = 200, lie, 0.0
        with pytest.raises(Exception, match="cores"):
            rest.cluster()
        answers["/json/"] = 200, lie, 0.2  # trickles: no read alone takes too long
        began = time.monotonic()
        with pytest.raises(Exception, match="not done within"):
            rest.cluster()
        assert time.monotonic() - began < 20
        answers["/json/"] = 500, b"", 0.0
        with pytest.raises(Exception, match="500"):
            rest.cluster()
    finally:
        ended.set()
        server.shutdown()
        server.server_close()
