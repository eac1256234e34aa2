"""REST bodies of hosts: report, status, mode and templates; and the health of the manager itself."""

from __future__ import annotations

from typing import Annotated, Final, Literal

from pydantic import AfterValidator, Field, TypeAdapter, ValidationError

from ebbtide.deflation.errors import InvalidField
from ebbtide.deflation.modes import HostMode
from ebbtide.deflation.resources import ResourceVector
from ebbtide.messages.common import (
    LARGEST,
    MOST,
    MOST_VMS,
    Address,
    Body,
    ChangingPage,
    Health,
    Name,
    Open,
    Rows,
    Sentence,
    Size,
    Vector,
    problem_of,
)
from ebbtide.messages.labels import LABEL_WORDS
from ebbtide.messages.machines import CoreChange
from ebbtide.messages.migrations import MigrationAddress
from ebbtide.messages.vms import VMStatus


def capacity_of(text: str) -> ResourceVector:
    """What a host may hand out, in the words of an option: ``cpu_cores=6,memory_mib=4096``.

    :raises ValueError: no report could say it, or nothing would fit in; names what is wrong.
    """
    values: dict[str, float] = {}
    for part in text.split(","):
        name, _, value = part.partition("=")
        if (component := name.strip()) in values:
            raise InvalidField(component, "is given twice")
        try:
            values[component] = float(value)
        except ValueError:
            raise ValueError(f"{part!r} is not COMPONENT=NUMBER, as in cpu_cores=6,memory_mib=4096") from None
    capacity = ResourceVector.of(values)
    for component in ("cpu_cores", "memory_mib"):
        if not capacity[component]:
            raise InvalidField(component, "must be given, and above 0")
    try:
        return TypeAdapter(Size).validate_python(capacity.as_dict()).vector()
    except ValidationError as error:
        raise ValueError(problem_of(error).detail) from None


class HostTemplate(Body):
    """A template that a host has."""

    name: Name = Field(description="by which a VM asks for it")
    shared_disk: bool = Field(False, description="its VMs' disks are on storage that other hosts reach too")


class TemplateInfo(HostTemplate):
    """One row of GET /v1/templates."""

    description: str = Field("", description="as the host's operator wrote it")
    most: Vector | None = Field(None, description="largest size of its VMs; a component that is 0 is not limited")


class TemplateList(Body):
    """GET /v1/templates of a host agent, GET /v1/hosts/ID/templates of the manager; by name."""

    templates: Rows[TemplateInfo] = Field(description="by name")


#: No host counts further: the manager itself counts on above it, for the VMs of a host that is forgotten.
MOST_SEQUENCE: Final = LARGEST - 1_000_000


def _countable(changes: tuple[CoreChange, ...]) -> tuple[CoreChange, ...]:
    for change in changes:
        if change.sequence > MOST_SEQUENCE:
            raise ValueError(f"sequence must be at most {MOST_SEQUENCE}, but is {change.sequence}")
    return changes


class HostReport(Body):
    """What an agent tells its manager, regularly and after every change."""

    id: Name = Field(description="the host's id")
    url: Address = Field(description="where the agent's REST API listens: scheme, host and port")
    incarnation: Sentence = Field(description="differs after each start of the agent")
    sequence: int = Field(
        0, ge=0, le=LARGEST, description="rises with each change that this incarnation reports; 0: not counted"
    )
    capacity: Size = Field(description="what it hands out to VMs")
    free: Size = Field(
        description="what it could give away now: capacity less what its VMs are charged, and no more memory than the "
        "machine has available less its reserve"
    )
    deflatable: Vector = Field(description="what could still be taken from its VMs")
    vm_overhead_mib: float = Field(ge=0, le=1e6, description="memory that a new VM is charged beyond its size, MiB")
    accelerator: Sentence = Field(description="kvm or qemu (software emulation)")
    mode: Open[HostMode] = Field(HostMode.ACTIVE, description="what the host is to do")
    mode_reason: Sentence = Field("", description="as it was given")
    unavailable: Sentence = Field(
        "", max_length=1000, description="why its hypervisor does not answer; empty if it does"
    )
    overcommitted: Vector = Field(Vector(), description="what its VMs are charged beyond its capacity, or what it has")
    vms: Rows[VMStatus] = Field(description="all VMs of the host, off ones too")
    core_changes: Annotated[Rows[CoreChange], AfterValidator(_countable)] = Field(
        (), description="that are not acknowledged yet, oldest first"
    )
    budget: Vector = Field(Vector(), description="what harvest VMs may grow to hold above their minimums, together")
    budget_number: int = Field(0, ge=0, lt=LARGEST, description="of the latest budget that was granted")
    reserve_mib: float = Field(
        0.0,
        ge=0,
        le=MOST,
        description="memory that steady mode keeps free for arrivals, MiB: no VM grows into it by itself; 0: off",
    )
    templates: tuple[HostTemplate, ...] | None = Field(
        None, max_length=MOST_VMS, description="null: not said, so any may be there"
    )
    can_create: bool = Field(
        True, description="whether VMs can be made on it, or move to it: not where it is known to have no base image"
    )
    migration: MigrationAddress | None = Field(None, description="null: it takes part in no live migration")
    moves_by_command_only: Sentence = Field(
        "", max_length=1000, description="why no VM leaves it live unless somebody asks for that; empty if it may"
    )
    epoch: int = Field(0, ge=0, le=LARGEST, description="of the manager that it follows; 0: of none, or not said")


