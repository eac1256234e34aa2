"""Every REST body of host agent and manager (pydantic): the wire form of the vocabulary.

Names carry units. A ``target`` is always the size to reach, never an amount; amounts stand only in ledgers and needs.
What passes between host and guest is in :mod:`deflation.guest_messages`.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated, Any, Final, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from deflation.allocations import HARD_FLOOR, Allocation, Priority, check_sizes, effective_minimum
from deflation.errors import InvalidField
from deflation.instructions import Mode, Outcome
from deflation.ledger import Layer, LedgerEntry
from deflation.minimum_messages import AnyShares, Utility
from deflation.modes import HostMode
from deflation.placement_policies import PlacementPolicy
from deflation.resources import ZERO, ResourceVector
from deflation.utility import size_of_shares

NAME_PATTERN = r"^[a-z0-9]([a-z0-9-]{0,38}[a-z0-9])?$"
Name = Annotated[str, Field(pattern=NAME_PATTERN, description="lower-case letters, digits and hyphens, 1 to 40")]
RequestId = Annotated[str, Field(pattern=r"^[A-Za-z0-9._:-]{1,80}$", description="makes a repeated request harmless")]
#: Memory that a guest boots with where nothing else is said, MiB.
LEAST_BOOT_MIB = 384.0
Seconds = Annotated[float, Field(ge=0, le=86_400, allow_inf_nan=False, strict=True)]
Amount = Annotated[float, Field(ge=0, le=1e12, allow_inf_nan=False, strict=True)]
#: The largest whole number that any JSON parser keeps exactly; databases hold it too.
LARGEST: Final = 2**53
DryRun = Annotated[bool, Field(strict=True, description="say what would be done and change nothing")]


class Body(BaseModel):
    """Base of all bodies: unknown fields are refused, values cannot be changed after the check, numbers are finite."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


class Vector(Body):
    """A resource vector; what is left out is 0."""

    cpu_cores: Amount = 0.0
    memory_mib: Amount = 0.0
    disk_mib_s: Amount = 0.0
    network_mib_s: Amount = 0.0

    @classmethod
    def of(cls, vector: ResourceVector) -> Self:
        return cls(**{name: round(value, 6) for name, value in vector.as_dict().items()})

    def vector(self) -> ResourceVector:
        return ResourceVector(**self.model_dump())


class Problem(Body):
    """What every 4xx and 5xx answers."""

    error: str = Field(description="one sentence that says what is wrong")
    field: str | None = Field(None, description="the field that is wrong, where there is one")


class VMSpec(Body):
    """A VM as it is asked for."""

    name: Name
    priority: Priority = Priority.DEFLATABLE
    nominal: Vector
    minimum: Vector = Vector()
    minimum_share: AnyShares | None = Field(None, description="the minimum as a share of nominal, instead of minimum")
    utility: Utility | None = Field(None, description="the minimum by the application's utility, instead of minimum")
    start: Literal["nominal", "deflated"] = Field("nominal", description="deflated: smaller where nominal does not fit")
    ceiling: Vector | None = Field(None, description="harvest VMs only: up to where they may grow")
    template: Name = "lab"
    xml: str | None = Field(None, max_length=65_536, description="domain XML instead of a template; for admins only")
    boot_memory_mib: Amount | None = Field(None, description="memory that cannot be unplugged; default: half, >= 384")

    @model_validator(mode="after")
    def _sizes_agree(self) -> Self:
        ceiling = self.ceiling.vector() if self.ceiling is not None else None
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


# --- operations ------------------------------------------------------------------------------------------------------


class LedgerRow(Body):
    """One layer and one resource of one deflation; amounts in the unit of the resource's name."""

    layer: Layer
    resource: str
    asked: float
    promised: float
    verified: float
    seconds: float
    reason: str

    @classmethod
    def of(cls, entry: LedgerEntry) -> Self:
        return cls(
            layer=entry.layer,
            resource=entry.resource,
            asked=entry.asked,
            promised=entry.promised,
            verified=entry.verified,
            seconds=entry.seconds,
            reason=entry.reason,
        )


class VMOutcome(Body):
    """What an operation did to one VM. ``before`` and ``after`` are bounds, measured."""

    name: Name
    generation: int
    before: Vector
    after: Vector
    target: Vector
    shortfall: Vector
    ledger: tuple[LedgerRow, ...]
    seconds: float
    sentence: str

    @classmethod
    def of(cls, name: str, generation: int, outcome: Outcome) -> Self:
        return cls(
            name=name,
            generation=generation,
            before=Vector.of(outcome.before.size),
            after=Vector.of(outcome.after.size),
            target=Vector.of(outcome.target),
            shortfall=Vector.of(outcome.shortfall),
            ledger=tuple(LedgerRow.of(entry) for entry in outcome.ledger),
            seconds=round(outcome.seconds, 3),
            sentence=outcome.sentence,
        )


