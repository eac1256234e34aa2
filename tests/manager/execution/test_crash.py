"""A manager that is killed at any point and started again on its database ends each plan: placed or undone, once."""

from __future__ import annotations

import asyncio
import contextlib
import random
import signal
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from cluster_manager.store.database import PostgreSQL
from ebbtide.deflation.fencing import Fence
from ebbtide.deflation.resources import ZERO, ResourceVector
from ebbtide.deflation.sharing.proportional import share_room
from ebbtide.lab.state import write_private
from ebbtide.messages.operations import Operation, OperationState
from tests.chaos.checks import apart, hold
from tests.manager import cluster as clusters
from tests.manager.cluster import TOKEN, Cluster, cluster_of, vm
from tests.manager.databases import rows_of
from tests.manager.fake_agent import HOSTS_KEY, FakeAgent
from tests.manager.lifecycle import kill_at_every_record

pytestmark = pytest.mark.usefixtures("each_store")

REPO = Path(__file__).resolve().parents[3]
#: How often a real manager is killed at random; tests/chaos does it more often, and with everything else at once.
ROUNDS = 5


class Scenario:
    """Two hosts with two low-priority VMs on the first, and one request."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.first = FakeAgent("host-a", cpu_cores=6.0, memory_mib=2400.0)
        other = {"cpu_cores": 12.0, "memory_mib": 4800.0} if name == "undo" else {"cpu_cores": 1.0, "memory_mib": 500.0}
        self.second = FakeAgent("host-b", **other)
        self.request_id = "request"

    async def prepare(self, cluster: Cluster) -> None:
        for name in ("low-1", "low-2"):
            body = vm(name, on_preemption="delete" if self.name == "preempt-stateless" else "stop")
            assert (await cluster.create(body, policy="first-fit")).host == "host-a"
        if self.name == "delete":
            await cluster.create(vm("high-1", "fixed", 3.0, 800.0), policy="first-fit")
        if self.name == "undo":
            self.first.trouble.gives = {"low-1": 0.2, "low-2": 0.2}

    async def begin(self, cluster: Cluster) -> None:
        with contextlib.suppress(aiohttp.ClientError):
            if self.name == "delete":
                await cluster.call("DELETE", f"/v1/vms/high-1?request_id={self.request_id}")
            else:
                cores = 5.3 if self.name.startswith("preempt") else 3.0
                body = {"request_id": self.request_id, "vm": vm("high-1", "fixed", cores, 800.0), "deadline_s": 60.0}
                await cluster.call("POST", "/v1/vms", json={**body, "policy": "first-fit"})

    @property
    def expected(self) -> dict[str, int]:
        """How many VMs each host has in the end."""
        return {
            "place": {"host-a": 3, "host-b": 0},
            "undo": {"host-a": 2, "host-b": 1},
            "preempt": {"host-a": 3, "host-b": 0},
            "preempt-stateless": {"host-a": 2, "host-b": 0},
            "delete": {"host-a": 2, "host-b": 0},
        }[self.name]


async def agree(cluster: Cluster) -> None:
    """Hosts and manager tell the same story, no host is overfull, nobody is left deflated beside free room."""
    await cluster.ready()
    rows = (await cluster.get("/v1/vms"))["vms"]
    managed = {(row["name"], row["host"], row["state"] == "running") for row in rows}
    assert managed == {(name, agent.id, name in agent.running) for agent in cluster.agents for name in agent.vms}
    assert all(row["state"] in ("running", "preempted") for row in rows)
    for agent in cluster.agents:
        charged = sum((row.allocation().charge for row in agent.vms.values()), ZERO)
        assert charged.fits_in(agent.capacity), f"{agent.id} is overfull: {charged}"
        assert share_room([agent.vms[name].allocation() for name in agent.running], agent.free()) == {}


async def ended_well(scenario: Scenario, cluster: Cluster) -> Operation:
    operation = await cluster.ended(scenario.request_id)
    assert operation.state is OperationState.DONE, operation
    assert {agent.id: len(agent.vms) for agent in cluster.agents} == scenario.expected
    await agree(cluster)
    return operation


@contextlib.asynccontextmanager
async def prepared(path: Path, name: str) -> AsyncIterator[tuple[Scenario, Cluster]]:
    scenario = Scenario(name)
    async with cluster_of(path, scenario.first, scenario.second) as cluster:
        await scenario.prepare(cluster)
        yield scenario, cluster


@pytest.mark.parametrize("agent_forgets", [False, True], ids=["agent-remembers", "agent-forgets"])
@pytest.mark.parametrize("carried_out", [False, True], ids=["command-lost", "answer-lost"])
@pytest.mark.parametrize(
    ("name", "command"),
    [("place", 1), ("place", 2), ("undo", 1), ("undo", 2), ("delete", 1), ("delete", 2)]
    + [("preempt", number) for number in (1, 2, 3, 4)]
    + [("preempt-stateless", 2)],
)
async def test_a_manager_killed_while_a_command_is_under_way_finishes_the_plan(
    tmp_path: Path, name: str, command: int, carried_out: bool, agent_forgets: bool
) -> None:
    async with prepared(tmp_path, name) as (scenario, cluster):
        agent = scenario.first
        agent.trouble.hangs_at, agent.trouble.carries_out = len(agent.arrived) + command, carried_out
        await scenario.begin(cluster)
        async with asyncio.timeout(10):
            await agent.hanging.wait()
        await cluster.kill_manager()
        agent.trouble.hangs_at = None
        if agent_forgets:
            agent.forget()
        await cluster.start_manager()
        await ended_well(scenario, cluster)


async def test_a_reclaim_that_is_under_way_at_a_restart_is_waited_for_and_not_repeated(tmp_path: Path) -> None:
    async with prepared(tmp_path, "place") as (scenario, cluster):
        agent = scenario.first
        agent.trouble.never_ends = True
        await scenario.begin(cluster)
        async with asyncio.timeout(5):
            await agent.polled.wait()
        await cluster.kill_manager()
        agent.polled.clear()
        await cluster.start_manager()
        async with asyncio.timeout(5):
            await agent.polled.wait()
        agent.end_pending()
        operation = await ended_well(scenario, cluster)
        assert agent.arrived.count("reclaim") == 1
        assert [row.name for row in operation.vms] == ["low-1", "low-2"]


@pytest.mark.parametrize("name", ["preempt", "preempt-stateless"])
async def test_one_who_was_to_be_preempted_and_was_not_told_before_a_restart_stays_where_room_has_come_meanwhile(
    tmp_path: Path, name: str
) -> None:
    async with prepared(tmp_path, name) as (scenario, cluster):
        agent = scenario.first
        agent.trouble.hangs_at, agent.trouble.carries_out = len(agent.arrived) + 2, False
        await scenario.begin(cluster)
        async with asyncio.timeout(10):
            await agent.hanging.wait()
        told = agent.arrived[-1]
        assert told in ("stop", "delete")
        await cluster.kill_manager()
        agent.trouble.hangs_at = None
        agent.capacity = ResourceVector(20.0, 9000.0)
        await cluster.start_manager()
        operation = await cluster.ended(scenario.request_id)
        assert operation.state is OperationState.DONE, operation
        assert agent.arrived.count(told) == 1
        assert {"low-1", "low-2", "high-1"} == set(agent.running)
        assert "host-a has room for high-1" in (await cluster.events("preemption-withdrawn"))[0]["sentence"]
        assert await cluster.events("preempted") == []
        await agree(cluster)


@pytest.mark.parametrize("name", ["place", "delete"])
async def test_a_shutdown_in_the_middle_of_a_plan_is_quick_and_loses_nothing(tmp_path: Path, name: str) -> None:
    async with prepared(tmp_path, name) as (scenario, cluster):
        scenario.first.trouble.hangs_at = len(scenario.first.arrived) + 1
        await scenario.begin(cluster)
        await scenario.first.hanging.wait()
        async with asyncio.timeout(10):
            await cluster.stop_manager()
        await cluster.start_manager()
        await ended_well(scenario, cluster)


@pytest.mark.parametrize("stored", [False, True], ids=["before-the-record", "after-the-record"])
@pytest.mark.parametrize("name", ["place", "undo", "preempt", "preempt-stateless", "delete"])
async def test_a_manager_killed_at_every_record_finishes_the_plan(tmp_path: Path, name: str, stored: bool) -> None:
    """The manager is killed at its first record, the next one at its second, and so on to the end."""
    async with prepared(tmp_path, name) as (scenario, cluster):
        await scenario.begin(cluster)
        assert await kill_at_every_record(cluster, scenario.request_id, stored) >= 2
        await ended_well(scenario, cluster)


async def test_the_epoch_rises_with_every_start_and_is_in_every_command(tmp_path: Path) -> None:
    async with prepared(tmp_path, "place") as (scenario, cluster):
        assert scenario.first.epoch == 1
        await cluster.kill_manager()
        await cluster.start_manager()
        await cluster.ready()
        await scenario.begin(cluster)
        await ended_well(scenario, cluster)
        assert scenario.first.epoch == 2
        assert {body["epoch"] for body in scenario.first.bodies[-2:]} == {2}


async def test_an_agent_of_a_newer_manager_refuses_and_the_request_fails_with_the_reason(tmp_path: Path) -> None:
    async with prepared(tmp_path, "place") as (scenario, cluster):
        scenario.first.fence = scenario.second.fence = Fence(99)
        await scenario.begin(cluster)
        operation = await cluster.ended(scenario.request_id)
        assert operation.state is OperationState.FAILED
        assert "epoch 1 is over" in " ".join(operation.progress)
        assert set(scenario.first.vms) == {"low-1", "low-2"}


# --- a real process, a real kill -------------------------------------------------------------------------------------


class ManagerProcess:
    """``ebb-manager`` as a child process, and a client of it."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.url = ""
        self._process: asyncio.subprocess.Process | None = None
        write_private(directory / "token", TOKEN)
        write_private(directory / "hosts.key", HOSTS_KEY)

    async def start(self) -> None:
        argv = [sys.executable, "-m", "cluster_manager.main", "--listen", "127.0.0.1:0", "--policy", "first-fit"]
        argv += [
            "--token-file",
            str(self.directory / "token"),
            "--hosts-key-file",
            str(self.directory / "hosts.key"),
        ]
        database = clusters.database_in(self.directory)
        argv += ["--database", database.url if isinstance(database, PostgreSQL) else str(database)]
        self._process = await asyncio.create_subprocess_exec(*argv, cwd=REPO, stderr=asyncio.subprocess.PIPE)
        assert self._process.stderr is not None
        async with asyncio.timeout(30):
            while b"url=" not in (line := await self._process.stderr.readline()):
                assert line, "the manager ended before it listened"
        self.url = line.split(b"url=")[1].split()[0].decode()
        self._drain = asyncio.create_task(self._process.stderr.read(), name="stderr of the manager")

    async def end(self, number: signal.Signals) -> int:
        assert self._process is not None
        self._process.send_signal(number)
        async with asyncio.timeout(10):
            code = await self._process.wait()
        await self._drain
        return code


