"""The real host agent over a make-believe host, with gates in its REST interface.

Usage: python -m tests.chaos.agent_process HOST_ID WORLD_SOCKET DIRECTORY ADDRESS PORT MANAGER
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path

from aiohttp import web

from ebbtide.deflation.resources import ResourceVector
from ebbtide.rest.logs import configure_logs
from hostagent import service
from hostagent.api.app import make_app
from hostagent.control import reporter
from hostagent.libvirt.definitions import usable_boot_mib
from hostagent.libvirt.hypervisor import DomainState
from hostagent.operations.agent import Agent
from hostagent.state.intents import Intent
from hostagent.state.journal import Journal
from hostagent.vm.host import Host, Slice
from tests.chaos.gates import Gates
from tests.hostagent.fake_hypervisor import FakeHypervisor

CAPACITY = ResourceVector(cpu_cores=6, memory_mib=3600)
OVERHEAD_MIB = 320.0
REPORT_S = 0.2
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class OwnedHypervisor(FakeHypervisor):
    """One of several in a cluster."""

    def __init__(self, socket: Path, owner: str) -> None:
        super().__init__(socket)
        self._owner = owner

    async def domains(self) -> list[DomainState]:
        found = await self._call("domains")
        read = [DomainState(d["name"], d["state"], Intent.model_validate_json(d["intent"])) for d in found]
        return [domain for domain in read if domain.intent.owner == self._owner]


def gated(app: web.Application, gates: Gates) -> web.Application:
    """Gates before a command is looked at, before it is answered, and before the answer to a long poll."""

    @web.middleware
    async def middleware(request: web.Request, handler: Handler) -> web.StreamResponse:
        kind = _kind(request)
        await gates.pass_through(f"{kind}-arrived")
        answer = await handler(request)
        await gates.pass_through(f"{kind}-answer")
        return answer

    app.middlewares.append(middleware)
    return app


def _kind(request: web.Request) -> str:
    last = request.path.split("/")[2]
    return {"GET": "read", "POST": "post", "PUT": "put", "DELETE": "delete"}[request.method] + f"-{last}"


async def run(host_id: str, world: Path, directory: Path, address: str, port: int, manager: str) -> None:
    vars(reporter)["EVERY_S"] = REPORT_S
    part = Slice(host_id, f"http://{address}:{port}", CAPACITY, "qemu", OVERHEAD_MIB)
    host = Host(part, OwnedHypervisor(world, host_id), Journal(directory / "state"), lambda: 1e6)
    plain, gates = make_app, Gates(directory)
    vars(service)["make_app"] = lambda agent, token: gated(plain(agent, token), gates)
    token = directory / "token"
    await service.serve(
        Agent(host, usable_boot_mib), address, port, token, manager, directory / "report-token", asyncio.Event()
    )


def main() -> None:
    configure_logs()
    name, world, directory, address, port, manager = sys.argv[1:]
    asyncio.run(run(name, Path(world), Path(directory), address, int(port), manager))


if __name__ == "__main__":
    main()
