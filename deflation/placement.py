"""On which host a VM goes: cosine fitness over free + deflatable (seed 004 §5, Eq. 4).

Hosts are rows of arrays, so that a pass over many thousands of them is a few NumPy operations. The same for one host at
a time, to be compiled: :mod:`deflation.placement_kernels`.
:func:`rank_hosts` looks at every host; :mod:`deflation.placement_index` gives the same order without doing so.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from deflation.placement_kernels import DIGITS, MAY_LACK, left_of
from deflation.placement_policies import PlacementPolicy
from deflation.resources import COMPONENTS, TOLERANCE, ResourceVector

Matrix = NDArray[np.float64]
#: Components that a host need not declare.
OPTIONAL = np.array(MAY_LACK)


@dataclass(frozen=True, slots=True)
class HostView:
    """What placement knows of a host. Capacity 0 in disk or network means: not declared."""

    id: str
    capacity: ResourceVector
    free: ResourceVector
    deflatable: ResourceVector


def available(free: Iterable[float], deflatable: Iterable[float], taken: Iterable[float]) -> tuple[float, ...]:
    """What placement may count on: free + deflatable, less what others have been promised already.

    :param taken: in each component it comes off what is free, and where that is too little off what is deflatable.
    """
    return tuple(map(left_of, free, deflatable, taken))


def scale_factors(scale: Matrix) -> Matrix:
    """What each component is multiplied with: one by the largest host's capacity, 0 where no host has any."""
    return np.divide(1.0, scale, out=np.zeros_like(scale), where=scale > 0)


def fitness(demand: Matrix, availability: Matrix, capacity: Matrix, scale: Matrix | None = None) -> Matrix:
    """Cosine of demand and availability, each component divided by the largest host's capacity first.

    Raw units would make memory the only dimension. A component that a host does not declare (capacity 0) is left out
    for that host; a zero vector has fitness 0.

    :param demand: shape (4,), the order of ``COMPONENTS``.
    :param availability: shape (n, 4), free + deflatable.
    :param capacity: shape (n, 4).
    :param scale: shape (4,), the largest capacity of all hosts where the rows are only some of them.
    :returns: shape (n,), in [0, 1].
    """
    factor = scale_factors(capacity.max(axis=0, initial=0.0) if scale is None else scale)
    declared = capacity > 0
    wanted = np.where(declared, demand * factor, 0.0)
    have = np.where(declared, availability * factor, 0.0)
    norms = np.linalg.norm(wanted, axis=1) * np.linalg.norm(have, axis=1)
    dots = np.einsum("ij,ij->i", wanted, have)
    cosine = np.divide(dots, norms, out=np.zeros_like(dots), where=norms > 0)
    return np.asarray(np.clip(cosine, 0.0, 1.0), dtype=np.float64)


def feasible(demand: Matrix, availability: Matrix, capacity: Matrix) -> NDArray[np.bool_]:
    """Which hosts could hold the demand at all: enough in each component that the host declares. Shape (n,).

    CPU and memory are always declared: a host without any holds nothing.
    """
    return holds(demand, offers(availability, capacity))


def offers(availability: Matrix, capacity: Matrix) -> Matrix:
    """What a demand is held against: the availability, and anything where a host need not declare it and does not."""
    return np.where((capacity <= 0) & OPTIONAL, np.inf, availability)


def holds(demand: Matrix, offered: Matrix) -> NDArray[np.bool_]:
    """Which rows offer the demand. Shape (n,)."""
    return np.asarray((offered + TOLERANCE >= demand).all(axis=1))


def rank_hosts(
    demand: ResourceVector,
    hosts: Sequence[HostView],
    policy: PlacementPolicy = PlacementPolicy.BEST_FIT,
    generator: np.random.Generator | None = None,
) -> list[str]:
    """The feasible hosts in the order in which to try them; ties by host id.

    :param generator: the source of chance for two-choices.
    :raises ValueError: two-choices without a generator.
    :returns: host ids, best first; empty if no host can hold the demand.
    """
    if policy is PlacementPolicy.TWO_CHOICES and generator is None:
        raise ValueError("two-choices needs a seeded generator")
    ordered = sorted(hosts, key=lambda host: host.id)
    if not ordered:
        return []
    capacity = _matrix([host.capacity for host in ordered])
    availability = _matrix([host.free + host.deflatable for host in ordered])
    wanted = _matrix([demand])[0]
    rows = np.flatnonzero(feasible(wanted, availability, capacity))
    if policy is PlacementPolicy.FIRST_FIT:
        return [ordered[row].id for row in rows]
    scores = np.round(fitness(wanted, availability, capacity), DIGITS)
    best = sorted(rows, key=lambda row: (-float(scores[row]), ordered[row].id))
    if policy is PlacementPolicy.TWO_CHOICES and generator is not None and len(rows) > 2:
        drawn = set(generator.choice(rows, size=2, replace=False).tolist())
        # The two that were drawn come first; the rest stays behind them for when both fail.
        best.sort(key=lambda row: row not in drawn)
    return [ordered[row].id for row in best]


def _matrix(vectors: Sequence[ResourceVector]) -> Matrix:
    return np.array([list(vector) for vector in vectors], dtype=np.float64).reshape(-1, len(COMPONENTS))
