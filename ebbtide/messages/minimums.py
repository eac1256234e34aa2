"""The wire form of minimums that are no sizes: shares of nominal, and utility curves of the application."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

from ebbtide.deflation.resources import COMPONENTS, ResourceVector
from ebbtide.deflation.sharing.utility import check_curve, least_share

Share = Annotated[float, Field(ge=0, le=1, allow_inf_nan=False, strict=True)]
Point = tuple[Share, Annotated[float, Field(ge=0, allow_inf_nan=False, strict=True)]]
Curve = Annotated[tuple[Point, ...], Field(min_length=1, max_length=64, description="[[share, utility], ...]")]


class Shares(BaseModel):
    """Shares of the nominal size; what is left out is 0."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    cpu_cores: Share = Field(0.0, description="of nominal")
    memory_mib: Share = Field(0.0, description="of nominal")
    disk_mib_s: Share = Field(0.0, description="of nominal")
    network_mib_s: Share = Field(0.0, description="of nominal")

    def vector(self) -> ResourceVector:
        return ResourceVector(**self.model_dump())


def _of_all(value: Any) -> Any:
    """One number stands for every component."""
    if isinstance(value, int | float) and not isinstance(value, bool):
        return dict.fromkeys(COMPONENTS, value)
    return value


#: 0.25, or {"cpu_cores": 0.25, "memory_mib": 0.5}.
AnyShares = Annotated[Shares, BeforeValidator(_of_all, json_schema_input_type=Share | Shares)]


class Utility(BaseModel):
    """What the application is still worth at a share of its nominal size, and what it must be worth at least.

    A component without a curve has minimum 0; a manager refuses a request without any.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    cpu_cores: Curve | None = Field(None, description="its curve over the share of cores")
    memory_mib: Curve | None = Field(None, description="its curve over the share of memory")
    disk_mib_s: Curve | None = Field(None, description="its curve over the share of the disk's bandwidth")
    network_mib_s: Curve | None = Field(None, description="its curve over the share of the network's bandwidth")
    at_least: Annotated[float, Field(gt=0, allow_inf_nan=False, strict=True)] = Field(
        description="what it must still be worth"
    )

    def shares(self) -> ResourceVector:
        """The smallest share of each component that is useful enough.

        :raises InvalidField: the curve of a component is none or never useful enough.
        """
        found = {}
        for component in COMPONENTS:
            if (points := getattr(self, component)) is not None:
                field = f"utility.{component}"
                check_curve(points, field)
                found[component] = least_share(points, self.at_least, field)
        return ResourceVector.of(found)
