"""Order of hosts for a VM: cosine fitness over free + deflatable (Sharma et al. 2019, §5, Eq. 4).

Hosts are rows of arrays, so that a pass over many thousands of them is a few NumPy operations. The same for one host at
a time, to be compiled: `deflation.placement.kernels`.
`HostTable` keeps those arrays between decisions; a decision is one pass over them.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import islice

import numpy as np
from numpy.typing import NDArray

from ebbtide.deflation.placement.kernels import DIGITS, MAY_LACK, left_of
from ebbtide.deflation.placement.policy_names import PlacementPolicy
from ebbtide.deflation.resources import COMPONENTS, TOLERANCE, ResourceVector

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
    ordered = sorted(hosts, key=lambda host: host.id)
    capacity = _matrix([host.capacity for host in ordered])
    availability = _matrix([host.free + host.deflatable for host in ordered])
    wanted = np.array(list(demand), dtype=np.float64)
    rows = _ranked_rows(wanted, availability, capacity, np.arange(len(ordered)), policy, generator)
    return [ordered[row].id for row in rows.tolist()]


class HostTable:
    """Hosts that take VMs as rows of arrays, changed in place as they report."""

    def __init__(self) -> None:
        self._rows: dict[str, int] = {}
        #: By row; rows beyond these are room for hosts to come.
        self._ids: list[str] = []
        self._capacity: Matrix = np.zeros((0, len(COMPONENTS)))
        self._availability: Matrix = np.zeros((0, len(COMPONENTS)))
        #: The place of each row by host id; None: hosts have come or gone since it was made.
        self._by_id: NDArray[np.intp] | None = None

    def __len__(self) -> int:
        return len(self._ids)

    def __contains__(self, host_id: str) -> bool:
        return host_id in self._rows

    def ids(self, most: int) -> list[str]:
        """The first hosts by id."""
        return heapq.nsmallest(most, self._ids)

    def availability(self, host_id: str) -> ResourceVector:
        """As it was given. Raises KeyError for a host that is not here."""
        return ResourceVector(*self._availability[self._rows[host_id]].tolist())

    def offered(self) -> tuple[list[str], Matrix]:
        """All hosts, and what a demand is held against at each: a row a host."""
        count = len(self)
        return list(self._ids), offers(self._availability[:count], self._capacity[:count])

    def fitness_of(self, host_id: str, demand: ResourceVector) -> float:
        """Of one host, as it is ranked by. Raises KeyError for a host that is not here."""
        row = self._rows[host_id]
        scale = self._capacity[: len(self)].max(axis=0)
        one = slice(row, row + 1)
        score = fitness(np.array(list(demand)), self._availability[one], self._capacity[one], scale)
        return round(float(score[0]), DIGITS)

    def put(self, host_id: str, capacity: Sequence[float], availability: Sequence[float]) -> None:
        """Add a host or change it.

        :param capacity: in the order of ``COMPONENTS``; 0 in disk or network means: not declared.
        :param availability: free + deflatable, or whatever the demand is to be held against.
        """
        row = self._rows.get(host_id)
        if row is None:
            row = self._rows[host_id] = len(self._ids)
            self._ids.append(host_id)
            self._by_id = None
            if row == len(self._capacity):
                self._capacity, self._availability = _grown(self._capacity), _grown(self._availability)
        self._capacity[row], self._availability[row] = capacity, availability

    def drop(self, host_id: str) -> None:
        """Forget a host, whose row the last one takes; one that is not here stays so."""
        row = self._rows.pop(host_id, None)
        if row is None:
            return
        last = len(self._ids) - 1
        moved = self._ids.pop()
        if row != last:
            self._ids[row], self._rows[moved] = moved, row
            self._capacity[row], self._availability[row] = self._capacity[last], self._availability[last]
        self._by_id = None

    def rank(
        self,
        demand: ResourceVector,
        most: int,
        policy: PlacementPolicy = PlacementPolicy.BEST_FIT,
        generator: np.random.Generator | None = None,
        accepts: Callable[[str], bool] | None = None,
    ) -> list[str]:
        """The first hosts of `rank_hosts`, in its order.

        :param most: how many hosts at most.
        :param accepts: whether a host comes into question at all; asked of feasible hosts only.
        :raises ValueError: two-choices without a generator.
        """
        count = len(self)
        if self._by_id is None:
            self._by_id = np.empty(count, np.intp)
            self._by_id[sorted(range(count), key=self._ids.__getitem__)] = np.arange(count)

        def accepted(row: int) -> bool:
            return accepts is None or accepts(self._ids[row])

        wanted = np.array(list(demand), dtype=np.float64)
        figures = (wanted, self._availability[:count], self._capacity[:count], self._by_id)
        # Two-choices draws among those that come into question; the others need no more of them than are wanted.
        drawing = policy is PlacementPolicy.TWO_CHOICES and accepts is not None
        rows = _ranked_rows(*figures, policy, generator, accepted if drawing else None)
        return [self._ids[row] for row in islice(filter(accepted, rows.tolist()), most)]


def _ranked_rows(
    wanted: Matrix,
    availability: Matrix,
    capacity: Matrix,
    by_id: NDArray[np.intp],
    policy: PlacementPolicy,
    generator: np.random.Generator | None,
    accepts: Callable[[int], bool] | None = None,
) -> NDArray[np.intp]:
    """The feasible rows in the order in which to try them; see `rank_hosts`.

    :param by_id: the place of each row by host id.
    """
    rows = np.flatnonzero(feasible(wanted, availability, capacity))
    if accepts is not None:
        rows = np.array([row for row in rows.tolist() if accepts(row)], dtype=np.intp)
    rows = rows[np.argsort(by_id[rows])]
    match policy:
        case PlacementPolicy.FIRST_FIT:
            return rows
        case PlacementPolicy.BEST_FIT:
            return _by_fitness(wanted, availability, capacity, rows)
        case PlacementPolicy.TWO_CHOICES:
            if generator is None:
                raise ValueError("two-choices needs a seeded generator")
            best = _by_fitness(wanted, availability, capacity, rows)
            if len(rows) <= 2:
                return best
            drawn = generator.choice(rows, size=2, replace=False)
            # The two that were drawn come first; the rest stays behind them for when both fail.
            return best[np.argsort(~np.isin(best, drawn), kind="stable")]


def _by_fitness(wanted: Matrix, availability: Matrix, capacity: Matrix, rows: NDArray[np.intp]) -> NDArray[np.intp]:
    """These rows by falling fitness, equal ones in the order in which they come."""
    scores = np.round(fitness(wanted, availability[rows], capacity[rows], capacity.max(axis=0, initial=0.0)), DIGITS)
    return rows[np.argsort(-scores, kind="stable")]


def _matrix(vectors: Sequence[ResourceVector]) -> Matrix:
    return np.array([list(vector) for vector in vectors], dtype=np.float64).reshape(-1, len(COMPONENTS))


def _grown(rows: Matrix) -> Matrix:
    """A copy with room for as many rows again."""
    larger = np.zeros((max(64, 2 * len(rows)), rows.shape[1]))
    larger[: len(rows)] = rows
    return larger
