"""A random forest that says how likely something is, as arrays: what a compiled loop can ask. Pure.

It is grown elsewhere, by a library; it stands here as well since each job that finds no room asks it, inside the loop
of a simulation, where no Python object can be called.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]


class Forest(NamedTuple):
    """Nodes of all trees; a leaf's ``feature`` is negative, and its ``value`` the share of ones that it saw."""

    roots: Ints
    feature: Ints
    threshold: Floats
    #: The child for values up to the threshold, and the one for those above.
    low: Ints
    high: Ints
    value: Floats


def predicted(forest: Forest, features: Floats) -> float:
    """The mean of what the trees say; 0 of a forest without any. A kernel."""
    trees = len(forest.roots)
    if trees == 0:
        return 0.0
    total = 0.0
    for i in range(trees):
        node = forest.roots[i]
        while forest.feature[node] >= 0:
            low = features[forest.feature[node]] <= forest.threshold[node]
            node = forest.low[node] if low else forest.high[node]
        total += forest.value[node]
    return float(total / trees)


def nothing() -> Forest:
    """A forest without trees."""
    ints, floats = np.empty(0, np.int64), np.empty(0)
    return Forest(ints, ints, floats, ints, ints, floats)
