"""The ledger: what each layer was asked for, promised and verifiably gave (rule 3: only verified counts)."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum

from ebbtide.deflation.resources import ZERO, ResourceVector


class Layer(StrEnum):
    """The layers of the cascade, top first (Sharma et al. 2019, Fig. 3)."""

    APPLICATION = "application"
    GUEST = "guest"
    HYPERVISOR = "hypervisor"


@dataclass(frozen=True, slots=True)
class LedgerEntry:
    """One layer and one resource of one deflation.

    Amounts are in the unit of the resource's name. The ``verified`` amounts of guest and hypervisor add up to the fall
    of the bound; the application's is the part of the guest's that it made possible, and is never added.
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
    """One layer's side of the ledger while an operation runs."""

    asked: ResourceVector = ZERO
    promised: ResourceVector = ZERO
    started: float | None = None
    ended: float | None = None
    reasons: list[str] = field(default_factory=list)

    def say(self, reason: str) -> None:
        if reason and reason not in self.reasons:
            self.reasons.append(reason)

    @property
    def seconds(self) -> float:
        return 0.0 if self.started is None or self.ended is None else self.ended - self.started
