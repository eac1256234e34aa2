"""Rows of hosts in blocks of alike ones, each with bounds, so that a decision looks into few of them.

A block knows of each figure the largest that any of its rows has. Rows are cut into blocks by a tree over chosen
figures: a row that changes moves to the block where it belongs, and a block that is full is cut in two. Bounds only
widen as rows change; they are made tight again when a decision looks into the block.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, TypeVar

import numpy as np
from numpy.typing import NDArray

Matrix = NDArray[np.float64]
Slots = NDArray[np.intp]

T = TypeVar("T", bound=np.generic)

_LEAF: Final = -1


class Blocks:
    """Rows of a matrix, by number, in blocks.

    :param weights: shape (columns,): how much a column's spread counts when a block is cut; 0: it never is cut by it.
        The rows must differ in at least one column that counts.
    :param size: most rows of a block.
    """

    def __init__(self, weights: Matrix, size: int) -> None:
        if size < 2:
            raise ValueError(f"a block holds at least 2 rows, not {size}")
        self._size = size
        self._axes = np.flatnonzero(weights)
        self._weights = weights[self._axes]
        self._columns = len(weights)
        self.build(np.zeros((0, self._columns)), np.zeros(0, np.intp), np.zeros(0, np.intp))

    def build(self, rows: Matrix, slots: Slots, groups: Slots) -> None:
        """Start anew with these rows.

        :param rows: shape (n, columns), all rows of the table.
        :param slots: which of them are in blocks.
        :param groups: shape of ``slots``: rows of different groups never share a block.
        """
        #: Shape (blocks, columns): at least the largest figure of any row; -inf in an empty block.
        self.bounds: Matrix = np.zeros((0, self._columns))
        #: The group of each block.
        self.groups: Slots = np.zeros(0, np.intp)
        self.count = 0
        self.filled = 0
        self._members: NDArray[np.intp] = np.zeros((0, self._size), np.intp)
        self._lengths: list[int] = []
        self._loose: set[int] = set()
        #: By row: its block and its place there.
        self._where: dict[int, tuple[int, int]] = {}
        # The tree: an inner node goes left where the row's figure on its axis is below its cut; a leaf has a block.
        self._axis: list[int] = []
        self._cut: list[float] = []
        self._left: list[int] = []
        self._right: list[int] = []
        self._roots: dict[int, int] = {}
        for group in np.unique(groups).tolist():
            self._roots[group] = self._node()
            self._plant(self._roots[group], rows, slots[groups == group], group)

    # --- changes -----------------------------------------------------------------------------------------------------

    def put(self, rows: Matrix, slot: int, figures: Sequence[float], group: int) -> None:
        """A row came or changed; ``figures`` are its own, as they stand in ``rows``."""
        node = self._roots.get(group)
        if node is None:
            node = self._roots[group] = self._node()
            self._leaf(node, rows, np.zeros(0, np.intp), group)
        while (axis := self._axis[node]) != _LEAF:
            node = self._left[node] if figures[axis] < self._cut[node] else self._right[node]
        block = self._left[node]
        was = self._where.get(slot)
        if was is not None and was[0] != block:
            self.drop(slot)
            was = None
        if was is not None:
            self._loose.add(block)
        elif self._lengths[block] < self._size:
            self._join(block, slot)
        else:
            self._split(node, rows, slot, group)
            return
        bound = self.bounds[block]
        np.maximum(bound, rows[slot], out=bound)

    def drop(self, slot: int) -> None:
        """A row is gone. Raises KeyError where it is in no block."""
        block, place = self._where.pop(slot)
        self._lengths[block] = last = self._lengths[block] - 1
        moved = int(self._members[block, last])
        if moved != slot:
            self._members[block, place] = moved
            self._where[moved] = (block, place)
        self.filled -= 1
        if last:
            self._loose.add(block)
        else:
            self.bounds[block] = -np.inf
            self._loose.discard(block)

    def __contains__(self, slot: int) -> bool:
        return slot in self._where

    @property
    def sparse(self) -> bool:
        """Whether so many rows have gone that building anew pays."""
        return self.count > 16 + 8 * self.filled // self._size

    # --- looking -----------------------------------------------------------------------------------------------------

    def look(self, rows: Matrix, blocks: Sequence[int]) -> Slots:
        """The rows of some blocks, whose bounds are tight afterwards."""
        found = [self._members[block, : self._lengths[block]] for block in blocks]
        for block, slots in zip(blocks, found, strict=True):
            if block in self._loose:
                self._loose.discard(block)
                self.bounds[block] = rows[slots].max(axis=0)
        return np.concatenate(found) if found else np.zeros(0, np.intp)

    # --- the tree ----------------------------------------------------------------------------------------------------

    def _node(self) -> int:
        for column in (self._axis, self._left, self._right):
            column.append(_LEAF)
        self._cut.append(0.0)
        return len(self._axis) - 1

    def _plant(self, root: int, rows: Matrix, slots: Slots, group: int) -> None:
        """Grow a tree from a node without a block, down to blocks that are at most full."""
        open_nodes = [(root, slots)]
        while open_nodes:
            node, members = open_nodes.pop()
            if len(members) <= self._size:
                self._leaf(node, rows, members, group)
                continue
            axis, cut = self._best_cut(rows[members][:, self._axes])
            below = rows[members, axis] < cut
            self._axis[node], self._cut[node] = axis, cut
            self._left[node], self._right[node] = self._node(), self._node()
            open_nodes += [(self._left[node], members[below]), (self._right[node], members[~below])]

    def _best_cut(self, figures: Matrix) -> tuple[int, float]:
        """The column with the widest spread, and a figure near its middle that leaves rows on both sides."""
        # Rounding gives even equal figures a spread.
        differ = figures.max(axis=0) > figures.min(axis=0)
        chosen = int(np.where(differ, figures.std(axis=0) * self._weights, -1.0).argmax())
        column = np.sort(figures[:, chosen])
        cut = column[len(column) // 2]
        if cut == column[0]:
            later = int(np.searchsorted(column, cut, side="right"))
            if later == len(column):
                raise ValueError("rows of a block must differ in a column that counts")
            cut = column[later]
        return int(self._axes[chosen]), float(cut)

    def _leaf(self, node: int, rows: Matrix, members: Slots, group: int) -> None:
        block = self.count
        if block == len(self._members):
            room = max(16, 2 * block)
            self._members = _grown(self._members, room)
            self.bounds = _grown(self.bounds, room)
            self.groups = _grown(self.groups, room)
        self.count += 1
        self._lengths.append(0)
        self._axis[node], self._left[node] = _LEAF, block
        self.groups[block] = group
        self._fill(block, rows, members)

    def _fill(self, block: int, rows: Matrix, members: Slots) -> None:
        self._members[block, : len(members)] = members
        self._lengths[block] = len(members)
        self.filled += len(members)
        self.bounds[block] = rows[members].max(axis=0, initial=-np.inf)
        self._loose.discard(block)
        self._where.update((slot, (block, place)) for place, slot in enumerate(members.tolist()))

    def _join(self, block: int, slot: int) -> None:
        place = self._lengths[block]
        self._members[block, place] = slot
        self._where[slot] = (block, place)
        self._lengths[block] = place + 1
        self.filled += 1

    def _split(self, node: int, rows: Matrix, slot: int, group: int) -> None:
        """Cut a full block in two, with one row more: one half stays, the other gets a block of its own."""
        block = self._left[node]
        members = np.append(self._members[block, : self._lengths[block]], slot)
        axis, cut = self._best_cut(rows[members][:, self._axes])
        below = rows[members, axis] < cut
        self.filled -= self._lengths[block]
        stays, goes = self._node(), self._node()
        self._axis[node], self._cut[node], self._left[node], self._right[node] = axis, cut, stays, goes
        self._left[stays] = block
        self._fill(block, rows, members[below])
        self._leaf(goes, rows, members[~below], group)


def _grown(array: NDArray[T], room: int) -> NDArray[T]:
    """A copy with room for more rows."""
    larger = np.zeros((room, *array.shape[1:]), array.dtype)
    larger[: len(array)] = array
    return larger
