"""Why a placement has to preempt on a host, and how it is told (docs/contracts.md, splitting a need)."""

from __future__ import annotations

from cluster_manager.plans import PlanState, Reason
from cluster_manager.readings import allocations_of, pressed_on
from deflation.messages import HostReport, Vector
from deflation.proportional import sizes_to_reach
from deflation.resources import ResourceVector


def with_reason(state: PlanState, report: HostReport, missing: ResourceVector) -> PlanState:
    """Why this host would have to preempt, and the sizes its VMs should reach, as they are before anything changes.

    The reason is ``minimum`` only where the minimums stand in the way. Where a guest under pressure does, from which
    nothing is taken, it is a ``shortfall`` like that of any other layer.
    """
    targets, in_the_way = sizes_to_reach(allocations_of(report), missing)
    reason: Reason = "minimum" if in_the_way else "shortfall"
    layer = state.failed_layer
    if not in_the_way and not missing.fits_in(report.deflatable.vector()):
        layer = layer or f"guest ({', '.join(sorted(pressed_on(report))) or 'one'} under pressure gives nothing)"
    wire = {name: Vector.of(target) for name, target in targets.items()}
    return state.model_copy(update={"reason": reason, "targets": wire, "failed_layer": layer})


def why_preempted(state: PlanState, victim: str, reason: Reason, missing: ResourceVector) -> str:
    """The sentence that stands in the record of a preemption."""
    why = f"the minimums leave {missing} too little" if reason == "minimum" else f"deflation fell short of {missing}"
    if state.failed_layer:
        why += f" in layer {state.failed_layer}"
    why += f" for {state.vm}"
    return f"preempting {victim} on {state.host} (reason {reason}): {why}"
