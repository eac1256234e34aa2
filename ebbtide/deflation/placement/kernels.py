"""The choice of a host as kernels over numbers: what `deflation.placement.fitness` does for all hosts at once, for one.

Two forms of one formula: NumPy's passes over all hosts are what is quick in interpreted code, a loop over hosts is what
is quick in compiled code. Tests hold them to each other, to ``DIGITS`` (docs/internals/policies.md). For the rules of
kernels see
`deflation.kernels`. Tables hold one row per host, in the order of the hosts' ids, so that ties fall to the first.

Source: Sharma et al. 2019, §5, Eq. 4.
"""

from __future__ import annotations

import math
from typing import Final

from ebbtide.deflation.kernels import WIDTH, Row, Table
from ebbtide.deflation.resources import COMPONENTS, TOLERANCE

#: Fitnesses that agree in so many digits are a tie.
DIGITS: Final = 9
_PARTS: Final = 10.0**DIGITS
#: Components that a host need not declare.
MAY_LACK: Final = tuple(component in ("disk_mib_s", "network_mib_s") for component in COMPONENTS)


def scale_of(capacity: Table, factors: Row) -> None:
    """What each component is multiplied with: one by the largest host's capacity, 0 where no host has any.

    :param factors: filled.
    """
    for c in range(WIDTH):
        largest = 0.0
        for i in range(len(capacity)):
            if capacity[i][c] > largest:
                largest = capacity[i][c]
        factors[c] = 1.0 / largest if largest > 0.0 else 0.0


def left_of(free: float, beyond: float, taken: float) -> float:
    """What is left in one component after something is taken: first of what is free, then of what is beyond it."""
    rest = free - taken if free > taken else 0.0
    lacks = taken - free if taken > free else 0.0
    return rest + (beyond - lacks if beyond > lacks else 0.0)


def holds_demand(demand: Row, availability: Row, capacity: Row) -> bool:
    """Whether a host could hold the demand: enough in each component that it declares."""
    holding = True
    for c in range(WIDTH):
        enough = availability[c] + TOLERANCE >= demand[c]
        holding = holding and (enough or (MAY_LACK[c] and capacity[c] <= 0.0))
    return holding


def fitness_of_host(demand: Row, availability: Row, capacity: Row, factors: Row) -> float:
    """Cosine of demand and availability of one host: see `deflation.placement.fitness.fitness`.

    :param factors: see `scale_of`.
    """
    dot, wanted, have = 0.0, 0.0, 0.0
    for c in range(WIDTH):
        if capacity[c] > 0.0:
            want, amount = demand[c] * factors[c], availability[c] * factors[c]
            dot += want * amount
            wanted += want * want
            have += amount * amount
    norms = math.sqrt(wanted) * math.sqrt(have)
    if norms <= 0.0:
        return 0.0
    cosine = dot / norms
    return cosine if cosine < 1.0 else 1.0


def score_of(fitness: float) -> int:
    """A fitness in whole parts of its last digit: equal scores are a tie. Halves go to the even part, as in NumPy."""
    parts = fitness * _PARTS
    whole = math.floor(parts)
    rest = parts - whole
    return whole + 1 if rest > 0.5 or (rest == 0.5 and whole % 2 == 1) else whole


def best_host(demand: Row, availability: Table, capacity: Table, factors: Row) -> int:
    """Best-fit: the place of the fittest host that can hold the demand; -1 if none can."""
    best, highest = -1, -1
    for i in range(len(availability)):
        if holds_demand(demand, availability[i], capacity[i]):
            score = score_of(fitness_of_host(demand, availability[i], capacity[i], factors))
            if score > highest:
                best, highest = i, score
    return best


def first_host(demand: Row, availability: Table, capacity: Table) -> int:
    """First-fit: the first place of a host that can hold the demand; -1 if none can."""
    for i in range(len(availability)):
        if holds_demand(demand, availability[i], capacity[i]):
            return i
    return -1


def fitter_host(demand: Row, availability: Table, capacity: Table, factors: Row, one: int, other: int) -> int:
    """Two-choices: the fitter of two hosts that were drawn among those that can hold the demand."""
    left = score_of(fitness_of_host(demand, availability[one], capacity[one], factors))
    right = score_of(fitness_of_host(demand, availability[other], capacity[other], factors))
    if left == right:
        return min(one, other)
    return one if left > right else other


#: All kernels of this module.
KERNELS: Final = (scale_of, left_of, holds_demand, fitness_of_host, score_of, best_host, first_host, fitter_host)
