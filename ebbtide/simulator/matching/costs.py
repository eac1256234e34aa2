"""Costs of machines (Agarwal et al. 2023 §4.4): regular, Spot and harvest VMs, in regular core-hours.

A harvest VM's minimum is paid as a Spot VM of that size, each core beyond it at a discount to that. Prices move; the
paper takes them at one moment, and says that Spot is 48 to 88 % cheaper than regular.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from ebbtide.simulator.errors import InvalidParameter


class VmKind(StrEnum):
    """What machines are rented."""

    #: All cores that on-demand VMs leave on their server; never fewer than their least size.
    HARVEST = "harvest"
    #: A fixed size, evicted as a whole.
    SPOT = "spot"
    #: A fixed size, never evicted.
    REGULAR = "regular"


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


def per_hour(kind: VmKind, cores: float, least_cores: float, prices: Prices) -> float:
    """What a machine costs an hour, in core-hours of a regular one.

    :param cores: that it has.
    :param least_cores: its minimum, of a harvest VM.
    :raises InvalidParameter: fewer cores than the minimum.
    """
    if kind is VmKind.REGULAR:
        return cores
    if kind is VmKind.SPOT:
        return cores * (1.0 - prices.spot_discount)
    least = least_cores if cores else 0.0
    if not 0 <= least <= cores * (1 + 1e-9):
        raise InvalidParameter("cores", f"must be at least {least:g}, the machine's minimum, but is {cores:g}")
    harvested = (cores - least) * (1.0 - prices.harvest_discount)
    return (least + harvested) * (1.0 - prices.spot_discount)


class Meter:
    """What machines have cost, as they come, change and go.

    :param from_s: what was before is not counted.
    """

    def __init__(self, kind: VmKind, prices: Prices, from_s: float) -> None:
        self._kind = kind
        self._prices = prices
        self._at_s = from_s
        self._hourly: dict[int, float] = {}
        self._cores: dict[int, int] = {}
        #: Regular core-hours, and core-hours of these machines, so far.
        self.total = 0.0
        self.core_h = 0.0

    @property
    def per_h(self) -> float:
        """Regular core-hours an hour, now."""
        return sum(self._hourly.values())

    def to(self, at_s: float) -> None:
        """Time goes on; times of what came before change nothing."""
        if at_s > self._at_s:
            hours = (at_s - self._at_s) / 3600.0
            self.total += self.per_h * hours
            self.core_h += sum(self._cores.values()) * hours
            self._at_s = at_s

    def change(self, machine: int, at_s: float, cores: int, least_cores: int) -> None:
        """A machine has so many cores from now on; 0: it is gone."""
        self.to(at_s)
        self._hourly.pop(machine, None)
        self._cores.pop(machine, None)
        if cores:
            self._cores[machine] = cores
            self._hourly[machine] = per_hour(self._kind, cores, least_cores, self._prices)
