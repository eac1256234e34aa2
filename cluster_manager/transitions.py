"""How a plan goes on: one pure function for all kinds."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Final

from cluster_manager.lifecycle import (
    advance_adoption,
    advance_release,
    advance_resize,
    advance_start,
    advance_stop,
)
from cluster_manager.migrations import advance_migration
from cluster_manager.placements import advance_placement
from cluster_manager.plans import Event, PlanKind, PlanState
from cluster_manager.removals import advance_reinflation, advance_removal, advance_target
from cluster_manager.steps import Step
from deflation.errors import ProtocolViolation

_KINDS: Final[Mapping[PlanKind, Callable[[PlanState, Event], Step]]] = {
    "create": advance_placement,
    "delete": advance_removal,
    "target": advance_target,
    "reinflate": advance_reinflation,
    "stop": advance_stop,
    "start": advance_start,
    "resize": advance_resize,
    "migrate": advance_migration,
    "adopt": advance_adoption,
    "release": advance_release,
}


def advance(state: PlanState, event: Event) -> Step:
    """What a plan does next.

    :raises ProtocolViolation: the event does not answer the plan's instruction, or the plan has ended.
    """
    if state.finished:
        raise ProtocolViolation("event", f"{type(event).__name__} comes after the end of plan {state.id}")
    return _KINDS[state.kind](state, event)
