"""REST bodies of the history: what a host's agent samples, and what the manager has kept of hosts and VMs."""

from __future__ import annotations

from typing import Annotated, Final

from pydantic import ConfigDict, Field

from ebbtide.messages.common import MOST, Body, Name, Rows

#: One figure over time; null: it was not known then.
Series = tuple[float | None, ...]
_Amount = Annotated[float, Field(ge=0, le=MOST)]
_Percent = Annotated[float, Field(ge=0, le=100)]
#: How often an agent tells of what its VMs use where nothing else changes, seconds.
SAMPLED_EVERY_S: Final = 120.0


class VMUsage(Body):
    """What a VM uses by its host's own look, and what the layers hold of it. Null: it is not known, which is not 0."""

    name: Name = Field(description="the VM's name")
    resident_memory_mib: _Amount | None = Field(
        None, description="what its process has in the host's memory, the emulator included"
    )
    cpu_pressure_percent: _Percent | None = Field(
        None, description="share of time in which its tasks waited for a CPU, in the guest's words (PSI, 10 s)"
    )
    memory_pressure_percent: _Percent | None = Field(
        None, description="share of time in which some task waited for memory, in the guest's words (PSI, 10 s)"
    )
    guest_cpu_cores: _Amount | None = Field(None, description="what its guest layer keeps away: CPUs off line")
    guest_memory_mib: _Amount | None = Field(None, description="the same of memory: unplugged")
    application_cpu_cores: _Amount | None = Field(
        None, description="the part of the guest layer's that the application made possible; never added to it"
    )
    application_memory_mib: _Amount | None = Field(None, description="the same of memory")


class HostUsage(Body):
    """What an agent tells its manager every two minutes, for the history alone: nothing is decided by it."""

    vms: Rows[VMUsage] = Field(description="its VMs that run")


class UsageReply(Body):
    """The manager's answer to what a host uses."""

    every_s: float = Field(description="when the next one is of use, seconds")


class HistoryMark(Body):
    """Something that happened in the time of a history: a line of the event log."""

    time: float = Field(description="seconds since the epoch")
    event_id: int = Field(ge=1, description="of the event: GET /v1/events has all of it")
    kind: str = Field(description="of the event")
    sentence: str = Field(description="what happened and why")


class Columns(Body):
    """Figures over time, a value for each of `times`: the mean over that step, of a host the sum of its VMs."""

    known_s: Series = Field(
        (),
        description="seconds of the step for which there were figures: the mean of nominal, minimum, bound, capacity, "
        "free or vms times this is an amount; others may have been known for less of it; empty: the manager is of a "
        "version that does not say",
    )
    nominal_cpu_cores: Series = Field(description="what was sold")
    nominal_memory_mib: Series = Field(description="what was sold")
    minimum_cpu_cores: Series = Field(description="never less than this")
    minimum_memory_mib: Series = Field(description="never less than this")
    bound_cpu_cores: Series = Field(description="what the host lets it hold")
    bound_memory_mib: Series = Field(description="what the host lets it hold")
    resident_memory_mib: Series = Field(description="what is in the host's memory, the emulator included")
    application_cpu_cores: Series = Field(description="the part of guest_cpu_cores that applications made possible")
    application_memory_mib: Series = Field(description="the part of guest_memory_mib that applications made possible")
    guest_cpu_cores: Series = Field(description="what the guest layer keeps away; with hypervisor: nominal less bound")
    guest_memory_mib: Series = Field(description="what the guest layer keeps away; with hypervisor: nominal less bound")
    hypervisor_cpu_cores: Series = Field(description="what the hypervisor layer keeps away")
    hypervisor_memory_mib: Series = Field(description="what the hypervisor layer keeps away")
    cpu_pressure_percent: Series = Field(description="PSI of the guest; of a host the highest of its VMs")
    cpu_pressure_max_percent: Series = Field(description="the highest within the step")
    memory_pressure_percent: Series = Field(description="PSI of the guest; of a host the highest of its VMs")
    memory_pressure_max_percent: Series = Field(description="the highest within the step")
    under_pressure_percent: Series = Field(
        description="share of the time in which its agent judged it to be under pressure; of a host, any of its VMs"
    )


class HostColumns(Columns):
    """Those of a host."""

    capacity_cpu_cores: Series = Field(description="what it hands out to VMs")
    capacity_memory_mib: Series = Field(description="what it hands out to VMs")
    free_cpu_cores: Series = Field(description="what it could give away")
    free_memory_mib: Series = Field(description="what it could give away")
    vms: Series = Field(description="how many VMs it had that are not off")


class History(Body):
    """A stretch of time in equal steps. Where nothing was heard, values are null; none is made up."""

    model_config = ConfigDict(validate_by_name=True, serialize_by_alias=True)

    from_: float = Field(alias="from", description="where the first step begins, seconds since the epoch")
    to: float = Field(description="where the last step ends, or now, if it is under way; seconds since the epoch")
    step_s: float = Field(description="length of a step, seconds: 60 and multiples")
    times: tuple[float, ...] = Field(description="the beginning of each step, seconds since the epoch")
    marks: tuple[HistoryMark, ...] = Field(description="what happened meanwhile, oldest first, the latest 500")


class HostHistory(History):
    """GET /v1/hosts/ID/history of the manager."""

    host: Name = Field(description="the host's id")
    columns: HostColumns = Field(description="one list for each figure, as long as `times`")


class VMHistory(History):
    """GET /v1/vms/NAME/history of the manager: on whatever hosts it was."""

    vm: Name = Field(description="the VM's name; an earlier VM of that name is part of it")
    columns: Columns = Field(description="one list for each figure, as long as `times`")
