"""Growth of this host's harvest VMs within the manager's budget, taken back as soon as other VMs need it.

Who gets how much and when is decided in `deflation.sharing.harvest`. The budget is in the journal, so that it outlives
the agent; a reclaim, a creation and a growth of others revoke it before anything else happens.
"""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import Mapping
from typing import Final

import structlog

from ebbtide.deflation.allocations import Priority, lack, shareable, undeclared
from ebbtide.deflation.cascade.mechanisms import Mechanism
from ebbtide.deflation.cascade.reconcile import RepairPace
from ebbtide.deflation.modes import HostEvent
from ebbtide.deflation.resources import ResourceVector
from ebbtide.deflation.sharing.harvest import HARVEST_PACE, harvest_targets, harvested
from ebbtide.deflation.sharing.hysteresis import RoomWatch
from ebbtide.deflation.sharing.proportional import split_need
from ebbtide.messages.commands import Budget, BudgetStatus
from ebbtide.messages.common import Vector
from ebbtide.messages.explanations import DecisionKind
from hostagent.clock import now as _now
from hostagent.errors import HostAgentError, HypervisorError, superseded
from hostagent.state.history import sizes
from hostagent.state.intents import Phase, Request
from hostagent.vm.host import Host, persist_all, plan_all
from hostagent.vm.managed_vm import ManagedVM

#: How often it is checked whether harvest VMs can grow, in seconds; a new budget is used at once.
HARVEST_S: Final = 2.0
#: Time for harvest VMs to shrink and to grow, in seconds.
SHRINK_S: Final = 30.0
GROW_S: Final = 60.0
#: A guest that boots grows when it has said hello, or does not after this, in seconds.
BOOT_S: Final = 60.0

log = structlog.get_logger()


