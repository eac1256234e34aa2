"""The ledger: what each layer was asked for, promised and verifiably gave (rule 3: only verified counts)."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Final

from ebbtide.deflation.resources import ZERO, ResourceVector


class Layer(StrEnum):
    """The layers of the cascade, top first (Sharma et al. 2019, Fig. 3; the cold pages are ours)."""

    APPLICATION = "application"
    #: Pages of the guest that can go without harm, made free so that nothing in use has to be moved to unplug.
    COLD = "cold"
    GUEST = "guest"
    HYPERVISOR = "hypervisor"


#: What makes the guest's part possible. The figures are never added, and a shortfall is not theirs.
ENABLING: Final = (Layer.APPLICATION, Layer.COLD)


@dataclass(frozen=True, slots=True)
class LedgerEntry:
    """One layer and one resource of one deflation.

    Amounts are in the unit of the resource's name. The ``verified`` amounts of guest and hypervisor add up to the fall
    of the bound; those of the application and of the cold pages are the parts of the guest's that each made possible,
    and are never added.
    """

    layer: Layer
    resource: str
    asked: float
    promised: float
    verified: float
    seconds: float
    reason: str


@dataclass(slots=True)
class LayerAccount:
    """One layer's side of the ledger while an operation runs.

    Each resource comes to a layer, and leaves it, by itself.
    """

    #: The most that it was asked for, and what it said it would give.
    asked: ResourceVector = ZERO
    promised: ResourceVector = ZERO
    reasons: list[str] = field(default_factory=list)
    #: Seconds by resource, so far, and since when it is at work on one.
    _spent: dict[str, float] = field(default_factory=dict)
    _since: dict[str, float] = field(default_factory=dict)

    def say(self, reason: str) -> None:
        if reason and reason not in self.reasons:
            self.reasons.append(reason)

    def enter(self, components: Iterable[str], need: ResourceVector, now: float) -> None:
        """The layer begins to work on these, of which so much is missing."""
        for name in components:
            self.asked = self.asked.with_component(name, max(self.asked[name], need[name]))
            self._since.setdefault(name, now)

    def leave(self, components: Iterable[str], now: float) -> None:
        """The layer has done with these; what it was not at work on is left alone."""
        for name in components:
            if (since := self._since.pop(name, None)) is not None:
                self._spent[name] = self._spent.get(name, 0.0) + now - since

    def promise(self, amount: ResourceVector) -> None:
        """So much more is to come, as far as it was asked for."""
        self.promised = (self.promised + amount).smaller(self.asked)

    @property
    def is_open(self) -> bool:
        return bool(self._since)

    def seconds(self, component: str) -> float:
        return self._spent.get(component, 0.0)
