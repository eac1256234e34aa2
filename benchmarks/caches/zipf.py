"""Keys of a workload and what a perfect cache would hold of them. Pure: a seeded generator draws.

Popularity by rank is rank ** -exponent; ranks are spread over the keys by a permutation, so that popular items lie
beside unpopular ones in memory, as they do in a cache that was filled in the order of arrival.
"""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import numpy.typing as npt

Keys = npt.NDArray[np.int64]
Weights = npt.NDArray[np.float64]

#: Bytes of a key on the wire: `k` and digits, all of one length, so that requests are slices of one array.
DIGITS = 7
KEY_BYTES = DIGITS + 1


def popularity(count: int, exponent: float) -> Weights:
    """Probability of each rank, the most popular first; exponent 0 is uniform."""
    weights = np.arange(1, count + 1, dtype=np.float64) ** -exponent
    return np.asarray(weights / weights.sum(), dtype=np.float64)


class Workload:
    """Draws keys 0 to count - 1."""

    def __init__(self, count: int, exponent: float, generator: np.random.Generator) -> None:
        self.count = count
        self.by_key: Weights = np.empty(count)
        self._by_rank = popularity(count, exponent)
        self._key_of_rank = generator.permutation(count)
        self.by_key[self._key_of_rank] = self._by_rank
        self._cumulated = np.cumsum(self._by_rank)
        self._generator = generator

    def draw(self, number: int) -> Keys:
        """So many keys, one after another."""
        ranks = np.searchsorted(self._cumulated, self._generator.random(number) * self._cumulated[-1])
        return np.asarray(self._key_of_rank[np.minimum(ranks, self.count - 1)], dtype=np.int64)

    def drawn_by(self, generator: np.random.Generator) -> Workload:
        """The same keys with the same popularity, drawn by another generator."""
        other = copy.copy(self)
        other._generator = generator
        return other

    def mass(self, held: Keys) -> float:
        """The share of requests that these keys answer."""
        return float(self.by_key[held].sum())

    def best(self, places: int) -> float:
        """The hit ratio of the most popular keys: no cache of so many places does better."""
        return float(self._by_rank[:places].sum())


def least_recently_used(stored: int, requests: Keys, places: int) -> Keys:
    """What an ideal LRU of so many places holds: the keys used last.

    :param stored: how many keys were stored one after another, from 0 on, before the requests.
    """
    last = np.arange(stored, dtype=np.int64) - stored
    np.maximum.at(last, requests, np.arange(len(requests), dtype=np.int64))
    return np.argsort(last, kind="stable")[::-1][:places]


def names(keys: Keys) -> npt.NDArray[Any]:
    """One row of KEY_BYTES bytes for each key."""
    powers = 10 ** np.arange(DIGITS - 1, -1, -1, dtype=np.int64)
    rows = np.empty((len(keys), KEY_BYTES), dtype=np.uint8)
    rows[:, 0] = ord("k")
    rows[:, 1:] = (keys[:, None] // powers) % 10 + ord("0")
    return rows


def gets(keys: Keys, batch: int) -> bytes:
    """`get` commands of `batch` keys each, all of one length (see get_bytes), as one string."""
    rows = names(keys[: len(keys) // batch * batch]).reshape(-1, batch, KEY_BYTES)
    out = np.full((len(rows), get_bytes(batch)), ord(" "), dtype=np.uint8)
    out[:, :3] = np.frombuffer(b"get", dtype=np.uint8)
    for place in range(batch):
        start = 4 + place * (KEY_BYTES + 1)
        out[:, start : start + KEY_BYTES] = rows[:, place]
    out[:, -2:] = np.frombuffer(b"\r\n", dtype=np.uint8)
    return out.tobytes()


def get_bytes(batch: int) -> int:
    """Length of one of these commands."""
    return 3 + batch * (KEY_BYTES + 1) + 2
