"""How long spot machines live: 1442 preemptible VMs of Google's, of 2019 (Kadupitiya et al. 2020, the paper's [24])."""

from __future__ import annotations

from typing import Final

import numpy as np

from ebbtide.simulator.jobs.columns import Floats

#: Shares of them (github.com/kadupitiya/goog-preemption-data, Apache-2.0), and lifetimes that these did not exceed; s.
#: The paper's curve through them is off by up to .09, most in the first minutes, which are those of trials.
SHARES: Final = (0, 0.005, 0.01, 0.02, 0.05, 0.1, 0.15, 0.2, 0.25, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1)
LIFETIMES_S: Final = (
    *(38, 65, 75, 101, 161, 285, 437, 892, 1302, 2139),
    *(3897, 6689, 15_754, 49_133, 86_632, 87_249, 89_398),
)
_DRAWN: Final = 1 << 14


def lifetimes(seed: int) -> Floats:
    """Lifetimes of so many machines, drawn; s."""
    drawn = np.random.default_rng([seed, 4]).uniform(size=_DRAWN)
    return np.interp(drawn, SHARES, LIFETIMES_S)
