"""Removal of a host that does not come back, and of what was there: only an operator can know that it is gone."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

import structlog

from cluster_manager.errors import RequestError, busy, wrong_state
from cluster_manager.execution.operations import Operations
from cluster_manager.execution.running_plans import BUSY, clears, is_stranded
from cluster_manager.inventory.enrolment import Enrolments
from cluster_manager.inventory.hosts import Hosts
from cluster_manager.plans.live_migrations import LiveMigrationPlan
from cluster_manager.plans.migration_cleanup import has_arrived
from cluster_manager.plans.plans import finish
from cluster_manager.store import queries
from cluster_manager.store.rows import StoredChange, StoredVM, stored_vm
from cluster_manager.store.store import Store
from ebbtide.messages.hosts import ForgottenHost
from ebbtide.messages.operations import OperationState
from ebbtide.messages.vms import VMState

log = structlog.get_logger()

#: So many names stand in a refusal.
SHOWN: Final = 5


@dataclass(frozen=True)
class HostRemoval:
    """For one term of a manager."""

    operations: Operations
    store: Store
    hosts: Hosts
    enrolments: Enrolments
    #: Is told of core changes that no host reports: of the VMs that are gone with theirs.
    lost: Callable[[str, list[StoredChange]], None]

    async def forget(self, host: str, lost_vms: bool) -> ForgottenHost:
        """Drop a silent host: its VMs are gone with it, their names free.

        What only cleared up after a VM there ends as well, and so does a live migration that waits for the host's word,
        if its VM is given up: from there, and what was kept for it elsewhere is given back; or to there, and the VM is
        off on its old host, which has said so. Core changes and events stay.

        :param lost_vms: whether the host may have VMs.
        :raises RequestError: 404 there is none, 409 it reports, has VMs, or a plan is at work on it.
        """
        # Just after a start every host is silent, those too that will report in a moment.
        await self.hosts.settle()
        async with self.operations.admission, self.hosts.leaving(host):
            if self.hosts.get(host) is None and self.enrolments.has_joined(host):
                await self.enrolments.forget(host)
                log.info("host forgotten that never reported", host=host)
                return ForgottenHost(id=host, vms=(), sentence=f"{host} is forgotten: it has joined and never reported")
            self._check(host)
            plans = self.operations.plans_at(host)
            stranded = [state for state in plans if lost_vms and is_stranded(state, host)]
            # One that has come up elsewhere, or is not off on its old host any more: its plan sees it at its next look.
            stranded = [state for state in stranded if self._stays(state, host)]
            working = [state.request_id for state in plans if not clears(state) and state not in stranded]
            if working:
                raise busy(f"{host} is waited for: see operation {_some(working)}", "id")
            vms = await self._vms(host)
            ending = {state.vm for state in stranded}
            at_work = [f"{vm.name} is {vm.phase}" for vm in vms if vm.phase in BUSY and vm.name not in ending]
            if at_work:
                raise busy(f"{host}: {_some(at_work)}; wait for that", "id")
            if vms and not lost_vms:
                some = _some([vm.name for vm in vms])
                raise RequestError(409, f"{host} has {some}, which would be given up: say so by lost_vms", "lost_vms")
            names = [vm.name for vm in vms]
            lost = f" with {', '.join(names)}" if names else ""
            sentence = f"{host} is forgotten{lost}: it was said not to come back"
            done, failed = OperationState.DONE, OperationState.FAILED
            there = [state for state in stranded if state.host == host]
            rests = [state.left_there() for state in stranded if state not in there]
            ends = [state.lost_there(sentence) for state in there]
            others = [state for state in plans if state not in there]
            ends += [finish(state, failed if state in stranded else done, sentence) for state in others]
            # First: a host that is still there without its invitation is as any other.
            await self.enrolments.forget(host)
            # Before the record: none of them may write its own next step behind it.
            await self.operations.drop(host, plans)
            known = self.hosts.get(host)
            seen_at = known.seen_at if known is not None else 0.0
            changes = await self.store.forget_host(host, names, ends, sentence, rests, seen_at=seen_at)
            self.hosts.forget(host)
            self.lost(host, changes)
            for rest in rests:
                self.operations.go_on(rest)
            await self.operations.waiting.read()
        log.info("host forgotten", host=host, vms=names)
        return ForgottenHost(id=host, vms=tuple(names), sentence=sentence)

    def _stays(self, state: LiveMigrationPlan, host: str) -> bool:
        """Whether what a live migration waits for will not come from anywhere but a host that is to be forgotten."""
        if state.host != host:
            return not has_arrived(self.hosts.vm(state.host, state.vm))
        at_home = self.hosts.vm(state.home, state.vm)
        return at_home is not None and at_home.state is VMState.STOPPED

    def _check(self, host: str) -> None:
        if self.hosts.get(host) is None:
            raise RequestError(404, f"there is no host {host}", "id")
        if self.hosts.is_reporting(host):
            raise wrong_state(f"{host} reports: end its agent first, if it is not to come back", "id")

    async def _vms(self, host: str) -> list[StoredVM]:
        query = queries.vms(None, None, host=host, phases=None, prefix=None)
        return [stored_vm(row) for row in await self.store.rows(query)]


def _some(words: list[str]) -> str:
    more = f" and {len(words) - SHOWN} more" if len(words) > SHOWN else ""
    return ", ".join(words[:SHOWN]) + more
