"""kill -9 of the host agent at each state of both state machines: started again, it ends at the plan.

The make-believe host stands in, since no real guest is in the same state twice; a real one is killed in
tests/guests/test_agent_killed.py.
"""

from __future__ import annotations

import asyncio
import contextlib
import signal
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from ebbtide.deflation.cascade import cascade, reinflation
from hostagent.state.intents import Phase
from tests.faults.fakes import AgentProcess, agent_process
from tests.faults.invariants import broken, not_nominal
from tests.hostagent.conftest import low_vm
from tests.hostagent.world import World

pytestmark = pytest.mark.service

DOWN = {"cpu_cores": 1.0, "memory_mib": 474.0}
#: Where memory moves too, the limits on CPU are set together with its last step.
FEWER_CPUS = {"cpu_cores": 1.0, "memory_mib": 1024.0}
UP = {"cpu_cores": 3.0, "memory_mib": 1024.0}
ENTERED, ANSWERED = "entered", "answered"
#: Before the first instruction, and after the last.
INSTRUCTING = {"new": (ENTERED,), "done": (ENTERED,)}


def moments(phases: Any) -> list[tuple[str, str]]:
    return [(phase.value, moment) for phase in phases for moment in INSTRUCTING.get(phase.value, (ENTERED, ANSWERED))]


@pytest.fixture
async def agent(world: World, tmp_path: Path) -> AsyncIterator[AgentProcess]:
    async with agent_process(world, tmp_path) as made:
        yield made


@pytest.mark.parametrize(("phase", "moment"), moments(cascade.Phase))
async def test_an_agent_killed_at_each_state_of_a_deflation_ends_at_the_plan(
    world: World, agent: AgentProcess, phase: str, moment: str
) -> None:
    await agent.start("Cascade", phase, moment)
    await _fill(agent, world, UP)
    if phase == "clearing":
        for domain in world.domains.values():
            # Nothing is free, and what an application would give is not waited for.
            domain.cold_mib, domain.cache_mib = 1000.0, 0.0
            domain.findings = [["cold-reclaim", True, "the host has them go first", ""]]
    await _killed_and_at_the_plan(world, agent, FEWER_CPUS if phase == "limiting" else DOWN)


@pytest.mark.parametrize("moment", [ENTERED, ANSWERED])
@pytest.mark.parametrize("phases", ["unplugging+offlining", "promised+unplugging"])
async def test_an_agent_killed_with_two_steps_under_way_ends_at_the_plan(
    world: World, agent: AgentProcess, phases: str, moment: str
) -> None:
    await agent.start("Cascade", phases, moment)
    await _fill(agent, world, UP)
    for domain in world.domains.values():
        if "promised" in phases:
            # It takes a while to keep what it promises.
            domain.application = "slow"
    await _killed_and_at_the_plan(world, agent, DOWN)


async def _killed_and_at_the_plan(world: World, agent: AgentProcess, size: dict[str, float]) -> None:
    before = await agent.picture()
    await _killed(agent, size)
    await agent.start()
    operation = await agent.caller.ended("t")
    assert operation["state"] == "done", operation
    assert broken(before, await agent.picture()) == []
    (domain,) = world.domains.values()
    assert (domain.bound_mib, len(domain.online)) == (size["memory_mib"], 1)
    assert world.least_available_mib >= 48
    await _reinflated(agent)


async def test_what_a_killed_agent_had_asked_of_a_guest_is_called_off_where_the_guest_cannot_give_it(
    world: World, agent: AgentProcess
) -> None:
    """Killed when the guest has stopped half way, before it is asked for no more; the next agent never hears of it."""
    await agent.start("Hypervisor", "set_plugged", ANSWERED)
    await _fill(agent, world, UP)
    (domain,) = world.domains.values()
    domain.stuck_mib = domain.plugged_mib / 2
    before = await agent.picture()
    await _killed(agent, {**UP, "memory_mib": 474.0}, deadline_s=6.0)
    assert domain.requested_mib < domain.plugged_mib
    world.guests_answer = False
    await agent.start("Hello", "1")
    operation = await agent.caller.ended("t")
    assert operation["state"] == "partial", operation
    assert broken(before, await agent.picture()) == []
    world.guests_answer, domain.stuck_mib = True, 0.0
    await _reinflated(agent)


