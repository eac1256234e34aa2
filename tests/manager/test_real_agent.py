"""The manager with the real host agent, a process over a make-believe hypervisor: they must understand each other."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import aiohttp
import pytest

from cluster_manager.settings import AgentLimits
from ebbtide.deflation.resources import ZERO
from ebbtide.lab.state import write_private
from ebbtide.messages.hosts import HostReport
from ebbtide.messages.operations import OperationState
from ebbtide.rest.credentials import command_token, report_token
from tests.hostagent.world import World, random_delays
from tests.manager.cluster import Cluster, cluster_of, vm
from tests.manager.fake_agent import HOSTS_KEY
from tests.waiting import until

pytestmark = [pytest.mark.service, pytest.mark.usefixtures("each_store")]

REPO = Path(__file__).resolve().parents[2]
#: An agent that is started again needs its time; loaded machines are slow.
PATIENT = AgentLimits(answer_s=5.0, absence_s=30.0, poll_s=2.0, pause_s=0.05, grace_s=30.0, start_stop_s=60.0)


class RealAgent:
    """host-a: a process that can be killed, and a relay that carries its reports to the manager."""

    def __init__(self, world: World, state_dir: Path, session: aiohttp.ClientSession) -> None:
        self.world = world
        self._state_dir = state_dir
        self._session = session
        self._process: asyncio.subprocess.Process | None = None
        with socket.create_server(("127.0.0.1", 0)) as probe:
            self._port = probe.getsockname()[1]

    async def start(self) -> None:
        argv = ["-m", "tests.hostagent.agent_process", str(self.world.socket), str(self._state_dir), str(self._port)]
        with (self._state_dir / "agent.log").open("ab") as log:
            self._process = await asyncio.create_subprocess_exec(sys.executable, *argv, cwd=REPO, stderr=log)

    async def kill(self) -> None:
        if self._process is not None and self._process.returncode is None:
            self._process.kill()
            await self._process.wait()

    async def report(self) -> HostReport:
        """What it says of itself; waits while it is starting."""
        async with asyncio.timeout(30):
            while True:
                with contextlib.suppress(aiohttp.ClientError):
                    headers = {"Authorization": f"Bearer {command_token(HOSTS_KEY, 'host-a')}"}
                    url = f"http://127.0.0.1:{self._port}/v1/host"
                    async with self._session.get(url, headers=headers) as response:
                        return HostReport.model_validate_json(await response.read())
                await asyncio.sleep(0.05)

    async def relay(self, manager: str) -> None:
        while True:
            with contextlib.suppress(aiohttp.ClientError, TimeoutError):
                body = (await self.report()).model_dump(mode="json")
                async with self._session.post(f"{manager}/v1/hosts/host-a/report", json=body) as response:
                    assert response.status == 200, await response.text()
            await asyncio.sleep(0.05)


@pytest.fixture
async def pair(tmp_path: Path) -> AsyncIterator[tuple[Cluster, RealAgent]]:
    """A manager and a real agent with two low-priority VMs of 3 cores on its 6 cores and 3600 MiB."""
    write_private(tmp_path / "token", command_token(HOSTS_KEY, "host-a"))
    # A short path: the name of a unix socket has room for 107 bytes only.
    with TemporaryDirectory(prefix="ebb") as directory:
        world = World(Path(directory))
        await world.start()
        headers = {"Authorization": f"Bearer {report_token(HOSTS_KEY, 'host-a')}"}
        async with cluster_of(tmp_path, agents=PATIENT) as cluster, aiohttp.ClientSession(headers=headers) as session:
            agent = RealAgent(world, tmp_path, session)
            await agent.start()
            relay = asyncio.create_task(agent.relay(cluster.url), name="relay")
            try:
                async with asyncio.timeout(30):
                    await until(lambda: _registered(cluster))
                for name in ("low-1", "low-2"):
                    operation = await cluster.create(vm(name), deadline_s=60.0)
                    assert operation.state is OperationState.DONE, operation
                yield cluster, agent
            finally:
                relay.cancel()
                await asyncio.gather(relay, return_exceptions=True)
                await agent.kill()
                await world.stop()


async def _registered(cluster: Cluster) -> bool:
    return bool((await cluster.get("/v1/hosts"))["hosts"])


def high(cpu_cores: float = 3.0) -> Any:
    return vm("high-1", "fixed", cpu_cores, 1300.0)


async def sizes(agent: RealAgent) -> dict[str, float]:
    return {row.name: row.current.cpu_cores for row in (await agent.report()).vms}


async def test_a_real_agent_is_deflated_and_reinflated(pair: tuple[Cluster, RealAgent]) -> None:
    cluster, agent = pair
    operation = await cluster.create(high(), deadline_s=60.0)
    assert operation.state is OperationState.DONE, operation
    assert {row.name for row in operation.vms} == {"low-1", "low-2"}
    assert all(row.ledger for row in operation.vms)
    assert await sizes(agent) == {"low-1": 1.5, "low-2": 1.5, "high-1": 3.0}
    charged = sum((row.allocation().charge for row in (await agent.report()).vms), ZERO)
    assert 3600.0 - 8.0 <= charged.memory_mib <= 3600.0
    operation = await cluster.delete("high-1")
    assert operation.state is OperationState.DONE, operation
    assert await sizes(agent) == {"low-1": 3.0, "low-2": 3.0}

    async def learnt() -> bool:
        changes = (await cluster.get("/v1/core-changes?machine=low-1"))["core_changes"]
        return [row["cores_after"] for row in changes] == [3.0, 1.5, 3.0]

    await until(learnt)
    rows = (await cluster.get("/v1/machines?duration_s=0"))["machines"]
    assert {row["machine"]: row["last_change"] for row in rows} == {"low-1": "growth", "low-2": "growth"}


async def test_a_real_agent_preempts_for_the_manager_below_the_minimum(pair: tuple[Cluster, RealAgent]) -> None:
    cluster, agent = pair
    operation = await cluster.create(high(5.3), deadline_s=60.0)
    assert operation.state is OperationState.DONE, operation
    assert sorted(cores > 0 for cores in (await sizes(agent)).values()) == [False, True, True]
    (event,) = await cluster.events("preempted")
    assert "reason minimum" in event["sentence"]


async def test_a_target_reaches_a_real_agent(pair: tuple[Cluster, RealAgent]) -> None:
    cluster, agent = pair
    body = {"request_id": "t", "generation": 9, "target": {"cpu_cores": 1.5, "memory_mib": 700.0}}
    status, answer = await cluster.call("PUT", "/v1/vms/low-1/target", json=body)
    assert status == 202, answer
    assert (await cluster.ended("t")).state is OperationState.DONE
    assert (await sizes(agent))["low-1"] == 1.5
    status, problem = await cluster.call(
        "PUT", "/v1/vms/low-1/target", json={**body, "request_id": "u", "generation": 8}
    )
    assert (status, problem["field"]) == (409, "generation")


@pytest.mark.parametrize("calls", [0, 3, 8, 15, 25])
async def test_a_real_agent_killed_in_the_middle_of_a_placement_ends_at_the_plan(
    pair: tuple[Cluster, RealAgent], calls: int
) -> None:
    """The agent is killed after so many more calls to its hypervisor, and started again."""
    cluster, agent = pair
    agent.world.delay = random_delays(calls, 0.02)
    enough = len(agent.world.calls) + calls
    request = {"request_id": "c", "vm": high(), "deadline_s": 60.0}
    assert (await cluster.call("POST", "/v1/vms", json=request))[0] == 202
    await until(lambda: len(agent.world.calls) >= enough)
    await agent.kill()
    await agent.start()
    operation = await cluster.ended("c")
    found = await sizes(agent)
    if operation.state is OperationState.DONE:
        assert set(found) == {"low-1", "low-2", "high-1"}
    else:
        assert found == {"low-1": 3.0, "low-2": 3.0}
    charged = sum((row.allocation().charge for row in (await agent.report()).vms), ZERO)
    assert charged.fits_in((await agent.report()).capacity.vector())
