"""kill -9 of the host agent at random moments of a deflation: it ends at the plan, or where it began."""

from __future__ import annotations

import asyncio
import contextlib
import random
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from ebbtide.lab.state import write_private
from hostagent.state.intents import Intent, Phase
from tests.forked import Forked
from tests.hostagent.conftest import TOKEN, low_vm
from tests.hostagent.world import World, random_delays

pytestmark = pytest.mark.service

KILLS = 24
NEED = {"cpu_cores": 3.0, "memory_mib": 1100.0}
Agent = Callable[[], Awaitable[Forked]]


class Caller:
    """Speaks to an agent that may be dead at any time."""

    def __init__(self, port: int, session: aiohttp.ClientSession) -> None:
        self._url = f"http://127.0.0.1:{port}"
        self._session = session

    async def request(self, method: str, path: str, body: Any = None) -> tuple[int, Any]:
        async with self._session.request(method, self._url + path, json=body) as response:
            return response.status, await response.json()

    async def ready(self) -> None:
        async with asyncio.timeout(60):
            while True:
                with contextlib.suppress(aiohttp.ClientError):
                    await self.request("GET", "/v1/host")
                    return
                await asyncio.sleep(0.05)

    async def ended(self, request_id: str) -> Any:
        async with asyncio.timeout(60):
            while True:
                status, operation = await self.request("GET", f"/v1/operations/{request_id}?wait_s=20")
                if status == 404 or operation["state"] != "running":
                    return operation if status == 200 else None


@pytest.fixture
async def agent(world: World, tmp_path: Path) -> AsyncIterator[tuple[Agent, Caller]]:
    """Start agents one after another on the same port and state directory."""
    write_private(tmp_path / "token", TOKEN)
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    processes: list[Forked] = []
    session = aiohttp.ClientSession(headers={"Authorization": f"Bearer {TOKEN}"})
    caller = Caller(port, session)

    async def start() -> Forked:
        arguments = [str(world.socket), str(tmp_path), str(port)]
        process = await Forked.start("tests.hostagent.agent_process", arguments, tmp_path / "agent.log")
        processes.append(process)
        await caller.ready()
        return process

    yield start, caller
    for process in processes:
        process.kill()
        await process.wait()
    await session.close()


async def test_a_killed_agent_ends_at_the_plan_or_at_nominal(world: World, agent: tuple[Agent, Caller]) -> None:
    """Each round: deflate, kill at a random moment, restart, compare; then reinflate and go again."""
    start, caller = agent
    generator = random.Random(20191)
    process = await start()
    for name in ("low-1", "low-2"):
        await caller.request("POST", "/v1/vms", {"request_id": f"c-{name}", "vm": low_vm(name)})
        assert (await caller.ended(f"c-{name}"))["state"] == "done"
    await _connected(caller)
    interrupted = 0
    for number in range(3 * KILLS):
        if number >= KILLS and interrupted >= 10:
            break  # a busy machine needs more of them to hit ten
        for domain in world.domains.values():
            domain.cache_mib = 500.0
        world.delay = random_delays(number, 0.03)
        body = {"request_id": f"reclaim-{number}", "need": NEED, "deadline_s": 30.0}
        sending = asyncio.create_task(caller.request("POST", "/v1/reclaims", body))
        await asyncio.sleep(generator.uniform(0.0, 1.0))
        process.kill()
        await process.wait()
        await asyncio.gather(sending, return_exceptions=True)
        phases = {Intent.model_validate_json(d.intent).phase for d in world.domains.values()}
        interrupted += Phase.DEFLATING in phases
        world.delay = lambda: 0.0
        process = await start()
        operation = await caller.ended(f"reclaim-{number}")
        for name, domain in world.domains.items():
            intent = Intent.model_validate_json(domain.intent)
            assert intent.phase is Phase.SETTLED, name
            memory, cpus = domain.bound_mib, len(domain.online)
            if (memory, cpus) == (1024, 3):
                assert domain.quota is None
                assert intent.committed.memory_mib == 1024
            else:
                assert operation is not None, "deflated, but nobody owns it"
                assert (memory, cpus, domain.quota) == (474, 2, 0.75), name
                assert (intent.committed.memory_mib, intent.committed.cpu_cores) == (474, 1.5)
                assert intent.cause is not None
                assert intent.cause.request_id == f"reclaim-{number}"
        await _connected(caller)
        await caller.request("POST", "/v1/reinflations", {"request_id": f"back-{number}"})
        assert (await caller.ended(f"back-{number}"))["state"] == "done"
        assert all((d.bound_mib, len(d.online), d.quota) == (1024, 3, None) for d in world.domains.values())
    assert world.least_available_mib >= 48
    assert interrupted >= 10, f"only {interrupted} of {3 * KILLS} kills came in the middle of a deflation"


async def _connected(caller: Caller) -> None:
    async with asyncio.timeout(20):
        while True:
            _, host = await caller.request("GET", "/v1/host")
            if all(vm["guest_connected"] for vm in host["vms"]):
                return
            await asyncio.sleep(0.05)