async def test_cpus_that_a_killed_agent_took_off_line_cost_a_vm_nothing_while_its_guest_is_silent(
    world: World, agent: AgentProcess
) -> None:
    """Which are on line the guest says to nobody then; were all, the cap of the domain would hold them."""
    await agent.start("Cascade", "offlining", ANSWERED)
    await _fill(agent, world, UP)
    before = await agent.picture()
    await _killed(agent, FEWER_CPUS)
    world.guests_answer = False
    await agent.start("Hello", "1")
    operation = await agent.caller.ended("t")
    assert operation["state"] == "done", operation
    (domain,) = world.domains.values()
    assert domain.online == {0}
    assert broken(before, await agent.picture()) == []
    domain.online = {0, 1, 2}
    assert broken(before, await agent.picture()) == []
    domain.online, world.guests_answer = {0}, True
    await _reinflated(agent)


@pytest.mark.parametrize(("phase", "moment"), moments(reinflation.Phase))
async def test_an_agent_killed_at_each_state_of_a_reinflation_ends_at_the_plan(
    world: World, agent: AgentProcess, phase: str, moment: str
) -> None:
    await agent.start("Reinflation", phase, moment)
    await _fill(agent, world, DOWN)
    before = await agent.picture()
    await _killed(agent, UP)
    await agent.start()
    operation = await agent.caller.ended("t")
    assert operation["state"] == "done", operation
    after = await agent.picture()
    assert (broken(before, after), not_nominal(after)) == ([], [])
    await _reinflated(agent)


@pytest.mark.parametrize("moment", [ENTERED, ANSWERED])
@pytest.mark.parametrize("call", ["create", "resume"])
async def test_an_agent_killed_in_a_creation_leaves_a_running_vm_or_nothing(
    world: World, agent: AgentProcess, call: str, moment: str
) -> None:
    await agent.start("Hypervisor", call, moment)
    with contextlib.suppress(aiohttp.ClientError):
        await agent.caller.request("POST", "/v1/vms", {"request_id": "c", "vm": low_vm("low-1")})
    assert await agent.died() == -signal.SIGKILL
    await agent.start()
    operation = await agent.caller.ended("c")
    if not world.domains:
        assert operation is None, "nothing was begun, so nobody knows of it"
        assert await agent.statuses() == []
        return
    assert operation["state"] == "done"
    await agent.connected()
    picture = await agent.picture()
    assert (broken(picture, picture), not_nominal(picture)) == ([], [])


@pytest.mark.parametrize("moment", [ENTERED, ANSWERED])
async def test_an_agent_killed_in_a_deletion_leaves_nothing(world: World, agent: AgentProcess, moment: str) -> None:
    await agent.start("Hypervisor", "destroy", moment)
    await _fill(agent, world, UP)
    with contextlib.suppress(aiohttp.ClientError):
        await agent.caller.request("DELETE", "/v1/vms/low-1?request_id=d")
    assert await agent.died() == -signal.SIGKILL
    await agent.start()
    async with asyncio.timeout(20):
        while world.domains or await agent.statuses():
            await asyncio.sleep(0.05)


async def _fill(agent: AgentProcess, world: World, size: dict[str, float]) -> None:
    """A VM with a cache, at a size."""
    created = await agent.command("POST", "/v1/vms", {"request_id": "c", "vm": low_vm("low-1")})
    assert created["state"] == "done", created
    await agent.connected()
    for domain in world.domains.values():
        domain.cache_mib = 300.0
    if size != UP:
        body = {"request_id": "s", "generation": 2, "target": size, "deadline_s": 30.0}
        assert (await agent.command("PUT", "/v1/vms/low-1/target", body))["state"] == "done"


async def _killed(agent: AgentProcess, size: dict[str, float], deadline_s: float = 30.0) -> None:
    """Ask for a size and see the agent die of it, its intent unfinished."""
    body = {"request_id": "t", "generation": 9, "target": size, "deadline_s": deadline_s}
    with contextlib.suppress(aiohttp.ClientError):
        await agent.caller.request("PUT", "/v1/vms/low-1/target", body)
    assert await agent.died() == -signal.SIGKILL
    (intent,) = agent.intents()
    assert intent.phase in (Phase.DEFLATING, Phase.REINFLATING), "the operation had ended before the kill"


async def _reinflated(agent: AgentProcess) -> None:
    await agent.connected()
    await agent.command("POST", "/v1/reinflations", {"request_id": "back", "vms": ["low-1"]})
    async with asyncio.timeout(20):
        while any(intent.phase is not Phase.SETTLED for intent in agent.intents()):
            await asyncio.sleep(0.05)
    assert not_nominal(await agent.picture()) == []
