"""REST bodies of dry runs: what a command or a request would come to. Nothing is changed."""

from __future__ import annotations

from typing import Literal, Self

from pydantic import Field

from ebbtide.deflation.cascade.instructions import Outcome
from ebbtide.deflation.ledger import Layer
from ebbtide.messages.common import Body, Name, Open, RequestId, Vector


class ForecastRow(Body):
    """One layer and one resource of a dry run; amounts in the unit of the resource's name."""

    layer: Open[Layer] = Field(description="which")
    resource: str = Field(description="the component of the vector")
    asked: float = Field(description="of this layer")
    could: float = Field(description="what it would take or give by the latest readings; nothing of it is verified")
    reason: str = Field(description="why not all")


class VMForecast(Body):
    """What would be done to one VM."""

    name: Name = Field(description="the VM's name")
    current: Vector = Field(description="as committed")
    now: Vector = Field(description="the bound, read just now")
    target: Vector = Field(description="the size to reach")
    expected: Vector = Field(description="where willing layers would bring it; the application's part is not in it")
    shortfall: Vector = Field(description="what would be missing")
    rows: tuple[ForecastRow, ...] = Field(description="by layer and resource")
    sentence: str = Field(description="the same in words")

    @classmethod
    def of(cls, name: str, current: Vector, outcomes: tuple[Outcome, ...], sentence: str) -> Self:
        last = outcomes[-1]
        return cls(
            name=name,
            current=current,
            now=Vector.of(outcomes[0].before.size),
            target=Vector.of(outcomes[0].target),
            expected=Vector.of(last.after.size),
            shortfall=Vector.of(sum((o.shortfall for o in outcomes[1:]), outcomes[0].shortfall)),
            rows=tuple(
                ForecastRow(
                    layer=entry.layer,
                    resource=entry.resource,
                    asked=entry.asked,
                    could=entry.verified,
                    reason=entry.reason,
                )
                for outcome in outcomes
                for entry in outcome.ledger
            ),
            sentence=sentence,
        )


class Forecast(Body):
    """The answer to a command with ``dry_run``: what would be done. Nothing has been changed or remembered."""

    request_id: RequestId
    kind: Open[Literal["target", "reclaim", "reinflate"]] = Field(description="what was asked for")
    host: Name = Field(description="the host's id")
    vms: tuple[VMForecast, ...] = Field(description="one row a VM")
    shortfall: Vector = Field(Vector(), description="what would be missing, of all VMs")
    sentence: str = Field(description="what would be done, and what would be missing")


class HostChoice(Body):
    """A host that placement would try, in its turn."""

    id: Name = Field(description="the host's id")
    fitness: float = Field(ge=0, le=1, description="cosine of demand and free + deflatable (Sharma et al. 2019, §5)")
    free: Vector = Field(description="beside the VM's overhead and what running placements have chosen")
    deflatable: Vector = Field(description="what could still be taken from its VMs")


class SizeChange(Body):
    """A VM that would shrink or grow."""

    name: Name
    before: Vector = Field(description="as its host last reported it")
    after: Vector = Field(description="as it would be")


class DryRunReport(Body):
    """The answer to a creation or deletion with ``dry_run``, by the hosts' last reports; layers may give less."""

    request_id: RequestId
    kind: Open[Literal["create", "delete"]] = Field(description="what was asked for")
    would: Open[Literal["done", "failed"]] = Field(description="how the operation would end")
    sentence: str = Field(description="what would be done and why, or why it would be refused")
    host: Name | None = Field(None, description="where the VM would be, or is")
    hosts: tuple[HostChoice, ...] = Field((), description="in the order in which they would be tried")
    need: Vector = Field(Vector(), description="what would have to be reclaimed on that host")
    deflated: tuple[SizeChange, ...] = Field((), description="who would shrink, and by how much")
    grown: tuple[SizeChange, ...] = Field((), description="who would grow")
    preempted: tuple[Name, ...] = Field((), description="who would be stopped: the last resort")
    reason: Open[Literal["minimum", "shortfall"]] | None = Field(None, description="why a VM would be preempted")
    steps: tuple[str, ...] = Field((), description="what would be done, a sentence a step")


class ProposedMove(Body):
    """A VM that would move to another host while it runs."""

    vm: Name = Field(description="which")
    source: Name = Field(description="where it is")
    target: Name = Field(description="where it would be")
    memory_mib: float = Field(description="to be copied, by the size that it has")
    copies_disk: bool = Field(description="its disk is on its host alone: copying that comes on top")
    lasted_s: float = Field(description="for so long VMs of its host have been deflated, or are taken to have been")
    given_back: Vector = Field(description="to itself and to those that it leaves behind")
    core_hours: float = Field(description="given back for as long as the deflation is expected to last")
    gib_hours: float = Field(description="given back for as long as the deflation is expected to last")
    worth: float = Field(description="core-hours, with GiB-hours by their worth, per GiB copied")
    sentence: str = Field(description="the same in words")


class LeftOut(Body):
    """A host that takes no part, or a VM of a deflated host that lacks something and cannot move."""

    host: Name
    vm: Name | None = Field(None, description="null: all of the host")
    sentence: str = Field(description="why")


class RebalancingReport(Body):
    """GET /v1/rebalancing of the manager: what would be moved, by the hosts' last reports. Nothing is moved."""

    lasted_s: float | None = Field(
        description="for how long VMs are taken to have been deflated; null: for as long as this manager has seen it"
    )
    watched_s: float | None = Field(None, description="for how long this manager has looked; null: lasted_s counts")
    hosts: int = Field(description="that take part")
    deflated_hosts: int = Field(description="of these, with VMs that lack what is worth a resize")
    unready_hosts: int = Field(description="that do not answer, or whose hypervisor does not: they take no part")
    moves: tuple[ProposedMove, ...] = Field(description="each after those before it")
    more: bool = Field(False, description="there may be more moves than are looked for")
    memory_mib: float = Field(description="to be copied by all of them")
    core_hours: float = Field(description="given back by all of them")
    gib_hours: float = Field(description="given back by all of them")
    left_out: tuple[LeftOut, ...] = Field((), description="at most 200 of them")
    sentence: str = Field(description="the same in words")
