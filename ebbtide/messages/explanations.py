"""REST bodies that explain: decisions with their inputs, events, and what the layers of a VM can do."""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from typing import Annotated, Literal, Self, get_args

from pydantic import Field, WithJsonSchema

from ebbtide.deflation.cascade.mechanisms import Finding, Mechanism
from ebbtide.deflation.ledger import Layer
from ebbtide.deflation.modes import HostMode
from ebbtide.messages.common import Body, Name, Open, Vector, WatchedPage
from ebbtide.messages.operations import VMOutcome
from ebbtide.messages.vms import (
    NOTICE_S,
    NOTICE_WORDS,
    PREEMPTION_WORDS,
    ManagedState,
    OnPreemption,
    Preempted,
    VMStatus,
)


class DecisionKind(StrEnum):
    """What a decision was about."""

    #: A VM is started and charged with its size.
    ADMIT = "admit"
    DEFLATE = "deflate"
    REINFLATE = "reinflate"
    #: A size was neither to fall nor to grow.
    RESIZE = "resize"
    #: Something that another program had changed was put right, or seen and left.
    REPAIR = "repair"
    #: A guest runs a CPU that it calls off line.
    DRIFT = "drift"
    #: Limits leave a VM less than its minimum, or no longer; two domains claim to be one VM.
    ALARM = "alarm"
    #: A guest under pressure is shrunk no further and given what there is.
    PRESSURE = "pressure"
    #: A guest asked for more itself.
    REQUEST = "request"
    #: A memory limit was set or lifted.
    LIMIT = "limit"
    #: A command was refused; nothing has changed.
    REFUSED = "refused"
    REMOVE = "remove"
    #: A VM stopped, and not by us.
    STOPPED = "stopped"
    MODE = "mode"
    #: Harvest VMs grow, or give back for others.
    HARVEST = "harvest"
    #: Idle memory is trimmed before it is asked for, or given back.
    STEADY = "steady"
    #: The VMs hold more than the host may hand out, or no longer.
    OVERCOMMITTED = "overcommitted"
    #: The hypervisor does not answer, or answers again.
    HYPERVISOR = "hypervisor"


class Decision(Body):
    """One decision: what, and from which inputs, in one sentence."""

    number: int = Field(ge=1, description="counts up in each incarnation of the agent")
    at: float = Field(description="seconds since the epoch")
    vm: str | None = Field(None, description="about which VM; null: about the host")
    kind: Annotated[str, WithJsonSchema({"type": "string", "enum": list(DecisionKind)})] = Field(
        description="what it was about; later versions have more kinds"
    )
    sentence: str = Field(description="what was decided, and why")
    inputs: Mapping[str, float | str] = Field({}, description="what it was decided by; names carry units")
    outcome: str | None = Field(None, description="what came of it, where something was tried")
    repeated: int = Field(0, description="how often the same was decided again since then, without anything between")


class DecisionPage(Body):
    """GET /v1/decisions of a host agent: oldest first."""

    host: Name = Field(description="whose they are")
    incarnation: str = Field(description="numbers begin again with each")
    decisions: tuple[Decision, ...] = Field(description="oldest first")
    newest: int = Field(description="the number of the latest decision of all; 0 where there is none")
    forgotten: bool = Field(description="whether decisions were asked for that are remembered no more")


class FindingRow(Body):
    """Whether one mechanism can be used on one VM now."""

    mechanism: Open[Mechanism] = Field(description="its name")
    layer: Open[Layer] = Field(description="to which it belongs")
    available: bool = Field(description="whether it can be used now")
    reason: str = Field(description="why not; where it is available: what is used")
    fix: str = Field("", description="what would make it available, to be copied")

    @classmethod
    def of(cls, finding: Finding) -> Self:
        return cls(
            mechanism=finding.mechanism,
            layer=finding.layer,
            available=finding.available,
            reason=finding.reason,
            fix=finding.fix,
        )


class PastResize(Body):
    """A resize that has ended, with its ledger."""

    at: float = Field(description="seconds since the epoch")
    request_id: str = Field(description="the request that began it")
    outcome: VMOutcome = Field(description="what was done")


class Explanation(Body):
    """GET /v1/vms/NAME/explain of a host agent: why a VM has the size it has, and what could be done with it."""

    vm: VMStatus = Field(description="the VM")
    sentence: str = Field(description="why it has its size")
    bound: Vector | None = Field(description="what the host lets it hold, read just now; null: it could not be read")
    deflatable: Vector = Field(description="what could still be taken down to its minimum")
    mode: Open[HostMode] = Field(description="of its host")
    mode_reason: str = Field("", description="as it was given")
    findings: tuple[FindingRow, ...] = Field(description="what each mechanism can do, by layer")
    resizes: tuple[PastResize, ...] = Field((), description="the latest, oldest first")
    decisions: tuple[Decision, ...] = Field((), description="the latest about this VM, oldest first")


#: What the manager writes into its event log.
EventKind = Literal[
    "acquirer-decommissioned",
    "acquirer-gave-back",
    "acquirer-looked",
    "acquirer-not-ours",
    "adopted",
    "called-off",
    "certificate-ends",
    "contention",
    "deflated",
    "deleted",
    "failed",
    "host-forgotten",
    "hypervisor",
    "lost",
    "migrated",
    "mode",
    "moving",
    "overcommitted",
    "paused",
    "placed",
    "preempted",
    "preempting",
    "preemption-withdrawn",
    "pressure",
    "refused",
    "reinflated",
    "released",
    "resized",
    "restored",
    "returned",
    "started",
    "stopped",
    "task-cancelled",
    "task-done",
    "task-failed",
    "task-preempted",
    "task-started",
    "task-submitted",
    "task-warned",
    "undone",
    "waiting",
]
#: A reader takes a kind that it does not know as it comes: a later version has more.
_AnyKind = Annotated[str, WithJsonSchema({"type": "string", "enum": list(get_args(EventKind))})]


class EventRow(Body):
    """One line of the manager's event log."""

    at: float = Field(description="seconds since the epoch")
    vm: str | None = Field(None, description="about which VM; null: about none")
    host: str | None = Field(None, description="about which host; null: about none")
    kind: _AnyKind = Field(description="what happened; later versions have more kinds")
    sentence: str = Field(description="what happened and why")


class Event(EventRow):
    """One line of the manager's event log, with its number."""

    id: int = Field(ge=1, description="counts up; streams resume by it")


class EventPage(WatchedPage):
    """GET /v1/events of the manager: newest first."""

    events: tuple[Event, ...] = Field(description="newest first")


class VMExplanation(Body):
    """GET /v1/vms/NAME/explain of the manager: the host's explanation, and what the manager itself knows."""

    host: str | None = Field(description="where it is; null: on none")
    state: Open[ManagedState] = Field(description="what it is doing")
    sentence: str = Field(description="what the manager did with it last, and why")
    on_preemption: Open[OnPreemption] = Field(OnPreemption.STOP, description=PREEMPTION_WORDS)
    preemption_notice_s: float = Field(NOTICE_S, description=NOTICE_WORDS)
    preempted: Preempted | None = Field(None, description="since when it waits for room, and why; null: it does not")
    explanation: Explanation | None = Field(description="of the host; null where it cannot be had")
    unreachable: str | None = Field(None, description="why the host's explanation cannot be had")
    events: tuple[EventRow, ...] = Field((), description="of this VM, oldest first")
    plans: tuple[str, ...] = Field((), description="what is at work on it now, or waits for its host; a sentence each")
