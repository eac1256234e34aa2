"""Looks after the VMs: sees which run, goes on with what failed, removes what nobody owns, checks parked vCPUs."""

from __future__ import annotations

import asyncio
import contextlib
from typing import Final

import structlog

from deflation.resources import ZERO
from hostagent.errors import HypervisorError
from hostagent.host import Host
from hostagent.hypervisor import DomainState
from hostagent.intents import Phase
from hostagent.vms import ManagedVM

#: How often the VMs are looked at, in seconds.
WATCH_S: Final = 2.0
#: Time for a resize that is tried again, in seconds.
RETRY_DEADLINE_S: Final = 60.0
_RESIZING: Final = (Phase.DEFLATING, Phase.REINFLATING)

log = structlog.get_logger()


class Watch:
    """Looks at each VM now and then, and at once when the hypervisor says that a domain has started or stopped."""

    def __init__(self, host: Host) -> None:
        self._host = host
        self._stirred = asyncio.Event()
        host.hypervisor.on_lifecycle(lambda domain: self._stirred.set())

    async def run(self) -> None:
        """Watch until cancelled."""
        while True:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(WATCH_S):
                    await self._stirred.wait()
            self._stirred.clear()
            try:
                await self._refresh()
            except HypervisorError as error:
                log.warning("the VMs could not be looked at", why=str(error))

    async def _refresh(self) -> None:
        """See which VMs run, go on with resizes that failed, and check on parked vCPUs."""
        if self._host.sizes.locked():
            return
        async with self._host.sizes:
            found = {domain.name: domain for domain in await self._host.hypervisor.domains()}
            for vm in list(self._host.vms.values()):
                await self._look_at(vm, found.pop(vm.domain, None))
            for domain in found.values():
                # A creation that was given up, but libvirt carried it out in the end.
                log.warning("removing a domain of ours that no VM belongs to", domain=domain.name)
                await self._host.hypervisor.destroy(domain.name)
            stuck = [vm for vm in self._host.vms.values() if vm.running and vm.intent.phase in _RESIZING]
            await self._host.resize(stuck, RETRY_DEADLINE_S)
        await asyncio.gather(*(vm.watch() for vm in list(self._host.vms.values())))

    async def _look_at(self, vm: ManagedVM, domain: DomainState | None) -> None:
        if vm.intent.phase is Phase.CREATING:
            return
        if vm.intent.phase is Phase.DELETING:
            await self._host.forget(vm)
            return
        running = domain is not None and domain.state == "running"
        if running != vm.running:
            log.info("the VM started" if running else "the VM stopped", vm=vm.name)
            vm.running = running
            self._host.changed.set()
        if domain is None:
            log.warning("the VM's domain was removed or taken over by somebody else", vm=vm.name)
            await self._host.record_change(vm.name, vm.allocation().current, ZERO, "removed by somebody else")
            await self._host.drop(vm)
