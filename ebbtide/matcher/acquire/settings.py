"""The table ``[acquirer]`` of the engine file: whether the manager keeps a pool of harvest VMs, and of which kind."""

from __future__ import annotations

from typing import Annotated, Any, Final

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from ebbtide.deflation.allocations import Priority
from ebbtide.deflation.errors import InvalidField
from ebbtide.matcher.acquire.net_changes import AcquirerOptions
from ebbtide.matcher.predict.changes import whole_cores
from ebbtide.messages.common import no_switch
from ebbtide.messages.requests import VMRequest
from ebbtide.messages.vms import OnPreemption, VMSpec

#: A number follows, and names have 40 characters at the most.
_PREFIX: Final = r"^[a-z][a-z0-9-]{0,31}$"
_Share = Annotated[float, Field(ge=0, le=1, allow_inf_nan=False)]


class AcquirerSettings(BaseModel):
    """Of the acquirer. Its machines are ``PREFIX1``, ``PREFIX2`` and so on; others' VMs may be called so, too.

    :param vm: a VM as `VMSpec` has it, without name and priority.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    prefix: Annotated[str, Field(pattern=_PREFIX)] = "harvest-"
    least_machines: Annotated[int, Field(ge=0, le=10_000)] = 1
    most_machines: Annotated[int, Field(ge=1, le=10_000)]
    replaced_share: _Share = 0.1
    least_utilisation: _Share = 0.6
    most_utilisation: _Share = 0.8
    period_s: Annotated[float, Field(ge=0.05, le=86_400)] = 3600.0
    #: Seconds between two looks at what has come, gone and emptied.
    look_s: Annotated[float, Field(ge=0.02, le=600)] = 10.0
    #: For one placement.
    deadline_s: Annotated[float, Field(ge=1, le=3600)] = 60.0
    vm: dict[str, Any]

    @field_validator("*", mode="before")
    @classmethod
    def _no_switch(cls, value: Any) -> Any:
        return no_switch(value)

    @field_validator("vm")
    @classmethod
    def _vm_can_be(cls, given: dict[str, Any]) -> dict[str, Any]:
        for key in ("name", "priority"):
            if key in given:
                raise ValueError(f"{key} is not to be said: the acquirer does")
        VMRequest(request_id="a", vm=_spec(given, "a"))
        return given

    @model_validator(mode="after")
    def _options_can_be(self) -> AcquirerSettings:
        try:
            self.options()
        except InvalidField as error:
            raise ValueError(str(error)) from error
        return self

    def options(self) -> AcquirerOptions:
        """For the policy."""
        cores = max(whole_cores(self.spec(1).nominal.cpu_cores), 1)
        return AcquirerOptions(
            self.least_machines,
            self.most_machines,
            self.replaced_share,
            self.least_utilisation,
            self.most_utilisation,
            self.period_s,
            float(cores),
        )

    def spec(self, number: int) -> VMSpec:
        """The VM of a number."""
        return _spec(self.vm, f"{self.prefix}{number}")

    def number_of(self, name: str) -> int | None:
        """The number in a name like those of our VMs; None: it is none."""
        digits = name.removeprefix(self.prefix)
        if digits == name or not digits.isascii() or not digits.isdigit() or digits.startswith("0"):
            return None
        return int(digits)


def _spec(given: dict[str, Any], name: str) -> VMSpec:
    # Another one takes the place of a worker that is preempted: nothing of it is kept, unless it is asked for.
    given = {"on_preemption": OnPreemption.DELETE.value, **given}
    return VMSpec.model_validate({**given, "name": name, "priority": Priority.HARVEST.value})