@pytest.mark.service
async def test_a_real_manager_killed_at_random_moments_loses_and_doubles_nothing(tmp_path: Path) -> None:
    first = FakeAgent("host-a", cpu_cores=6.0, memory_mib=2400.0)
    second = FakeAgent("host-b", cpu_cores=6.0, memory_mib=2400.0)
    chance = random.Random(20)
    process = ManagerProcess(tmp_path)
    await process.start()
    headers = {"Authorization": f"Bearer {TOKEN}"}
    async with aiohttp.ClientSession(headers=headers) as session:
        for agent in (first, second):
            await agent.start()
        try:
            requests = await _workload(process, session, (first, second), chance)
            for request_id in requests:
                state = (await _ended(process, session, request_id))["state"]
                hold("in the end", *[f"{request_id} is {state}"] * (state not in ("done", "failed")))
            async with session.get(f"{process.url}/v1/vms") as response:
                rows = (await response.json())["vms"]
            managed = {(row["name"], row["host"]) for row in rows if row["host"]}
            hold("in the end", *apart(managed, {(name, agent.id) for agent in (first, second) for name in agent.vms}))
            hold("in the end", *(f"{name} is on both hosts" for name in set(first.vms) & set(second.vms)))
            for agent in (first, second):
                charged = sum((row.allocation().charge for row in agent.vms.values()), ZERO)
                hold("in the end", *[f"{agent.id} is overfull with {charged}"] * (not charged.fits_in(agent.capacity)))
            assert await process.end(signal.SIGTERM) == 0
        finally:
            for agent in (first, second):
                await agent.close()
            with contextlib.suppress(ProcessLookupError):
                await process.end(signal.SIGKILL)


