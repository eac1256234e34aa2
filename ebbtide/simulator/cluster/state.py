"""The state of a cluster as arrays: what compiled loops read and write, and what a checkpoint holds.

VMs have slots in a table that grows with those alive. A slot has no meaning: VMs are told apart and ordered by their
number, which is that of their arrival.
"""

from __future__ import annotations

from typing import Any, Final, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from ebbtide.deflation.kernels import WIDTH
from ebbtide.simulator.inputs.batches import Floats, Indices

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
#: By what the placement under way looks for nodes (`deflation.placement.placement_step`).
PURPOSE: Final = 6
_CELLS: Final = 7

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
#: Came back after a preemption.
RETURNED: Final = 9
_KINDS: Final = 10

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
#: Low-priority VMs, and those of them that have less than nominal.
LOW_HOSTED: Final = 9
LOW_DEFLATED: Final = 10
LEVELS: Final = 11

# --- Tally.stays: of the VMs that have left ---
STAY_S: Final = 0
STAY_CORE_S: Final = 1

# --- Tally.fault: what a validating run has found ---
FAULT: Final = 0
FAULT_NODE: Final = 1
FAULT_VM: Final = 2
FAULT_COMPONENT: Final = 3


#: The table of VMs; one row a slot.
VM: Final = np.dtype(
    [
        # The arrival's number; also the order of names, by which ties are decided.
        ("number", np.int64),
        # As the policies know it: `deflation.kernels.FIXED` or `DEFLATABLE`.
        ("priority", np.int64),
        # As it was sold: HIGH or LOW.
        ("sold_as", np.int64),
        # Nominal, minimum and current size.
        ("upper", np.float64, WIDTH),
        ("minimum", np.float64, WIDTH),
        ("current", np.float64, WIDTH),
        # The size that a preemption would have deflated it to, while one is under way.
        ("goal", np.float64, WIDTH),
        ("admitted_s", np.float64),
        # Infinite: not seen to depart.
        ("departs_s", np.float64),
        # The row of its utility curve.
        ("curve", np.int64),
        # Throughput relative to nominal, of its current size.
        ("rate", np.float64),
        # Whether it is of low priority and has less than nominal.
        ("deflated", np.int64),
        # The node it is on; NOBODY: the slot is free.
        ("node", np.int64),
        # The members of its node that came before and after it.
        ("before", np.int64),
        ("after", np.int64),
        # Its place in the heap of departures.
        ("place", np.int64),
        # Slots by departure, a binary heap, and free slots, a stack: no matter of the row's VM.
        ("heap", np.int64),
        ("spare", np.int64),
    ]
)

NODE: Final = np.dtype(
    [
        ("capacity", np.float64, WIDTH),
        # What no VM holds, what deflation could free, what low-priority VMs are charged.
        ("free", np.float64, WIDTH),
        ("deflatable", np.float64, WIDTH),
        ("low", np.float64, WIDTH),
        # What placement may count on by deflation, and by preemption.
        ("placeable", np.float64, WIDTH),
        ("preemptable", np.float64, WIDTH),
        # Members, in the order in which they came.
        ("first", np.int64),
        ("last", np.int64),
        ("members", np.int64),
        # Nominal cores hosted, their integral over the window, and until when it is complete.
        ("sold_cores", np.float64),
        ("sold_core_s", np.float64),
        ("since_s", np.float64),
    ]
)

#: Counters, clock and integrals of a cluster.
TALLY: Final = np.dtype(
    [
        ("state", np.int64, _CELLS),
        ("clock", np.float64, 3),
        # Whole run or window, HIGH or LOW, kind.
        ("counts", np.int64, (2, 2, _KINDS)),
        ("levels", np.float64, LEVELS),
        # Integrals of the levels over the whole run and over the window, and the highest within the window.
        ("whole", np.float64, LEVELS),
        ("window", np.float64, LEVELS),
        ("peak", np.float64, LEVELS),
        ("stays", np.float64, 2),
        ("fault", np.int64, 4),
        # What each component is multiplied with before a fitness.
        ("factors", np.float64, WIDTH),
        # Of the decision under way; nothing of it outlives that. The size that is asked for, and with what the VM costs
        # besides; nodes that were left.
        ("asked", np.float64, WIDTH),
        ("demand", np.float64, WIDTH),
        ("missing", np.float64, WIDTH),
        ("need", np.float64, WIDTH),
        ("short", np.float64, WIDTH),
        ("left", np.int64, MOST_NODES),
    ]
)

