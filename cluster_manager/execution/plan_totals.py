"""Totals of the plans of a term: how long they took, and whom they preempted why. In memory: for metrics only."""

from __future__ import annotations

from collections import Counter

from cluster_manager.plans.plans import Finish, Note, Plan, Step, preempted_by
from cluster_manager.plans.returns import ReturnPlan
from ebbtide.rest.metrics.totals import OPERATION_S, Distributions


class PlanTotals:
    """Counted as the steps of plans are stored."""

    def __init__(self) -> None:
        #: By kind and how they ended.
        self.durations: Distributions[tuple[str, str]] = Distributions(OPERATION_S)
        #: VMs that were preempted, by reason.
        self.preempted: Counter[str] = Counter()

    def add(self, before: Plan, step: Step, seconds: float) -> None:
        """Count a step that was stored.

        :param before: the plan before it.
        :param seconds: since the plan began.
        """
        reasons = {victim.vm: str(victim.reason) for victim in preempted_by(before.instruction)}
        if isinstance(before, ReturnPlan) and before.perhaps is not None:
            # Its answer was lost: it is counted when its host says what came of it.
            reasons[before.vm] = str(before.perhaps)
        for effect in step.effects:
            if isinstance(effect, Note) and effect.kind == "preempted" and effect.vm in reasons:
                self.preempted[reasons[effect.vm]] += 1
        end = step.state.instruction
        if isinstance(end, Finish) and not isinstance(before.instruction, Finish):
            self.durations[before.kind, end.state.value].add(seconds)
