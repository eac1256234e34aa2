"""What a plan that clears up on a host has to leave alone there: its VM, while another plan is bringing it."""

from __future__ import annotations

from cluster_manager.execution.running_plans import clears_up
from cluster_manager.plans.host_wait import MovePlan
from cluster_manager.plans.placements import PlacementPlan
from cluster_manager.plans.plans import Arrive, Create, Plan
from cluster_manager.plans.reading import UnreadPlan
from cluster_manager.store import queries
from cluster_manager.store.rows import stored_plan
from cluster_manager.store.store import Store


async def brought_meanwhile(store: Store, state: Plan, host: str) -> str:
    """Why a plan that clears up on a host removes nothing there now; empty if nobody brings its VM there.

    To be asked by a plan that holds the host. The record has the VM there only once it has come up.
    """
    assert state.vm is not None, "it clears up after a VM"
    plans = [stored_plan(row).state for row in await store.rows(queries.under_way(state.vm, host))]
    others = (plan for plan in plans if plan.id != state.id and has_begun(plan))
    return next((f"{plan.kind} {plan.request_id} is bringing {state.vm} to {host}" for plan in others), "")


def has_begun(plan: Plan) -> bool:
    """Whether a plan may have brought its VM to its host by now.

    One that only waits for the host needs it cleared first, and those that clear up must not wait for one another.
    """
    if isinstance(plan, UnreadPlan):
        return True
    if clears_up(plan) or not isinstance(plan, MovePlan | PlacementPlan):
        return False
    waits = isinstance(plan, PlacementPlan) or plan.stage in ("source", "room")
    return not waits or plan.starts > 0 or isinstance(plan.instruction, Arrive | Create)