async def _workload(
    process: ManagerProcess, session: aiohttp.ClientSession, agents: tuple[FakeAgent, ...], chance: random.Random
) -> list[str]:
    """Rounds: a few requests, then a kill at a random moment, then a start."""
    requests = []
    for turn in range(ROUNDS):
        for agent in agents:
            agent.manager = process.url
            await agent.send_report()
        for number in range(3):
            request_id = f"r-{turn}-{number}"
            if number == 2 and turn % 2:
                url = f"{process.url}/v1/vms/vm-{turn - 1}-0?request_id={request_id}"
                call = session.delete(url)
            else:
                priority = chance.choice(["deflatable", "fixed"])
                body = vm(f"vm-{turn}-{number}", priority, chance.choice([1.0, 2.0, 3.0]), 600.0)
                call = session.post(f"{process.url}/v1/vms", json={"request_id": request_id, "vm": body})
            async with call as response:
                if response.status == 202:
                    requests.append(request_id)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(chance.uniform(0.0, 0.15)):
                await asyncio.Event().wait()
        await process.end(signal.SIGKILL)
        await process.start()
    for agent in agents:
        agent.manager = process.url
        await agent.send_report()
    assert len(requests) > 2 * ROUNDS
    return requests


async def _ended(process: ManagerProcess, session: aiohttp.ClientSession, request_id: str) -> Any:
    async with asyncio.timeout(60):
        while True:
            async with session.get(f"{process.url}/v1/operations/{request_id}?wait_s=5") as response:
                hold("in the end", *[f"{request_id} was lost"] * (response.status == 404))
                assert response.status == 200, response.status
                operation = await response.json()
            if operation["state"] != "running":
                return operation


