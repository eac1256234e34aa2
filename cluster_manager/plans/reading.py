"""Reader of stored plans, of this version and of the one before it, and what stands for one that cannot be read."""

from __future__ import annotations

import json
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
from ebbtide.deflation.floors import HARD_FLOOR
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
_KINDS: Final[dict[str, type[Plan]]] = {
    kind.model_fields["kind"].default: kind
    for kind in (
        PlacementPlan,
        RemovalPlan,
        TargetPlan,
        ReinflationPlan,
        StopPlan,
        StartPlan,
        ResizePlan,
        MigrationPlan,
        AdoptionPlan,
        ReleasePlan,
        ReturnPlan,
        LiveMigrationPlan,
        CancelPlan,
    )
}


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
    # Every plan of the earlier version has this key, none of this one.
    if '"life":' in text and "life" in (found := json.loads(text)):
        return _ANY.validate_python(_renewed(found), context=as_sent)
    return _ANY.validate_json(text, context=as_sent)


def _renewed(found: dict[str, Any]) -> dict[str, Any]:
    """A plan of the earlier version, which had one type for all kinds and one size by another name."""
    life = found.pop("life") or {}
    spec = found.get("spec") or life.get("spec") or _any_spec(found["vm"])
    names = {"rest": "continues", "home": "bound_to"}
    flat = {**{names.get(key, key): value for key, value in life.items()}, **found, "spec": spec}
    if (size := flat.pop("initial", None)) is not None:
        flat["start_size"] = size
    instruction = flat["instruction"]
    if instruction["do"] == "create" and "initial" in instruction:
        instruction["start_size"] = instruction.pop("initial")
    if flat.get("stage") == "home" and instruction["do"] != "finish":
        # It was on its way back to its old host: it ends as soon as that can be asked (`MovePlan`).
        flat["instruction"] = {"do": "await-host", "host": flat["bound_to"], "until_s": 0.0}
    return {key: value for key, value in flat.items() if key in _KINDS[flat["kind"]].model_fields}


def _any_spec(vm: str | None) -> dict[str, Any]:
    """Of a VM that has arrived: its plan keeps no room for it any more."""
    return {"name": vm, "nominal": {"cpu_cores": HARD_FLOOR.cpu_cores, "memory_mib": HARD_FLOOR.memory_mib}}
