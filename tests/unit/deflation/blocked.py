"""Mechanisms with some of them blocked, as tests need them."""

from __future__ import annotations

from collections.abc import Mapping

from ebbtide.deflation.cascade.mechanisms import LAYER_OF, Mechanism, Mechanisms
from ebbtide.deflation.ledger import Layer


def without(
    *blocked: Layer | Mechanism, block_mib: float = 2.0, why: Mapping[Layer | Mechanism, str] | None = None
) -> Mechanisms:
    """All mechanisms but those of the layers and those named; ``why`` gives reasons, else there is a general one."""
    reasons = why or {}
    found: dict[Mechanism, str] = {}
    for one in blocked:
        members = [one] if isinstance(one, Mechanism) else [m for m, layer in LAYER_OF.items() if layer is one]
        found |= dict.fromkeys(members, reasons.get(one, f"{one.value} is blocked by the test"))
    return Mechanisms(found, block_mib)
