"""Looks after the VMs: sees which run, goes on with what failed, removes what nobody owns, puts drift right.

Every few seconds one cheap call tells what all domains do; a VM is looked at closely when that call, its guest or an
event gives reason to, and now and then in any case.
"""

from __future__ import annotations

import asyncio
import contextlib
from typing import Final

import structlog

from deflation.modes import HostEvent
from deflation.resources import ZERO
from hostagent.admission import admit
from hostagent.errors import HostAgentError, HypervisorError
from hostagent.host import CONCURRENT, RESIZING, Host
from hostagent.hypervisor import DomainSummary
from hostagent.intents import Phase
from hostagent.relief import relieve_vm
from hostagent.vms import ManagedVM

#: How often all domains are surveyed, in seconds.
WATCH_S: Final = 2.0
#: How often a VM is looked at closely although nothing seems to have changed, in seconds; half as often one from which
#: nothing is taken, since there is little that could be lifted.
CLOSE_LOOK_S: Final = 15.0
#: How often a VM that stays under pressure is given what has come free meanwhile, in seconds.
RELIEF_PAUSE_S: Final = 5.0
#: How often it is asked whether the domains still bear our intents, in seconds.
OWNERS_S: Final = 60.0
#: Time for a resize that is tried again, in seconds.
RETRY_DEADLINE_S: Final = 60.0

log = structlog.get_logger()


