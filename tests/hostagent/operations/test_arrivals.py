"""An arrival that was answered as failed is not taken up later, and its room is free again."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from hostagent.errors import HypervisorTimeout
from hostagent.operations import operations
from hostagent.operations.agent import Agent
from hostagent.state.intents import Intent, Phase
from hostagent.state.journal import Journal
from tests.hostagent.conftest import Client, Command, has_failed, low_vm, succeeding
from tests.hostagent.fake_moves import FakeMoves
from tests.hostagent.world import World
from tests.waiting import until

DOMAIN = "ebb-host-a.web"
IDENTITY = "0c9d1a34-6c1b-4f0e-9a55-0d8d9f6b2c11"
BODY: dict[str, Any] = {
    "request_id": "a",
    "vm": low_vm("web"),
    "size": low_vm("web")["nominal"],
    "boot_memory_mib": 512.0,
    "uuid": IDENTITY,
}
ARRIVAL = "/v1/vms/web/arrival"


class Late(FakeMoves):
    """A hypervisor that does not answer in time, and defines late what it was to define."""

    def __init__(self, world: World) -> None:
        super().__init__(self._nothing)
        self._world = world
        self._intents: list[Intent] = []

    async def _nothing(self, *_: object) -> None:
        raise AssertionError("it is asked to receive only")

    async def receive(self, domain: str, identity: str, intent: Intent) -> None:
        self._intents.append(intent)
        raise HypervisorTimeout("libvirt did not answer within 15 s")

    async def wakes(self, state: str = "stopped") -> None:
        (intent,) = self._intents
        await self._world._do_receive(DOMAIN, IDENTITY, intent.model_dump_json(), intent.boot_mib)
        self._world.domains[DOMAIN].state = state


def late_moves(agent: Agent, world: World, monkeypatch: pytest.MonkeyPatch) -> Late:
    moves = Late(world)
    monkeypatch.setattr(agent.host.hypervisor, "moves", moves)
    return moves


async def defined_late(
    agent: Agent, command: Command, world: World, monkeypatch: pytest.MonkeyPatch, state: str = "stopped"
) -> None:
    """An arrival fails, its agent ends, and only then is its domain defined."""
    moves = late_moves(agent, world, monkeypatch)
    assert (await command("POST", ARRIVAL, BODY)).state == "failed"
    await agent.close()
    await moves.wakes(state)


async def test_an_arrival_that_was_defined_after_it_had_failed_is_cleared_away_by_a_successor_of_the_agent(
    agent: Agent, command: Command, world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    await defined_late(agent, command, world, monkeypatch)
    async with succeeding(world, tmp_path) as successor:
        await has_failed(successor, "a")
        await until(lambda: not world.domains and "web" not in successor.host.vms)
        assert successor.host.free() == successor.host.slice.capacity


async def test_an_arrival_that_has_failed_stays_charged_until_its_domain_can_be_removed(
    agent: Agent, command: Command, world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    await defined_late(agent, command, world, monkeypatch)
    world.failures["destroy"] = "libvirt did not answer within 60 s"
    async with succeeding(world, tmp_path) as successor:
        await has_failed(successor, "a")
        assert successor.host.vms["web"].allocation().charge.memory_mib > 1024.0
        world.failures.clear()
        await until(lambda: not world.domains and "web" not in successor.host.vms)


async def test_a_vm_that_runs_here_is_looked_after_though_its_arrival_was_answered_as_failed(
    agent: Agent, command: Command, world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    await defined_late(agent, command, world, monkeypatch, "running")
    async with succeeding(world, tmp_path) as successor:
        await has_failed(successor, "a")
        await until(lambda: successor.host.vms["web"].intent.phase is Phase.SETTLED)
        assert world.domains[DOMAIN].state == "running"


async def test_an_arrival_is_not_answered_as_failed_before_that_is_written_down(
    agent: Agent, client: Client, world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    moves = late_moves(agent, world, monkeypatch)
    with monkeypatch.context() as broken:

        def full(_: Journal) -> None:
            raise OSError("no space left on device")

        broken.setattr(Journal, "_save_state", full)
        broken.setattr(operations, "WRITE_AGAIN_S", 0.02)
        assert (await client.post(ARRIVAL, json=BODY)).status == 202
        async with asyncio.timeout(20):
            while (operation := await agent.requests.operations.get("a")) is None or not operation.progress:
                await asyncio.sleep(0.02)
        assert operation.state == "running", operation.sentence
        await agent.close()
    await moves.wakes()
    async with succeeding(world, tmp_path) as successor:
        ended = await successor.requests.operations.get("a", 5.0)
        assert ended is not None
        assert (ended.state, "web" in successor.host.vms) == ("done", True), "it goes on where it was"