class ReportReply(Body):
    """The manager's answer to a report."""

    epoch: int = Field(description="of the manager that leads")
    acknowledged: int = Field(description="core changes up to this sequence need not be sent again")


class HostStatus(Body):
    """A host as the manager sees it."""

    id: Name = Field(description="the host's id")
    url: str = Field(description="where its agent listens")
    state: Open[Literal["ready", "overcommitted", "unavailable", "silent"]] = Field(
        description="only a ready host gets new VMs; overcommitted: its VMs hold more than it has; unavailable: its "
        "hypervisor does not answer, or it follows a manager of a higher epoch; a silent one does not report, and is "
        "never assumed empty"
    )
    state_reason: str = Field("", description="why it is in that state")
    seen_at: float = Field(description="when it reported last, seconds since the epoch")
    capacity: Vector = Field(description="what it hands out to VMs")
    free: Vector = Field(description="what it could give away")
    deflatable: Vector = Field(description="what could still be taken from its VMs")
    accelerator: str = Field(description="kvm or qemu (software emulation)")
    mode: Open[HostMode] = Field(HostMode.ACTIVE, description="what the host is to do")
    mode_reason: str = Field("", description="as it was given")
    vms: tuple[str, ...] = Field(description="names of its VMs")
    version: str = Field("", description="differs when its capacity, address or mode does")
    labels: dict[str, str] = Field({}, description=LABEL_WORDS)


class HostPage(ChangingPage):
    """GET /v1/hosts of the manager: by id."""

    hosts: tuple[HostStatus, ...] = Field(description="by id")


class ForgottenHost(Body):
    """DELETE /v1/hosts/ID of the manager."""

    id: Name
    vms: tuple[Name, ...] = Field(description="VMs that are gone with it")
    sentence: str = Field(description="what was forgotten")


class ModeStatus(Body):
    """GET /v1/mode of a host agent."""

    mode: Open[HostMode] = Field(description="what it is to do")
    reason: str = Field("", description="as it was given")
    since: float | None = Field(None, description="seconds since the epoch; null: never changed")
    sentence: str = Field(description="the same in words")
    unfinished: tuple[str, ...] = Field((), description="what is still to be undone, a sentence a VM; mode off only")


ManagerRole = Literal["leader", "standby"]


class ManagerHealth(Health):
    """The manager runs, and which role it has at this moment."""

    role: Open[ManagerRole] = Field(description="leader, or standby, which answers nothing else")


class Readiness(Body):
    """The manager leads, and its store answers."""

    ready: Literal[True] = Field(True, description="always true: else it is 503")
    epoch: int = Field(description="counts take-overs")
    sentence: str = Field(description="the same in words")


class Caller(Body):
    """GET /v1/whoami: what the request's token is good for."""

    name: str = Field(description="as the tokens file has it")
    role: Open[Literal["viewer", "operator", "admin"]] = Field(
        description="a viewer looks, an operator changes, an admin invites hosts"
    )
    sentence: str = Field(description="the same in words")
