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
from app_adapters.spark.workers import Workers
from tests.adapters.proc import ended, tree
from tests.adapters.spark_cluster import HOSTS, Cluster, Vm, Watch
from tests.waiting import until_sync

pytestmark = pytest.mark.service

#: A VM-level deflation costs almost everything, a self-deflation what it takes: the policy picks self.
PREFER_SELF = Curves(vm=Curve(((0.01, 0.02),)))

#: Sums of parts that were shuffled once and then are read again and again, each of which takes a moment, for as long as
#: the file `go` is there; the answer is whether they were right.
SUMS = """
import json, sys, time
from pathlib import Path
from pyspark import SparkConf, SparkContext
directory = Path(__file__).parent
conf = SparkConf().setAll(json.loads(sys.argv[2]).items()).setMaster(sys.argv[1]).setAppName("sums")
context = SparkContext(conf=conf)
def work(part):
    time.sleep(0.15)
    yield sum(value for _, value in part)
total, rounds = 0, 0
data = context.parallelize(range(16000), 16).map(lambda x: (x % 100, x)).cache().reduceByKey(lambda a, b: a + b, 16)
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

    done: dict[str, Any] = until_sync(look, f"{request_id} ends", 90)
    return done


def settled_mib(vm: Vm) -> float:
    """PSS once the heap of a young executor has stopped growing."""
    sizes = [0.0]

    def settled() -> bool:
        time.sleep(0.5)
        sizes.append(vm.pss_mib())
        return len(sizes) > 5 and max(sizes[-4:]) - min(sizes[-4:]) < 0.02 * sizes[-1]

    until_sync(settled, "the executor's heap stops growing")
    return sizes[-1]


def size(vm: Vm, request_id: str, direction: str, target: dict[str, float], mode: str = "ask") -> tuple[int, Any]:
    return vm.rest.target(request_id, direction, 0, target=target, mode=mode)


def ask_both(
    vms: list[Vm], request_id: str, target: dict[str, float], mode: str = "ask"
) -> list[tuple[int, dict[str, Any]]]:
    with ThreadPoolExecutor(2) as pool:
        return list(pool.map(lambda vm: size(vm, request_id, "deflate", target, mode), vms))


def maps_done(spark: Cluster) -> int:
    """Tasks of the stage that shuffled the data, first and repeated ones."""
    return sum(stage["numCompleteTasks"] for stage in spark.driver("stages") or [] if stage["shuffleWriteBytes"])


def test_a_cluster_with_a_running_job_gives_slots_up_and_takes_them_back(
    tmp_path: Path, record_property: Callable[[str, object], None]
) -> None:
    with cluster(tmp_path, curves=PREFER_SELF) as spark:
        vms = first, second = [spark.add_vm(host, grace_s=15.0) for host in HOSTS]
        (tmp_path / "go").touch()
        job = spark.run_job(SUMS)
        until_sync(lambda: spark.slots() == dict.fromkeys(HOSTS, 2), "all executors work")
        with Watch(spark.driver_ui) as watch:
            until_sync(lambda: maps_done(spark) == 16 and len(spark.driver("stages")) > 3, "the data are shuffled")

            # Each VM gives one slot up, by one decision. The other slot goes on, with its executor and its files.
            before, began = spark.executors(), {vm.host: vm.roots() for vm in vms}
            answers = ask_both(list(vms), "half", {"cpu_cores": 1.0})
            assert [status for status, _ in answers] == [202, 202], answers
            assert answers[0][1]["reason"] == answers[1][1]["reason"]
            assert "2 of 2 VMs deflated" in answers[0][1]["reason"]
            for vm in vms:
                done = finished(vm, "half")
                assert (done["state"], done["released"]) == ("released", {"cpu_cores": 1}), done
                assert "ended" not in done["reason"], done
                assert (vm.roots("slots"), vm.roots("idle")) == (began[vm.host][:1], began[vm.host][1:])
                assert tree(*vm.roots("idle")) == vm.roots("idle"), "no executor is left"
            assert spark.cores() == dict.fromkeys(HOSTS, 1)
            after = spark.executors()
            assert all(len(ids) == 1 and set(ids) <= set(before[host]) for host, ids in after.items()), (before, after)
            stages = len(spark.driver("stages"))
            until_sync(lambda: len(spark.driver("stages")) > stages + 3, "the job goes on")
            assert maps_done(spark) == 16, "nothing that was shuffled is computed again"

            # They come back beside the others.
            for vm in vms:
                assert size(vm, "full", "reinflate", {"cpu_cores": 2.0})[0] == 202
            for vm in vms:
                assert finished(vm, "full")["state"] == "released"
            until_sync(lambda: spark.slots() == dict.fromkeys(HOSTS, 2), "all is back")
            assert all(set(after[host]) <= set(ids) for host, ids in spark.executors().items()), "those that stayed"

            # Memory is given slot by slot, too, and goes with the idle Workers when it is asked for.
            before_mib = settled_mib(first)
            current = first.rest.capabilities()["resources"]["memory_mib"]["current"]
            assert current == pytest.approx(before_mib, rel=0.1)
            status, answer = size(first, "memory", "deflate", {"memory_mib": 700.0})
            assert status == 202, answer
            done = finished(first, "memory")
            assert done["state"] == "released", done
            assert done["released"]["memory_mib"] == pytest.approx(before_mib - first.pss_mib(), rel=0.15, abs=30)
            assert done["released"]["memory_mib"] > 250
            assert first.pss_mib() < 700
            assert first.roots("idle") == []
            assert spark.cores() == {HOSTS[0]: 1, HOSTS[1]: 2}

            # All of it, forced: at once, without asking the cluster, and nothing of the tree is left.
            lived = {pid: started(pid) for pid in second.pids()}
            asked_s = time.monotonic()
            status, answer = size(second, "force", "deflate", {"cpu_cores": 0.0}, mode="force")
            assert status == 202, answer
            assert "forced" in answer["reason"]
            done = finished(second, "force")
            record_property("forced_s", round(time.monotonic() - asked_s, 2))
            assert done["released"] == {"cpu_cores": 2}
            assert second.pss_mib() == 0
            assert not [pid for pid, at in lived.items() if started(pid) == at and not ended(pid)]
            assert size(first, "up", "reinflate", {"cpu_cores": 2.0, "memory_mib": 1400.0})[0] == 202
            assert size(second, "up", "reinflate", {"cpu_cores": 2.0})[0] == 202
            for vm in vms:
                assert finished(vm, "up")["state"] == "released"
            until_sync(lambda: spark.slots() == dict.fromkeys(HOSTS, 2), "all is back")
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
        until_sync(lambda: spark.slots() == {HOSTS[0]: 2}, "both executors work")
        before = vm.pids()
        status, answer = size(vm, "down", "deflate", {"cpu_cores": 1.0})
        assert (status, answer["state"]) == (409, "refused"), answer
        assert answer["reason"].startswith("VM-level deflation: T_self"), answer
        assert answer["floor"]["cpu_cores"] == 2
        assert set(before) <= set(vm.pids())
        (tmp_path / "go").unlink()
        assert job.answer() == "right"

        # A driver that cannot be asked is no reason to kill its tasks.
        spark.service._rest.drivers = ("http://127.0.0.1:1",)
        (tmp_path / "go").touch()
        job = spark.run_job(SUMS)
        until_sync(lambda: spark.slots() == {HOSTS[0]: 2}, "both executors work")
        status, answer = size(vm, "blind", "deflate", {"cpu_cores": 1.0})
        assert (status, answer["state"]) == (409, "refused"), answer
        assert "to be safe" in answer["reason"]
        (tmp_path / "go").unlink()
        assert job.answer() == "right"


@pytest.mark.parametrize("cycles", [4, pytest.param(10, marks=pytest.mark.deep)])
def test_cycles_leave_nothing_behind_and_a_new_adapter_finds_the_workers(tmp_path: Path, cycles: int) -> None:
    with cluster(tmp_path, window_s=0.3) as spark:
        vm = spark.add_vm(HOSTS[0], grace_s=1.0)
        sizes, descriptors = [], []
        for i in range(cycles):
            assert size(vm, f"down{i}", "deflate", {"cpu_cores": 0.0, "memory_mib": 0.0}, "force")[0] == 202
            done = finished(vm, f"down{i}")
            assert done["released"]["memory_mib"] > 80, done
            assert vm.pss_mib() == 0
            assert size(vm, f"up{i}", "reinflate", {"cpu_cores": 2.0, "memory_mib": 1400.0})[0] == 202
            assert finished(vm, f"up{i}")["state"] == "released"
            sizes.append(vm.pss_mib())
            descriptors.append(len(list(Path("/proc/self/fd").iterdir())))
        assert max(sizes[cycles // 2 :]) < 1.25 * max(sizes[: cycles // 2]) + 10, sizes
        assert descriptors[-1] <= descriptors[1] + 5, descriptors
        found = Workers(["true"], vm.state_file)
        assert found.cores == 2
        assert found.resident_mib() == pytest.approx(vm.pss_mib(), rel=0.1, abs=5)
        found.decommission(1)
        until_sync(lambda: spark.cores() == {HOSTS[0]: 1}, "the master knows of the slot that was given up")
        vm.workers = Workers(["true"], vm.state_file)
        assert (vm.workers.cores, len(vm.roots("idle"))) == (1, 1)


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
