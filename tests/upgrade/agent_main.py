"""A host agent of any version over a make-believe host, which reports to a manager: run from that version's folder.

Usage: python agent_main.py FOLDER WORLD_SOCKET STATE_DIR PORT MANAGER_URL HOSTS_KEY
"""

import asyncio
import sys
from pathlib import Path

from aiohttp import web

import hostagent
from ebbtide.deflation.resources import ResourceVector
from ebbtide.rest.credentials import command_token, report_token
from hostagent.api.app import make_app
from hostagent.control.reporter import Reporter
from hostagent.libvirt.definitions import usable_boot_mib
from hostagent.operations.agent import Agent
from hostagent.state.journal import Journal
from hostagent.vm.host import Host, Slice
from tests.hostagent.fake_hypervisor import FakeHypervisor

HOST = "host-a"
CAPACITY = ResourceVector(cpu_cores=6, memory_mib=3600)


async def run(world: Path, state_dir: Path, port: int, manager: str, key: str) -> None:
    part = Slice(HOST, f"http://127.0.0.1:{port}", CAPACITY, "qemu", 320.0)
    agent = Agent(Host(part, FakeHypervisor(world), Journal(state_dir), lambda: 1e6), usable_boot_mib)
    await agent.start()
    runner = web.AppRunner(make_app(agent, command_token(key, HOST)))
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", port).start()
    await Reporter(agent.host, manager, report_token(key, HOST)).run()


def main() -> None:
    folder, world, state_dir, port, manager, key = sys.argv[1:]
    if Path(hostagent.__file__).parents[1] != Path(folder):
        sys.exit(f"this is the agent of {hostagent.__file__}, not of {folder}")
    asyncio.run(run(Path(world), Path(state_dir), int(port), manager, key))


if __name__ == "__main__":
    main()
