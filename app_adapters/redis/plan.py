"""Plan of what a Redis or Valkey can give, and how far its limit goes down for it. Pure; sizes are MiB.

The fields are those of INFO (redis.io: INFO; Redis 7.0: src/server.c, src/evict.c).
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from typing import Iterator, Mapping

MIB = 1024 * 1024
EVICTING_POLICIES = (
    "allkeys-lru",
    "allkeys-lfu",
    "allkeys-random",
    "volatile-lru",
    "volatile-lfu",
    "volatile-random",
    "volatile-ttl",
)
NO_EVICTION = "noeviction"
SMALLEST_LIMIT_MIB = 2.0  # 0 would be no limit at all
KEPT_SHARE = 0.1  # of what can be evicted: with nothing left to evict, writes fail
MARGIN_MIB = 8.0  # in the maximum, so that what moves beside the data costs the limit nothing of its full size
STEP_MIB = 16.0
LEAST_STEP_MIB = 2.0
VAIN_SHARE = 0.4
VAIN_YIELD = 0.2
FORKS = ("rdb_bgsave_in_progress", "aof_rewrite_in_progress", "module_fork_in_progress")
_KEYSPACE = re.compile(r"keys=(\d+),expires=(\d+)")


@dataclass(frozen=True)
class Figures:
    """A server's memory.

    `used` is what counts against `limit` (0 = none), `beside` what is resident and neither data nor free pages that the
    allocator still has, `purgeable` those pages, `evictable` the part of `used` that the policy may evict.
    """

    rss: float
    used: float
    limit: float
    purgeable: float
    evictable: float

    @property
    def predicted(self) -> float:
        """Resident size once the allocator has given back what it can."""
        return max(self.rss - self.purgeable, 0.0)

    @property
    def beside(self) -> float:
        return max(self.predicted - self.used, 0.0)

    @property
    def least(self) -> float:
        """The least resident size that eviction can reach."""
        return max(self.predicted - (1 - KEPT_SHARE) * self.evictable, 0.0)


def limit_in(text: str) -> int | None:
    """The last maxmemory of a configuration file as CONFIG REWRITE writes it, bytes; None where it has none."""
    found = re.findall(r"^maxmemory (\d+)(kb|mb|gb|)\s*$", text, re.MULTILINE)
    return int(found[-1][0]) * {"": 1, "kb": 1024, "mb": MIB, "gb": 1024 * MIB}[found[-1][1]] if found else None


def number(info: Mapping[str, str], name: str) -> float:
    """A numeric field of INFO, 0 where this version does not have it."""
    try:
        return float(info.get(name, "0"))
    except ValueError:
        return 0.0


def figures(info: Mapping[str, str], rss_mib: float, policy: str) -> Figures:
    """The figures under an eviction policy, which need not be the one that is set."""
    used = number(info, "used_memory") / MIB
    not_counted = number(info, "mem_not_counted_for_evict") / MIB
    fixed = ("used_memory_startup", "mem_clients_normal", "mem_clients_slaves", "mem_replication_backlog")
    data = max(used - not_counted - sum(number(info, name) for name in fixed) / MIB, 0.0)
    return Figures(
        rss=rss_mib,
        used=used - not_counted,
        limit=number(info, "maxmemory") / MIB,
        purgeable=max(number(info, "allocator_resident") - number(info, "allocator_active"), 0.0) / MIB,
        evictable=data * evictable_share(info, policy),
    )


def evictable_share(info: Mapping[str, str], policy: str) -> float:
    """Of the keys, those that the policy may evict: all, those that expire, or none."""
    if policy.startswith("allkeys-"):
        return 1.0
    if not policy.startswith("volatile-"):
        return 0.0
    keys, expiring = counts(info)
    return expiring / keys if keys else 0.0


def counts(info: Mapping[str, str]) -> tuple[int, int]:
    """Keys of all databases, and how many of them expire."""
    found = [_KEYSPACE.match(value) for name, value in info.items() if name[:2] == "db" and name[2:].isdigit()]
    matches = [match for match in found if match is not None]
    return sum(int(match.group(1)) for match in matches), sum(int(match.group(2)) for match in matches)


def policy_to_use(info: Mapping[str, str], allowed: str) -> str:
    """The policy of a deflation: the server's own, or `allowed` where the server's evicts nothing and one is given."""
    own = info.get("maxmemory_policy", NO_EVICTION)
    return allowed if own == NO_EVICTION and allowed else own


def obstacle(info: Mapping[str, str], allowed: str) -> str:
    """Why nothing can be taken from this server now, empty where something can."""
    if info.get("loading", "0") != "0":
        return "it is loading its data"
    if info.get("role") == "slave":
        return "it is a replica, which holds what its master holds: deflate the master"
    allocator = info.get("mem_allocator", "unknown")
    if not allocator.startswith("jemalloc"):
        return f"its allocator is {allocator}, which keeps the memory of evicted keys (jemalloc does not)"
    policy = policy_to_use(info, allowed)
    if policy == NO_EVICTION:
        return "its maxmemory-policy is noeviction: a lower limit would fail writes (see --policy)"
    if policy.startswith("volatile-") and counts(info)[1] == 0:
        return f"its maxmemory-policy is {policy}, and no key expires"
    fork = fork_running(info)
    if fork:
        return f"it is saving ({fork}): what is evicted now is copied for the save"
    return ""


def fork_running(info: Mapping[str, str]) -> str:
    """The save or rewrite that runs, empty where none does."""
    return next((name.replace("_in_progress", "") for name in FORKS if info.get(name, "0") != "0"), "")


def forks(info: Mapping[str, str], save_points: str | None) -> bool:
    """Whether it forks now and then, to save or to feed a replica; where the save points are not known, it may."""
    return save_points != "" or info.get("aof_enabled", "0") != "0" or number(info, "connected_slaves") > 0


def limit_for(found: Figures, resident_mib: float) -> float:
    """The limit with which about so much stays resident, never one that only an empty policy could keep."""
    lowest = max(found.used - (1 - KEPT_SHARE) * found.evictable, SMALLEST_LIMIT_MIB)
    return max(resident_mib - found.beside, min(lowest, found.used))


def maximum_for(found: Figures, limit_mib: float) -> float:
    """Resident size with that limit used up."""
    return max(limit_mib + found.beside + MARGIN_MIB, found.rss)


def steps(now: Figures, limit_mib: float) -> Iterator[float]:
    """Limits on the way down, small enough that no single one evicts for long. A deflation never raises the limit."""
    if 0 < now.limit <= limit_mib:
        return
    start = min(now.used, now.limit) if now.limit > 0 else now.used
    count = max(math.ceil((start - limit_mib) / STEP_MIB), 1)
    for i in range(1, count + 1):
        yield limit_mib if i == count else start - (start - limit_mib) * i / count


def next_limit(now: Figures, goal_mib: float, lowest_mib: float) -> float:
    """The limit of the next round, the same as what is used where none is needed or possible.

    A third of what is still too much: a slab of the allocator comes free with the last of its keys, so that the same
    eviction gives little at first and more than its size at the end.
    """
    surplus_mib = now.predicted - goal_mib
    if surplus_mib <= 0:
        return now.used
    return max(now.used - max(surplus_mib / 3, LEAST_STEP_MIB), min(lowest_mib, now.used))


def in_vain(first: Figures, now: Figures) -> bool:
    """Whether so much was evicted for so little that more would cost data for nothing: fragments hold the memory."""
    evicted_mib = first.used - now.used
    return evicted_mib > VAIN_SHARE * first.evictable and first.predicted - now.predicted < VAIN_YIELD * evicted_mib
