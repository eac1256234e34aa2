"""The resource vector: what is sold, taken and given back (Sharma et al. 2019, §3.2)."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, fields, replace
from typing import Final

from ebbtide.deflation.errors import InvalidField

_LARGEST: Final = sys.float_info.max
#: Below this, a difference between two amounts is rounding and not capacity.
TOLERANCE: Final = 1e-6


@dataclass(frozen=True, slots=True)
class ResourceVector:
    """CPU, memory, disk and network of a VM or host; finite, never negative.

    :raises InvalidField: a component is negative, infinite, NaN or not a number; the error names it.
    """

    #: CPU in cores; sizes move in steps of 0.01.
    cpu_cores: float = 0.0
    #: Memory in MiB.
    memory_mib: float = 0.0
    #: Disk bandwidth in MiB/s; 0 where it is not declared.
    disk_mib_s: float = 0.0
    #: Network bandwidth in MiB/s; 0 where it is not declared.
    network_mib_s: float = 0.0

    def __post_init__(self) -> None:
        for name in COMPONENTS:
            value = getattr(self, name)
            if type(value) is float and 0.0 <= value <= _LARGEST:
                continue
            if isinstance(value, bool) or not isinstance(value, int | float):
                raise InvalidField(name, f"must be a number, not {type(value).__name__}")
            if not -_LARGEST <= value <= _LARGEST:
                raise InvalidField(name, "must be finite")
            if value < 0:
                raise InvalidField(name, f"must not be negative, but is {value:g}")
            object.__setattr__(self, name, float(value))

    @classmethod
    def of(cls, values: Mapping[str, float]) -> ResourceVector:
        """Build from names of components; missing ones are 0.

        :raises InvalidField: an unknown name or a bad value.
        """
        for name in values:
            if name not in COMPONENTS:
                raise InvalidField(name, f"is no component of a resource vector ({', '.join(COMPONENTS)})")
        return cls(**values)

    def __iter__(self) -> Iterator[float]:
        return iter((self.cpu_cores, self.memory_mib, self.disk_mib_s, self.network_mib_s))

    def __getitem__(self, component: str) -> float:
        if component not in COMPONENTS:
            raise KeyError(component)
        return float(getattr(self, component))

    def __add__(self, other: ResourceVector) -> ResourceVector:
        return self._paired(other, lambda a, b: a + b)

    def __mul__(self, factor: float) -> ResourceVector:
        return ResourceVector(*(value * factor for value in self))

    __rmul__ = __mul__

    def less(self, other: ResourceVector) -> ResourceVector:
        """``max(self - other, 0)`` in each component: what is left of self after other."""
        return self._paired(other, lambda a, b: max(a - b, 0.0))

    def smaller(self, other: ResourceVector) -> ResourceVector:
        """The smaller of both, in each component."""
        return self._paired(other, min)

    def larger(self, other: ResourceVector) -> ResourceVector:
        """The larger of both, in each component."""
        return self._paired(other, max)

    def fits_in(self, other: ResourceVector) -> bool:
        """Whether no component exceeds that of other (beyond rounding)."""
        return (
            self.cpu_cores <= other.cpu_cores + TOLERANCE
            and self.memory_mib <= other.memory_mib + TOLERANCE
            and self.disk_mib_s <= other.disk_mib_s + TOLERANCE
            and self.network_mib_s <= other.network_mib_s + TOLERANCE
        )

    def is_zero(self) -> bool:
        """Whether nothing is left but rounding."""
        return all(value <= TOLERANCE for value in self)

    def with_component(self, component: str, value: float) -> ResourceVector:
        """A copy with one component replaced."""
        return replace(self, **{component: value})

    def as_dict(self) -> dict[str, float]:
        """The components by name, as on the wire."""
        return {name: getattr(self, name) for name in COMPONENTS}

    def __str__(self) -> str:
        parts = [f"{figure(value)} {unit}" for value, unit in zip(self, _UNITS, strict=True) if value > TOLERANCE]
        return ", ".join(parts) or "nothing"

    def _paired(self, other: ResourceVector, combine: Callable[[float, float], float]) -> ResourceVector:
        return ResourceVector(*(combine(a, b) for a, b in zip(self, other, strict=True)))


def figure(value: float) -> str:
    """A size as it stands in sentences and tables: six digits, and of a million and more all before the point."""
    return f"{value:g}" if abs(value) < 1e6 else f"{value:.0f}"


#: The components, in the order of the vector.
COMPONENTS: Final = tuple(field.name for field in fields(ResourceVector))
_UNITS: Final = ("cores", "MiB", "MiB/s disk", "MiB/s network")

#: The step in which sizes of each component are handed out (CONTRACTS, units and shapes).
QUANTUM: Final = ResourceVector(cpu_cores=0.01, memory_mib=1.0, disk_mib_s=1.0, network_mib_s=1.0)

ZERO: Final = ResourceVector()
