"""REST bodies of requests: what users and programs send to the manager about VMs."""

from __future__ import annotations

import json
from typing import Annotated, Self

from pydantic import AfterValidator, Field, model_validator

from ebbtide.deflation.allocations import Priority
from ebbtide.deflation.cascade.instructions import Mode
from ebbtide.deflation.errors import InvalidField
from ebbtide.deflation.modes import HostMode
from ebbtide.deflation.placement.policy_names import PlacementPolicy
from ebbtide.messages.common import (
    LARGEST,
    MODE_WORDS,
    MOST,
    Body,
    DomainName,
    DryRun,
    Name,
    PartialVector,
    RequestId,
    Seconds,
    StopSeconds,
    Target,
    Vector,
    cleaned_text,
)
from ebbtide.messages.vms import NOTICE_WORDS, PREEMPTION_WORDS, PRIORITY_WORDS, OnPreemption, VMSpec


class VMRequest(Body):
    """POST /v1/vms of the manager: place a VM, deflating others where that is needed."""

    request_id: RequestId
    vm: VMSpec = Field(description="as it is asked for")
    policy: PlacementPolicy | None = Field(None, description="default: as the manager is configured")
    deadline_s: Seconds = 60.0
    dry_run: DryRun = False

    @model_validator(mode="after")
    def _start_fits_priority(self) -> Self:
        if self.vm.start == "deflated" and self.vm.priority is Priority.FIXED:
            raise InvalidField("vm.start", "is deflated, but a fixed VM always has its nominal size")
        return self

    @model_validator(mode="after")
    def _utility_says_something(self) -> Self:
        # Not of every spec: version 0.1 has stored such ones.
        if self.vm.utility is not None and not self.vm.utility.model_dump(exclude={"at_least"}, exclude_none=True):
            raise InvalidField("vm.utility", "must have the curve of a component")
        return self


class TargetRequest(Body):
    """PUT /v1/vms/NAME/target of the manager: bring a VM to a size."""

    request_id: RequestId
    generation: int | None = Field(
        None,
        ge=1,
        le=LARGEST,
        strict=True,
        description="numbers the targets of a VM, so that one that comes late does not undo a later one: one below "
        "that of the VM is refused; default: the next one, when its host is asked",
    )
    target: Target = Field(
        description="the size to reach, never an amount, of at least one component; what is left out keeps its size"
    )
    deadline_s: Seconds = 60.0
    mode: Mode = Field(Mode.ASK, description=MODE_WORDS)
    dry_run: DryRun = False

    def fingerprint(self) -> str:
        """What a repetition has in common with it; as version 0.1 stored it, which had no word for what is left out."""
        target = Vector(**self.target.model_dump(exclude_none=True)).model_dump()
        asked = {"generation": self.generation, "target": target, "deadline_s": self.deadline_s, "mode": self.mode}
        return json.dumps({"order": 0, **asked}, separators=(",", ":"))


class ModeRequest(Body):
    """PUT /v1/hosts/ID/mode of the manager: what the host is to do from now on."""

    request_id: RequestId
    mode: HostMode = Field(description="what it is to do from now on")
    reason: Annotated[
        str, Field(max_length=200, description="shown wherever the mode is"), AfterValidator(cleaned_text)
    ] = ""


class CancelRequest(Body):
    """POST /v1/operations/ID/cancel of the manager: have an operation end, and give back what it took."""

    request_id: RequestId


class StopRequest(Body):
    """POST /v1/vms/NAME/stop of the manager."""

    request_id: RequestId
    limit_s: StopSeconds = Field(60.0, description="after this the guest's power is cut")


class StartRequest(Body):
    """POST /v1/vms/NAME/start of the manager."""

    request_id: RequestId
    anywhere: bool = Field(False, strict=True, description="on another host, where its own has no room for it")
    lose_disk: bool = Field(False, strict=True, description="what is on a disk that is not shared may be lost")
    deadline_s: Seconds = 60.0


