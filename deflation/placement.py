"""On which host a VM goes: cosine fitness over free + deflatable (seed 004 §5, Eq. 4).

Hosts are rows of arrays, so that a pass over many thousands of them is a few NumPy operations; the manager and the
simulator both keep such arrays.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from deflation.placement_policies import PlacementPolicy
from deflation.resources import COMPONENTS, TOLERANCE, ResourceVector

Matrix = NDArray[np.float64]
#: Components that a host need not declare.
_OPTIONAL: Final = np.array([component in ("disk_mib_s", "network_mib_s") for component in COMPONENTS])


@dataclass(frozen=True, slots=True)
class HostView:
    """What placement knows of a host. Capacity 0 in disk or network means: not declared."""

    id: str
    capacity: ResourceVector
    free: ResourceVector
    deflatable: ResourceVector


def fitness(demand: Matrix, availability: Matrix, capacity: Matrix) -> Matrix:
    """Cosine of demand and availability, each component divided by the largest host's capacity first.

    Raw units would make memory the only dimension. A component that a host does not declare (capacity 0) is left out
    for that host; a zero vector has fitness 0.

    :param demand: shape (4,), the order of ``COMPONENTS``.
    :param availability: shape (n, 4), free + deflatable.
    :param capacity: shape (n, 4).
    :returns: shape (n,), in [0, 1].
    """
    scale = capacity.max(axis=0, initial=0.0)
    factor = np.divide(1.0, scale, out=np.zeros_like(scale), where=scale > 0)
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
    undeclared = (capacity <= 0) & _OPTIONAL
    return np.asarray(((availability + TOLERANCE >= demand) | undeclared).all(axis=1))


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
    scores = fitness(wanted, availability, capacity)
    best = sorted(rows, key=lambda row: (-round(float(scores[row]), 9), ordered[row].id))
    if policy is PlacementPolicy.TWO_CHOICES and generator is not None and len(rows) > 2:
        drawn = set(generator.choice(rows, size=2, replace=False).tolist())
        # The two that were drawn come first; the rest stays behind them for when both fail.
        best.sort(key=lambda row: row not in drawn)
    return [ordered[row].id for row in best]


def _matrix(vectors: Sequence[ResourceVector]) -> Matrix:
    return np.array([list(vector) for vector in vectors], dtype=np.float64).reshape(-1, len(COMPONENTS))
