"""A manager killed at any point of a VM's lifecycle ends each plan: done or undone, once, and never two running."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from ebbtide.messages.hosts import HostTemplate
from ebbtide.messages.operations import OperationState
from tests.manager.cluster import Cluster, cluster_of, vm
from tests.manager.fake_agent import FakeAgent
from tests.manager.lifecycle import ask, consistent, kill_at_every_record, send, watch_for_two
from tests.waiting import until

pytestmark = pytest.mark.usefixtures("each_store")

#: What is asked for, and how many commands it takes on the first and on the second host.
BODIES: dict[str, dict[str, Any]] = {
    "stop": {"limit_s": 1.0},
    "start": {},
    "resize": {"nominal": {"cpu_cores": 4.0}},
    "migrate": {"host": "host-b", "lose_disk": True},
    "live": {"host": "host-b", "live": True, "copy_storage": True},
}
COMMANDS = [("stop", 0, 1), ("stop", 0, 2), ("start", 0, 1), ("start", 0, 2), ("resize", 0, 1), ("resize", 0, 2)]
COMMANDS += [("resize", 0, 3), ("migrate", 0, 1), ("migrate", 0, 2), ("migrate", 1, 1), ("migrate", 1, 2)]
COMMANDS += [("live", 1, 1), ("live", 1, 2), ("live", 0, 1), ("live", 0, 2)]


@contextlib.asynccontextmanager
async def prepared(path: Path, verb: str) -> AsyncIterator[tuple[Cluster, list[str]]]:
    first = FakeAgent("host-a", cpu_cores=6.0, memory_mib=2400.0)
    second = FakeAgent("host-b", cpu_cores=4.0, memory_mib=1500.0)
    async with cluster_of(path, first, second) as cluster:
        for name in ("low-1", "low-2"):
            await cluster.create(vm(name), policy="first-fit")
        if verb == "start":
            await ask(cluster, "low-1", "stop", request_id="before")
            await cluster.create(vm("high-1", "fixed", 2.0, 600.0), policy="first-fit")
        if verb in ("migrate", "live"):
            first.peers, second.peers = {"host-b": second}, {"host-a": first}
            await fill(cluster, second)
        yield cluster, watch_for_two(cluster.agents, "low-1")


async def fill(cluster: Cluster, agent: FakeAgent) -> None:
    """A VM on the agent's host, so that there is no room without a deflation."""
    agent.templates = (HostTemplate(name="lab"), HostTemplate(name="here"))
    for other in cluster.agents:
        other.templates = other.templates or (HostTemplate(name="lab"),)
    await cluster.ready()
    made = await cluster.create(vm("low-3", cpu_cores=3.0, memory_mib=900.0, template="here"))
    assert made.host == agent.id


async def begin(cluster: Cluster, verb: str) -> None:
    with contextlib.suppress(aiohttp.ClientError):
        path = "migrate" if verb == "live" else verb
        await send(cluster, "low-1", path, request_id="request", **BODIES[verb])


async def ended_well(cluster: Cluster, both: list[str]) -> None:
    operation = await cluster.ended("request")
    assert operation.state is OperationState.DONE, (operation.sentence, operation.progress)
    assert both == []
    await consistent(cluster)


@pytest.mark.parametrize(
    ("carried_out", "agent_forgets"),
    [(False, False), (True, False), (True, True)],
    ids=["command-lost", "answer-lost", "agent-forgets"],
)
@pytest.mark.parametrize(("verb", "host", "command"), COMMANDS)
async def test_a_manager_killed_while_a_command_is_under_way_finishes_the_plan(
    tmp_path: Path, verb: str, host: int, command: int, carried_out: bool, agent_forgets: bool
) -> None:
    async with prepared(tmp_path, verb) as (cluster, both):
        agent = cluster.agents[host]
        agent.trouble.hangs_at, agent.trouble.carries_out = len(agent.arrived) + command, carried_out
        await begin(cluster, verb)
        async with asyncio.timeout(10):
            await agent.hanging.wait()
        await cluster.kill_manager()
        agent.trouble.hangs_at = None
        if agent_forgets:
            agent.forget()
        await cluster.start_manager()
        await ended_well(cluster, both)


@pytest.mark.parametrize("stored", [False, True], ids=["before-the-record", "after-the-record"])
@pytest.mark.parametrize("verb", list(BODIES))
async def test_a_manager_killed_at_every_record_finishes_the_plan(tmp_path: Path, verb: str, stored: bool) -> None:
    async with prepared(tmp_path, verb) as (cluster, both):
        await begin(cluster, verb)
        assert await kill_at_every_record(cluster, "request", stored) >= 2
        await ended_well(cluster, both)


async def test_a_manager_killed_while_it_waits_for_a_host_waits_again(tmp_path: Path) -> None:
    async with prepared(tmp_path, "migrate") as (cluster, both):
        _, second = cluster.agents
        second.trouble.hangs_at = len(second.arrived) + 2
        await begin(cluster, "migrate")
        async with asyncio.timeout(10):
            await second.hanging.wait()
        await second.die()

        async def waiting() -> bool:
            progress = (await cluster.get("/v1/operations/request"))["progress"]
            return any("waiting for host-b" in sentence for sentence in progress)

        await until(waiting)
        await cluster.kill_manager()
        await cluster.start_manager()
        assert (await cluster.get("/v1/operations/request"))["state"] == "running"
        await second.revive()
        second.manager = cluster.agents[0].manager
        await ended_well(cluster, both)
