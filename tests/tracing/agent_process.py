"""A host agent over a make-believe host that sends spans, as `ebb-hostagent --tracing` does.

Usage: python -m tests.tracing.agent_process WORLD_SOCKET DIRECTORY PORT MANAGER
"""

from __future__ import annotations

import asyncio
import signal
import sys
from pathlib import Path

from ebbtide.rest.logs import configure_logs
from ebbtide.tracing.exporting import exporting
from hostagent.libvirt.definitions import usable_boot_mib
from hostagent.operations.agent import Agent
from hostagent.service import serve
from hostagent.state.journal import Journal
from hostagent.vm.host import Host, Slice
from tests.hostagent.agent_process import CAPACITY, OVERHEAD_MIB
from tests.hostagent.fake_hypervisor import FakeHypervisor


async def run(world: Path, directory: Path, port: int, manager: str) -> None:
    stop = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stop.set)
    part = Slice("host-a", f"http://127.0.0.1:{port}", CAPACITY, "qemu", OVERHEAD_MIB)
    async with exporting(True, "ebb-hostagent", host="host-a"):
        agent = Agent(Host(part, FakeHypervisor(world), Journal(directory / "agent"), lambda: 1e6), usable_boot_mib)
        token, own = directory / "command-token", directory / "report-token"
        await serve(agent, "127.0.0.1", port, token, manager, own, stop)


def main() -> None:
    configure_logs()
    asyncio.run(run(Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3]), sys.argv[4]))


if __name__ == "__main__":
    main()
