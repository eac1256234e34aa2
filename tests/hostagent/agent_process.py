"""A host agent over a make-believe host, as a process of its own: it can be killed like the real one.

Usage: python -m tests.hostagent.agent_process WORLD_SOCKET STATE_DIR PORT
"""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

from ebbtide.deflation.resources import ResourceVector
from ebbtide.rest.logs import configure_logs
from hostagent.libvirt.definitions import usable_boot_mib
from hostagent.operations.agent import Agent
from hostagent.service import serve
from hostagent.state.journal import Journal
from hostagent.vm.host import Host, Slice
from tests.hostagent.fake_hypervisor import FakeHypervisor

CAPACITY = ResourceVector(cpu_cores=6, memory_mib=3600)
OVERHEAD_MIB = 320.0


async def run(world: Path, state_dir: Path, port: int) -> None:
    part = Slice("host-a", f"http://127.0.0.1:{port}", CAPACITY, "qemu", OVERHEAD_MIB)
    agent = Agent(Host(part, FakeHypervisor(world), Journal(state_dir), lambda: 1e6), usable_boot_mib)
    token_file = state_dir / "token"
    await serve(agent, "127.0.0.1", port, token_file, None, None, asyncio.Event())


def main() -> None:
    configure_logs()
    asyncio.run(run(Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3])))


if __name__ == "__main__":
    main()
