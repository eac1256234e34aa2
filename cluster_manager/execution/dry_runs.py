"""Dry runs over the hosts' last reports: creations and deletions by their checks and plans."""

from __future__ import annotations

import asyncio
from collections.abc import Generator
from typing import Final

from cluster_manager.execution.instruction_executor import InstructionExecutor
from cluster_manager.execution.operations import Operations
from cluster_manager.inventory.hosts import Hosts
from cluster_manager.inventory.versions import ANY_VERSION, Precondition
from cluster_manager.plans.dry_run_plan import dry_run_plan
from cluster_manager.plans.placements import start_placement
from cluster_manager.plans.plans import ChooseHosts, HostsChosen, Plan
from cluster_manager.plans.removals import removed_already, start_removal
from cluster_manager.store.store import Store
from ebbtide.deflation.placement.fitness import HostView
from ebbtide.deflation.placement.policy_names import PlacementPolicy
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
            chosen, seen[:] = self._chooser.choices(state, instruction)
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

        recorded = await self._operations.recorded()
        return await _in_turns(
            dry_run_plan(state, self._reports(), choose, choices, recorded, self._chooser.move_first)
        )

    async def delete(self, name: str, request_id: str, precondition: Precondition = ANY_VERSION) -> DryRunReport:
        """Who would grow when a VM is deleted. Raises RequestError as the deletion itself."""
        row = await self._operations.deletable(name, precondition)
        if row.host is None:
            return await _in_turns(dry_run_plan(removed_already(_PLAN_ID, request_id, name), {}, self._none))
        state = start_removal(_PLAN_ID, request_id, name, row.host)
        return await _in_turns(dry_run_plan(state, self._reports(), self._none))

    def _reports(self) -> dict[str, HostReport]:
        return {host.report.id: host.report for host in self._hosts.ready()}

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
