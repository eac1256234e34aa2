"""How likely a job is to be long, by what was lately found out of jobs that want as many cores. A kernel.

Jobs that come together are alike: somebody submits a hundred of them. So those that came shortly before say more of a
job than what it states. What they say ages by when they came, not by when it was found out.
"""

from __future__ import annotations

from typing import Final

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]

#: Columns of what is kept for each number of cores: weights of jobs, of the long ones of them, when they were right;
#: trials under way.
WEIGHT: Final = 0
LONG: Final = 1
AT_S: Final = 2
TRIALS: Final = 3
COLUMNS: Final = 4

#: What is believed before anything is known, and what it weighs: a fifth of one job that came just now.
PRIOR: Final = 0.3
PRIOR_WEIGHT: Final = 0.2


def aged(past: Floats, cores: int, now_s: float, half_life_s: float) -> None:
    """Let what is known of jobs of so many cores grow old."""
    share = 0.5 ** ((now_s - past[cores, AT_S]) / half_life_s)
    past[cores, WEIGHT] *= share
    past[cores, LONG] *= share
    past[cores, AT_S] = now_s


def found_out(past: Floats, cores: int, long: bool, submitted_s: float, now_s: float, half_life_s: float) -> None:
    """A job has turned out short or long.

    :param past: shape (most cores + 1, `COLUMNS`).
    """
    aged(past, cores, now_s, half_life_s)
    weight = 0.5 ** ((now_s - submitted_s) / half_life_s)
    past[cores, WEIGHT] += weight
    if long:
        past[cores, LONG] += weight


def long_chance(past: Floats, cores: int, now_s: float, half_life_s: float) -> float:
    """How likely a job of so many cores that comes now is to be long; 0 to 1."""
    aged(past, cores, now_s, half_life_s)
    return float((past[cores, LONG] + PRIOR_WEIGHT * PRIOR) / (past[cores, WEIGHT] + PRIOR_WEIGHT))