class Harvest:
    """The harvest VMs of one host. `run` until cancelled."""

    def __init__(self, host: Host) -> None:
        self._host = host
        self._watch = RoomWatch(HARVEST_PACE)
        self._news = asyncio.Event()
        #: Since when each harvest VM runs, and when one whose growth fell short may be tried again.
        self._since: dict[str, float] = {}
        self._paces: dict[str, RepairPace] = {}

    # --- the budget ----------------------------------------------------------------------------------------------

    def status(self) -> BudgetStatus:
        """The budget in force."""
        budget = self._host.journal.budget
        held = harvested([vm.allocation() for vm in self._host.vms.values()])
        return BudgetStatus(number=budget.number, room=Vector.of(budget.room), held=Vector.of(held))

    async def grant(self, budget: Budget) -> BudgetStatus:
        """Take a budget. The one that was taken last is taken once, also if it was revoked since.

        :raises RequestRefused: its number is lower than the latest, or was another budget's (409).
        :raises JournalError: it could not be stored.
        """
        journal, room = self._host.journal, budget.room.vector()
        if budget.number < journal.budget.number:
            latest = journal.budget.number
            raise superseded(f"number {budget.number} is below {latest}, which was granted before", "number")
        if budget.number == journal.budget.number:
            if room != journal.budget.granted:
                raise superseded(f"number {budget.number} was granted with another room", "number")
            return self.status()
        await asyncio.to_thread(journal.grant, budget.number, room)
        if room.is_zero():
            self._stop_growing("the budget was revoked")
        self._news.set()
        self._host.changed.set()
        return self.status()

    async def revoke(self, why: str) -> None:
        """Nothing grows any more until the manager grants the next budget; a growth under way is stopped.

        :raises JournalError: it could not be stored.
        """
        if not self._host.journal.budget.room.is_zero():
            await asyncio.to_thread(self._host.journal.revoke_budget)
            self._host.note(None, DecisionKind.HARVEST, f"the budget of harvest VMs is revoked: {why}", {})
        self._stop_growing(why)

    def _stop_growing(self, why: str) -> None:
        for vm in self._harvest_vms():
            if vm.intent.phase is Phase.REINFLATING:
                vm.resizer.interrupt(why)

    # --- taking back ---------------------------------------------------------------------------------------------

    def spare(self, besides: str = "") -> ResourceVector:
        """What harvest VMs could be asked for; one under pressure gives nothing.

        :param besides: the name of a VM that does not count.
        """
        rows = [vm.row() for vm in self._harvest_vms() if vm.name != besides and vm in self._host.resizable()]
        return harvested(rows)

    async def make_room(self, size: ResourceVector, why: str, besides: str = "") -> None:
        """Shrink harvest VMs by what ``size`` lacks; what they do not give is for the caller to see in what is free.

        :param size: what another VM needs, overhead included.
        :raises HostAgentError: the budget could not be revoked, or an intent not be stored.
        """
        if size.is_zero():
            return
        await self.revoke(why)
        await self._host.sample()
        if self._lacking(size).is_zero():
            return
        until = _now() + SHRINK_S
        async with self._host.reclaiming(), self._host.claimed(SHRINK_S / 2, _is_no_harvest) as claim:
            await self._host.sample()
            need = self._lacking(size)
            targets = split_need([vm.row() for vm in claim.vms if vm.name != besides], need).targets
            if targets:
                self._host.note(None, DecisionKind.HARVEST, f"harvest VMs give {need}: {why}", {"need": sizes(need)})
            members = self._plan(targets)
            claim.keep(members)
            await persist_all(members)
            await self._host.resize(members, max(until - _now(), 1.0), ended=claim.release)

    def _lacking(self, size: ResourceVector) -> ResourceVector:
        return size.less(self._host.free().larger(undeclared(self._host.slice.capacity, size)))

    # --- growing -------------------------------------------------------------------------------------------------

    async def run(self) -> None:
        """Let harvest VMs grow, again and again."""
        while True:
            try:
                async with asyncio.timeout(HARVEST_S):
                    await self._news.wait()
            except TimeoutError:
                pass
            self._news.clear()
            try:
                await self._grow()
            except HostAgentError as error:
                log.warning("harvest VMs could not grow", why=str(error))
            except Exception:
                log.exception("the growth of harvest VMs failed")

    async def _grow(self) -> None:
        vms = self._harvest_vms()
        if not vms:
            return
        await self._host.sample()
        self._since = {vm.name: self._since.get(vm.name, _now()) for vm in vms if vm.running}
        self._paces = {vm.name: self._paces.get(vm.name, RepairPace()) for vm in vms}
        rows = [vm.allocation() for vm in vms]
        self._watch.observe(_now(), rows, shareable(self._host.free(), self._host.slice.capacity, lack(rows)))
        if not self._targets(vms, frozenset()):
            return
        whole = await self._whole(vms)
        async with self._host.claimed(0.0, _is_no_harvest) as claim:
            await self._host.sample()
            # In one turn of the loop with the plan: no other operation counts on this room.
            targets = self._targets(claim.vms, whole)
            members = self._plan(targets)
            claim.keep(members)
            if not members:
                return
            told = "; ".join(f"{name} to {size}" for name, size in targets.items())
            self._host.note(None, DecisionKind.HARVEST, f"harvest VMs grow within budget: {told}", {})
            granted = self._host.journal.budget
            await persist_all(members)
            if self._host.journal.budget != granted:
                await asyncio.gather(*(vm.record.unplan() for vm in members))
                return
            for outcome in await self._host.resize(members, GROW_S, ended=claim.release):
                pace = self._paces[outcome.name]
                pace.held() if outcome.shortfall.vector().is_zero() else pace.tried(_now())

    def _targets(self, vms: list[ManagedVM], whole: frozenset[str]) -> dict[str, ResourceVector]:
        """Who of these VMs may grow to what now."""
        host = self._host
        # What comes free belongs to a guest under pressure first.
        if not host.modes.does(HostEvent.HARVEST) or host.under_pressure():
            return {}
        others = [vm.allocation() for vm in self._harvest_vms() if vm not in vms]
        budget = host.journal.budget.room.less(harvested(others))
        ready = [vm.allocation() for vm in vms if self._is_ready(vm)]
        busy = [vm.allocation() for vm in vms if vm.allocation() not in ready]
        free = host.free().less(ResourceVector(memory_mib=host.reserve_mib))
        room = shareable(free, host.slice.capacity, lack(ready))
        return harvest_targets(ready, room, budget.less(harvested(busy)), self._watch, _now(), whole)

    def _is_ready(self, vm: ManagedVM) -> bool:
        """Whether a VM can make something of a growth now."""
        settled = vm.running and vm.intent.phase is Phase.SETTLED and not vm.record.uncertain
        if vm.name in self._paces and not self._paces[vm.name].due(_now()):
            return False
        return settled and (vm.link.connected or _now() - self._since.get(vm.name, _now()) >= BOOT_S)

    async def _whole(self, vms: list[ManagedVM]) -> frozenset[str]:
        """Names of the VMs whose vCPUs cannot be given quotas: their guests can use whole cores only."""
        whole = set()
        for vm in vms:
            try:
                found = await vm.resizer.mechanisms()
            except HypervisorError:
                whole.add(vm.name)
                continue
            if not found.has(Mechanism.QUOTA):
                whole.add(vm.name)
        return frozenset(whole)

    def _harvest_vms(self) -> list[ManagedVM]:
        return [
            vm
            for vm in self._host.vms.values()
            if vm.intent.spec.priority is Priority.HARVEST and vm.intent.phase is not Phase.STOPPED
        ]

    def _plan(self, targets: Mapping[str, ResourceVector]) -> list[ManagedVM]:
        """Plan for each VM: a reinflation of this host's own, whichever way it goes."""
        request_id = f"harvest-{uuid.uuid4().hex[:12]}"
        request = Request(request_id, "reinflate", {"request_id": request_id}, time.time())
        # Their sizes follow the budget, whatever a target has set.
        return plan_all(self._host, targets, request, freed=targets)


def _is_no_harvest(vm: ManagedVM) -> bool:
    return vm.intent.spec.priority is not Priority.HARVEST
