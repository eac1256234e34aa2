"""Kill -9 of the manager, of slurmctld, of a slurmd and of a whole node, with tasks on a real Slurm: none is lost, and
none is begun twice that may not be. Each task writes a line when it begins and one when it ends."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import subprocess
import sys
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from benchmarks.matching.slurm_cluster import USER, SlurmCluster
from ebbtide.lab.cluster import free_ports
from ebbtide.lab.state import write_private
from tests.engines.engine_hosts import counting
from tests.waiting import until

pytestmark = [pytest.mark.service, pytest.mark.timeout(280)]

REPO = Path(__file__).resolve().parents[2]
FINAL = {"done", "failed", "cancelled"}
_tries = itertools.count()


class Process:
    """A real ``ebb-manager`` with Slurm as its engine; it keeps its port and its store over kills."""

    def __init__(self, directory: Path, cluster: SlurmCluster) -> None:
        self.directory = directory
        self.cluster = cluster
        self.url = f"http://127.0.0.1:{free_ports(1)[0]}"
        self._process: subprocess.Popen[bytes] | None = None
        write_private(directory / "token", "clients")
        write_private(directory / "hosts.key", "agents")
        lines = [
            'engine = "slurm"', f'directory = "{cluster.tasks}"', f'slurm_conf = "{cluster.conf}"', f'user = "{USER}"',
            "period_s = 0.2", 'label = "crash"',
        ]  # fmt: skip
        (directory / "engine.toml").write_text("\n".join(lines))

    @property
    def log(self) -> str:
        return (self.directory / "manager.log").read_text()

    def start(self) -> None:
        """Harmless where it runs."""
        if self._process is not None:
            return
        options = {
            "--listen": self.url.removeprefix("http://"),
            "--token-file": str(self.directory / "token"),
            "--hosts-key-file": str(self.directory / "hosts.key"),
            "--database": str(self.directory / "manager.sqlite"),
            "--engine-file": str(self.directory / "engine.toml"),
        }
        argv = [sys.executable, "-m", "cluster_manager.main", *(word for pair in options.items() for word in pair)]
        with (self.directory / "manager.log").open("ab") as log:
            self._process = subprocess.Popen(argv, cwd=REPO, stdout=log, stderr=log)

    @property
    def runs(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def kill(self) -> None:
        """``kill -9``."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None


class Service:
    """A test's tasks: their names begin with a word of its own."""

    def __init__(self, process: Process, session: aiohttp.ClientSession, word: str) -> None:
        self.process = process
        self.cluster = process.cluster
        self._session = session
        self._word = word

    async def start(self) -> None:
        self.process.start()

        async def answers() -> bool:
            with contextlib.suppress(aiohttp.ClientError):
                async with self._session.get(f"{self.process.url}/readyz") as response:
                    return response.status == 200
            assert self.process.runs, self.process.log
            return False

        await until(answers)

    def kill(self) -> None:
        self.process.kill()

    async def call(self, method: str, path: str, **options: Any) -> Any:
        headers = {"Authorization": "Bearer clients"}
        async with self._session.request(method, self.process.url + path, headers=headers, **options) as response:
            assert response.status < 300, await response.text()
            return await response.json()

    def runs(self, name: str) -> Path:
        return self.cluster.runs / f"{self._word}-{name}.runs"

    async def submit(self, name: str, seconds: float, **fields: Any) -> None:
        command = list(counting(self.runs(name), seconds))
        task = {"name": f"{self._word}-{name}", "command": command, "cores": 2, "duration_s": seconds, **fields}
        await self.call("POST", "/v1/tasks", json={"request_id": task["name"], "task": task})

    async def tasks(self) -> dict[str, Any]:
        rows = (await self.call("GET", f"/v1/tasks?limit=1000&prefix={self._word}-"))["tasks"]
        return {row["name"].removeprefix(f"{self._word}-"): row for row in rows}

    async def until(self, condition: Callable[[dict[str, Any]], bool], limit_s: float = 120.0) -> dict[str, Any]:
        found: dict[str, Any] = {}

        async def is_so() -> bool:
            found.clear()
            with contextlib.suppress(aiohttp.ClientError):
                found.update(await self.tasks())
            return bool(found) and condition(found)

        try:
            await until(is_so, limit_s=limit_s)
        except TimeoutError:
            raise AssertionError(f"{found}\n{self.process.log[-5000:]}") from None
        return found

    async def all_ended(self) -> dict[str, Any]:
        return await self.until(lambda tasks: all(row["state"] in FINAL for row in tasks.values()))

    def lines(self, name: str) -> Counter[str]:
        path = self.runs(name)
        return Counter(path.read_text().split() if path.exists() else [])

    async def has_begun(self, *names: str) -> None:
        async def begun() -> bool:
            return all(self.lines(name)["begun"] for name in names)

        try:
            await until(begun)
        except TimeoutError:
            queue = self.cluster.command("squeue", "--states=all", "--format=%A %j %T %r %N")
            nodes = self.cluster.command("sinfo", "--Node", "--long")
            raise AssertionError(f"{await self.tasks()}\n{queue}\n{nodes}\n{self.process.log[-5000:]}") from None


@pytest.fixture(scope="module")
def process(slurm: SlurmCluster, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Process]:
    made = Process(tmp_path_factory.mktemp("manager"), slurm)
    yield made
    made.kill()


