"""The budget that a manager grants a host for its harvest VMs (docs/placement.md)."""

from __future__ import annotations

from pydantic import Field

from deflation.messages import LARGEST, Body, Vector


class Budget(Body):
    """PUT /v1/budget of a host agent: what its harvest VMs may hold together above their minimums."""

    epoch: int = Field(0, ge=0, strict=True, description="the manager's leadership; a lower one is refused")
    order: int = Field(0, ge=0, le=LARGEST, strict=True, description="counts a manager's commands; a lower one is late")
    number: int = Field(ge=1, strict=True, description="rises with every budget; a lower one is refused")
    room: Vector


class BudgetStatus(Body):
    """The answer: the budget in force, which is nothing once a reclaim, a creation or a growth of others revoked it."""

    number: int
    room: Vector
    held: Vector = Field(description="what the harvest VMs hold above their minimums now")