class Watch:
    """Runs the looks, each VM's in a task of its own, so that one that hangs keeps nobody from being looked at."""

    def __init__(self, host: Host) -> None:
        self._host = host
        self._looks: dict[str, asyncio.Task[None]] = {}
        #: When each VM was looked at closely, and what the survey said then.
        self._seen: dict[str, tuple[float, DomainSummary]] = {}
        self._owners_at = 0.0
        #: Looks have slots of their own: those at silent guests must not hold up operations.
        self._slots = asyncio.Semaphore(CONCURRENT)
        #: Until when a VM's relief is not tried again.
        self._relieved: dict[str, float] = {}
        #: Domains that bear a name of this host and are not ours, as of the last asking.
        self._foreign: set[str] = set()
        host.hypervisor.on_lifecycle(self._on_lifecycle)

    def _on_lifecycle(self, domain: str) -> None:
        for vm in self._host.vms.values():
            if vm.domain == domain:
                vm.stir()
        self._host.stirred.set()

    async def run(self) -> None:
        """Watch until cancelled. A round that fails is logged, the next one comes all the same."""
        try:
            while True:
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(WATCH_S):
                        await self._host.stirred.wait()
                self._host.stirred.clear()
                try:
                    await self._round()
                except HypervisorError as error:
                    log.warning("the VMs could not be looked at", why=str(error))
                except Exception:
                    log.exception("a round of the watch broke")
        finally:
            for task in self._looks.values():
                task.cancel()
            await asyncio.gather(*self._looks.values(), return_exceptions=True)

    async def _round(self) -> None:
        # Listed before the domains: a VM that comes into being meanwhile is not missed for it.
        vms = [vm for vm in self._host.vms.values() if vm.intent.phase is not Phase.CREATING]
        await self._host.sample()
        for domain, why in (await self._host.hypervisor.check_limits()).items():
            for vm in vms:
                if vm.domain == domain:
                    self._host.note(vm.name, "limit", f"the memory limit is lifted: {why}", {})
                    vm.stir()
        found = await self._host.hypervisor.survey()
        now = asyncio.get_running_loop().time()
        if now - self._owners_at >= OWNERS_S:
            self._foreign = found.keys() - {domain.name for domain in await self._host.hypervisor.domains()}
            self._owners_at = now
            self._seen = {vm.domain: self._seen[vm.domain] for vm in vms if vm.domain in self._seen}
            self._relieved = {vm.name: self._relieved[vm.name] for vm in vms if vm.name in self._relieved}
        found = {name: summary for name, summary in found.items() if name not in self._foreign}
        for vm in vms:
            self._consider(vm, found.get(vm.domain))
        known = {vm.domain for vm in self._host.vms.values()} | {vm.domain for vm in vms}
        if found.keys() - known:
            await self._remove_unowned(known)

    def _consider(self, vm: ManagedVM, summary: DomainSummary | None) -> None:
        """Begin a close look where there is reason for one."""
        if not self._host.holds(vm):
            return
        if summary is not None and summary.state == "running":
            vm.upkeep.glance(summary.vcpus, summary.vcpu_seconds)
            vm.pressure.glimpse(summary.usable_mib, summary.major_faults, summary.said_at)
        vm.pressure.judge()
        if vm.pressure.sentence:
            vm.upkeep.unsettled = True
            if self._host.modes.does(HostEvent.PRESSURE):
                self._relieve(vm)
        if vm.name in self._looks:
            return
        at, earlier = self._seen.get(vm.domain, (0.0, None))
        now = asyncio.get_running_loop().time()
        calm = (
            summary is not None
            and earlier is not None
            and (summary.uuid, summary.state, summary.vcpus, summary.balloon_mib)
            == (earlier.uuid, earlier.state, earlier.vcpus, earlier.balloon_mib)
            and not vm.upkeep.unsettled
            and not vm.uncertain
            and vm.intent.phase is Phase.SETTLED
            and now - at < CLOSE_LOOK_S * (1 if vm.deflated else 2)
        )
        if calm or vm.lock.locked():
            return
        if summary is not None:
            self._seen[vm.domain] = (now, summary)
        task = asyncio.create_task(self._guarded(vm, summary, earlier), name=f"look:{vm.name}")
        self._looks[vm.name] = task
        task.add_done_callback(lambda done: self._looks.pop(vm.name, None))

    def _relieve(self, vm: ManagedVM) -> None:
        """Give a VM under pressure what can be spared, in a task of its own that waits for no other work."""
        name = f"relief:{vm.name}"
        now = asyncio.get_running_loop().time()
        if name in self._looks or now < self._relieved.get(vm.name, 0.0) or not vm.running:
            return
        self._relieved[vm.name] = now + RELIEF_PAUSE_S
        task = asyncio.create_task(self._relieving(vm), name=name)
        self._looks[name] = task
        task.add_done_callback(lambda done: self._looks.pop(name, None))

    async def _relieving(self, vm: ManagedVM) -> None:
        try:
            await relieve_vm(self._host, vm)
        except HostAgentError as error:
            log.warning("a VM under pressure could not be relieved", vm=vm.name, why=str(error))
        except Exception:
            log.exception("the relief of a VM broke", vm=vm.name)

    async def _guarded(self, vm: ManagedVM, summary: DomainSummary | None, earlier: DomainSummary | None) -> None:
        try:
            async with vm.lock, self._slots:
                if self._host.holds(vm):
                    await self._look_at(vm, summary, earlier)
        except HostAgentError as error:
            vm.upkeep.unsettled = True
            log.warning("the VM could not be looked at", vm=vm.name, why=str(error))
        except Exception:
            vm.upkeep.unsettled = True
            log.exception("a look at a VM broke", vm=vm.name)

    async def _look_at(self, vm: ManagedVM, summary: DomainSummary | None, earlier: DomainSummary | None) -> None:
        size, cause, modes = vm.allocation().current, vm.intent.cause, self._host.modes
        if vm.intent.phase is Phase.CREATING:
            return
        if vm.intent.phase is Phase.DELETING:
            reason = cause.request_id if cause is not None and cause.kind == "delete" else "could not be started"
            if reason != "could not be started":
                await self._host.record_change(vm.name, size, ZERO, reason)
            await self._host.forget(vm)
            return
        if summary is None or (earlier is not None and earlier.uuid != summary.uuid):
            owned = {domain.name for domain in await self._host.hypervisor.domains()}
            if vm.domain not in owned:
                log.warning("the VM's domain was removed or taken over by somebody else", vm=vm.name)
                self._seen.pop(vm.domain, None)
                await self._host.record_change(vm.name, size, ZERO, "removed by somebody else")
                await self._host.drop(vm)
                return
        if summary is None:
            return
        running = summary.state == "running"
        if vm.uncertain and not running:
            await vm.persist()
        if vm.intent.phase in (Phase.STOPPING, Phase.STARTING):
            return  # an operation is about it
        if vm.intent.phase is Phase.ADMITTING and summary.state == "stopped":
            # Nothing is left to admit; it is off like one that stopped by itself.
            await vm.store(phase=Phase.SETTLED)
            vm.running = vm.upkeep.unsettled = False
            self._host.changed.set()
            return
        if vm.intent.phase is Phase.STOPPED and not running and summary.state != "stopped":
            running = modes.does(HostEvent.FOREIGN_START)  # paused by us until there is room
        if running != vm.running:
            if vm.intent.phase is Phase.ADMITTING or (running and modes.does(HostEvent.FOREIGN_START)):
                # Not started by us: it is held to its committed size first.
                running = await admit(self._host, vm)
            elif running:
                if vm.intent.phase is Phase.STOPPED:
                    await vm.store(phase=Phase.SETTLED)
                self._host.note(vm.name, "admit", f"started by somebody else and left as it is: {modes.sentence}", {})
            else:
                self._host.note(vm.name, "stopped", "the VM stopped", {"state": summary.state})
            vm.running = running
            self._host.changed.set()
        elif vm.intent.phase is Phase.ADMITTING:
            vm.running = running = await admit(self._host, vm)
        if not running:
            vm.upkeep.unsettled = False
        elif vm.intent.phase in RESIZING:
            if modes.does(HostEvent.UNFINISHED) and vm.upkeep.pace.due(asyncio.get_running_loop().time()):
                vm.upkeep.pace.tried(asyncio.get_running_loop().time())
                await self._host.resize_one(vm, RETRY_DEADLINE_S)
        else:
            await vm.upkeep.look("" if modes.does(HostEvent.DRIFT) else modes.sentence)

    async def _remove_unowned(self, known: set[str]) -> None:
        """Remove domains of ours that no VM belongs to: creations that were given up, but carried out in the end."""
        for domain in await self._host.hypervisor.domains():
            if domain.intent.adopted is not None:
                continue  # somebody else's: never removed
            if domain.name not in known and domain.name not in {vm.domain for vm in self._host.vms.values()}:
                log.warning("removing a domain of ours that no VM belongs to", domain=domain.name)
                await self._host.hypervisor.destroy(domain.name)
