"""Chance for kernels: L'Ecuyer's combined generator (1988), the same numbers interpreted and compiled.

Period 2.3e18. All products stay under 2^62, so that nothing wraps. The state is two numbers in an array.
"""

from __future__ import annotations

from typing import Final

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]

_FIRST: Final = 2147483563
_SECOND: Final = 2147483399


def state_of(one: int, other: int) -> Ints:
    """The state for two seeds, whole numbers that are not negative: shape (2,)."""
    return np.array([one % (_FIRST - 1) + 1, other % (_SECOND - 1) + 1], np.int64)


def draw(state: Ints, below: int) -> int:
    """A whole number from 0 to ``below`` - 1, each as likely; ``below`` at most 2^31. A kernel."""
    one = 40014 * state[0] % 2147483563
    other = 40692 * state[1] % 2147483399
    state[0] = one
    state[1] = other
    mixed = (one - other) % 2147483562
    return int(mixed * below // 2147483562)
