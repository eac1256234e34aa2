"""REST bodies of commands: what a manager sends to a host agent."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field

from ebbtide.deflation.allocations import Priority
from ebbtide.deflation.cascade.instructions import Mode
from ebbtide.deflation.modes import HostMode
from ebbtide.messages.common import (
    LARGEST,
    MODE_WORDS,
    MOST,
    Body,
    DomainName,
    DryRun,
    Name,
    RequestId,
    Seconds,
    StopSeconds,
    Target,
    Vector,
    cleaned_text,
)
from ebbtide.messages.vms import VMSpec


class Command(Body):
    """What every command of a manager to an agent carries."""

    request_id: RequestId
    epoch: int = Field(0, ge=0, le=LARGEST, strict=True, description="the manager's leadership; a lower one is refused")
    order: int = Field(0, ge=0, le=LARGEST, strict=True, description="counts a manager's commands; a lower one is late")

    def comparable(self) -> dict[str, Any]:
        """The command as it is compared and stored; a new leader repeats it under its own epoch."""
        return self.model_dump(mode="json", exclude={"epoch", "order", "dry_run"})


class CreateCommand(Command):
    """POST /v1/vms of a host agent: start a VM at its nominal size, or deflated."""

    vm: VMSpec = Field(description="as it is asked for")
    start_size: Vector | None = Field(None, description="the size to start at; default: nominal")


class StopCommand(Command):
    """POST /v1/vms/NAME/stop: ask the guest to power off, and cut its power when it has not within ``limit_s``."""

    limit_s: StopSeconds = Field(60.0, description="after this the guest's power is cut, seconds")
    reason: Literal["stop", "minimum", "shortfall"] = Field(
        "stop", description="minimum or shortfall: it is preempted, and its guest is told first"
    )
    suspend: bool = Field(
        False, description="preempted: save its memory where there is room and time, so that it goes on where it was"
    )


class WithdrawCommand(Command):
    """POST /v1/vms/NAME/withdrawal: the VM stays, whose guest was told that it is preempted."""

    preemption: RequestId = Field(description="the request that preempts it, while its notice runs")
    reason: Annotated[str, Field(max_length=200), AfterValidator(cleaned_text)] = Field("", description="for the log")


class StartCommand(Command):
    """POST /v1/vms/NAME/start of a host agent: start a VM that is off."""

    start_size: Vector | None = Field(None, description="the size to start at; default: the one that it had last")


class SpecCommand(Command):
    """PUT /v1/vms/NAME/spec: what the VM is sold from now on."""

    spec: VMSpec = Field(description="what it is sold from now on")
    deadline_s: Seconds = 60.0


class TargetCommand(Command):
    """PUT /v1/vms/NAME/target of a host agent: bring a VM to a size."""

    generation: int = Field(
        ge=1, le=LARGEST, strict=True, description="rises with every target of a VM; a lower one is refused"
    )
    target: Target = Field(
        description="the size to reach, never an amount, of at least one component; what is left out keeps its size"
    )
    deadline_s: Seconds = 60.0
    mode: Mode = Field(Mode.ASK, description=MODE_WORDS)
    dry_run: DryRun = False

    def comparable(self) -> dict[str, Any]:
        # As earlier versions stored it, which had no word for what is left out.
        return super().comparable() | {"target": Vector(**self.target.model_dump(exclude_none=True)).model_dump()}


class ReclaimCommand(Command):
    """POST /v1/reclaims of a host agent: free this much, split in proportion over its VMs."""

    need: Vector = Field(description="amounts to free beyond what is free now")
    deadline_s: Seconds = 60.0
    mode: Mode = Field(Mode.ASK, description=MODE_WORDS)
    dry_run: DryRun = False
    exclude: tuple[Name, ...] = Field((), description="VMs that give nothing: the room is for them")


class ReinflateCommand(Command):
    """POST /v1/reinflations of a host agent: share this room among the VMs that lack something."""

    room: Vector | None = Field(None, description="what to share; default: all that the host has free")
    vms: tuple[Name, ...] = Field(
        (), description="who may grow; none named: all but harvest VMs, held ones up to the size of their target"
    )
    deadline_s: Seconds = 60.0
    dry_run: DryRun = False


class AdoptCommand(Command):
    """POST /v1/adoptions: look after a running domain that another program has made, at the size that it has."""

    domain: DomainName
    name: Name
    priority: Priority = Field(Priority.DEFLATABLE, description="as which it is looked after")
    minimum: Vector = Field(Vector(), description="never less than this")


class ReleaseCommand(Command):
    """POST /v1/vms/NAME/release: undo everything and look after an adopted domain no more."""

    deadline_s: Seconds = 60.0


class ModeCommand(Command):
    """PUT /v1/mode of a host agent: what the host is to do from now on."""

    mode: HostMode = Field(description="what it is to do from now on")
    reason: Annotated[
        str, Field(max_length=200, description="shown wherever the mode is"), AfterValidator(cleaned_text)
    ] = ""


class EpochCommand(Body):
    """PUT /v1/epoch of a host agent: the manager that asks leads; an earlier one is refused from now on."""

    epoch: int = Field(ge=0, le=LARGEST, strict=True, description="the manager's leadership; a lower one is refused")


class Budget(Body):
    """PUT /v1/budget of a host agent: what its harvest VMs may hold together above their minimums."""

    epoch: int = Field(0, ge=0, le=LARGEST, strict=True, description="the manager's leadership; a lower one is refused")
    order: int = Field(0, ge=0, le=LARGEST, strict=True, description="counts a manager's commands; a lower one is late")
    number: int = Field(ge=1, le=LARGEST, strict=True, description="rises with every budget; a lower one is refused")
    room: Vector = Field(description="above their minimums, together")


class SteadySettings(Body):
    """PUT /v1/hosts/ID/steady of the manager: how a host keeps room before it is asked for; what is left out stays."""

    enabled: bool | None = Field(None, strict=True, description="whether idle memory is trimmed; default: as it is")
    reserve_mib: Annotated[float, Field(ge=0, le=MOST, allow_inf_nan=False)] | Literal["auto"] | None = Field(
        None, description="memory to keep free, MiB; auto: learned from arrivals; default: as it is"
    )


class SteadyCommand(SteadySettings):
    """PUT /v1/steady of a host agent."""

    epoch: int = Field(0, ge=0, le=LARGEST, strict=True, description="the manager's leadership; a lower one is refused")
    order: int = Field(0, ge=0, le=LARGEST, strict=True, description="counts a manager's commands; a lower one is late")


class SteadyStatus(Body):
    """Steady mode of a host: what is set, what was learned, and what is so now."""

    enabled: bool = Field(description="whether idle memory is trimmed")
    reserve_mib: float | None = Field(description="memory to keep free as it was set, MiB; null: learned")
    learned_mib: float = Field(description="the reserve by which 95 % of the latest arrivals had fitted at once, MiB")
    kept_mib: float = Field(description="what is to be free now, MiB; 0 while steady mode is off")
    free_mib: float = Field(description="what is free now, MiB")
    refill_s: float = Field(description="how long the reserve takes to be full again, seconds")
    sentence: str = Field(description="the same in words")


class BudgetStatus(Body):
    """The answer: the budget in force, which is nothing once a reclaim, a creation or a growth of others revoked it."""

    number: int = Field(description="of the latest budget")
    room: Vector = Field(description="what is left of it")
    held: Vector = Field(description="what the harvest VMs hold above their minimums now")
