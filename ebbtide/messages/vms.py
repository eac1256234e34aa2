"""REST bodies of VMs: the VM as it is asked for, as its host agent sees it and as the manager sees it."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated, Final, Literal, Self

from pydantic import AfterValidator, Field, model_validator

from ebbtide.deflation.allocations import Allocation, Priority, check_sizes
from ebbtide.deflation.cascade.instructions import GuestKind
from ebbtide.deflation.cascade.pressure import BUDGET_S
from ebbtide.deflation.errors import InvalidField
from ebbtide.deflation.floors import HARD_FLOOR, effective_minimum
from ebbtide.deflation.resources import ZERO, ResourceVector
from ebbtide.deflation.sharing.utility import size_of_shares
from ebbtide.messages.common import (
    LARGEST,
    MOST,
    MOST_CORES,
    Amount,
    Body,
    ChangingPage,
    Name,
    Open,
    Page,
    Sentence,
    Size,
    StopSeconds,
    Vector,
    is_known,
)
from ebbtide.messages.labels import LABEL_WORDS, Labels
from ebbtide.messages.minimums import AnyShares, Utility

#: Memory that a guest boots with where nothing else is said, MiB.
LEAST_BOOT_MIB = 384.0
#: Names of templates that stand for something else: a VM made from XML in a request, and an adopted one.
XML_TEMPLATE: Final = "xml"
ADOPTED_TEMPLATE: Final = "adopted"
RESERVED_TEMPLATES: Final = (XML_TEMPLATE, ADOPTED_TEMPLATE)


KIND_WORDS: Final = (
    "what of the guest answers: our agent (its domain has the channel), qemu-guest-agent only, or its balloon driver"
)
PRIORITY_WORDS: Final = (
    "fixed: never touched; deflatable: shrinks to its minimum; harvest: grows into what its host leaves"
)
PREEMPTION_WORDS: Final = "what becomes of it when there is no room any more"
NOTICE_WORDS: Final = "how long it has to end its work when it is preempted, seconds"
#: How long a VM that is preempted has to end its work, where nothing else is said, seconds.
NOTICE_S: Final = 30.0


class OnPreemption(StrEnum):
    """What becomes of a VM for which there is no room any more."""

    #: It is told, powers off, and waits for room with its disk.
    STOP = "stop"
    #: It is told, its memory is saved to disk, and it goes on where it was; stopped where disk or time do not allow it.
    SUSPEND = "suspend"
    #: It goes at once, with its disk.
    DELETE = "delete"


def _measurable(size: Vector) -> Vector:
    given = size.__dict__
    told = {name: round(value, 4 if name == "cpu_cores" else 6) for name, value in given.items()}
    # Of thousands of stored ones, which are so already, not one is made anew.
    return size if told == given else type(size)(**told)


#: What a VM is sold, to the digits that hosts measure and tell: of more, what a VM has would never come up to it.
Sold = Annotated[Size, AfterValidator(_measurable)]


class VMSpec(Body):
    """A VM as it is asked for."""

    name: Name = Field(description="the VM's name")
    priority: Open[Priority] = Field(
        Priority.DEFLATABLE,
        description=PRIORITY_WORDS,
    )
    nominal: Sold = Field(description="what it is sold")
    minimum: Sold = Field(Vector(), description="never less than this; raised to the hard floors")
    minimum_share: AnyShares | None = Field(None, description="the minimum as a share of nominal, instead of minimum")
    utility: Utility | None = Field(None, description="the minimum by the application's utility, instead of minimum")
    start: Open[Literal["nominal", "deflated"]] = Field(
        "nominal", description="deflated: smaller where nominal does not fit"
    )
    ceiling: Sold | None = Field(None, description="harvest VMs only: up to where they may grow")
    template: Name = Field("lab", description="of its host, by name")
    xml: str | None = Field(None, max_length=65_536, description="domain XML instead of a template; for admins only")
    boot_memory_mib: Amount | None = Field(None, description="memory that cannot be unplugged; default: half, >= 384")
    on_preemption: Open[OnPreemption] = Field(
        OnPreemption.STOP,
        description="stop: it keeps its disk and waits for room; suspend: its memory is saved, too, where disk and "
        "time allow that; delete: it goes with its disk",
    )
    preemption_notice_s: StopSeconds = Field(
        NOTICE_S, description="for ending its work when it is preempted; no longer than the arriving VM can wait"
    )
    steady: bool = Field(
        True,
        strict=True,
        exclude_if=lambda steady: steady,
        description="whether steady mode may trim it, where its host has that on",
    )
    #: For the manager only: agents know of none.
    labels: Labels = Field({}, exclude_if=lambda labels: not labels, description=LABEL_WORDS)

    @model_validator(mode="after")
    def _sizes_agree(self) -> Self:
        ceiling = self.ceiling.vector() if self.ceiling is not None else None
        for field, size in (("nominal", self.nominal), ("ceiling", self.ceiling)):
            if size is not None and size.cpu_cores > MOST_CORES:
                raise InvalidField(f"{field}.cpu_cores", f"must be at most {MOST_CORES}")
        if is_known(self.priority):
            check_sizes(self.priority, self.nominal.vector(), self.asked_minimum(), ceiling)
        if self.boot_memory_mib is not None:
            if self.boot_memory_mib > self.nominal.memory_mib:
                raise InvalidField("boot_memory_mib", "exceeds nominal.memory_mib")
            if self.boot_memory_mib < HARD_FLOOR.memory_mib:
                raise InvalidField("boot_memory_mib", f"must be at least {HARD_FLOOR.memory_mib:g}")
        return self

    def asked_minimum(self) -> ResourceVector:
        """The minimum as it was asked for, in whichever way.

        :raises InvalidField: it was asked for in two ways, or its curve is none.
        """
        nominal, minimum = self.nominal.vector(), self.minimum.vector()
        for field, other in (("minimum_share", self.minimum_share), ("utility", self.utility)):
            if other is not None and not minimum.is_zero():
                raise InvalidField(field, "contradicts minimum: give one of minimum, minimum_share and utility")
        if self.utility is not None:
            if self.minimum_share is not None:
                raise InvalidField("utility", "contradicts minimum_share: give one of them")
            return size_of_shares(nominal, self.utility.shares())
        return size_of_shares(nominal, self.minimum_share.vector()) if self.minimum_share is not None else minimum

    def with_minimum(self, minimum: ResourceVector) -> Self:
        """The same with an absolute minimum. Not checked against the other sizes."""
        return self.model_copy(update={"minimum": Vector.of(minimum), "minimum_share": None, "utility": None})

    def least_start(self) -> ResourceVector:
        """The smallest size at which it can be started: its minimum, and the memory to boot with."""
        nominal = self.nominal.vector()
        boot_mib = self.boot_memory_mib if self.boot_memory_mib is not None else LEAST_BOOT_MIB
        return self.allocation(ZERO).minimum.larger(ResourceVector(memory_mib=boot_mib)).smaller(nominal)

    def allocation(self, current: ResourceVector, overhead_mib: float = 0.0) -> Allocation:
        """The row that policies read, with the effective minimum."""
        nominal = self.nominal.vector()
        minimum = nominal if self.priority is Priority.FIXED else effective_minimum(self.asked_minimum(), nominal)
        ceiling = self.ceiling.vector() if self.ceiling is not None else None
        return Allocation(self.name, self.priority, nominal, minimum, current, ceiling, overhead_mib)


class VMState(StrEnum):
    """What a VM is doing, as libvirt and its intent say."""

    STARTING = "starting"
    RUNNING = "running"
    DEFLATING = "deflating"
    REINFLATING = "reinflating"
    STOPPING = "stopping"
    #: Its vCPUs stand still and it keeps what it holds: suspended by an operator, or by us until there is room for it.
    PAUSED = "paused"
    #: Off: it holds no room, and keeps its disk.
    STOPPED = "stopped"
    #: On its way to another host, or from one: it is charged here, and nothing changes its size.
    MIGRATING = "migrating"


class NotYetDeflatable(Body):
    """Memory of a VM that cannot be taken now, but probably can be soon: its guest agent does not answer yet."""

    memory_mib: float = Field(ge=0, le=MOST, description="what can probably be taken then, above the minimum")
    in_s: float = Field(ge=0, le=MOST, description="in how many seconds, by what its boots took so far: a guess")
    why: Sentence = Field(description='why it does not answer, to go on with after "which is"')


class VMStatus(Body):
    """One VM on one host, as its agent sees it."""

    name: Name = Field(description="the VM's name")
    host: Sentence = Field(description="the host's id")
    domain: Sentence = Field(description="the name in libvirt")
    state: Open[VMState] = Field(description="what it is doing")
    priority: Open[Priority] = Field(description=PRIORITY_WORDS)
    nominal: Size = Field(description="what it was sold")
    minimum: Size = Field(description="effective: raised to the hard floors")
    ceiling: Size | None = Field(None, description="harvest VMs only: up to where it may grow")
    current: Size = Field(description="the committed bound")
    overhead_mib: float = Field(ge=0, le=1e6, description="memory that it is charged beyond its size, MiB")
    generation: int = Field(ge=0, le=LARGEST, description="of its latest target")
    guest_connected: bool = Field(description="whether its guest agent answers")
    guest_kind: Open[GuestKind] = Field(GuestKind.AGENT, description=KIND_WORDS)
    template: Name = Field("lab", description="of its host, by name")
    boot_memory_mib: float = Field(ge=0, le=MOST, description="memory that cannot be unplugged, MiB")
    not_yet: NotYetDeflatable | None = Field(None, description="memory that can be taken soon; null: now, or never")
    pressure: Sentence | None = Field(None, description="why the guest is under pressure; null if it is not")
    pressure_budget_s: float = Field(
        BUDGET_S, description="for how long the guest's claims of pressure still count; it comes back while none does"
    )
    asks: Size = Field(Vector(), description="what it wants under pressure and its host cannot spare")
    throttled_share: float | None = Field(
        None, description="share of periods in which its quota stopped a vCPU, lately; null: it has no quota"
    )
    drift_total: int = Field(0, description="how often something had to be put right that another program had changed")
    broken_offline_total: int = Field(
        0, description="how often a vCPU used the host's CPU although the guest called it off line"
    )
    contention: Sentence | None = Field(
        None, description="how often another program undoes what is put right; null: none"
    )
    held: bool = Field(False, description="a target has set its size: it does not grow by itself, only by command")
    start_size: Size | None = Field(
        None, description="off, on command or by itself: the size it comes up with; it holds no room"
    )
    start_overhead_mib: float | None = Field(
        None, ge=0, le=1e6, description="memory that its start costs beyond that size, MiB; null: as that of a new VM"
    )
    saved_mib: float | None = Field(
        None,
        ge=0,
        le=MOST,
        description="suspended: what its saved memory takes on disk; it goes on where it was",
    )
    started_at: Amount | None = Field(
        None, description="since when its work is under way, seconds since the epoch; null: unknown"
    )
    off_reason: Sentence | None = Field(None, description="why it is off or paused, where no command has made it so")
    at_next_start: VMSpec | None = Field(None, description="what it becomes at its next start, where it cannot be now")
    adopted: bool = Field(False, description="another program's domain: it is never removed, only released")
    uuid: Sentence | None = Field(None, description="of its domain; null: not known yet")

    def allocation(self) -> Allocation:
        """The row that policies read."""
        return Allocation(
            self.name,
            self.priority,
            self.nominal.vector(),
            self.minimum.vector(),
            self.current.vector(),
            self.ceiling.vector() if self.ceiling is not None else None,
            self.overhead_mib,
        )


class VMStatusPage(Page):
    """GET /v1/vms of a host agent: by name."""

    vms: tuple[VMStatus, ...] = Field(description="by name")


ManagedState = Literal[
    "placing", "running", "paused", "deleting", "failed", "stopping", "stopped", "starting", "migrating", "preempted"
]


class Preempted(Body):
    """A VM that was stopped for lack of room, and waits for room."""

    reason: Sentence = Field(description="minimum: the minimums left too little; shortfall: a deflation fell short")
    at: float = Field(description="seconds since the epoch")
    position: int = Field(ge=1, description="in the queue of its host, oldest first; those behind may fit sooner")
    waits_for: Vector = Field(description="what its host has too little of, free and deflatable, for its least size")
    sentence: Sentence = Field(description="its place in the queue and what it waits for, in words")


class ClusterVM(Body):
    """A VM as the manager sees it."""

    name: Name
    host: str | None = Field(description="where it is; null: on none")
    state: Open[ManagedState] = Field(description="what it is doing")
    priority: Open[Priority] = Field(description=PRIORITY_WORDS)
    nominal: Vector = Field(description="what it was sold")
    minimum: Vector = Field(description="never less than this; raised to the hard floors")
    ceiling: Vector | None = Field(None, description="harvest VMs only: up to where it may grow")
    current: Vector = Field(description="what its host lets it hold, as it was committed last")
    generation: int = Field(description="of its latest target; the next one is higher")
    guest_connected: bool = Field(False, description="whether its guest agent answers")
    guest_kind: Open[GuestKind] = Field(GuestKind.AGENT, description=KIND_WORDS)
    sentence: str = Field(description="what happened to it last, and why")
    version: str = Field("", description="differs when anything that a client can change does: for If-Match")
    at_next_start: VMSpec | None = Field(None, description="what it becomes at its next start, where it cannot be now")
    on_preemption: Open[OnPreemption] = Field(OnPreemption.STOP, description=PREEMPTION_WORDS)
    preemption_notice_s: float = Field(NOTICE_S, description=NOTICE_WORDS)
    steady: bool = Field(True, description="whether steady mode may trim it, where its host has that on")
    preempted: Preempted | None = Field(None, description="since when it waits for room, and why; null: it does not")
    saved_mib: float | None = Field(
        None, description="suspended: what its saved memory takes on its host's disk; null: it is not"
    )
    labels: dict[str, str] = Field({}, description=LABEL_WORDS)


class VMPage(ChangingPage):
    """GET /v1/vms of the manager: by name."""

    vms: tuple[ClusterVM, ...] = Field(description="by name")