class ResizeRequest(Body):
    """PATCH /v1/vms/NAME of the manager: what the VM is sold from now on; what is left out stays."""

    request_id: RequestId
    nominal: PartialVector | None = Field(None, description="what it is sold")
    minimum: PartialVector | None = Field(None, description="never less than this")
    ceiling: PartialVector | None = Field(None, description="harvest VMs only: up to where it may grow")
    priority: Priority | None = Field(None, description=PRIORITY_WORDS)
    on_preemption: OnPreemption | None = Field(None, description=PREEMPTION_WORDS)
    preemption_notice_s: StopSeconds | None = Field(None, description=NOTICE_WORDS)
    steady: bool | None = Field(None, strict=True, description="whether steady mode may trim it")
    deadline_s: Seconds = 60.0

    def onto(self, spec: VMSpec) -> VMSpec:
        """The spec with these changes. A ceiling goes with the priority that needs one, a minimum never above nominal.

        :raises InvalidField: the sizes contradict each other, or nothing is to be changed.
        :raises ValidationError: a value can be none.
        """
        kept = {field: getattr(self, field) for field in ("on_preemption", "preemption_notice_s", "steady")}
        if all(part is None for part in (self.nominal, self.minimum, self.ceiling, self.priority, *kept.values())):
            raise InvalidField(
                "nominal", "or minimum, ceiling, priority, what is done on preemption or steady must be given"
            )
        priority = self.priority or spec.priority
        nominal = self.nominal.onto(spec.nominal) if self.nominal is not None else spec.nominal
        minimum, shares = spec.minimum, {}
        if self.minimum is not None:
            # An absolute one takes the place of a share of nominal.
            minimum = self.minimum.onto(Vector.of(spec.asked_minimum()))
            shares = {"minimum_share": None, "utility": None}
        else:
            # A minimum that was not asked for again follows a smaller nominal size.
            minimum = Vector.of(minimum.vector().smaller(nominal.vector()))
        ceiling = None
        if priority is Priority.HARVEST:
            ceiling = spec.ceiling or nominal
            if self.ceiling is not None:
                ceiling = self.ceiling.onto(ceiling)
            else:
                ceiling = Vector.of(ceiling.vector().larger(nominal.vector()))
        elif self.ceiling is not None:
            raise InvalidField("ceiling", "is for harvest VMs")
        boot_mib = spec.boot_memory_mib
        if boot_mib is not None:
            boot_mib = min(boot_mib, nominal.memory_mib)
        changed = {
            "priority": priority,
            "nominal": nominal.model_dump(),
            "minimum": minimum.model_dump(),
            "ceiling": ceiling.model_dump() if ceiling is not None else None,
            "boot_memory_mib": boot_mib,
            **{field: value for field, value in kept.items() if value is not None},
        }
        return VMSpec.model_validate({**spec.model_dump(), **shares, **changed})


class MigrateRequest(Body):
    """POST /v1/vms/NAME/migrate of the manager: stop it where it is, start it elsewhere; or move it while it runs."""

    request_id: RequestId
    host: Name | None = Field(None, description="where to; default: where it fits best")
    lose_disk: bool = Field(False, strict=True, description="what is on a disk that is not shared may be lost")
    limit_s: StopSeconds = Field(60.0, description="for the guest's own power-off")
    deadline_s: Seconds = Field(60.0, description="for finding room; live: and once more for the move, then called off")
    live: bool = Field(False, strict=True, description="while it runs, at the size that it has")
    copy_storage: bool = Field(False, strict=True, description="live: copy a disk that is not shared")
    bandwidth_mib_s: float = Field(0.0, ge=0, le=MOST, allow_inf_nan=False, description="live: at most; 0: no limit")

    @model_validator(mode="after")
    def _check_live(self) -> Self:
        if not self.live and (self.copy_storage or self.bandwidth_mib_s):
            raise InvalidField("live", "must be true, since copy_storage and bandwidth_mib_s are for that")
        return self


class AdoptRequest(Body):
    """POST /v1/adoptions of the manager."""

    request_id: RequestId
    host: Name = Field(description="where the domain runs")
    domain: DomainName
    name: Name | None = Field(None, description="its name from now on; default: the domain's")
    priority: Priority = Field(Priority.DEFLATABLE, description="as which it is looked after")
    minimum: Vector = Field(Vector(), description="never less than this")


class ReleaseRequest(Body):
    """POST /v1/vms/NAME/release of the manager."""

    request_id: RequestId
    deadline_s: Seconds = 60.0