@pytest.fixture
async def service(process: Process) -> AsyncIterator[Service]:
    """With n1 to n4 free and whole."""
    # Each try has tasks of its own.
    word = f"c{next(_tries)}"
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=20)) as session:
        made = Service(process, session, word)
        for name in process.cluster.names:
            process.cluster.command("scontrol", "update", f"NodeName={name}", "Gres=vcore:4")
        await made.start()
        yield made


def check(service: Service, tasks: dict[str, Any], twice: frozenset[str] = frozenset()) -> None:
    """All done, each run from its beginning to its end, none twice but those that may have been."""
    for name, row in tasks.items():
        lines = service.lines(name)
        assert row["state"] == "done", row
        assert lines["ended"] == 1, (row, lines)
        assert lines["begun"] == row["attempts"], (row, lines)
        assert lines["begun"] == 1 or (name in twice and row["restartable"]), (row, lines)


async def test_a_manager_that_is_killed_again_and_again(service: Service) -> None:
    for turn in range(3):
        for number in range(3):
            await service.submit(f"t-{turn}-{number}", 0.5, restartable=number == 0)
        # Moments between the first submission to Slurm and the last release.
        await _pause(0.15 + 0.2 * turn)
        service.kill()
        await service.start()
    tasks = await service.all_ended()
    assert len(tasks) == 9
    check(service, tasks)


async def test_a_slurmctld_that_is_killed_in_the_middle(service: Service, slurm: SlurmCluster) -> None:
    for number in range(4):
        await service.submit(f"before-{number}", 8.0, restartable=False)
    await service.has_begun(*(f"before-{number}" for number in range(4)))
    # Slurm writes its state down a few seconds later: what it does not know by then it would begin again.
    await _pause(6.0)
    slurm.kill("slurmctld")
    for number in range(4):
        await service.submit(f"after-{number}", 0.3)
    await service.until(lambda tasks: "cannot be used" in tasks["after-0"]["sentence"])
    slurm.restart_controller()
    check(service, await service.all_ended())


async def test_a_slurmd_that_is_killed_leaves_its_tasks_running(service: Service, slurm: SlurmCluster) -> None:
    await service.submit("once", 4.0)
    await service.has_begun("once")
    machine = (await service.tasks())["once"]["machine"]
    slurm.kill(machine)
    slurm.start_daemon(machine)
    check(service, await service.all_ended())


async def test_a_node_that_dies_takes_its_tasks_along(service: Service, slurm: SlurmCluster) -> None:
    for name, restartable in (("safe-0", True), ("once-0", False), ("safe-1", True), ("once-1", False)):
        await service.submit(name, 6.0, restartable=restartable, cores=2)
    await service.has_begun("safe-0", "safe-1", "once-0", "once-1")
    tasks = await service.tasks()
    machine = tasks["safe-0"]["machine"]
    slurm.kill_node(machine)
    try:
        tasks = await service.all_ended()
    finally:
        slurm.start_daemon(machine)
    hit = {name for name, row in tasks.items() if service.lines(name) != Counter(begun=1, ended=1)}
    assert "safe-0" in hit
    for name, row in tasks.items():
        lines = service.lines(name)
        if name.startswith("once") and name in hit:
            assert (row["state"], lines) == ("failed", Counter(begun=1)), row
            assert "not restartable" in row["sentence"]
        else:
            assert (row["state"], lines["ended"], lines["begun"]) == ("done", 1, row["attempts"]), (row, lines)

    async def back() -> bool:
        return machine in await asyncio.to_thread(slurm.idle)

    await until(back)


async def test_everything_dies_at_once(service: Service, slurm: SlurmCluster) -> None:
    for number in range(6):
        await service.submit(f"safe-{number}", 3.0, restartable=True)
    await service.has_begun("safe-0")
    machine = (await service.tasks())["safe-0"]["machine"] or "n1"
    service.kill()
    slurm.kill("slurmctld")
    slurm.kill_node(machine)
    slurm.restart_controller()
    slurm.start_daemon(machine)
    await service.start()
    tasks = await service.all_ended()
    assert len(tasks) == 6
    for name, row in tasks.items():
        assert row["state"] == "done", str(row)
        assert service.lines(name)["ended"] >= 1


async def test_a_slurmctld_that_is_killed_before_it_has_written_anything_down(
    service: Service, slurm: SlurmCluster
) -> None:
    for number in range(4):
        await service.submit(f"safe-{number}", 3.0, restartable=True)
        await service.submit(f"once-{number}", 3.0)
    await service.has_begun("safe-0")
    slurm.kill("slurmctld")
    slurm.restart_controller()
    tasks = await service.all_ended()
    for name, row in tasks.items():
        lines = service.lines(name)
        assert lines["begun"] >= 1 or row["state"] == "failed", row
        if name.startswith("safe"):
            assert row["state"] == "done", row
        else:
            # Whatever Slurm has forgotten: begun once, or known to be lost.
            assert lines["begun"] == 1, (row, lines)
            assert row["state"] == ("done" if lines["ended"] else "failed"), (row, lines)


async def _pause(seconds: float) -> None:
    """Let the others work so long."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(seconds):
            await asyncio.Event().wait()
