"""The agent: a host, the commands it takes, and the watch over its VMs."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from hostagent.adoption_commands import AdoptionCommands
from hostagent.commands import Commands
from hostagent.dry_run import DryRun
from hostagent.eternal import guarded
from hostagent.host import Host
from hostagent.intents import Phase
from hostagent.lifecycle_commands import LifecycleCommands
from hostagent.mode_commands import ModeCommands
from hostagent.resuming import Resuming
from hostagent.watch import Watch


class Agent:
    """Call :meth:`start` first and :meth:`close` last.

    :param boot_mib: how much of a VM's memory is boot memory, given nominal and wished-for boot memory.
    """

    def __init__(self, host: Host, boot_mib: Callable[[float, float | None], float]) -> None:
        self.host = host
        self.commands = Commands(host, boot_mib)
        self.lifecycle = LifecycleCommands(host, self.commands, boot_mib)
        self.adoptions = AdoptionCommands(host, self.commands)
        self._resuming = Resuming(host, self.commands, self.lifecycle.resumed() | self.adoptions.resumed())
        self.mode_commands = ModeCommands(host, self.commands)
        self.dry_run = DryRun(host, self.commands)
        self._eternal: list[asyncio.Task[None]] = []

    async def start(self) -> None:
        """Find our domains and go on with whatever an earlier agent left unfinished."""
        await self.host.sample()
        for found in await self.host.hypervisor.domains():
            # One that was stopped on command is charged nothing: the watch is to see its foreign start and admit it.
            running = found.state == "running" and found.intent.phase is not Phase.STOPPED
            self.host.adopt(found.name, found.intent, running=running)
        await self.host.hypervisor.sweep()
        self._resuming.resume()
        self._eternal = [
            asyncio.create_task(guarded(Watch(self.host).run), name="watch"),
            asyncio.create_task(guarded(self.mode_commands.run), name="mode"),
            asyncio.create_task(guarded(self.commands.harvest.run), name="harvest"),
        ]

    async def close(self) -> None:
        """Stop working; VMs stay as they are, their intents say what is to go on."""
        for task in self._eternal:
            task.cancel()
        await asyncio.gather(*self._eternal, return_exceptions=True)
        await self.commands.operations.close()
        await asyncio.gather(*(vm.stop() for vm in self.host.vms.values()))
        await self.host.hypervisor.close()
