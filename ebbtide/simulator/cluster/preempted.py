"""What becomes of preempted VMs: a cluster whose preempted VMs are deleted, stopped or suspended, and come back.

The way back is `deflation.sharing.return_queue`, moves are `deflation.placement.rebalancing`'s: what the manager calls.
What everything costs in time is stated (`Costs`). A VM has so much to do as it stayed in the trace: it stays longer by
what it lost and by the time for which it was off.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Final

import numpy as np

from ebbtide.deflation.kernels import DELETES, FIXED, STOPS, SUSPENDS
from ebbtide.deflation.placement.fitness import fitness
from ebbtide.deflation.placement.rebalance_pace import EVERY_S, MOST_MOVES, RebalancePace
from ebbtide.deflation.placement.rebalancing import (
    HostRows,
    Move,
    Rebalancer,
    Rooms,
    is_deflated,
    move_instead,
)
from ebbtide.deflation.placement.waiting import MOVE_MIB_S, kept_for_notice_s, movable_mib
from ebbtide.deflation.resources import TOLERANCE, ResourceVector
from ebbtide.deflation.sharing.return_queue import ReturnQueue, Waiting
from ebbtide.deflation.sharing.suspension import why_not_saved
from ebbtide.deflation.sharing.undo import SMALLEST_GROWTH
from ebbtide.simulator.cluster.cluster import Cluster
from ebbtide.simulator.cluster.members import CPU, MEMORY
from ebbtide.simulator.cluster.state import HIGH, LEAVING, NOBODY, Arrivals
from ebbtide.simulator.inputs.batches import Floats

#: Between two readings of a host on which somebody waits for whom there is room, in seconds.
LOOK_S: Final = 10.0


class Way(StrEnum):
    """What is done where minimums are in the way of a high-priority VM."""

    DELETE = "delete"
    STOP = "stop"
    SUSPEND = "suspend"
    #: A VM is moved where that does; else victims are stopped.
    MIGRATION = "migration"
    #: The same, and VMs that stay deflated are moved to where there is room.
    REBALANCING = "rebalancing"

    @property
    def choice(self) -> int:
        """By which victims are chosen, as a manager would whose VMs all were sold so."""
        return {Way.DELETE: DELETES, Way.SUSPEND: SUSPENDS}.get(self, STOPS)


@dataclass(frozen=True, slots=True)
class Costs:
    """What things take. A VM that is stopped, or moved instead, holds its minimum of memory, once it has given the
    rest; one that is moved to where there is room is copied as it is.
    """

    #: From a start to work that goes on, in seconds.
    boot_s: float = 40.0
    #: Told before; programs have two thirds of it (hostagent.vm.notice).
    notice_s: float = 30.0
    program_share: float = 2 / 3
    #: To and from the disk, for checkpoints and suspended memory; MiB/s.
    disk_mib_s: float = 200.0
    #: Between checkpoints that are made without a notice.
    checkpoint_every_s: float = 3600.0
    #: Bandwidth of a move, MiB/s, and for how long an arriving VM waits at the most, for moves as well.
    move_mib_s: float = MOVE_MIB_S
    deadline_s: float = 60.0
    #: Memory with which a guest boots, as a share of nominal.
    boot_memory_share: float = 0.5
    #: Between two looks of the rebalancer, and how many of its moves are under way at a time, one of a host.
    rebalance_every_s: float = EVERY_S
    rebalance_most_moves: int = MOST_MOVES


@dataclass(slots=True)
class Account:
    """What happened within the window."""

    preempted: set[int] = field(default_factory=set)
    #: By VM and when it stopped working: from then to work that goes on; infinite: not back when the run ended.
    back: dict[tuple[int, float], float] = field(default_factory=dict)
    preemptions: int = 0
    lost_core_s: float = 0.0
    off_vm_s: float = 0.0
    moves_instead: int = 0
    moves: int = 0
    moved_mib: float = 0.0

    @property
    def back_s(self) -> list[float]:
        return list(self.back.values())


class ReturningCluster:
    """A cluster, arrival by arrival, with what becomes of the preempted.

    :param arrivals: all of them; the cluster has taken none.
    """

    def __init__(
        self,
        cluster: Cluster,
        arrivals: Arrivals,
        way: Way,
        costs: Costs,
        window_s: tuple[float, float],
        pace: RebalancePace,
    ) -> None:
        cluster.rules = cluster.rules._replace(choice=way.choice)
        self._cluster = cluster
        self._arrivals = arrivals
        self._way = way
        self._costs = costs
        self._window_s = window_s
        self._departs_s = arrivals.departs_s.copy()
        self._began_s = arrivals.at_s.copy()
        self._off_since: dict[int, float] = {}
        self._stopped_s = arrivals.at_s.copy()
        self._waiting: dict[int, list[Waiting]] = {}
        self._queues: dict[int, ReturnQueue] = {}
        #: When a node is to be looked at again; REBALANCE: all of them.
        self._looks: list[tuple[float, int]] = []
        self._looking: set[int] = set()
        self._rebalancer = Rebalancer(pace)
        #: The rebalancer's moves that are not over, and when they are.
        self._under_way: dict[Move, float] = {}
        self.account = Account()

    def run(self, until_s: float, progress: Callable[[float], None]) -> None:
        """Everything until then."""
        cluster, at_s = self._cluster, self._arrivals.at_s
        last, row = int(np.searchsorted(at_s, until_s)), 0
        if self._way is Way.REBALANCING:
            heapq.heappush(self._looks, (self._costs.rebalance_every_s, NOBODY))
        while True:
            arrives_s = float(at_s[row]) if row < last else math.inf
            looks_s = self._looks[0][0] if self._looks else math.inf
            departs_s = self._next_departure() if any(self._waiting.values()) else math.inf
            if min(arrives_s, looks_s, departs_s) >= until_s:
                break
            if departs_s <= min(arrives_s, looks_s):
                members = cluster.nodes.members.copy()
                cluster.pass_until(departs_s)
                for node in np.flatnonzero(members != cluster.nodes.members).tolist():
                    self._look(node)
            elif looks_s < arrives_s:
                _, node = heapq.heappop(self._looks)
                cluster.pass_until(looks_s)
                self._looking.discard(node)
                if node == NOBODY:
                    self._rebalance()
                else:
                    self._look(node)
            else:
                self._arrive(row)
                row += 1
                if row % 1000 == 0:
                    progress(row / last)
        cluster.finish(until_s)
        for number, since_s in self._off_since.items():
            self.account.off_vm_s += self._measured(since_s, until_s)
            self._is_back(number, math.inf)

    def _next_departure(self) -> float:
        vms, leaving = self._cluster.vms, int(self._cluster.tally.state[LEAVING])
        return float(vms.departs_s[vms.heap[0]]) if leaving else math.inf

    def _measured(self, from_s: float, until_s: float) -> float:
        return max(min(until_s, self._window_s[1]) - max(from_s, self._window_s[0]), 0.0)

    def _in_window(self) -> bool:
        return self._window_s[0] <= self._cluster.now_s < self._window_s[1]

    # --- arrivals and preemptions ------------------------------------------------------------------------------------

    def _arrive(self, row: int) -> None:
        arrivals, cluster = self._arrivals, self._cluster
        if self._way in (Way.MIGRATION, Way.REBALANCING) and arrivals.sold_as[row] == HIGH:
            cluster.pass_until(float(arrivals.at_s[row]))
            if not self._holds(cluster.nodes.placeable, arrivals.upper[row]).any():
                self._move_instead(arrivals.upper[row])
        decided = cluster.take(arrivals.part(slice(row, row + 1)))
        for number, node, _ in decided.victims.tolist():
            self._preempted(number, node)
        for node in {int(decided.node[0]), *decided.victims[:, 1].tolist()} - {NOBODY}:
            self._look(node)

    def _holds(self, availability: Floats, size: Floats) -> Floats:
        declared = self._cluster.nodes.capacity > TOLERANCE
        holds: Floats = ((availability >= size - TOLERANCE) | ~declared).all(axis=1)
        return holds

    def _preempted(self, number: int, node: int) -> None:
        now, account, began_s = self._cluster.now_s, self.account, float(self._began_s[number])
        ran_s = max(now - began_s, 0.0)
        deleted = self._way is Way.DELETE
        lost_s = ran_s if deleted else self._lost_s(number, ran_s)
        if self._in_window():
            account.preemptions += 1
            account.preempted.add(number)
            account.lost_core_s += lost_s * float(self._arrivals.upper[number, CPU])
        if deleted:
            return
        # What is still to do when it is back; one that was booting still has not worked since it first went.
        self._departs_s[number] += lost_s - max(now, began_s)
        if now >= began_s:
            self._stopped_s[number] = now
        self._off_since[number] = now
        waiting = Waiting(_name(number), ResourceVector(*self._charged(self._least(number)).tolist()))
        self._waiting.setdefault(node, []).append(waiting)

    def _suspends(self, number: int) -> bool:
        """Whether its memory is on the disk before its notice is over, which is looked at before."""
        costs, state_mib = self._costs, float(self._arrivals.minimum[number, MEMORY])
        return self._way is Way.SUSPEND and not why_not_saved(state_mib, math.inf, costs.notice_s, costs.disk_mib_s)

    def _write_s(self, number: int) -> float:
        return float(self._arrivals.minimum[number, MEMORY]) / self._costs.disk_mib_s

    def _lost_s(self, number: int, ran_s: float) -> float:
        """Work since the last checkpoint: that at its notice, where there is time for one."""
        costs = self._costs
        saves = self._write_s(number) <= costs.notice_s * costs.program_share
        return 0.0 if saves or self._suspends(number) else ran_s % costs.checkpoint_every_s

    def _least(self, number: int) -> Floats:
        """The smallest size that it comes back with: a guest that boots needs its boot memory."""
        least: Floats = self._arrivals.minimum[number].copy()
        if not self._suspends(number):
            least[MEMORY] = max(least[MEMORY], self._arrivals.upper[number, MEMORY] * self._costs.boot_memory_share)
        return least

    def _charged(self, size: Floats) -> Floats:
        charged: Floats = size.copy()
        charged[MEMORY] += self._cluster.rules.overhead_mib
        return charged

    # --- the way back ------------------------------------------------------------------------------------------------

    def _look(self, node: int) -> None:
        """A reading of a node: who can come back does."""
        waiting = self._waiting.get(node)
        if not waiting:
            return
        queue, now = self._queues.setdefault(node, ReturnQueue()), self._cluster.now_s
        room = self._read(queue, node)
        while (name := queue.due(now)) is not None:
            queue.tried(now, name)
            self._bring_back(node, name)
            room = self._read(queue, node)
        if node not in self._looking and any(one.least.fits_in(room) for one in waiting):
            self._looking.add(node)
            heapq.heappush(self._looks, (now + LOOK_S, node))

    def _read(self, queue: ReturnQueue, node: int) -> ResourceVector:
        nodes = self._cluster.nodes
        room = ResourceVector(*(nodes.free[node] + nodes.deflatable[node]).tolist())
        queue.observe(self._cluster.now_s, self._waiting[node], room)
        return room

    def _bring_back(self, node: int, name: str) -> None:
        number, now, costs = int(name), self._cluster.now_s, self._costs
        back_s = self._write_s(number) if self._suspends(number) else costs.boot_s
        departs_s = now + back_s + float(self._departs_s[number])
        row = self._arrivals.part(slice(number, number + 1))
        row = row._replace(at_s=np.array([now]), departs_s=np.array([departs_s]))
        if not self._cluster.bring_back(number, row, node, self._least(number)):
            return
        self._waiting[node] = [one for one in self._waiting[node] if one.name != name]
        self._departs_s[number], self._began_s[number] = departs_s, now + back_s
        since_s = self._off_since.pop(number)
        self.account.off_vm_s += self._measured(since_s, now)
        self._is_back(number, now + back_s)

    def _is_back(self, number: int, at_s: float) -> None:
        stopped_s = float(self._stopped_s[number])
        if stopped_s >= self._window_s[0]:
            self.account.back[number, stopped_s] = at_s - stopped_s

    # --- moves -------------------------------------------------------------------------------------------------------

    def _hosts(self) -> list[HostRows]:
        """Every node as policies of moves see it."""
        vms, nodes = self._cluster.vms, self._cluster.nodes
        low = np.flatnonzero((vms.node != NOBODY) & (vms.priority != FIXED))
        low = low[np.lexsort((vms.number[low], vms.node[low]))]
        edges = np.searchsorted(vms.node[low], np.arange(len(nodes) + 1))
        free = np.where(nodes.capacity > TOLERANCE, nodes.free, np.inf)
        overhead_mib = self._cluster.rules.overhead_mib
        return [
            HostRows(
                str(node),
                free[node],
                [_name(number) for number in vms.number[rows].tolist()],
                vms.upper[rows],
                vms.minimum[rows],
                vms.current[rows],
                overhead_mib,
            )
            for node in range(len(nodes))
            if (rows := low[edges[node] : edges[node + 1]]) is not None
        ]

    def _move_instead(self, size: Floats) -> None:
        """Make room for an arriving VM on the node where it would preempt, by one move."""
        nodes, costs = self._cluster.nodes, self._costs
        able = np.flatnonzero(self._holds(nodes.preemptable, size))
        if not len(able):
            return
        scores = fitness(size, nodes.preemptable[able], nodes.capacity[able], nodes.capacity.max(axis=0))
        hosts, node = self._hosts(), int(able[np.round(scores, 9).argmax()])
        missing = ResourceVector(*np.maximum(self._charged(size) - nodes.free[node], 0.0).tolist())
        seconds = costs.deadline_s - kept_for_notice_s(costs.notice_s, costs.deadline_s)
        move = move_instead(hosts[node], Rooms.of(hosts), missing, movable_mib(seconds, costs.move_mib_s))
        if move is not None:
            self.account.moves_instead += self._carry_out(move, shrunk=True) and self._in_window()

    def _rebalance(self) -> None:
        now = self._cluster.now_s
        heapq.heappush(self._looks, (now + self._costs.rebalance_every_s, NOBODY))
        hosts = self._hosts()
        self._rebalancer.observe(now, [host.id for host in hosts if is_deflated(host, SMALLEST_GROWTH)])
        self._under_way = {move: ends_s for move, ends_s in self._under_way.items() if ends_s > now}
        while len(self._under_way) < self._costs.rebalance_most_moves:
            standing_by = {host for move in self._under_way for host in (move.source, move.target)}
            standing_by |= {str(node) for node, waiting in self._waiting.items() if waiting}
            move = self._rebalancer.due(now, [host for host in hosts if host.id not in standing_by])
            if move is None:
                break
            self._rebalancer.moved(now, move)
            if self._carry_out(move):
                self._under_way[move] = now + move.memory_mib / self._costs.move_mib_s
                self._look(int(move.source))
                self._look(int(move.target))
                hosts = self._hosts()

    def _carry_out(self, move: Move, shrunk: bool = False) -> bool:
        moved = self._cluster.move(int(move.vm), int(move.target), shrunk)
        if moved and self._in_window():
            self.account.moves += 1
            self.account.moved_mib += move.memory_mib
        return moved


def _name(number: int) -> str:
    """Names stand in the order of numbers."""
    return f"{number:09d}"
