"""What a plan that clears up on a host has to leave alone there: its VM, while another plan is bringing it."""

from __future__ import annotations

from cluster_manager.execution.running_plans import clears_up
from cluster_manager.plans.plans import Plan
from cluster_manager.store import queries
from cluster_manager.store.rows import stored_plan
from cluster_manager.store.store import Store


async def brought_meanwhile(store: Store, state: Plan, host: str) -> str:
    """Why a plan that clears up on a host removes nothing there now; empty if nobody brings its VM there.

    To be asked by a plan that holds the host: another one may have said that it comes, and waits for the host then, but
    brings nothing before it has it. The record has the VM there only once it has come up.
    """
    assert state.vm is not None, "it clears up after a VM"
    plans = [stored_plan(row).state for row in await store.rows(queries.under_way(state.vm, host))]
    # Those that clear up as well must not wait for one another.
    others = (plan for plan in plans if plan.id != state.id and not clears_up(plan))
    return next((f"{plan.kind} {plan.request_id} is bringing {state.vm} to {host}" for plan in others), "")
