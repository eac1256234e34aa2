"""A random forest that says how likely something is: trees as arrays, so that a kernel can ask them. Pure.

Breiman (2001): each tree learns from a sample drawn with replacement, each split looks at some of the features; the
best split is the one that leaves the least variance (CART). Values of a feature are cut into bins by their quantiles
first, so a split costs one count over the rows of a node.
"""

from __future__ import annotations

from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

_BINS: Final = 64


class Forest(NamedTuple):
    """Nodes of all trees; a leaf's ``feature`` is -1, and its ``value`` the share of ones that it saw."""

    roots: Ints
    feature: Ints
    threshold: Floats
    #: The child for values up to the threshold; the other one is the node behind it.
    child: Ints
    value: Floats


def predicted(forest: Forest, features: Floats) -> float:
    """The mean of what the trees say; 0 of a forest without any. A kernel."""
    trees = len(forest.roots)
    if trees == 0:
        return 0.0
    total = 0.0
    for i in range(trees):
        node = forest.roots[i]
        while forest.feature[node] >= 0:
            child = forest.child[node]
            node = child if features[forest.feature[node]] <= forest.threshold[node] else child + 1
        total += forest.value[node]
    return float(total / trees)


def nothing() -> Forest:
    """A forest without trees."""
    return Forest(np.empty(0, np.int64), np.empty(0, np.int64), np.empty(0), np.empty(0, np.int64), np.empty(0))


def grown(
    rows: Floats,
    labels: Floats,
    generator: np.random.Generator,
    *,
    trees: int = 16,
    depth: int = 12,
    least_leaf: int = 20,
    looks_at: int = 5,
) -> Forest:
    """Learn from rows of shape (count, features) and labels of shape (count,), 0 to 1.

    :param depth: the most splits above a leaf.
    :param least_leaf: rows that a leaf has at least.
    :param looks_at: features that each split looks at, drawn for each.
    :raises ValueError: shapes that do not fit together, or values that are not finite.
    """
    if rows.ndim != 2 or labels.shape != rows.shape[:1]:
        raise ValueError(f"rows and labels must have shapes (n, k) and (n,), not {rows.shape} and {labels.shape}")
    if not (np.isfinite(rows).all() and np.isfinite(labels).all()):
        raise ValueError("rows and labels must be finite")
    if not len(rows):
        return nothing()
    edges = [np.unique(np.quantile(column, np.linspace(0, 1, _BINS + 1)[1:-1])) for column in rows.T]
    codes = np.stack([np.searchsorted(edge, column) for edge, column in zip(edges, rows.T, strict=True)], axis=1)
    roots: list[int] = []
    nodes: list[tuple[int, float, int, float]] = []
    for _ in range(trees):
        drawn = generator.integers(0, len(rows), len(rows))
        roots.append(len(nodes))
        nodes.append((-1, 0.0, -1, 0.0))
        todo = [(roots[-1], drawn, 0)]
        while todo:
            node, members, above = todo.pop()
            value = float(labels[members].mean())
            nodes[node] = (-1, 0.0, -1, value)
            if above >= depth or len(members) < 2 * least_leaf or value in (0.0, 1.0):
                continue
            looked = generator.permutation(rows.shape[1])[:looks_at]
            feature, code = _split(codes[members], labels[members], looked, least_leaf)
            if feature < 0:
                continue
            child = len(nodes)
            nodes.extend([(-1, 0.0, -1, 0.0)] * 2)
            nodes[node] = (feature, float(edges[feature][code]), child, value)
            low = codes[members, feature] <= code
            todo.append((child, members[low], above + 1))
            todo.append((child + 1, members[~low], above + 1))
    return Forest(
        roots=np.array(roots, np.int64),
        feature=np.array([node[0] for node in nodes], np.int64),
        threshold=np.array([node[1] for node in nodes]),
        child=np.array([node[2] for node in nodes], np.int64),
        value=np.array([node[3] for node in nodes]),
    )


def _split(codes: Ints, labels: Floats, looked: Ints, least_leaf: int) -> tuple[int, int]:
    """The feature, and the last bin that goes left; (-1, -1) if no split leaves less variance."""
    count, total = len(labels), float(labels.sum())
    best, found = total * total / count * (1 + 1e-12) + 1e-12, (-1, -1)
    for feature in looked.tolist():
        counts = np.cumsum(np.bincount(codes[:, feature], minlength=_BINS))[:-1]
        sums = np.cumsum(np.bincount(codes[:, feature], labels, minlength=_BINS))[:-1]
        fits = (counts >= least_leaf) & (count - counts >= least_leaf)
        if not fits.any():
            continue
        # The least variance is the most of these sums of squares.
        gains = np.full(len(counts), -np.inf)
        left, right = counts[fits], count - counts[fits]
        gains[fits] = sums[fits] ** 2 / left + (total - sums[fits]) ** 2 / right
        place = int(gains.argmax())
        if gains[place] > best:
            best, found = float(gains[place]), (feature, place)
    return found
