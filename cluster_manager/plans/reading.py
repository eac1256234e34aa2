"""Reader of stored plans, of this version and of the one before it."""

from __future__ import annotations

import json
from typing import Annotated, Any, Final

from pydantic import Field, TypeAdapter

from cluster_manager.plans.lifecycle import AdoptionPlan, ReleasePlan, ResizePlan, StartPlan, StopPlan
from cluster_manager.plans.live_migrations import LiveMigrationPlan
from cluster_manager.plans.migrations import MigrationPlan
from cluster_manager.plans.placements import PlacementPlan
from cluster_manager.plans.plans import Plan
from cluster_manager.plans.removals import CancelPlan, ReinflationPlan, RemovalPlan, TargetPlan
from cluster_manager.plans.returns import ReturnPlan
from ebbtide.deflation.floors import HARD_FLOOR

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


def read_plan(text: str) -> Plan:
    """A plan as it is stored."""
    # Every plan of the earlier version has this key, none of this one.
    if '"life":' in text and "life" in (found := json.loads(text)):
        return _ANY.validate_python(_renewed(found))
    return _ANY.validate_json(text)


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
