"""Agent: a host, the commands that it takes, and the tasks that look after its VMs."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence

import structlog

from hostagent.control.harvest import Harvest
from hostagent.control.host_reboot import see_reboot
from hostagent.control.overcommitment import Overcommitment
from hostagent.control.reconciler import Reconciler
from hostagent.control.steady import Steady
from hostagent.control.unowned import told_apart
from hostagent.errors import AdoptedUnknown, HypervisorError, JournalError
from hostagent.libvirt.hypervisor import DomainState
from hostagent.operations.adoption_commands import AdoptionCommands
from hostagent.operations.creation_commands import CreationCommands
from hostagent.operations.dry_run import DryRun
from hostagent.operations.lifecycle_commands import LifecycleCommands
from hostagent.operations.migration_commands import MigrationCommands
from hostagent.operations.mode_commands import ModeCommands
from hostagent.operations.requests import Requests
from hostagent.operations.resuming import Resuming
from hostagent.operations.size_commands import SizeCommands
from hostagent.state.intents import Intent, Phase
from hostagent.supervised_task import guarded
from hostagent.vm.host import Host
from hostagent.vm.managed_vm import ManagedVM

log = structlog.get_logger()


class Agent:
    """Call `start` first and `close` last.

    :param boot_mib: how much of a VM's memory is boot memory, given nominal and wished-for boot memory.
    """

    def __init__(self, host: Host, boot_mib: Callable[[float, float | None], float]) -> None:
        self.host = host
        self.requests = Requests(host)
        self.harvest = Harvest(host)
        self.steady = Steady(host)
        self.creations = CreationCommands(host, self.requests, self.harvest, boot_mib)
        self.sizes = SizeCommands(host, self.requests, self.harvest)
        self.lifecycle = LifecycleCommands(host, self.requests, boot_mib)
        self.adoptions = AdoptionCommands(host, self.requests)
        self.migrations = MigrationCommands(host, self.requests, self.harvest)
        kinds = self.lifecycle.resumed() | self.adoptions.resumed() | self.migrations.resumed()
        self._resuming = Resuming(host, self.requests.operations, self.creations, kinds)
        self.mode_commands = ModeCommands(host, self.requests, self.sizes)
        self.dry_run = DryRun(host, self.sizes, self.harvest)
        #: What gives its own certificate, PEM, as it is in force.
        self.certificate: Callable[[], Sequence[bytes]] = tuple
        self._supervised: list[asyncio.Task[None]] = []

    async def start(self, wait: Callable[[str], Awaitable[None]] | None = None) -> None:
        """Find our domains and go on with whatever an earlier agent left unfinished.

        :param wait: called with why the hypervisor does not answer, before it is asked again; default: it is not.
        :raises HypervisorError: it does not answer, or it is not known which domains are ours.
        """
        domains = await self._domains(wait)
        await self.host.sample()
        try:
            # Once the hypervisor has answered, and before anything can be taken.
            await asyncio.to_thread(self.host.journal.begin)
        except JournalError as error:
            log.warning("it is not written down that there is an agent here", why=str(error))
        vms = told_apart(domains)
        for found in vms:
            self._take_in(found)
        await see_reboot(self.host, vms)
        creating = [found.name for found in domains if found.intent.phase is Phase.CREATING]
        await self.host.hypervisor.sweep(creating)
        self._resuming.resume(self.host.vms.values())
        for found in domains:
            self._release_again(found)
        self._supervised = [
            asyncio.create_task(
                guarded(Reconciler(self.host, self._take_back, self._has_failed).run), name="reconciler"
            ),
            asyncio.create_task(guarded(self.mode_commands.run), name="mode-upholding"),
            asyncio.create_task(guarded(self.harvest.run), name="harvest-growth"),
            asyncio.create_task(guarded(self.steady.run), name="steady-mode"),
            asyncio.create_task(guarded(Overcommitment(self.host).run), name="overcommitment"),
        ]

    async def _domains(self, wait: Callable[[str], Awaitable[None]] | None) -> Sequence[DomainState]:
        while True:
            try:
                return await self.host.hypervisor.domains()
            except AdoptedUnknown:
                raise  # waiting does not mend a file
            except HypervisorError as error:
                if wait is None:
                    raise
                await wait(str(error))

    def _take_in(self, found: DomainState) -> ManagedVM:
        # One that was stopped on command is charged nothing; the reconciler admits a foreign start of it.
        running = found.state == "running" and found.intent.phase is not Phase.STOPPED
        if found.emulated and self.host.slice.accelerator != "qemu":
            log.warning("a VM is emulated until it is made anew", domain=found.name)
        vm = self.host.adopt(found.name, found.intent, running=running, emulated=found.emulated)
        # Known before it is surveyed: to start it as one that is off fails, and that cuts its power.
        vm.paused = found.state == "paused"
        # It may have been started without all its memory.
        vm.resizer.late.started(asyncio.get_running_loop().time())
        return vm

    def _release_again(self, found: DomainState) -> None:
        """Its owner has had it back, whatever a snapshot or a backup says."""
        vm = self.host.vms.get(found.intent.spec.name)
        if found.released and vm is not None and vm.domain == found.name:
            self.adoptions.release_again(vm)

    def _has_failed(self, intent: Intent) -> bool:
        if (cause := intent.cause) is None:
            return False
        failed = self.host.journal.has_failed(cause.kind, cause.request_id)
        return failed or cause.request_id in self.host.unwritten

    async def _take_back(self, found: DomainState) -> None:
        """Look after a domain of ours that libvirt did not name for a while, as after a start."""
        vm = self._take_in(found)
        log.warning("a domain of ours is there again and is looked after", domain=found.name, vm=vm.name)
        await self._resuming.take_back(vm)
        coming = found.intent.phase is Phase.ARRIVING or vm.intent.phase is Phase.CREATING
        told = coming or self.host.journal.last_cores(vm.name) > 0
        if found.state != "stopped" and not told:
            await self.host.tell_growth(vm, vm.allocation().current, "its domain is there again")
        self._release_again(found)
        self.host.changed.set()

    async def close(self) -> None:
        """Stop working; VMs stay as they are, their intents say what is to go on."""
        for task in self._supervised:
            task.cancel()
        await asyncio.gather(*self._supervised, return_exceptions=True)
        await self.requests.operations.close()
        await asyncio.gather(*(vm.stop() for vm in self.host.vms.values()))
        await self.host.hypervisor.close()