class OperationState(StrEnum):
    """Where an operation stands; all but ``running`` are final."""

    RUNNING = "running"
    DONE = "done"
    PARTIAL = "partial"
    FAILED = "failed"


class Operation(Body):
    """One operation and, when it has ended, what it did and why, in one sentence."""

    request_id: RequestId
    kind: Literal[
        "create",
        "delete",
        "target",
        "reclaim",
        "reinflate",
        "mode",
        "stop",
        "start",
        "resize",
        "migrate",
        "adopt",
        "release",
    ]
    state: OperationState
    sentence: str
    vm: str | None = None
    host: str | None = None
    vms: tuple[VMOutcome, ...] = ()
    shortfall: Vector = Vector()
    started_at: float = Field(description="seconds since the epoch")
    seconds: float = 0.0
    progress: tuple[str, ...] = Field((), description="what has been done so far, a sentence a step")


class Command(Body):
    """What every command of a manager to an agent carries."""

    request_id: RequestId
    epoch: int = Field(0, ge=0, le=LARGEST, strict=True, description="the manager's leadership; a lower one is refused")
    order: int = Field(0, ge=0, le=LARGEST, strict=True, description="counts a manager's commands; a lower one is late")


class CreateCommand(Command):
    """POST /v1/vms of a host agent: start a VM at its nominal size, or deflated."""

    vm: VMSpec
    initial: Vector | None = Field(None, description="the size to start at; default: nominal")


class TargetCommand(Command):
    """PUT /v1/vms/NAME/target of a host agent: bring a VM to a size."""

    generation: int = Field(
        ge=1, le=LARGEST, strict=True, description="rises with every target; a lower one is refused"
    )
    target: Vector
    deadline_s: Seconds = 60.0
    mode: Mode = Mode.ASK
    dry_run: DryRun = False


class ReclaimCommand(Command):
    """POST /v1/reclaims of a host agent: free this much, split in proportion over its VMs."""

    need: Vector = Field(description="amounts to free beyond what is free now")
    deadline_s: Seconds = 60.0
    mode: Mode = Mode.ASK
    dry_run: DryRun = False
    exclude: tuple[Name, ...] = Field((), description="VMs that give nothing: the room is for them")


class ReinflateCommand(Command):
    """POST /v1/reinflations of a host agent: share this room among the VMs that lack something."""

    room: Vector | None = Field(None, description="what to share; default: all that the host has free")
    vms: tuple[Name, ...] = Field((), description="who may grow; none named: all but harvest VMs")
    deadline_s: Seconds = 60.0
    dry_run: DryRun = False


class ModeCommand(Command):
    """PUT /v1/mode of a host agent, PUT /v1/hosts/ID/mode of the manager: what the host is to do from now on."""

    mode: HostMode
    reason: Annotated[str, Field(max_length=200, description="shown wherever the mode is")] = ""


# --- hosts and VMs ---------------------------------------------------------------------------------------------------


class VMState(StrEnum):
    """What a VM is doing, as libvirt and its intent say."""

    STARTING = "starting"
    RUNNING = "running"
    DEFLATING = "deflating"
    REINFLATING = "reinflating"
    STOPPING = "stopping"
    STOPPED = "stopped"


class VMStatus(Body):
    """One VM on one host, as its agent sees it."""

    name: Name
    host: str
    domain: str = Field(description="the name in libvirt")
    state: VMState
    priority: Priority
    nominal: Vector
    minimum: Vector = Field(description="effective: raised to the hard floors")
    ceiling: Vector | None = None
    current: Vector = Field(description="the committed bound")
    overhead_mib: float
    generation: int
    guest_connected: bool
    template: Name = "lab"
    boot_memory_mib: float
    pressure: str | None = Field(None, description="why the guest is under pressure; null if it is not")
    asks: Vector = Field(Vector(), description="what it wants under pressure and its host cannot spare")
    throttled_share: float | None = Field(
        None, description="share of periods in which its quota stopped a vCPU, lately; null: it has no quota"
    )
    drift_total: int = Field(0, description="how often something had to be put right that somebody else had changed")
    held: bool = Field(False, description="a target has set its size: it does not grow by itself, only by command")
    start_size: Vector | None = Field(
        None, description="stopped on command: the size it comes up with; it holds no room"
    )
    at_next_start: VMSpec | None = Field(None, description="what it becomes at its next start, where it cannot be now")
    adopted: bool = Field(False, description="somebody else's domain: it is never removed, only released")

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


