"""Dry runs over the hosts' last reports: creations and deletions by their checks and plans."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Generator
from typing import Final

from cluster_manager.execution.instruction_executor import InstructionExecutor
from cluster_manager.execution.operations import Operations
from cluster_manager.execution.running_plans import check_readable, how_ended
from cluster_manager.inventory.hosts import Hosts
from cluster_manager.inventory.versions import ANY_VERSION, Precondition
from cluster_manager.plans.dry_run_plan import Known, dry_run_plan
from cluster_manager.plans.placements import start_placement
from cluster_manager.plans.plans import ChooseHosts, HostsChosen, Plan, VMPhase
from cluster_manager.plans.removals import removed_already, start_calling_off, start_removal
from cluster_manager.plans.report_queries import to_come
from cluster_manager.store.store import Store
from ebbtide.deflation.placement.fitness import HostView
from ebbtide.deflation.placement.policy_names import PlacementPolicy
from ebbtide.deflation.resources import ZERO, ResourceVector
from ebbtide.messages.common import Vector
from ebbtide.messages.dry_runs import DryRunReport, HostChoice
from ebbtide.messages.hosts import HostReport
from ebbtide.messages.requests import VMRequest

#: The plan of a dry run is none of the running ones.
_PLAN_ID: Final = "dry-run"


class DryRuns:
    """Answers requests that carry ``dry_run``; nothing is changed or remembered.

    :param chooser: ranks hosts. One of its own, so that a dry run draws no lot that a placement would have drawn.
    :param policy: of requests that name none.
    """

    def __init__(
        self, hosts: Hosts, operations: Operations, store: Store, chooser: InstructionExecutor, policy: PlacementPolicy
    ) -> None:
        self._hosts = hosts
        self._operations = operations
        self._store = store
        self._chooser = chooser
        self._policy = policy

    async def create(self, request: VMRequest) -> DryRunReport:
        """Where a VM would go, and who would give what for it. Raises RequestError as the creation itself."""
        await self._operations.check_name(request.vm.name)
        await self._hosts.settle()
        policy = request.policy or self._policy
        state = start_placement(_PLAN_ID, request.request_id, request.vm, request.deadline_s, policy)
        seen: list[tuple[HostView, float]] = []

        def choose(state: Plan, instruction: ChooseHosts) -> HostsChosen:
            chosen, seen[:] = self._chooser.ranking.choices(state, instruction)
            return chosen

        def choices(chosen: HostsChosen) -> tuple[HostChoice, ...]:
            return tuple(
                HostChoice(
                    id=view.id,
                    fitness=round(score, 6),
                    free=Vector.of(view.free),
                    deflatable=Vector.of(view.deflatable),
                )
                for view, score in seen
            )

        sold = await self._operations.sold()
        reports = self._reports()
        known = Known(sold, {host: self._reserved(report) for host, report in reports.items()}, time.time())
        moves = self._chooser.move_first, self._chooser.move_mib_s
        return await _in_turns(dry_run_plan(state, reports, choose, choices, known, *moves))

    async def delete(self, name: str, request_id: str, precondition: Precondition = ANY_VERSION) -> DryRunReport:
        """Who would grow when a VM is deleted. Raises RequestError as the deletion itself."""
        await self._hosts.settle()
        row = await self._operations.deletable(name, precondition)
        if row.phase is VMPhase.PLACING:
            check_readable(placement := await self._store.plan(row.request_id))
            # As if the placement were to end where it is now.
            waiting = start_calling_off(_PLAN_ID, request_id, name, row.request_id)
            state: Plan = waiting.next_step(how_ended(0.0, placement)).state
        elif row.host is None:
            state = removed_already(_PLAN_ID, request_id, name)
        else:
            state = start_removal(_PLAN_ID, request_id, name, row.host, row.phase, owed=row.owes_removal)
        return await _in_turns(dry_run_plan(state, self._reports(), self._none))

    def _reports(self) -> dict[str, HostReport]:
        return {host.report.id: host.report for host in self._hosts.ready()}

    def _reserved(self, report: HostReport) -> ResourceVector:
        """What running placements have chosen on a host and is not charged there yet."""
        coming = to_come(report, self._hosts.availability.queue(report.id, but=_PLAN_ID))
        overhead = ResourceVector(memory_mib=report.vm_overhead_mib)
        return sum((arrival.size + overhead for arrival in coming), ZERO)

    @staticmethod
    def _none(state: Plan, instruction: ChooseHosts) -> HostsChosen:
        return HostsChosen(0.0, (), "a deletion looks for no host")


async def _in_turns(steps: Generator[None, None, DryRunReport]) -> DryRunReport:
    """The answer of a dry run; after each of its steps the loop's other work has its turn."""
    while True:
        try:
            next(steps)
        except StopIteration as end:
            report: DryRunReport = end.value
            return report
        await asyncio.sleep(0)
