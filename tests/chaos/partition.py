"""A manager and two real host agents over make-believe hosts, each in a network namespace of its own."""

from __future__ import annotations

import asyncio
import contextlib
import signal
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import aiohttp

from ebbtide.lab.state import write_private
from ebbtide.rest.credentials import command_token, report_token
from hostagent.state.intents import Intent
from tests.chaos.agent_process import CAPACITY, OVERHEAD_MIB
from tests.chaos.checks import Violated, apart, hold, settled
from tests.chaos.gates import Gates
from tests.chaos.manager_process import PATIENCE
from tests.chaos.namespaces import PORT, Network, network, sockets_in
from tests.chaos.process import ManagerProcess
from tests.forked import Forked
from tests.hostagent.world import World
from tests.manager.cluster import TOKEN, vm
from tests.manager.fake_agent import HOSTS_KEY

HOSTS = ("host-a", "host-b")


@dataclass
class Partition:
    """``sites``: what each host really holds, and the gates in its agent."""

    network: Network
    manager: ManagerProcess
    manager_gates: Gates
    session: aiohttp.ClientSession
    worlds: dict[str, World] = field(default_factory=dict)
    gates: dict[str, Gates] = field(default_factory=dict)
    violations: set[str] = field(default_factory=set)

    async def call(self, method: str, path: str, body: Any = None) -> tuple[int, Any]:
        async with self.session.request(method, self.manager.url + path, json=body) as response:
            return response.status, await response.json()

    async def create(self, name: str, priority: str = "deflatable", request_id: str = "", **size: float) -> str:
        """Ask for a VM of 3 cores and 1000 MiB; gives the request id."""
        request_id = request_id or f"create-{name}"
        body = {"request_id": request_id, "vm": vm(name, priority, **size), "deadline_s": 60.0}
        status, answer = await self.call("POST", "/v1/vms", body)
        assert status == 202, answer
        return request_id

    async def ended(self, request_id: str, limit_s: float = 60.0) -> Any:
        async with asyncio.timeout(limit_s):
            while True:
                status, operation = await self.call("GET", f"/v1/operations/{request_id}?wait_s=5")
                assert status == 200, operation
                if operation["state"] != "running":
                    return operation

    async def host_state(self, host: str, state: str, limit_s: float = 30.0) -> None:
        async with asyncio.timeout(limit_s):
            while True:
                _, found = await self.call("GET", "/v1/hosts")
                if {row["id"]: row["state"] for row in found["hosts"]}.get(host) == state:
                    return
                await asyncio.sleep(0.05)

    def intents(self, host: str) -> list[Intent]:
        return [Intent.model_validate_json(domain.intent) for domain in self.worlds[host].domains.values()]

    def names(self, host: str) -> set[str]:
        return {intent.spec.name for intent in self.intents(host)}

    def cores(self, host: str) -> dict[str, float]:
        return {intent.spec.name: intent.committed.cpu_cores for intent in self.intents(host)}

    async def watch(self) -> None:
        """No room is promised twice, and no VM is on two hosts: at any moment."""
        while True:
            for host in self.worlds:
                intents = self.intents(host)
                cores = sum(intent.committed.cpu_cores for intent in intents)
                memory_mib = sum(intent.committed.memory_mib + OVERHEAD_MIB for intent in intents)
                if cores > CAPACITY.cpu_cores + 1e-6 or memory_mib > CAPACITY.memory_mib + 1e-6:
                    self.violations.add(f"{host} is overfull: {cores} cores, {memory_mib} MiB")
            if both := self.names(HOSTS[0]) & self.names(HOSTS[1]):
                self.violations.add(f"on both hosts: {both}")
            await asyncio.sleep(0.01)

    async def agreed(self) -> None:
        """Manager and hosts tell the same story, and nothing is left to do."""
        for host in HOSTS:
            await self.host_state(host, "ready")
        left = await settled(self.manager.database, 30)
        assert not left, left
        _, found = await self.call("GET", "/v1/vms")
        managed = {(row["name"], row["host"]) for row in found["vms"] if row["host"]}
        present = {(name, host) for host in HOSTS for name in self.names(host)}
        self.hold("in the end", *apart(managed, present))

    def hold(self, when: str, *found: str) -> None:
        """What was seen while it happened, and what is found now."""
        hold(when, *found, *sorted(self.violations), *self.manager.defects())


@contextlib.asynccontextmanager
async def partition(directory: Path, patience_s: float | None) -> AsyncIterator[Partition]:
    """:param patience_s: how long the manager bears with an agent that is away; None: about a second."""
    with network(HOSTS) as net, TemporaryDirectory(prefix="ebb") as short:
        (directory / "manager").mkdir()
        process = ManagerProcess(directory / "manager", "0.0.0.0", PORT, net.manager)
        process.url = f"http://{net.manager_address(HOSTS[0])}:{PORT}"
        connector = aiohttp.TCPConnector(socket_factory=sockets_in(net.manager))
        headers = {"Authorization": f"Bearer {TOKEN}"}
        agents: list[Forked] = []
        async with aiohttp.ClientSession(connector=connector, headers=headers) as session:
            found = Partition(net, process, Gates(process.directory), session)
            watching: asyncio.Task[None] | None = None
            try:
                for host in HOSTS:
                    home = directory / host
                    home.mkdir()
                    write_private(home / "token", command_token(HOSTS_KEY, host))
                    write_private(home / "report-token", report_token(HOSTS_KEY, host))
                    (Path(short) / host).mkdir()
                    world = found.worlds[host] = World(Path(short) / host)
                    found.gates[host] = Gates(home)
                    await world.start()
                    agents.append(await _agent(net, host, world, home))
                await process.start(**({PATIENCE: str(patience_s)} if patience_s is not None else {}))
                for host in HOSTS:
                    await found.host_state(host, "ready", 60)
                watching = asyncio.create_task(found.watch(), name="watch")
                try:
                    yield found
                except Violated:
                    raise
                except Exception:
                    # Also where the test ended before it looked; a cancellation stays one.
                    found.hold("when the test failed")
                    raise
                found.hold("in the end")
            finally:
                if watching is not None:
                    watching.cancel()
                    await asyncio.gather(watching, return_exceptions=True)
                await process.end(signal.SIGKILL)
                for agent in agents:
                    agent.kill()
                    await agent.wait()
                for world in found.worlds.values():
                    await world.stop()


async def _agent(net: Network, host: str, world: World, home: Path) -> Forked:
    arguments = [host, str(world.socket), str(home), net.address(host), str(PORT)]
    arguments.append(f"http://{net.manager_address(host)}:{PORT}")
    return await Forked.start("tests.chaos.agent_process", arguments, home / "agent.log", namespace=net.namespace(host))
