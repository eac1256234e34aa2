"""The state of a cluster as arrays: what compiled loops read and write, and what a checkpoint holds.

VMs have slots in a table that grows with those alive. A slot has no meaning: VMs are told apart and ordered by their
number, which is that of their arrival.
"""

from __future__ import annotations

from typing import Any, Final, NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from deflation.kernels import WIDTH
from simulator.inputs.batches import Floats, Indices

#: No VM, no node.
NOBODY: Final = -1
#: Nodes that a placement looks at.
MOST_NODES: Final = 16

# --- cells of Tally.state ---
ALIVE: Final = 0
#: Free slots, the height of the stack ``Vms.spare``.
SPARE: Final = 1
#: VMs that will depart, the length of the heap.
LEAVING: Final = 2
#: The number of the next arrival.
NUMBER: Final = 3
#: Arrivals and departures so far.
EVENTS: Final = 4
#: Victims written down by this call.
VICTIMS: Final = 5
_CELLS: Final = 6

# --- cells of Tally.clock ---
NOW_S: Final = 0
WINDOW_FROM_S: Final = 1
WINDOW_UNTIL_S: Final = 2

# --- Tally.counts[part, class, kind] ---
WHOLE: Final = 0
WINDOW: Final = 1
HIGH: Final = 0
LOW: Final = 1
OFFERED: Final = 0
ADMITTED: Final = 1
REFUSED: Final = 2
PREEMPTED: Final = 3
DEPARTED: Final = 4
#: Of the admitted: with less than nominal.
DEFLATED_AT_START: Final = 5
#: Preempted within the window, of those admitted within it.
COHORT_PREEMPTED: Final = 6
#: Sizes made smaller, and larger.
DEFLATIONS: Final = 7
REINFLATIONS: Final = 8
_KINDS: Final = 9

# --- Tally.levels and what is made of them: what the cluster hosts at this moment ---
HOSTED: Final = 0
#: Nominal sizes.
SOLD_CORES: Final = 1
SOLD_MIB: Final = 2
#: Current sizes.
HELD_CORES: Final = 3
HELD_MIB: Final = 4
#: Nominal cores of low-priority VMs, and the same times their throughput relative to nominal.
LOW_CORES: Final = 5
LOW_RATE: Final = 6
HIGH_CORES: Final = 7
HIGH_RATE: Final = 8
LEVELS: Final = 9

# --- Tally.stays: of the VMs that have left ---
STAY_S: Final = 0
STAY_CORE_S: Final = 1

# --- Tally.fault: what a validating run has found ---
FAULT: Final = 0
FAULT_NODE: Final = 1
FAULT_VM: Final = 2
FAULT_COMPONENT: Final = 3


class Vms(NamedTuple):
    """The table of VMs; one row a slot."""

    #: The arrival's number; also the order of names, by which ties are decided.
    number: Indices
    #: As the policies know it: ``deflation.kernels.FIXED`` or ``DEFLATABLE``.
    priority: Indices
    #: As it was sold: HIGH or LOW.
    sold_as: Indices
    #: Nominal, minimum and current size; shape (slots, 4).
    upper: Floats
    minimum: Floats
    current: Floats
    #: The size that a preemption would have deflated it to, while one is under way; shape (slots, 4).
    goal: Floats
    admitted_s: Floats
    #: Infinite: not seen to depart.
    departs_s: Floats
    #: The row of its utility curve.
    curve: Indices
    #: Throughput relative to nominal, of its current size.
    rate: Floats
    #: The node it is on; NOBODY: the slot is free.
    node: Indices
    #: The members of its node that came before and after it.
    before: Indices
    after: Indices
    #: Its place in the heap of departures.
    place: Indices
    #: Slots by departure, a binary heap.
    heap: Indices
    #: Free slots, a stack.
    spare: Indices


class Nodes(NamedTuple):
    """The nodes; matrices have the shape (nodes, 4)."""

    capacity: Floats
    #: What no VM holds, what deflation could free, what low-priority VMs are charged.
    free: Floats
    deflatable: Floats
    low: Floats
    #: What placement may count on by deflation, and by preemption.
    placeable: Floats
    preemptable: Floats
    #: What each component is multiplied with before a fitness; shape (4,).
    factors: Floats
    #: Members, in the order in which they came.
    first: Indices
    last: Indices
    count: Indices
    #: Nominal cores hosted, their integral over the window, and until when it is complete.
    sold_cores: Floats
    sold_core_s: Floats
    since_s: Floats


class Tally(NamedTuple):
    """Counters, clock and integrals."""

    state: Indices
    clock: Floats
    #: Shape (2, 2, kinds): whole run or window, HIGH or LOW.
    counts: Indices
    levels: Floats
    #: Integrals of the levels over the whole run and over the window, and the highest within the window.
    whole: Floats
    window: Floats
    peak: Floats
    stays: Floats
    fault: Indices


class Work(NamedTuple):
    """Rows of one node's VMs for the policies; nothing in it outlives a decision."""

    vm: Indices
    priority: Indices
    order: Indices
    pressed: Indices
    chosen: Indices
    upper: Floats
    minimum: Floats
    current: Floats
    charge: Floats
    targets: Floats
    #: Nodes that a placement has left.
    left: Indices
    #: Of one vector each; the demand with and without what the VM costs besides its size.
    size: Floats
    demand: Floats
    missing: Floats
    need: Floats
    short: Floats


