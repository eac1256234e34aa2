"""The rebalancer at work: looks every so often, remembers since when VMs are deflated, and begins the moves worth it.

What it has seen is kept in the store with every look. A manager that starts soon after the last look goes on from
there; after a longer gap durations begin anew, since nobody knows what was between. VMs that were moved rest all the
same.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Final

import structlog
from pydantic import BaseModel, ConfigDict, ValidationError

from cluster_manager.defaults import RebalancingRules
from cluster_manager.errors import RequestError, StoreError
from cluster_manager.execution.lifecycle_requests import Lifecycle
from cluster_manager.execution.operations import Operations
from cluster_manager.inventory.hosts import Hosts
from cluster_manager.plans.rebalancing import Recorded, Reported, apart, look, rebalancing
from cluster_manager.store.store import Store
from ebbtide.deflation.placement.rebalance_pace import RebalancePace
from ebbtide.deflation.placement.rebalancing import Rebalancer
from ebbtide.messages.dry_runs import RebalancingReport
from ebbtide.messages.operations import Operation

log = structlog.get_logger()

#: The document in the store.
NAME: Final = "rebalancing"


class Seen(BaseModel):
    """What is stored with every look; times in seconds since the epoch."""

    model_config = ConfigDict(extra="ignore", allow_inf_nan=False)

    at: float
    began_at: float
    since: dict[str, float] = {}
    moved_at: dict[str, float] = {}


class Rebalancing:
    """Runs from `start` to `stop`, if there are rules for it.

    :param rules: None: it answers dry runs, and moves nobody.
    :param clock: seconds since the epoch.
    """

    def __init__(
        self,
        hosts: Hosts,
        operations: Operations,
        lifecycle: Lifecycle,
        store: Store,
        rules: RebalancingRules | None,
        clock: Callable[[], float],
    ) -> None:
        self._hosts = hosts
        self._operations = operations
        self._lifecycle = lifecycle
        self._store = store
        self._rules = rules
        self._clock = clock
        self._policy = Rebalancer()
        self._looked_at: float | None = None
        self._began_at = 0.0
        self._task: asyncio.Task[None] | None = None
        #: Over thousands of hosts a look takes seconds of a thread: one at a time.
        self._turn = asyncio.Lock()

    async def recall(self) -> None:
        """Go on from the last look of whoever led then. Raises StoreError."""
        body = await self._store.knowledge(NAME) if self._rules is not None else None
        if body is None:
            return
        try:
            seen = Seen.model_validate_json(body)
        except ValidationError as error:
            log.warning("what the rebalancer has seen is damaged, and begins anew", why=str(error.errors()[0]["msg"]))
            return
        self._policy = Rebalancer(since=seen.since, moved_at=seen.moved_at)
        self._looked_at, self._began_at = seen.at, seen.began_at

    def start(self) -> None:
        if self._rules is not None:
            self._task = asyncio.create_task(self._run(self._rules), name="rebalancing")

    async def stop(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
            self._task = None

    async def _run(self, rules: RebalancingRules) -> None:
        while True:
            await asyncio.sleep(rules.every_s)
            try:
                await self.look(rules)
            except StoreError as error:
                log.warning("nobody was moved to rebalance", why=str(error))
            except Exception:
                log.exception("nobody was moved to rebalance, by a defect of the manager")

    async def look(self, rules: RebalancingRules) -> list[Operation]:
        """Take in who is deflated now, and begin the moves that are worth it. Raises StoreError."""
        async with self._turn:
            now = self._clock()
            found = await self._look(rules, now)
            busy, under_way = self._operations.hosts_at_work(), self._operations.rebalancing()
            moves = apart(found.moves, busy, rules.most_moves - under_way)
            if moves and (why := self._operations.comes_first()):
                log.info("nobody is moved to rebalance now", why=why)
                moves = []
            for move in moves:
                # Before it begins: who was moved does not move again, whatever becomes of this manager.
                self._policy.moved_at[move.vm] = now
            seen = Seen(at=now, began_at=self._began_at, since=self._policy.since, moved_at=self._policy.moved_at)
            await self._store.save_knowledge(NAME, seen.model_dump_json())
        begun = []
        for move in moves:
            try:
                begun.append(await self._lifecycle.rebalance(move, rules))
            except RequestError as error:
                log.info("a VM is not moved to rebalance", vm=move.vm, why=str(error))
        return begun

    async def propose(self, lasted_s: float | None) -> RebalancingReport:
        """Which VMs would be moved between hosts; nothing is moved or remembered.

        :param lasted_s: for how long those that are deflated are taken to have been so; None: for as long as was seen,
            and where nothing is looked at for as long as it takes to count.
        """
        await self._hosts.settle()
        async with self._turn:
            if lasted_s is None and self._rules is not None:
                now = self._clock()
                policy, began_at = self._known(self._rules, now)
                reported, unseen = await self._reported()
                _, report = await asyncio.to_thread(
                    look, policy, now, reported, unseen, self._rules, max(now - began_at, 0.0)
                )
                return report
            taken_s = RebalancePace().hold_s if lasted_s is None else lasted_s
            reported, unseen = await self._reported()
            return await asyncio.to_thread(rebalancing, reported, len(unseen), taken_s)

    async def _look(self, rules: RebalancingRules, now: float) -> RebalancingReport:
        await self._hosts.settle()
        policy, began_at = self._known(rules, now)
        if began_at == now and self._looked_at is not None and self._policy.since:
            gap_s = now - self._looked_at
            why = f"the last look was {gap_s:.0f} s ago" if gap_s > 0 else "the clock was set back"
            log.info("since when VMs are deflated begins anew", why=why)
        reported, unseen = await self._reported()
        known, report = await asyncio.to_thread(look, policy, now, reported, unseen, rules, max(now - began_at, 0.0))
        self._policy, self._looked_at, self._began_at = known, now, began_at
        return report

    def _known(self, rules: RebalancingRules, now: float) -> tuple[Rebalancer, float]:
        """What is known at a time, and since when it was looked at without a gap."""
        if self._looked_at is not None and 0 <= now - self._looked_at <= rules.longest_gap_s:
            return self._policy, self._began_at
        # Also where the clock was set back: nobody rests for longer than from now.
        rest = {vm: min(at, now) for vm, at in self._policy.moved_at.items()}
        return Rebalancer(moved_at=rest), now

    async def _reported(self) -> tuple[list[Reported], frozenset[str]]:
        """The hosts that answer, and the ids of the others."""
        changing = self._operations.changed_vms()
        vms: dict[str, dict[str, Recorded]] = {}
        for row in await self._store.vms():
            if not row.unread:
                vms.setdefault(row.host or "", {})[row.name] = Recorded(row.phase, row.spec, row.name in changing)
        busy, taken = self._operations.hosts_at_work(), self._hosts.availability.reserved
        reports = [host.report for host in self._hosts.ready()]
        unseen = self._hosts.ids() - {report.id for report in reports}
        reported = [
            Reported(
                report,
                report.id in busy or self._hosts.locks.is_busy(report.id),
                taken(report.id),
                vms.get(report.id, {}),
                len(self._operations.waiting.specs(report.id)),
            )
            for report in reports
        ]
        return reported, unseen
