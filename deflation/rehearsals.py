"""REST bodies of the manager's dry runs: what creating or deleting a VM would come to. Nothing is changed."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from deflation.messages import Body, Name, RequestId, Vector


class HostChoice(Body):
    """A host that placement would try, in its turn."""

    id: Name
    fitness: float = Field(ge=0, le=1, description="cosine of demand and free + deflatable (seed 004 §5)")
    free: Vector = Field(description="beside the VM's overhead and what running placements have chosen")
    deflatable: Vector


class SizeChange(Body):
    """A VM that would shrink or grow."""

    name: Name
    before: Vector = Field(description="as its host last reported it")
    after: Vector


class Rehearsal(Body):
    """The answer to a creation or deletion with ``dry_run``, by the hosts' last reports; layers may give less."""

    request_id: RequestId
    kind: Literal["create", "delete"]
    would: Literal["done", "failed"] = Field(description="how the operation would end")
    sentence: str
    host: Name | None = Field(None, description="where the VM would be, or is")
    hosts: tuple[HostChoice, ...] = Field((), description="in the order in which they would be tried")
    need: Vector = Field(Vector(), description="what would have to be reclaimed on that host")
    deflated: tuple[SizeChange, ...] = Field((), description="who would shrink, and by how much")
    grown: tuple[SizeChange, ...] = Field((), description="who would grow")
    preempted: tuple[Name, ...] = Field((), description="who would be stopped: the last resort")
    reason: Literal["minimum", "shortfall"] | None = Field(None, description="why anybody would be preempted")
    steps: tuple[str, ...] = Field((), description="what would be done, a sentence a step")
