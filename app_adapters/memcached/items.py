"""Choice of the items that go when memcached shrinks: those that were not used for longest.

Three sources tell how warm an item is, since none does alone (memcached: items.c do_item_bump, doc/protocol.txt):

* its time of access, which moves at the second read at the earliest, in whole seconds, and not at all while the item
  counts as active; so among the warm it says little, and less where bumps were dropped;
* whether it was ever read;
* what is read right now (`watch fetchers`, for a moment): such items are hot, whatever the other two say.
"""

from __future__ import annotations

import contextlib
import math
from dataclasses import dataclass
from typing import Dict, Generator, Iterable

from app_adapters.adapter import Deadline
from app_adapters.errors import ApplicationError
from app_adapters.memcached.client import MIB, Busy, Item, MemcachedClient, Slabs

#: A read item counts as so much younger than its time of access says.
FETCHED_BONUS_S = 3600
#: Above every time of access: what was read while it was watched.
SEEN_RANK = 1 << 40
#: Seconds of watching, and how many more where so much is to go that the border lies among the warm.
WATCHES_S = (0.6, 2.0)
SEEN_KEYS = 100_000
#: Items of a dump in random order from which the border between cold and warm is told: to 0.4 % (standard error).
SAMPLE = 20_000
#: Part of the limit that stays free: for the error of the sample, and for what is stored meanwhile.
FREE_SHARE = 0.01
#: Each class may have one page that is not full; where classes are many, no more than this part of the limit.
HALF_FILLED_SHARE = 0.05
BUSY_PAUSE_S = 0.01
#: A memcached before 1.6.26 may crash where its client hangs up while it ends a dump (memcached #1119). The rest of so
#: many items is read instead: they are more than lie in the sockets' buffers, so that it is not at the end yet.
READ_OUT = 200_000

#: How often a key was seen to be read.
Seen = Dict[bytes, int]
#: What a chunk takes of its page, by the id of its class as it is dumped.
Taken = Dict[bytes, int]


@dataclass(frozen=True)
class Border:
    """Items below `rank` go, and `at_rank_bytes` of those at it."""

    rank: int
    at_rank_bytes: float


def rank(item: Item, seen: Seen) -> int:
    """How warm an item is: the higher, the warmer."""
    key, accessed_s, fetched, _, _ = item
    times = seen.get(key, 0)
    if times:
        return SEEN_RANK + times
    return int(accessed_s) + (FETCHED_BONUS_S if fetched == b"yes" else 0)


def border(by_rank: dict[int, float], share: float) -> Border:
    """Where the coldest `share` of all bytes ends, which are given by rank."""
    left = sum(by_rank.values()) * share
    for at in sorted(by_rank):
        if by_rank[at] >= left:
            return Border(at, left)
        left -= by_rank[at]
    return Border(max(by_rank, default=0), math.inf)


