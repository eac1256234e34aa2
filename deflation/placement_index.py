"""The order of :func:`deflation.placement.rank_hosts` over very many hosts, without looking at all of them.

Hosts are rows of arrays, changed in place as they report. Rows that are alike are kept in blocks
(:mod:`deflation.placement_blocks`), and a decision takes the blocks by the best that any of their hosts could be:

* feasible: only where the largest availability in the block covers the demand;
* fitness: directions are unit vectors, so ``cos = 1 - distance² / 2``; a block's directions lie in a box, and the
  distance from the demand's direction to that box bounds the fitness of every host in it;
* ties: the block's first host id.

It stops when no block that is left can hold a better host than the worst that it has. The order is exact.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from math import inf, sqrt
from typing import Final

import numpy as np
from numpy.typing import NDArray

from deflation.placement import OPTIONAL, Matrix, fitness, holds, scale_factors
from deflation.placement_blocks import Blocks, Slots
from deflation.placement_kernels import DIGITS, MAY_LACK
from deflation.placement_policies import PlacementPolicy
from deflation.resources import COMPONENTS, ResourceVector

#: Most hosts of a block: looking into one costs about as much as looking over the bounds of a hundred.
BLOCK: Final = 128
#: Blocks that are looked into at first; as many again each time, and twice as many.
_FIRST_LOOK: Final = 4
#: Beyond what rounding may add to a bound on a fitness.
_SLACK: Final = 1e-12
#: Room between the ranks of two ids, for hosts that come later.
_GAP: Final = 1 << 20

_N: Final = len(COMPONENTS)
#: Columns of a row's profile: what it offers, its direction and the opposite of that, the opposite of its id's rank,
#: and how large its availability is.
_OFFER, _AHEAD, _BACK = slice(0, _N), slice(_N, 2 * _N), slice(2 * _N, 3 * _N)
_RANK: Final = 3 * _N
_SIZE: Final = _RANK + 1
_COLUMNS: Final = _SIZE + 1
#: By which components a host declares: 1 where it does, by the bits of the group's number.
_DECLARED: Final = np.array([[group >> bit & 1 for bit in range(_N)] for group in range(1 << _N)], dtype=np.float64)

_NO_SLOTS: Final = np.zeros(0, np.intp)


class PlacementIndex:
    """Hosts that take VMs, ready to be ranked.

    :param block: most hosts of a block.
    """

    def __init__(self, block: int = BLOCK) -> None:
        self._slots: dict[str, int] = {}
        self._ids: list[str] = []
        self._spare: list[int] = []
        #: By slot: capacity and availability as they were given.
        self._given: list[tuple[tuple[float, ...], tuple[float, ...]] | None] = []
        self._capacity: Matrix = np.zeros((0, _N))
        self._availability: Matrix = np.zeros((0, _N))
        self._profile: Matrix = np.zeros((0, _COLUMNS))
        #: How many hosts have which capacity, by component; the largest is the scale of the fitness.
        self._capacities: tuple[Counter[float], ...] = tuple(Counter() for _ in COMPONENTS)
        self._scale = [0.0] * _N
        self._factors = [0.0] * _N
        #: All ids in order, and the rank of each slot: hosts that came later got one between their neighbours'.
        self._sorted: list[str] = []
        self._ranks: list[int] = []
        self._ranked = False
        #: Whether profiles and blocks are up to date; else the next decision makes them anew.
        self._built = False
        weights = np.zeros(_COLUMNS)
        weights[_RANK] = 1.0
        self._by_id = Blocks(weights, block)
        # Cut by direction, less by size; by rank only where all else is the same, since ranks are far above 1.
        weights[_AHEAD], weights[_SIZE], weights[_RANK] = 1.0, 0.25, 1e-30
        self._by_shape = Blocks(weights, block)

    def __len__(self) -> int:
        return len(self._slots)

    def __contains__(self, host_id: str) -> bool:
        return host_id in self._slots

    def ids(self, most: int) -> Iterator[str]:
        """The first hosts by id."""
        return islice(self._sorted, most)

    def availability(self, host_id: str) -> ResourceVector:
        """As it was given. Raises KeyError for a host that is not here."""
        given = self._given[self._slots[host_id]]
        assert given is not None, "its slot is in use"
        return ResourceVector(*given[1])

    def fitness_of(self, host_id: str, demand: ResourceVector) -> float:
        """Of one host, as it is ranked by. Raises KeyError for a host that is not here."""
        slot = self._slots[host_id]
        wanted, row = np.array(list(demand)), slice(slot, slot + 1)
        scores = fitness(wanted, self._availability[row], self._capacity[row], np.array(self._scale))
        return round(float(scores[0]), DIGITS)

    # --- changes -----------------------------------------------------------------------------------------------------

    def put(self, host_id: str, capacity: Sequence[float], availability: Sequence[float]) -> None:
        """Add a host or change it.

        :param capacity: in the order of ``COMPONENTS``; 0 in disk or network means: not declared.
        :param availability: free + deflatable, or whatever the demand is to be held against.
        """
        given = (tuple(capacity), tuple(availability))
        slot = self._slots.get(host_id)
        if slot is None:
            slot = self._add(host_id)
        elif self._given[slot] == given:
            return
        before = self._given[slot]
        self._given[slot] = given
        self._availability[slot] = given[1]
        if before is None or before[0] != given[0]:
            self._capacity[slot] = given[0]
            self._recount(before[0] if before is not None else None, given[0])
        if self._built:
            figures, group = self._figures(slot)
            self._profile[slot] = figures
            self._by_id.put(self._profile, slot, figures, 0)
            self._by_shape.put(self._profile, slot, figures, group)

    def drop(self, host_id: str) -> None:
        """Forget a host; one that is not here stays so."""
        slot = self._slots.pop(host_id, None)
        if slot is None:
            return
        del self._sorted[bisect_left(self._sorted, host_id)]
        given, self._given[slot] = self._given[slot], None
        # Where nothing is offered nothing is ever drawn.
        self._profile[slot] = -inf
        self._spare.append(slot)
        if slot in self._by_id:
            self._by_id.drop(slot)
            self._by_shape.drop(slot)
        if given is not None:
            self._recount(given[0], None)
        if self._by_id.sparse or self._by_shape.sparse:
            self._built = False

    def _add(self, host_id: str) -> int:
        if self._spare:
            slot = self._spare.pop()
        else:
            slot = len(self._ids)
            self._ids.append("")
            self._given.append(None)
            self._ranks.append(0)
            if slot == len(self._capacity):
                room = max(64, 2 * slot)
                self._capacity = _grown(self._capacity, room, 0.0)
                self._availability = _grown(self._availability, room, 0.0)
                self._profile = _grown(self._profile, room, -inf)
        self._ids[slot] = host_id
        self._slots[host_id] = slot
        at = bisect_left(self._sorted, host_id)
        self._sorted.insert(at, host_id)
        if self._ranked:
            before = self._ranks[self._slots[self._sorted[at - 1]]] if at else -_GAP
            last = at + 1 == len(self._sorted)
            after = before + 2 * _GAP if last else self._ranks[self._slots[self._sorted[at + 1]]]
            self._ranks[slot] = (before + after) // 2
            if self._ranks[slot] == before:
                self._ranked = self._built = False
        return slot

    def _recount(self, old: tuple[float, ...] | None, new: tuple[float, ...] | None) -> None:
        """Keep the scale: the largest capacity of all hosts here."""
        for component, counts in enumerate(self._capacities):
            if new is not None:
                counts[new[component]] += 1
                self._rescale(component, max(self._scale[component], new[component]))
            if old is not None:
                counts[old[component]] -= 1
                if not counts[old[component]]:
                    del counts[old[component]]
                    if old[component] == self._scale[component]:
                        self._rescale(component, max(counts, default=0.0))

    def _rescale(self, component: int, largest: float) -> None:
        if largest != self._scale[component]:
            self._scale[component] = largest
            self._factors = scale_factors(np.array(self._scale)).tolist()
            # All directions are others now.
            self._built = False

    def _figures(self, slot: int) -> tuple[tuple[float, ...], int]:
        """The profile of one host, and its group."""
        given = self._given[slot]
        assert given is not None, "its slot is in use"
        capacity, availability = given
        have, offer, group = [], [], 0
        for bit, (most, amount, factor) in enumerate(zip(capacity, availability, self._factors, strict=True)):
            declared = most > 0
            group |= declared << bit
            have.append(amount * factor if declared else 0.0)
            offer.append(inf if not declared and MAY_LACK[bit] else amount)
        size = sqrt(sum([value * value for value in have]))
        ahead = [value / size for value in have] if size > 0 else have
        return (*offer, *ahead, *[-value for value in ahead], -float(self._ranks[slot]), size), group

    def _build(self) -> None:
        """Profiles and blocks of all hosts at once."""
        if not self._ranked:
            for number, host_id in enumerate(self._sorted):
                self._ranks[self._slots[host_id]] = number * _GAP
            self._ranked = True
        slots = np.fromiter(self._slots.values(), np.intp, len(self._slots))
        capacity, availability = self._capacity[slots], self._availability[slots]
        declared = capacity > 0
        have = np.where(declared, availability * np.array(self._factors), 0.0)
        size = np.sqrt((have * have).sum(axis=1, keepdims=True))
        ahead = np.divide(have, size, out=have, where=size > 0)
        ranks = np.array(self._ranks, dtype=np.float64)[slots]
        offer = np.where(~declared & OPTIONAL, inf, availability)
        self._profile[slots] = np.column_stack([offer, ahead, -ahead, -ranks, size])
        self._by_id.build(self._profile, slots, np.zeros(len(slots), np.intp))
        self._by_shape.build(self._profile, slots, declared @ (1 << np.arange(_N)))
        self._built = True

    # --- decisions ---------------------------------------------------------------------------------------------------

    def rank(
        self,
        demand: ResourceVector,
        most: int,
        policy: PlacementPolicy = PlacementPolicy.BEST_FIT,
        generator: np.random.Generator | None = None,
        accepts: Callable[[str], bool] | None = None,
    ) -> list[str]:
        """The first hosts of :func:`deflation.placement.rank_hosts`, in its order.

        :param most: how many hosts at most.
        :param generator: the source of chance for two-choices; which two it draws is another chance than there.
        :param accepts: whether a host comes into question at all; asked of feasible hosts only.
        :raises ValueError: two-choices without a generator.
        :returns: host ids, best first; empty if no host can hold the demand.
        """
        if policy is PlacementPolicy.TWO_CHOICES and generator is None:
            raise ValueError("two-choices needs a seeded generator")
        if not self._built:
            self._build()
        wanted = np.array(list(demand), dtype=np.float64)
        if policy is PlacementPolicy.FIRST_FIT:
            slots = self._first(wanted, most, accepts)
        else:
            slots, _ = self._best(wanted, most, accepts)
            if policy is PlacementPolicy.TWO_CHOICES and generator is not None:
                drawn = self._draw(wanted, generator, accepts)
                if len(drawn):
                    rest = slots[~np.isin(slots, drawn)]
                    slots = np.concatenate([drawn[self._order(wanted, drawn)[0]], rest])[:most]
        return [self._ids[slot] for slot in slots.tolist()]

    def _first(self, wanted: Matrix, most: int, accepts: Callable[[str], bool] | None) -> Slots:
        """The first feasible hosts by id: blocks by id hold one stretch each."""
        blocks = self._by_id
        possible = np.flatnonzero(holds(wanted, blocks.bounds[: blocks.count, _OFFER]))
        order = possible[np.argsort(-blocks.bounds[possible, _RANK])]
        found, count = [_NO_SLOTS], 0
        for part in _parts(order):
            slots = self._taking(wanted, blocks.look(self._profile, part), accepts)
            found.append(slots[np.argsort(-self._profile[slots, _RANK])])
            count += len(slots)
            if count >= most:
                break
        return np.concatenate(found)[:most]

    def _best(self, wanted: Matrix, most: int, accepts: Callable[[str], bool] | None) -> tuple[Slots, Matrix]:
        """The feasible hosts of the highest fitness, best first, and their scores."""
        blocks = self._by_shape
        bounds = blocks.bounds[: blocks.count]
        possible = np.flatnonzero(holds(wanted, bounds[:, _OFFER]))
        ceiling = np.round(self._ceilings(wanted, bounds[possible], blocks.groups[possible]) + _SLACK, DIGITS)
        ranks = -bounds[possible, _RANK]
        order = np.lexsort((ranks, -ceiling))
        best, scores = _NO_SLOTS, np.zeros(0)
        begin, width = 0, _FIRST_LOOK
        while begin < len(order):
            part = order[begin : begin + width]
            if len(best) == most and most:
                score, rank = scores[-1], -self._profile[best[-1], _RANK]
                part = part[(ceiling[part] > score) | ((ceiling[part] == score) & (ranks[part] < rank))]
                # By the order of the blocks: where the first is no better than what there is, none is.
                if not len(part):
                    break
            slots = self._taking(wanted, blocks.look(self._profile, possible[part].tolist()), accepts)
            begin, width = begin + width, 2 * width
            if len(slots):
                slots = np.concatenate([best, slots])
                first, scores = self._order(wanted, slots, most)
                best = slots[first]
        return best, scores

    def _ceilings(self, wanted: Matrix, bounds: Matrix, groups: NDArray[np.intp]) -> Matrix:
        """What the fitness of no host of a block exceeds, by block."""
        ahead = _DECLARED * (wanted * np.array(self._factors))
        norms = np.linalg.norm(ahead, axis=1, keepdims=True)
        ahead = np.divide(ahead, norms, out=ahead, where=norms > 0)[groups]
        away = np.maximum(np.maximum(ahead - bounds[:, _AHEAD], -bounds[:, _BACK] - ahead), 0.0)
        closest = np.maximum(1.0 - np.einsum("ij,ij->i", away, away) / 2, 0.0)
        return np.where(norms[groups, 0] > 0, closest, 0.0)

    def _order(self, wanted: Matrix, slots: Slots, most: int | None = None) -> tuple[Slots, Matrix]:
        """The order of hosts by fitness and id, and the scores in it."""
        raw = fitness(wanted, self._availability[slots], self._capacity[slots], np.array(self._scale))
        scores = np.round(raw, DIGITS)
        rows = np.arange(len(slots))
        if most is not None and len(slots) > most > 0:
            rows = np.flatnonzero(scores >= np.partition(scores, len(scores) - most)[len(scores) - most])
        order = rows[np.lexsort((-self._profile[slots[rows], _RANK], -scores[rows]))][:most]
        return order, scores[order]

    def _taking(self, wanted: Matrix, slots: Slots, accepts: Callable[[str], bool] | None) -> Slots:
        """Those of the hosts that can hold the demand."""
        slots = slots[holds(wanted, self._profile[slots, _OFFER])]
        if accepts is None:
            return slots
        return slots[np.fromiter((accepts(self._ids[slot]) for slot in slots.tolist()), np.bool_, len(slots))]

    def _draw(self, wanted: Matrix, generator: np.random.Generator, accepts: Callable[[str], bool] | None) -> Slots:
        """Two feasible hosts, each pair as likely as any other; none where there are no more than two anyway."""
        if not self._sorted:
            return _NO_SLOTS
        for count in (64, 512):
            # By the place of the id, not of the slot: the same lot whatever the order in which hosts came.
            drawn = (self._slots[self._sorted[place]] for place in generator.integers(0, len(self._sorted), count))
            tried = self._taking(wanted, np.fromiter(drawn, np.intp, count), accepts)
            _, firsts = np.unique(tried, return_index=True)
            if len(firsts) >= 2:
                return tried[np.sort(firsts)[:2]]
        # Rare among the hosts: all of them, and what was drawn before is forgotten, so that no pair is favoured.
        blocks = self._by_shape
        possible = np.flatnonzero(holds(wanted, blocks.bounds[: blocks.count, _OFFER]))
        slots = self._taking(wanted, blocks.look(self._profile, possible.tolist()), accepts)
        slots = slots[np.argsort(-self._profile[slots, _RANK])]
        return generator.choice(slots, size=2, replace=False) if len(slots) > 2 else _NO_SLOTS


def _parts(order: Slots) -> Iterator[list[int]]:
    """Stretches of an order, each twice as long as the one before."""
    begin, width = 0, _FIRST_LOOK
    while begin < len(order):
        yield order[begin : begin + width].tolist()
        begin, width = begin + width, 2 * width


def _grown(matrix: Matrix, room: int, fill: float) -> Matrix:
    """A copy with room for more rows."""
    larger = np.full((room, matrix.shape[1]), fill)
    larger[: len(matrix)] = matrix
    return larger
