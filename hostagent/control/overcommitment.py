"""Deflation of a host whose VMs hold more than it may hand out: towards its capacity, as far as the minimums allow."""

from __future__ import annotations

import asyncio
import itertools
import time
from typing import Final

import structlog

from ebbtide.deflation.allocations import deflatable_capacity
from ebbtide.deflation.cascade.reconcile import RepairPace
from ebbtide.deflation.modes import HostEvent
from ebbtide.deflation.resources import TOLERANCE, ZERO, ResourceVector
from ebbtide.deflation.sharing.overcommitment import may_do_more
from ebbtide.deflation.sharing.proportional import split_need_in_turn
from ebbtide.messages.commands import ReclaimCommand
from ebbtide.messages.common import Vector
from ebbtide.messages.explanations import DecisionKind
from hostagent.errors import HostAgentError
from hostagent.state.history import sizes
from hostagent.state.intents import Request
from hostagent.vm.host import Host, persist_all, plan_all

#: How often the charges are held against the capacity, and time for one deflation, in seconds.
EVERY_S: Final = 2.0
DEADLINE_S: Final = 60.0
#: How long a VM that is busy is waited for, in seconds.
WAIT_S: Final = 10.0

log = structlog.get_logger()


class Overcommitment:
    """Looks after one host: `run` until cancelled."""

    def __init__(self, host: Host) -> None:
        self._host = host
        self._numbers = itertools.count(1)
        self._pace = RepairPace()
        #: How far the host was beyond its capacity after the last try, and the most that its VMs could give then or
        #: before it: a guest that the try puts under pressure gives nothing until it calms, and then no more than then.
        self._tried = ZERO, ZERO
        self._told = ""
        #: Names of VMs that gave less than they were asked for: asked last until the host is within its capacity.
        self._short: set[str] = set()

    async def run(self) -> None:
        while True:
            await asyncio.sleep(EVERY_S)
            try:
                await self.look()
            except HostAgentError as error:
                log.warning("the host could not be brought to its capacity yet", why=str(error))
            except Exception:
                log.exception("bringing the host to its capacity failed")

    async def look(self) -> None:
        """Deflate once where the VMs hold more than there is.

        :raises HostAgentError: an intent could not be stored; all are as they were.
        """
        host, beyond = self._host, self._beyond()
        self._tell(self._sentence(beyond))
        if beyond.is_zero():
            self._pace.held()
            self._short.clear()
            return
        now, deflatable = asyncio.get_running_loop().time(), self._deflatable()
        if may_do_more(beyond, deflatable, *self._tried):
            self._pace.at_once()  # a guest may have said hello
        if not host.modes.does(HostEvent.RECLAIM) or not self._pace.due(now):
            return
        self._pace.tried(now)
        self._tried = beyond, deflatable
        if not any(over > 0 and gives > TOLERANCE for over, gives in zip(beyond, deflatable, strict=True)):
            return
        async with host.claimed(WAIT_S, lambda vm: vm.is_fixed) as claim:
            await host.sample()
            need = self._beyond()
            split = split_need_in_turn([vm.row() for vm in claim.vms], need, self._short)
            request_id = f"capacity-{host.incarnation[:8]}-{next(self._numbers)}"
            command = ReclaimCommand(request_id=request_id, need=Vector.of(need), deadline_s=DEADLINE_S)
            request = Request(request_id, "reclaim", command.comparable(), time.time())
            members = plan_all(host, split.targets, request)
            claim.keep(members)
            await persist_all(members)
            outcomes = await host.resize(members, DEADLINE_S, ended=claim.release)
            self._short |= {outcome.name for outcome in outcomes if not outcome.shortfall.vector().is_zero()}
        await host.sample()
        self._tried = self._beyond(), deflatable.larger(self._deflatable())

    def _beyond(self) -> ResourceVector:
        """By the last readings: the reconciler takes some as often as it is looked at here."""
        host = self._host
        left_mib = host.available_mib - host.untouched_mib()
        host.memory.observe(asyncio.get_running_loop().time(), left_mib, host.slice.reserve_mib)
        return host.overcommitted()

    def _deflatable(self) -> ResourceVector:
        return deflatable_capacity(vm.row() for vm in self._host.vms.values())

    def _sentence(self, beyond: ResourceVector) -> str:
        if beyond.is_zero():
            return ""
        others = ": others on the host have taken memory that its VMs were sold" if self._host.memory.short_mib else ""
        return f"overcommitted by {beyond}{others}"

    def _tell(self, sentence: str) -> None:
        if sentence == self._told:
            return
        host = self._host
        inputs = {
            "capacity": sizes(host.slice.capacity),
            "beyond": sizes(host.overcommitted()),
            "available_mib": host.available_mib,
            "untouched_mib": host.untouched_mib(),
            "reserve_mib": host.slice.reserve_mib,
        }
        host.note(None, DecisionKind.OVERCOMMITTED, sentence or "within its capacity again", inputs)
        self._told = sentence
        host.changed.set()
