"""Names of the placement policies, apart from :mod:`deflation.placement`: bodies need them, host agents no NumPy."""

from __future__ import annotations

from enum import StrEnum


class PlacementPolicy(StrEnum):
    """Seed 004 §5: bin packing by fitness, or cheaper choices."""

    BEST_FIT = "best-fit"
    FIRST_FIT = "first-fit"
    TWO_CHOICES = "two-choices"
