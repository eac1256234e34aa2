"""Looks after the VMs: sees which run, goes on with what failed, removes what nobody owns, checks for drift."""

from __future__ import annotations

import asyncio
import contextlib
from typing import Final

import structlog

from deflation.resources import ZERO
from hostagent.errors import HypervisorError
from hostagent.host import RESIZING, Host
from hostagent.hypervisor import DomainState
from hostagent.intents import Phase
from hostagent.vms import ManagedVM

#: How often the VMs are looked at, in seconds.
WATCH_S: Final = 2.0
#: Time for a resize that is tried again, in seconds.
RETRY_DEADLINE_S: Final = 60.0

log = structlog.get_logger()


class Watch:
    """Looks at each VM now and then, and at once when a domain has started or stopped or a guest says hello."""

    def __init__(self, host: Host) -> None:
        self._host = host
        host.hypervisor.on_lifecycle(lambda domain: host.stirred.set())

    async def run(self) -> None:
        """Watch until cancelled. A round that fails is logged, the next one comes all the same."""
        while True:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(WATCH_S):
                    await self._host.stirred.wait()
            self._host.stirred.clear()
            try:
                if not self._host.sizes.locked():
                    async with self._host.sizes:
                        await self._round()
            except HypervisorError as error:
                log.warning("the VMs could not be looked at", why=str(error))
            except Exception:
                log.exception("a round of the watch broke")

    async def _round(self) -> None:
        # Listed before the domains: a VM that comes into being meanwhile is not missed for it.
        vms = [vm for vm in self._host.vms.values() if vm.intent.phase is not Phase.CREATING]
        found = {domain.name: domain for domain in await self._host.hypervisor.domains()}
        await asyncio.gather(*(self._guarded(vm, found.get(vm.domain)) for vm in vms))
        known = {vm.domain for vm in self._host.vms.values()} | {vm.domain for vm in vms}
        for name in found.keys() - known:
            # A creation that was given up, but libvirt carried it out in the end.
            log.warning("removing a domain of ours that no VM belongs to", domain=name)
            await self._host.hypervisor.destroy(name)

    async def _guarded(self, vm: ManagedVM, domain: DomainState | None) -> None:
        """One VM that cannot be looked at must not keep the others from it."""
        try:
            await self._look_at(vm, domain)
        except HypervisorError as error:
            log.warning("the VM could not be looked at", vm=vm.name, why=str(error))

    async def _look_at(self, vm: ManagedVM, domain: DomainState | None) -> None:
        size, cause = vm.allocation().current, vm.intent.cause
        if vm.intent.phase is Phase.DELETING:
            reason = cause.request_id if cause is not None and cause.kind == "delete" else "could not be started"
            if reason != "could not be started":
                await self._host.record_change(vm.name, size, ZERO, reason)
            await self._host.forget(vm)
            return
        if domain is None:
            log.warning("the VM's domain was removed or taken over by somebody else", vm=vm.name)
            await self._host.record_change(vm.name, size, ZERO, "removed by somebody else")
            await self._host.drop(vm)
            return
        running = domain.state == "running"
        if running != vm.running:
            log.info("the VM started" if running else "the VM stopped", vm=vm.name)
            vm.running = running
            self._host.changed.set()
            if running:
                # Not started by us: at once no more CPU than is committed; memory as soon as its guest says hello.
                await vm.enforce()
        if running and vm.intent.phase in RESIZING:
            await self._host.resize([vm], RETRY_DEADLINE_S)
        elif running:
            await vm.watch()