@pytest.mark.service
async def test_sigterm_and_sigint_end_the_manager_cleanly(tmp_path: Path) -> None:
    for number in (signal.SIGTERM, signal.SIGINT):
        process = ManagerProcess(tmp_path)
        await process.start()
        assert await process.end(number) == 0
    assert await asyncio.to_thread(lambda: [path.name for path in tmp_path.glob("*-wal")]) == []


@pytest.mark.parametrize("restart", [False, True])
async def test_two_plans_on_one_host_run_one_after_the_other(tmp_path: Path, restart: bool) -> None:
    """Also after a restart: the plan that was at work goes on first, even where the one that waited is older."""
    agent = FakeAgent("host-a", cpu_cores=12.0, memory_mib=4800.0)
    async with cluster_of(tmp_path, agent) as cluster:
        for name in ("low-1", "low-2", "low-3", "low-4"):
            await cluster.create(vm(name))
        agent.trouble.never_ends = True
        before = list(agent.arrived)
        for name in ("first", "second"):
            body = {"request_id": name, "vm": vm(name, "fixed", 3.0, 800.0), "deadline_s": 10.0}
            assert (await cluster.call("POST", "/v1/vms", json=body))[0] == 202
            async with asyncio.timeout(5):
                await agent.polled.wait()
        if restart:
            await cluster.kill_manager()
            rows_of(cluster.settings.database, "UPDATE plans SET number = 1000 WHERE request_id = 'first'")
            agent.polled.clear()
            await cluster.start_manager()
            await cluster.ready()
            async with asyncio.timeout(5):
                await agent.polled.wait()
        await _several_reports(agent)
        assert agent.arrived[len(before) :] == ["reclaim"]
        agent.end_pending()
        for name in ("first", "second"):
            assert (await cluster.ended(name)).state is OperationState.DONE
        assert agent.arrived[len(before) :] == ["reclaim", "create", "reclaim", "create"]
        await agree(cluster)


async def _several_reports(agent: FakeAgent) -> None:
    """Time enough for anybody who does not wait."""
    for _ in range(3):
        agent.reported.clear()
        await agent.reported.wait()