class CoreChange(Body):
    """One growth or shrink of a machine's cores (seed 000 §2.1): one per committed operation and VM, at its end."""

    sequence: int = Field(ge=1, le=LARGEST, description="counts up on each host; the manager acknowledges by it")
    machine: Name
    host: str
    at: float = Field(ge=0, le=1e11, description="seconds since the epoch")
    cores_before: float = Field(ge=0, le=1e6)
    cores_after: float = Field(ge=0, le=1e6)
    cause: str


class HostTemplate(Body):
    """A template that a host has."""

    name: Name
    shared_disk: bool = Field(False, description="its VMs' disks are on storage that other hosts reach too")


class HostReport(Body):
    """What an agent tells its manager, regularly and after every change."""

    id: Name
    url: str = Field(pattern="^https?://", max_length=400, description="where the agent's REST API listens")
    incarnation: str = Field(description="differs after each start of the agent")
    sequence: int = Field(0, ge=0, description="rises with each change that this incarnation reports; 0: not counted")
    capacity: Vector
    free: Vector
    deflatable: Vector
    vm_overhead_mib: float
    accelerator: str
    mode: HostMode = HostMode.ACTIVE
    mode_reason: str = ""
    vms: tuple[VMStatus, ...]
    core_changes: tuple[CoreChange, ...] = ()
    budget: Vector = Field(Vector(), description="what harvest VMs may grow to hold above their minimums, together")
    budget_number: int = Field(0, description="of the latest budget that was granted")
    templates: tuple[HostTemplate, ...] | None = Field(None, description="null: not said, so any may be there")


class ReportReply(Body):
    """The manager's answer to a report."""

    epoch: int
    acknowledged: int = Field(description="core changes up to this sequence need not be sent again")


class HostStatus(Body):
    """A host as the manager sees it."""

    id: Name
    url: str
    state: Literal["ready", "silent"] = Field(description="a silent host gets no new VM and is never assumed empty")
    seen_at: float
    capacity: Vector
    free: Vector
    deflatable: Vector
    accelerator: str
    mode: HostMode = HostMode.ACTIVE
    mode_reason: str = ""
    vms: tuple[str, ...]
    version: str = Field("", description="differs when its capacity, address or mode does")


ManagedState = Literal["placing", "running", "deleting", "failed", "stopping", "stopped", "starting", "migrating"]


class ManagedVM(Body):
    """A VM as the manager sees it."""

    name: Name
    host: str | None
    state: ManagedState
    priority: Priority
    nominal: Vector
    minimum: Vector
    ceiling: Vector | None = None
    current: Vector
    generation: int
    guest_connected: bool = False
    sentence: str = Field(description="what happened to it last, and why")
    version: str = Field("", description="differs when anything that a client can change does: for If-Match")
    at_next_start: VMSpec | None = Field(None, description="what it becomes at its next start, where it cannot be now")


class VMRequest(Body):
    """POST /v1/vms of the manager: place a VM, deflating others where that is needed."""

    request_id: RequestId
    vm: VMSpec
    policy: PlacementPolicy | None = Field(None, description="default: as the manager is configured")
    deadline_s: Seconds = 60.0
    dry_run: DryRun = False

    @model_validator(mode="after")
    def _start_fits_priority(self) -> Self:
        if self.vm.start == "deflated" and self.vm.priority is Priority.FIXED:
            raise InvalidField("vm.start", "is deflated, but a fixed VM always has its nominal size")
        return self


def problem_of(error: ValidationError | InvalidField) -> Problem:
    """One sentence, and the field, for a body that does not fit."""
    if isinstance(error, InvalidField):
        return Problem(error=str(error), field=error.field)
    first: dict[str, Any] = dict(error.errors(include_url=False)[0])
    cause = first.get("ctx", {}).get("error")
    path = ".".join(str(part) for part in first["loc"])
    if isinstance(cause, InvalidField):
        field = f"{path}.{cause.field}" if path else cause.field
        return Problem(error=f"{field} {cause.problem}", field=field)
    message = first["msg"][:1].lower() + first["msg"][1:]
    return Problem(error=f"{path or 'the body'}: {message}", field=path or None)
