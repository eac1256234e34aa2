"""Reader of stored plans, and what stands for one that cannot be read."""

from __future__ import annotations

from typing import Annotated, Any, Final

from pydantic import Field, TypeAdapter

from cluster_manager.plans.lifecycle import AdoptionPlan, ReleasePlan, ResizePlan, StartPlan, StopPlan
from cluster_manager.plans.live_migrations import LiveMigrationPlan
from cluster_manager.plans.migrations import MigrationPlan
from cluster_manager.plans.placements import PlacementPlan
from cluster_manager.plans.plans import (
    AwaitHost,
    Event,
    Finish,
    Note,
    Plan,
    ReinflationPending,
    SetVM,
    Step,
    VMPhase,
    finish,
    unexpected,
)
from cluster_manager.plans.removals import CancelPlan, ReinflationPlan, RemovalPlan, TargetPlan
from cluster_manager.plans.returns import ReturnPlan
from ebbtide.messages.common import as_sent
from ebbtide.messages.operations import OperationState

AnyPlan = Annotated[
    PlacementPlan
    | RemovalPlan
    | TargetPlan
    | ReinflationPlan
    | StopPlan
    | StartPlan
    | ResizePlan
    | MigrationPlan
    | AdoptionPlan
    | ReleasePlan
    | ReturnPlan
    | LiveMigrationPlan
    | CancelPlan,
    Field(discriminator="kind"),
]
_ANY: Final[TypeAdapter[Plan]] = TypeAdapter(AnyPlan)


class UnreadPlan(Plan):
    """What is known, by the columns of its row, of a plan whose state is damaged or of a later version.

    It is carried out by nobody, and what is stored of it stays for a manager that can read it.
    """

    def next_step(self, event: Event) -> Step:
        raise unexpected(self, event)

    def ended(self, phase: VMPhase, host: str | None) -> Step:
        """Its end by somebody who waits for it no more: nothing that it may have done is undone.

        :param phase: where its VM stands then.
        :param host: where its VM is, or may be.
        """
        said = f"{self.kind} was ended, since its stored plan cannot be read: what came of it is not known"
        step = finish(self, OperationState.FAILED, said)
        if self.vm is not None:
            step = step.also(SetVM(self.vm, phase, host, said))
        if host is not None:
            step = step.also(ReinflationPending(host, True))
        return step.also(Note("failed", self.vm, host, said))


def unread_plan(row: Any, why: str) -> UnreadPlan:
    """What stands for a plan that cannot be read.

    :param row: of the table of plans.
    """
    said = f"its stored plan cannot be read ({why}): "
    if row.finished:
        said += "how it ended is all that is known"
        outcome = row.outcome if row.outcome in list(OperationState) else OperationState.FAILED
        instruction: AwaitHost | Finish = Finish(state=OperationState(outcome), sentence=said)
    else:
        said += f"this manager does not go on with it; `ebb plan cancel {row.request_id}` ends it"
        instruction = AwaitHost(host=row.host or "")
    return UnreadPlan.model_construct(
        id=row.id,
        request_id=row.request_id,
        kind=row.kind,
        instruction=instruction,
        vm=row.vm,
        host=row.host,
        progress=(said,),
    )


def read_plan(text: str) -> Plan:
    """A plan as it is stored."""
    return _ANY.validate_json(text, context=as_sent)
