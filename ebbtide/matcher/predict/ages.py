"""The grid on which ages and durations are counted: fine where they are short, sixteen bins to a doubling.

Kernel functions: they work alike on one value and on an array of them, and compile with numba (which is not imported
here). A position is a bin's number plus how far into the bin an age is.
"""

from __future__ import annotations

from typing import Any, Final, TypeAlias

import numpy as np
from numpy.typing import NDArray

#: One float, or an array of them: kernels take either and give the like.
Value: TypeAlias = Any
Floats: TypeAlias = NDArray[np.float64]

#: Seconds: below it bins are nearly equal, above it they grow by 4.4 % each.
FIRST_S: Final = 10.0
PER_DOUBLING: Final = 16.0
#: Bins: the last ends after 121 days.
BINS: Final = 320


def position(age_s: Value) -> Value:
    """Where on the grid an age lies, from 0 to below BINS. Below 0 and NaN count as 0."""
    return located(stretched(np.fmax(age_s, 0.0)))


def stretched(age_s: Value) -> Value:
    """What grows with an age, not below 0, as `located` wants it: ``d / FIRST_S`` more is the age ``d`` later."""
    return 1.0 + age_s / FIRST_S


def located(age: Value) -> Value:
    """The position of an age that is `stretched`."""
    found = np.log2(age)
    found *= PER_DOUBLING
    return np.minimum(found, BINS - 1e-9)


def edge(index: float) -> float:
    """The age in seconds at which a bin begins."""
    return float(FIRST_S * (2.0 ** (index / PER_DOUBLING) - 1.0))


def fill_lines(values: Floats, at_0: Floats, rises: Floats) -> None:
    """The same as lines over the position, one for each bin: ``at_0[index] + position * rises[index]``.

    Both out, shape as ``values``: (BINS + 2,).
    """
    for index in range(BINS + 1):
        rise = values[index + 1] - values[index]
        rises[index] = rise
        at_0[index] = values[index] - index * rise
    rises[BINS + 1] = 0.0
    at_0[BINS + 1] = values[BINS + 1]