class Curves(NamedTuple):
    """Utility curves: throughput relative to nominal over the share of nominal; shape (curves, points)."""

    shares: Floats
    utilities: Floats
    points: Indices


class Rules(NamedTuple):
    """A policy in numbers."""

    #: An index of `simulator.cluster.settings.PLACEMENTS`.
    placement: int
    #: Whether high-priority VMs preempt.
    preempts: int
    #: Whether low-priority VMs may start deflated.
    start_deflated: int
    #: Whether memory is ballooned and CPU shared, instead of all that.
    balloons: int
    #: Whether everything is checked after every event.
    validate: int
    #: Memory that a VM costs its node besides its size.
    overhead_mib: float


class Arrivals(NamedTuple):
    """VMs in the order of their arrival."""

    at_s: Floats
    #: Infinite: not seen to depart.
    departs_s: Floats
    #: Nominal and minimum sizes; shape (rows, 4).
    upper: Floats
    minimum: Floats
    #: HIGH or LOW.
    sold_as: Indices
    curve: Indices
    #: Two numbers in [0, 1) a row, for two-choices; shape (rows, 2).
    draws: Floats


Group = TypeVar("Group", Vms, Nodes, Tally)


def new_vms(slots: int) -> Vms:
    """A table of free slots."""
    matrix, floats, ints = _matrix(slots), np.zeros(slots), np.zeros(slots, np.int64)
    nobody = np.full(slots, NOBODY, np.int64)
    return Vms(
        number=ints.copy(),
        priority=ints.copy(),
        sold_as=ints.copy(),
        upper=matrix.copy(),
        minimum=matrix.copy(),
        current=matrix.copy(),
        goal=matrix.copy(),
        admitted_s=floats.copy(),
        departs_s=floats.copy(),
        curve=ints.copy(),
        rate=floats.copy(),
        node=nobody.copy(),
        before=nobody.copy(),
        after=nobody.copy(),
        place=nobody.copy(),
        heap=nobody.copy(),
        spare=np.arange(slots, dtype=np.int64)[::-1].copy(),
    )


def grown(vms: Vms, tally: Tally, slots: int) -> Vms:
    """The same table with more slots."""
    before = len(vms.number)
    larger = new_vms(slots)
    for name, column in vms._asdict().items():
        getattr(larger, name)[:before] = column
    height = int(tally.state[SPARE])
    more = slots - before
    larger.spare[:height] = vms.spare[:height]
    larger.spare[height : height + more] = np.arange(before, slots)
    tally.state[SPARE] = height + more
    return larger


def new_nodes(capacity: Floats) -> Nodes:
    """Empty nodes; what placement may count on is not filled in yet."""
    count = len(capacity)
    matrix, floats = _matrix(count), np.zeros(count)
    nobody = np.full(count, NOBODY, np.int64)
    return Nodes(
        capacity=np.ascontiguousarray(capacity, np.float64),
        free=matrix.copy(),
        deflatable=matrix.copy(),
        low=matrix.copy(),
        placeable=matrix.copy(),
        preemptable=matrix.copy(),
        factors=np.zeros(WIDTH),
        first=nobody.copy(),
        last=nobody.copy(),
        count=np.zeros(count, np.int64),
        sold_cores=floats.copy(),
        sold_core_s=floats.copy(),
        since_s=floats.copy(),
    )


def new_tally(slots: int, window_s: tuple[float, float], from_s: float) -> Tally:
    """Nothing has happened yet.

    :param window_s: what is measured, begin and end.
    :param from_s: where time begins.
    """
    state = np.zeros(_CELLS, np.int64)
    state[SPARE] = slots
    levels = np.zeros(LEVELS)
    return Tally(
        state=state,
        clock=np.array([from_s, window_s[0], window_s[1]]),
        counts=np.zeros((2, 2, _KINDS), np.int64),
        levels=levels.copy(),
        whole=levels.copy(),
        window=levels.copy(),
        peak=levels.copy(),
        stays=np.zeros(2),
        fault=np.zeros(4, np.int64),
    )


def new_work(slots: int) -> Work:
    """Rows for as many VMs."""
    matrix, ints, vector = _matrix(slots), np.zeros(slots, np.int64), np.zeros(WIDTH)
    return Work(
        vm=ints.copy(),
        priority=ints.copy(),
        order=ints.copy(),
        pressed=ints.copy(),
        chosen=ints.copy(),
        upper=matrix.copy(),
        minimum=matrix.copy(),
        current=matrix.copy(),
        charge=matrix.copy(),
        targets=matrix.copy(),
        left=np.zeros(MOST_NODES, np.int64),
        size=vector.copy(),
        demand=vector.copy(),
        missing=vector.copy(),
        need=vector.copy(),
        short=vector.copy(),
    )


def arrays_of(group: Vms | Nodes | Tally, prefix: str) -> dict[str, NDArray[Any]]:
    """The arrays of a group by name, as a checkpoint has them."""
    return {f"{prefix}.{name}": column for name, column in group._asdict().items()}


def group_of(kind: type[Group], arrays: dict[str, NDArray[Any]], prefix: str) -> Group:
    """A group out of a checkpoint. Raises KeyError where one of its arrays is missing."""
    return kind(*(np.ascontiguousarray(arrays[f"{prefix}.{name}"]) for name in kind._fields))


def _matrix(rows: int) -> Floats:
    return np.zeros((rows, WIDTH))
