"""What the tests of faults need of the make-believe host: an agent as a process, and pictures."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp

from ebbtide.deflation.bounds import EMULATOR_SHARE
from ebbtide.deflation.resources import ResourceVector
from ebbtide.lab.state import write_private
from ebbtide.messages.vms import VMStatus
from hostagent.state.intents import Intent
from tests.faults.invariants import Picture, Seen
from tests.forked import Forked
from tests.hostagent.agent_process import CAPACITY
from tests.hostagent.conftest import TOKEN
from tests.hostagent.test_kill import Caller
from tests.hostagent.world import World


def picture_of(world: World, statuses: list[VMStatus]) -> Picture:
    """The make-believe host's own figures beside what an agent says."""
    vms = {}
    for status in statuses:
        domain = world.domains[status.domain]
        quota = 1.0 if domain.quota is None else domain.quota
        cores = min(float(len(domain.online)), quota * len(domain.online))
        if domain.cap is not None:
            cores = min(cores, round(domain.cap / (1 + EMULATOR_SHARE), 4))
        vms[status.name] = Seen(
            status=status,
            held=ResourceVector(cpu_cores=cores, memory_mib=domain.bound_mib),
            process=id(domain),
            pending_mib=abs(domain.requested_mib - domain.plugged_mib),
            available_mib=domain.available_mib,
            # With less than nothing left its kernel would have killed something.
            oom_kills=int(world.least_available_mib < 0),
            boot_id=str(world.starts),
        )
    return Picture(CAPACITY, vms)


class AgentProcess:
    """An agent in a process of its own, started again and again on the same port and state directory."""

    def __init__(self, world: World, state_dir: Path, caller: Caller, port: int) -> None:
        self._arguments = [str(world.socket), str(state_dir), str(port)]
        self._log = state_dir / "agent.log"
        self._world = world
        self.caller = caller
        self.process: Forked | None = None

    async def start(self, *death: str, log: Path | None = None) -> None:
        """Start it; ``death``: where it is to kill itself (see `tests.faults.staged_agent`)."""
        words = [*self._arguments, *death]
        self.process = await Forked.start("tests.faults.staged_agent", words, log or self._log)
        await self.caller.ready()

    async def died(self) -> int:
        """Until it has ended; its exit status."""
        assert self.process is not None
        async with asyncio.timeout(60):
            return await self.process.wait()

    async def stop(self) -> None:
        if self.process is not None:
            self.process.kill()
            await self.process.wait()

    async def connected(self) -> None:
        async with asyncio.timeout(30):
            while not all(vm.guest_connected for vm in await self.statuses()):
                await asyncio.sleep(0.05)

    async def statuses(self) -> list[VMStatus]:
        _, host = await self.caller.request("GET", "/v1/host")
        return [VMStatus.model_validate(vm) for vm in host["vms"]]

    async def picture(self) -> Picture:
        return picture_of(self._world, await self.statuses())

    async def command(self, method: str, path: str, body: dict[str, Any]) -> Any:
        """Send it and wait for its end."""
        status, answer = await self.caller.request(method, path, body)
        assert status == 202, answer
        return await self.caller.ended(body["request_id"])

    def intents(self) -> list[Intent]:
        """What stands in the domains' metadata."""
        return [Intent.model_validate_json(domain.intent) for domain in self._world.domains.values()]


@asynccontextmanager
async def agent_process(world: World, state_dir: Path) -> AsyncIterator[AgentProcess]:
    write_private(state_dir / "token", TOKEN)
    write_private(state_dir / "report-token", "reports-of-the-test")
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    async with aiohttp.ClientSession(headers={"Authorization": f"Bearer {TOKEN}"}) as session:
        made = AgentProcess(world, state_dir, Caller(port, session), port)
        try:
            yield made
        finally:
            await made.stop()
