"""Moves of VMs between hosts: one instead of a preemption, others where VMs stay deflated while another has room.

A move costs the bytes that it copies, which are the memory that the VM holds. A move to rebalance gives back cores and
memory for as long as the deflation would have lasted: as long again as it has lasted, by the best guess that needs no
model. Moves on trial only: nobody is moved here.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, TypeAlias

import numpy as np
from numpy.typing import NDArray

from ebbtide.deflation.allocations import Allocation, Priority
from ebbtide.deflation.placement.rebalance_pace import RebalancePace
from ebbtide.deflation.resources import COMPONENTS, TOLERANCE, ZERO, ResourceVector

Matrix: TypeAlias = NDArray[Any]

CPU: Final = COMPONENTS.index("cpu_cores")
MEMORY: Final = COMPONENTS.index("memory_mib")
#: A core for an hour is worth as much as so many GiB for an hour, as clouds sell them.
GIB_PER_CORE: Final = 7.5


@dataclass(frozen=True, slots=True)
class HostRows:
    """A host that VMs may leave and come to: what it has free, and its low-priority VMs that run.

    Tables have a row a VM, columns in the order of ``COMPONENTS``; capacity that is not declared is infinite in
    ``free``.
    """

    id: str
    free: Matrix
    names: Sequence[str]
    nominal: Matrix
    minimum: Matrix
    current: Matrix
    overhead_mib: float = 0.0
    #: Names of the VMs that cannot move.
    staying: Collection[str] = frozenset()

    @classmethod
    def of(
        cls,
        host: str,
        free: ResourceVector,
        rows: Iterable[Allocation],
        overhead_mib: float,
        staying: Collection[str] = frozenset(),
    ) -> HostRows:
        """From the rows that policies read; fixed VMs are left out, since nobody moves them."""
        low = [row for row in rows if row.priority is not Priority.FIXED]
        tables = ([row.nominal for row in low], [row.minimum for row in low], [row.current for row in low])
        nominal, minimum, current = (
            np.array([list(vector) for vector in table]).reshape(-1, len(COMPONENTS)) for table in tables
        )
        names = tuple(row.name for row in low)
        has = current.clip(max=nominal)
        return cls(host, np.array(list(free)), names, nominal, minimum, has, overhead_mib, staying)

    @property
    def lacking(self) -> Matrix:
        """What each VM lacks of its nominal size."""
        lacking: Matrix = np.maximum(self.nominal - self.current, 0.0)
        return lacking

    @property
    def deflatable(self) -> Matrix:
        """What each VM has above its minimum."""
        deflatable: Matrix = np.maximum(self.current - self.minimum, 0.0)
        return deflatable

    def charges(self, sizes: Matrix) -> Matrix:
        """What sizes cost a host."""
        charged: Matrix = sizes.copy()
        charged[..., MEMORY] += self.overhead_mib
        return charged


@dataclass(frozen=True, slots=True)
class Move:
    """One VM to another host."""

    vm: str
    source: str
    target: str
    #: To be copied.
    memory_mib: float
    #: Cores and memory that VMs get back by it, and its worth in core-hours per GiB copied.
    given_back: ResourceVector = ZERO
    worth: float = 0.0


@dataclass(frozen=True, slots=True, eq=False)
class Rooms:
    """What each of some hosts has for one more VM if its low-priority VMs give what they can.

    ``room``: a row a host, free + deflatable less what a VM costs beside its size.
    """

    hosts: Sequence[str]
    room: Matrix

    @classmethod
    def of(cls, hosts: Iterable[HostRows]) -> Rooms:
        """Of hosts that are known VM by VM."""
        known = list(hosts)
        room = np.array([host.free + host.deflatable.sum(axis=0) for host in known]).reshape(-1, len(COMPONENTS))
        room[:, MEMORY] -= [host.overhead_mib for host in known]
        return cls([host.id for host in known], room)


def move_instead(source: HostRows, others: Rooms, missing: ResourceVector, most_mib: float = np.inf) -> Move | None:
    """The cheapest move that leaves a host room for what is missing there, so that nobody is preempted; None: none.

    The VM gives what it can before it goes, and its new host's VMs make room for it by deflation.

    :param missing: what the arriving VM needs beyond what is free.
    :param most_mib: that can be copied in the time there is.
    """
    lacks, gives = np.array(list(missing)), source.deflatable
    freed = source.charges(source.current) + (gives.sum(axis=0) - gives)
    # Below its minimum nothing of a VM is left behind.
    fits = (freed >= lacks - TOLERANCE).all(axis=1) & (source.minimum[:, MEMORY] <= most_mib)
    for row in sorted(np.flatnonzero(fits).tolist(), key=lambda row: (source.minimum[row, MEMORY], source.names[row])):
        if source.names[row] in source.staying:
            continue
        asked = source.minimum[row]
        left = others.room - asked
        able = [at for at in np.flatnonzero((left >= -TOLERANCE).all(axis=1)).tolist() if others.hosts[at] != source.id]
        if able:
            # Where the most is left for others, by the component that is scarcest.
            at = max(
                sorted(able, key=others.hosts.__getitem__), key=lambda at: _scarcest(left[at], source.charges(asked))
            )
            return Move(source.names[row], source.id, others.hosts[at], float(source.minimum[row, MEMORY]))
    return None


@dataclass(slots=True)
class Rebalancer:
    """Hysteresis of moves over all hosts. Knows no clock but ``now``: seconds that never go back."""

    pace: RebalancePace = field(default_factory=RebalancePace)
    #: Since when each host has VMs that are deflated, and when the VMs were moved that rest.
    since: dict[str, float] = field(default_factory=dict)
    moved_at: dict[str, float] = field(default_factory=dict)

    def observe(self, now: float, deflated: Collection[str], unseen: Collection[str] = ()) -> None:
        """Take in which hosts have VMs that are deflated by what is worth a resize.

        :param unseen: hosts that do not answer: what was known of them stands.
        """
        kept = {host: self.since[host] for host in unseen if host in self.since}
        self.since = kept | {host: self.since.get(host, now) for host in deflated}
        self.moved_at = {vm: at for vm, at in self.moved_at.items() if now - at < self.pace.rest_s}

    def held_s(self, now: float, host: str) -> float:
        """For how long VMs of a host have been deflated; 0: for too short a time, or not at all."""
        lasted_s = now - self.since.get(host, now)
        return lasted_s if lasted_s >= self.pace.hold_s else 0.0

    def expected_h(self, now: float, host: str) -> float:
        """For how many hours more the VMs of a host are expected to be deflated; 0: they do not count yet."""
        return min(self.held_s(now, host), self.pace.longest_s) / 3600.0

    def due(self, now: float, hosts: Sequence[HostRows]) -> Move | None:
        """The move that is worth most of its bytes; None: none is worth it."""
        able = [(host.id, room) for host in hosts if (room := room_of(host)) is not None]
        moves = (self.best(now, source, able) for source in hosts)
        return max((move for move in moves if move is not None), key=precedence, default=None)

    def best(self, now: float, source: HostRows, able: Sequence[tuple[str, Matrix]]) -> Move | None:
        """The move away from one host that is worth most of its bytes; None: none is worth it.

        :param able: hosts that VMs may come to, with their `room_of`.
        """
        held_s = self.held_s(now, source.id)
        return self._best(source, able, self.expected_h(now, source.id)) if held_s > 0 else None

    def moved(self, now: float, move: Move) -> None:
        """It is carried out, or was tried: the VM rests."""
        self.moved_at[move.vm] = now

    def _best(self, source: HostRows, able: Sequence[tuple[str, Matrix]], hours: float) -> Move | None:
        rested = [
            row for row, name in enumerate(source.names) if name not in self.moved_at and name not in source.staying
        ]
        targets = [(host, room) for host, room in able if host != source.id]
        if not rested or not targets:
            return None
        lacking, current = source.lacking, source.current[rested]
        room = np.array([room for _, room in targets])
        # Tables over VMs and targets.
        size = np.minimum(source.nominal[rested][:, None], room[None])
        fits = (size >= current[:, None] - TOLERANCE).all(axis=2)
        others_lack = lacking.sum(axis=0) - lacking[rested]
        left_behind = np.minimum(others_lack, source.charges(current) + source.free)
        given = np.maximum(size - current[:, None], 0.0) + left_behind[:, None]
        worth = (given[..., CPU] + given[..., MEMORY] / 1024.0 / GIB_PER_CORE) * hours
        worth = np.where(fits, worth / (current[:, None, MEMORY] / 1024.0), -1.0)
        at, to = np.unravel_index(int(worth.argmax()), worth.shape)
        if worth[at, to] < self.pace.least_worth:
            return None
        given_back = ResourceVector(*(round(float(value), 2) for value in given[at, to]))
        name, mib = source.names[rested[at]], float(current[at, MEMORY])
        return Move(name, source.id, targets[to][0], mib, given_back, float(worth[at, to]))


def room_of(host: HostRows) -> Matrix | None:
    """What a host has free for one more VM beyond what its own lack; None: no cores or no memory."""
    room: Matrix = host.free - host.charges(host.lacking.sum(axis=0))
    return room if min(room[CPU], room[MEMORY]) > 0 else None


def precedence(move: Move) -> tuple[float, str]:
    """The largest goes first."""
    return move.worth, move.vm


def is_deflated(host: HostRows, least: ResourceVector) -> bool:
    """Whether VMs of a host lack together as much as is worth a resize, in some component."""
    return bool((host.lacking.sum(axis=0) >= np.array(list(least))).any())


def _scarcest(room: Matrix, asked: Matrix) -> float:
    """What is left, in multiples of what is asked for."""
    wanted = asked > TOLERANCE
    return float((room[wanted] / asked[wanted]).min()) if wanted.any() else 0.0
