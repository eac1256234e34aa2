"""Demand of others for the cores that on-demand VMs leave: their Spot VMs come, take room where there is some, and go.

A harvest VM shrinks when one comes to its server; a Spot VM of ours finds less room. What on-demand VMs take from a
server is taken from theirs and from the rest in proportion.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass
from typing import Final

import numpy as np

from ebbtide.simulator.errors import InvalidParameter
from ebbtide.simulator.inputs.batches import Floats, Indices

#: Cores of a VM of theirs, each as likely (Agarwal et al. 2023 §2.1).
SIZES: Final = (2, 4, 8)
#: Lifetimes before the beginning that those who are there then may have.
_LIVES: Final = 5.0


@dataclass(frozen=True, slots=True)
class Others:
    """How much they want.

    :param share: of all cores that on-demand VMs leave, about, where all found room at once.
    :param life_s: of a VM of theirs, in the mean (exponential).
    """

    share: float = 0.0
    life_s: float = 7200.0

    def __post_init__(self) -> None:
        """Raises InvalidParameter."""
        if not 0 <= self.share < 1:
            raise InvalidParameter("others_share", f"must be from 0 to below 1, but is {self.share:g}")
        if not self.life_s > 0:
            raise InvalidParameter("others_life_h", f"must be above 0, but is {self.life_s / 3600:g}")


class _Server:
    """Theirs on one server, by number: cores. Numbers grow with time."""

    __slots__ = ("held", "left", "vms")

    def __init__(self) -> None:
        self.left = 0
        self.held = 0
        self.vms: dict[int, int] = {}

    def leave(self, cores: int) -> list[int]:
        """On-demand VMs leave so many cores; who of theirs goes, the newest first."""
        most = self.held if cores >= self.left else self.held * cores // self.left
        self.left = cores
        gone = []
        while self.held > most:
            number, size = self.vms.popitem()
            self.held -= size
            gone.append(number)
        return gone


def left_by(
    machine: Indices, at_s: Floats, cores: Indices, others: Others, generator: np.random.Generator
) -> tuple[Indices, Floats, Indices]:
    """What they leave of each server, in the order of time; the first rows are those of all servers.

    :param machine, at_s, cores: what on-demand VMs leave, in the order of time; a server begins with its first row.
    """
    servers = [_Server() for _ in range(int(machine.max(initial=-1)) + 1)]
    begin_s, end_s = float(at_s[0]), float(at_s[-1])
    coming = _arrivals(machine, at_s, cores, others, generator)
    ends: list[tuple[float, int]] = []
    where: dict[int, int] = {}
    rows: list[tuple[int, float, int]] = []
    place = 0
    free = np.zeros(len(servers), np.int64)

    def tell(server: int, now_s: float) -> None:
        free[server] = servers[server].left - servers[server].held
        rows.append((server, now_s, int(free[server])))

    for number, (comes_s, size, goes_s) in enumerate([*coming, (end_s, 0, end_s)]):
        while True:
            changes_s = float(at_s[place]) if place < len(at_s) else np.inf
            ends_s = ends[0][0] if ends else np.inf
            if min(changes_s, ends_s) > comes_s:
                break
            if changes_s <= ends_s:
                server = int(machine[place])
                for gone in servers[server].leave(int(cores[place])):
                    del where[gone]
                tell(server, changes_s)
                place += 1
            else:
                _, other = heapq.heappop(ends)
                if (found := where.pop(other, None)) is not None:
                    servers[found].held -= servers[found].vms.pop(other)
                    tell(found, ends_s)
        rooms = np.flatnonzero(free >= size) if size else ()
        if len(rooms):
            server = int(rooms[generator.integers(len(rooms))])
            servers[server].vms[number] = size
            servers[server].held += size
            where[number] = server
            heapq.heappush(ends, (goes_s, number))
            tell(server, max(comes_s, begin_s))
    columns = tuple(zip(*rows, strict=True))
    return np.array(columns[0], np.int64), np.array(columns[1]), np.array(columns[2], np.int64)


def _arrivals(
    machine: Indices, at_s: Floats, cores: Indices, others: Others, generator: np.random.Generator
) -> list[tuple[float, int, float]]:
    """When they come, of what size, and when they go; who came before the beginning, and is there still, comes then."""
    begin_s, end_s = float(at_s[0]), float(at_s[-1])
    area = 0.0
    for server in np.unique(machine):
        mine = machine == server
        area += float((cores[mine] * np.diff(np.append(at_s[mine], end_s))).sum())
    span_s = end_s - begin_s
    # As many as hold that share of the mean, were there always room.
    per_s = others.share * area / max(span_s, 1.0) / float(np.mean(SIZES)) / others.life_s
    before_s = _LIVES * others.life_s
    count = int(generator.poisson(per_s * (span_s + before_s)))
    comes_s = np.sort(generator.uniform(begin_s - before_s, end_s, count))
    goes_s = comes_s + generator.exponential(others.life_s, count)
    sizes = generator.choice(SIZES, count)
    here = goes_s > begin_s
    columns = (np.maximum(comes_s, begin_s)[here], sizes[here], goes_s[here])
    return list(zip(*(column.tolist() for column in columns), strict=True))
