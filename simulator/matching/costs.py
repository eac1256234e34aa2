"""What machines cost (seed 000 §4.4): regular, Spot and harvest VMs, in regular core-hours.

A harvest VM's minimum is paid as a Spot VM of that size, each core beyond it at a discount to that. Prices move; the
paper takes them at one moment, and says that Spot is 48 to 88 % cheaper than regular.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from simulator.errors import InvalidParameter

#: What Spot VMs are cheaper than regular ones, at the least and at the most.
SPOT_DISCOUNTS: Final = (0.48, 0.88)


@dataclass(frozen=True, slots=True)
class Prices:
    """Shares of a regular core's price.

    :param spot_discount: of a core of a Spot VM. The default makes harvest VMs of the paper's mean sizes a quarter of
        the price of regular ones, as its result says.
    :param harvest_discount: of a harvested core, to a Spot VM's.
    """

    spot_discount: float = 0.6
    harvest_discount: float = 0.5

    def __post_init__(self) -> None:
        """Raises InvalidParameter."""
        for name in ("spot_discount", "harvest_discount"):
            value = getattr(self, name)
            if not 0 <= value < 1:
                raise InvalidParameter(name, f"must be from 0 to below 1, but is {value:g}")


@dataclass(frozen=True, slots=True)
class Costs:
    """Of the same core-hours, in hours of a regular core."""

    regular: float
    spot: float
    harvest: float


def costs(core_h: float, machine_h: float, least_cores: float, prices: Prices) -> Costs:
    """What so many core-hours cost as regular, Spot and harvest VMs.

    :param core_h: of all cores that were held, whether used or not.
    :param machine_h: of the harvest VMs that had them.
    :param least_cores: of each, its minimum.
    :raises InvalidParameter: fewer cores than the minimums say.
    """
    least_h = machine_h * least_cores
    if not 0 <= least_h <= core_h * (1 + 1e-9):
        raise InvalidParameter("core_h", f"must be at least {least_h:g}, the machines' minimums, but is {core_h:g}")
    spot = core_h * (1.0 - prices.spot_discount)
    harvested = (core_h - least_h) * (1.0 - prices.harvest_discount)
    return Costs(core_h, spot, (least_h + harvested) * (1.0 - prices.spot_discount))