#: Rows of one node's VMs for the policies; nothing in it outlives a decision.
WORK: Final = np.dtype(
    [
        ("vm", np.int64),
        ("priority", np.int64),
        ("order", np.int64),
        ("pressed", np.int64),
        ("chosen", np.int64),
        ("cost", np.float64),
        ("upper", np.float64, WIDTH),
        ("minimum", np.float64, WIDTH),
        ("current", np.float64, WIDTH),
        ("charge", np.float64, WIDTH),
        ("targets", np.float64, WIDTH),
    ]
)

#: A VM that is asked for, as the loop reads it: the columns of `Arrivals`.
ARRIVAL: Final = np.dtype(
    [
        ("at_s", np.float64),
        ("departs_s", np.float64),
        ("upper", np.float64, WIDTH),
        ("minimum", np.float64, WIDTH),
        ("sold_as", np.int64),
        ("curve", np.int64),
        ("draws", np.float64, 2),
    ]
)

#: Tables whose columns are attributes: ``vms.current[slot, component]``. One array each: functions that are handed
#: dozens of arrays take minutes to compile.
Vms: TypeAlias = Any
Nodes: TypeAlias = Any
Tally: TypeAlias = Any
Work: TypeAlias = Any
Asked: TypeAlias = Any


class Curves(NamedTuple):
    """Utility curves: throughput relative to nominal over the share of nominal; shape (curves, points)."""

    shares: Floats
    utilities: Floats
    points: Indices


class Rules(NamedTuple):
    """A policy in numbers."""

    #: An index of `simulator.cluster.placing.PLACEMENTS`.
    placement: int
    #: Whether high-priority VMs preempt.
    preempts: int
    #: Whether low-priority VMs may start deflated.
    start_deflated: int
    #: Whether memory is ballooned and CPU shared, instead of all that.
    balloons: int
    #: Whether everything is checked after every event.
    validate: int
    #: What becomes of a preempted VM, by which it costs (`deflation.kernels.preemption_cost`).
    choice: int
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

    def part(self, rows: slice) -> Arrivals:
        """Some of them."""
        return Arrivals._make(column[rows] for column in self)


def new_vms(slots: int) -> Vms:
    """A table of free slots."""
    vms = _table(slots, VM)
    for column in ("node", "before", "after", "place", "heap"):
        vms[column] = NOBODY
    vms.spare = np.arange(slots)[::-1]
    return vms


def grown(vms: Vms, tally: Tally, slots: int) -> Vms:
    """The same table with more slots."""
    before, height = len(vms), int(tally.state[SPARE])
    larger = new_vms(slots)
    larger[:before] = vms
    larger.spare[height : height + slots - before] = np.arange(before, slots)
    tally.state[SPARE] = height + slots - before
    return larger


def new_nodes(capacity: Floats) -> Nodes:
    """Empty nodes; what placement may count on is not filled in yet."""
    nodes = _table(len(capacity), NODE)
    nodes.capacity = capacity
    nodes.first = nodes.last = NOBODY
    return nodes


def new_tally(slots: int, window_s: tuple[float, float], from_s: float) -> Tally:
    """Nothing has happened yet.

    :param window_s: what is measured, begin and end.
    :param from_s: where time begins.
    """
    tally = _table(1, TALLY)[0]
    tally.state[SPARE] = slots
    tally.clock[:] = from_s, *window_s
    return tally


def new_work(slots: int) -> Work:
    """Rows for as many VMs."""
    return _table(slots, WORK)


def asked(arrivals: Arrivals, rows: slice) -> Asked:
    """Some arrivals as the loop reads them."""
    table = _table(len(arrivals.at_s[rows]), ARRIVAL)
    for name, column in arrivals._asdict().items():
        table[name] = column[rows]
    return table


def table_of(array: NDArray[Any], form: np.dtype[Any]) -> Any:
    """A table out of a checkpoint.

    :raises ValueError: it has other columns.
    """
    if array.dtype != form:
        raise ValueError("its tables have other columns")
    return np.ascontiguousarray(array).view(np.recarray)


def _table(rows: int, form: np.dtype[Any]) -> Any:
    return np.zeros(rows, form).view(np.recarray)
