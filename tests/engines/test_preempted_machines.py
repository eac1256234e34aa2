"""Tasks of a real Slurm and a real Dask on a VM that is preempted: told, begun again elsewhere, none lost, none twice
at a time. The hosts are made up; manager, schedulers, machines and commands are real."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from ebbtide.matcher.engines.interface import engine_of
from ebbtide.matcher.match.notices import PREEMPTED
from ebbtide.matcher.match.turns import said_by
from ebbtide.messages.operations import OperationState
from tests.engines.engine_hosts import EngineHost
from tests.manager.cluster import Cluster, cluster_of, vm
from tests.manager.fake_agent import FakeAgent
from tests.waiting import until

pytestmark = [pytest.mark.service, pytest.mark.timeout(280)]

NOTICE_S = 16.0
#: Within which all that is released at a time has begun, seconds.
ROUND_S = 3.0
#: Lines with the attempt's process: it begins, lives, was told, has ended. Who was told by TERM saves, and ends; all
#: others live on until the second file is there.
SCRIPT = """
trap 'echo told $$ >> "$1"' USR1
trap 'echo told $$ >> "$1"; sleep 0.2; exit 75' TERM
echo begun $$ >> "$1"
until [ -e "$2" ]; do sleep 0.2; echo lives $$ >> "$1"; done
echo ended $$ >> "$1"
"""
CORES = 4.0


class Tasks:
    """The tasks of one test, on all machines of an engine."""

    def __init__(self, cluster: Cluster, host: EngineHost, word: str) -> None:
        self._cluster = cluster
        self._host = host
        self._word = word
        self.names: list[str] = []
        #: Once it is there, all may end.
        self.go = host.cluster.runs / f"{word}.go"

    async def submit(self, name: str, **fields: Any) -> None:
        command = ["/bin/sh", "-c", SCRIPT, "task", str(self._path(name)), str(self.go)]
        task = {"name": f"{self._word}-{name}", "command": command, "cores": 2, "duration_s": 8.0, **fields}
        body = {"request_id": task["name"], "task": task}
        status, answer = await self._cluster.call("POST", "/v1/tasks", json=body)
        assert status == 202, answer
        self.names.append(name)

    def _path(self, name: str) -> Path:
        return self._host.cluster.runs / f"{self._word}-{name}.runs"

    def lines(self, name: str) -> list[tuple[str, str]]:
        """What its attempts wrote: a word, and whose process."""
        path = self._path(name)
        rows = path.read_text().splitlines() if path.exists() else []
        return [(word, pid) for word, pid in map(str.split, rows)]

    def words(self, name: str) -> list[str]:
        return [word for word, _ in self.lines(name)]

    async def row(self, name: str) -> Any:
        return await self._cluster.get(f"/v1/tasks/{self._word}-{name}")

    async def until_all(self, *states: str) -> dict[str, Any]:
        async def so() -> bool:
            return all([(await self.row(name))["state"] in states for name in self.names])

        await until(so, limit_s=120.0)
        return {name: await self.row(name) for name in self.names}


@pytest.mark.parametrize("killed", [False, True], ids=["", "manager-killed"])
async def test_tasks_on_a_preempted_vm_are_told_and_begun_again_elsewhere(
    engine_host: EngineHost, tmp_path: Path, killed: bool
) -> None:
    names = engine_host.cluster.names
    agent = FakeAgent("host-a", cpu_cores=CORES * len(names), memory_mib=1000.0 * len(names))
    settings = engine_host.settings.model_copy(update={"label": f"p{int(killed)}"})
    closed = said_by(settings.label, PREEMPTED)
    async with cluster_of(tmp_path, agent, engine=settings, make_engine=engine_of) as cluster:
        for name in names:
            rigid: Any = {"minimum": {"cpu_cores": CORES, "memory_mib": 600.0}}
            await cluster.create(vm(name, cpu_cores=CORES, memory_mib=600.0, **rigid))
        tasks = Tasks(cluster, engine_host, f"{engine_host.engine.kind}-{settings.label}")
        # Two on each machine, and two that wait.
        many = 2 * len(names)
        for number in range(many + 2):
            signal = "TERM" if number % 2 else "USR1"
            await tasks.submit(f"t-{number}", restartable=True, checkpoint_signal=signal, checkpoint_grace_s=2.0)

        async def all_run() -> bool:
            return all("begun" in tasks.words(f"t-{number}") for number in range(many))

        await until(all_run)
        agent.trouble.never_ends = True
        body = {"request_id": "high", "vm": vm("high", "fixed", CORES, 600.0), "deadline_s": NOTICE_S}
        assert (await cluster.call("POST", "/v1/vms", json=body))[0] == 202

        async def told() -> bool:
            return any("told" in tasks.words(name) for name in tasks.names)

        await until(told)
        (event,) = await cluster.events("preempting")
        victim = event["vm"]
        if killed:
            await cluster.kill_manager()
            await cluster.start_manager()
            await cluster.ready()

        async def empty() -> bool:
            status = await cluster.get("/v1/engine")
            found = [(row["drained"], row["tasks"]) for row in status["machines"] if row["name"] == victim]
            return found == [(closed, [])]

        await until(empty)
        tasks.go.touch()
        assert (await engine_host.look()).machines[victim].drained == closed
        # The guest powers off.
        engine_host.kill_machine(victim)
        agent.end_pending()
        assert (await cluster.ended("high")).state is OperationState.DONE
        rows = await tasks.until_all("done")
        hit = {name for name, row in rows.items() if row["preemptions"]}
        assert len(hit) == 2, rows
        for name, row in rows.items():
            lines, words = tasks.lines(name), tasks.words(name)
            assert (words.count("ended"), words.count("begun")) == (1, row["attempts"]), lines
            assert ("told" in words, row["attempts"]) == (name in hit, 1 + (name in hit)), (row, lines)
            # One attempt after the other: no line of the first after the second has begun.
            order = [pid for _, pid in lines]
            assert order == sorted(order, key=list(dict.fromkeys(order)).index), lines
        # What was broken off went before what was submitted later, or with it: tasks of one round begin in any order.
        began = {name: rows[name]["started_at"] for name in rows}
        assert max(began[name] for name in hit) < max(began[f"t-{many}"], began[f"t-{many + 1}"]) + ROUND_S
        engine_host.start_machine(victim)
        await cluster.delete("high")

        async def back() -> bool:
            machine = (await engine_host.look()).machines.get(victim)
            return machine is not None and machine.up and not machine.drained and machine.usable_cores == CORES

        await until(back, limit_s=120.0)
