"""Names of the placement policies; `deflation.placement.fitness` carries them out, with NumPy, which bodies and host
agents do without.
"""

from __future__ import annotations

from enum import StrEnum


class PlacementPolicy(StrEnum):
    """Sharma et al. 2019, §5: bin packing by fitness, or cheaper choices."""

    BEST_FIT = "best-fit"
    FIRST_FIT = "first-fit"
    TWO_CHOICES = "two-choices"