def used_bytes(slabs: Slabs) -> float:
    """What all items take of their pages, the pages' rests included."""
    return float(sum(class_.used_chunks * (MIB // class_.chunks_per_page) for class_ in slabs.classes.values()))


def item_bytes(item: Item, taken: Taken) -> int:
    """What an item takes of its pages; one that is larger than a chunk has several."""
    return max(taken.get(item[3], 0), int(item[4]))


def surplus_bytes(slabs: Slabs, limit_mib: int) -> float:
    """What has to go so that the rest fits into whole pages under the limit; negative where nothing has to."""
    half_filled = min(sum(class_.used_chunks > 0 for class_ in slabs.classes.values()), limit_mib * HALF_FILLED_SHARE)
    return used_bytes(slabs) - (limit_mib * (1 - FREE_SHARE) - half_filled) * MIB


def delete_coldest(
    client: MemcachedClient, deleter: MemcachedClient, limit_mib: int, in_any_order: bool, deadline: Deadline
) -> None:
    """Delete the coldest items until the rest fits under the limit.

    In two passes over a dump, so that the memory which this takes does not grow with the number of items. A dump in the
    order of the hash table is in random order, so the first pass ends after a sample; where that is all there is, it is
    the second pass as well.

    :param in_any_order: whether this memcached can dump in the order of its hash table.

    Raises: ApplicationError where the deadline passes or memcached cannot be reached.
    """
    if surplus_bytes(client.slabs(), limit_mib) <= 0:
        return
    seen: Seen = {}
    for watch_s in WATCHES_S:
        watch_s = min(watch_s, deadline.remaining_s / 10)
        for key, times in client.watch_reads(watch_s, SEEN_KEYS, lambda: deadline.passed).items():
            seen[key] = seen.get(key, 0) + times
        slabs = client.slabs()
        surplus = surplus_bytes(slabs, limit_mib)
        by_rank, everything = _ranks(client, in_any_order, seen, _taken(slabs), deadline)
        found = sum(by_rank.values())
        if not found or surplus <= 0:
            return
        used = used_bytes(slabs)
        share = min(surplus / (used if in_any_order else max(used, found)), 1.0)
        cold = border(by_rank, share)
        if not seen or share <= _cold_share(client):
            break
    taken, at_border = _taken(slabs), cold.at_rank_bytes * max(used / found, 1.0)
    again = (items for items in everything) if everything else _dump(client, in_any_order, deadline)
    with contextlib.closing(again):
        for items in again:
            keys, surplus, at_border = _cold_keys(items, seen, taken, cold.rank, surplus, at_border)
            if keys:
                deleter.delete_quietly(keys)
            if surplus <= 0:
                break
    deleter.settle()


def _taken(slabs: Slabs) -> Taken:
    return {b"%d" % id_: MIB // class_.chunks_per_page for id_, class_ in slabs.classes.items()}


def _ranks(
    client: MemcachedClient, in_any_order: bool, seen: Seen, taken: Taken, deadline: Deadline
) -> tuple[dict[int, float], list[list[Item]]]:
    """Bytes by rank, of a sample where the order is random; and all items, empty where there are more than a sample."""
    by_rank: dict[int, float] = {}
    everything: list[list[Item]] = []
    looked_at = 0
    with contextlib.closing(_dump(client, in_any_order, deadline)) as dump:
        for items in dump:
            for item in items:
                at = rank(item, seen)
                by_rank[at] = by_rank.get(at, 0) + item_bytes(item, taken)
            looked_at += len(items)
            if looked_at < SAMPLE:
                everything.append(items)
            elif in_any_order:
                break
    return by_rank, everything if looked_at < SAMPLE else []


def _cold_share(client: MemcachedClient) -> float:
    """The part of all items that memcached itself holds for cold; of the others their times of access tell little."""
    numbers = {"number": 0, "number_cold": 0}
    for name, value in client.stats("items").items():
        what = name.rpartition(":")[2]
        if what in numbers:
            numbers[what] += int(value)
    return numbers["number_cold"] / max(numbers["number"], 1)


def _cold_keys(
    items: Iterable[Item], seen: Seen, taken: Taken, border_rank: int, surplus: float, at_border: float
) -> tuple[list[bytes], float, float]:
    """Keys that go, and what is left of the surplus and of what may go at the border's rank."""
    keys = []
    for item in items:
        if surplus <= 0:
            break
        at = rank(item, seen)
        if at > border_rank or (at == border_rank and at_border <= 0):
            continue
        size = item_bytes(item, taken)
        keys.append(item[0])
        surplus -= size
        if at == border_rank:
            at_border -= size
    return keys, surplus, at_border


def _dump(client: MemcachedClient, in_any_order: bool, deadline: Deadline) -> Generator[list[Item], None, None]:
    """All items, many at a time. Close it where not all are wanted."""
    left = int(client.stats().get("curr_items", "0"))
    while True:
        try:
            for items in client.metadump("hash" if in_any_order else "all"):
                left -= len(items)
                if deadline.passed:
                    raise ApplicationError("the deadline passed while the items were listed")
                yield items
            return
        except Busy:
            if deadline.wait(BUSY_PAUSE_S):
                raise ApplicationError("the deadline passed while memcached's crawler was busy") from None
        finally:
            with contextlib.suppress(ApplicationError):
                client.leave_dump(left <= READ_OUT)
