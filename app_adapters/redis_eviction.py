"""The work on a Redis: evict down to a limit, and wait until the memory is back."""

from __future__ import annotations

import time
from typing import Iterator

from app_adapters.adapter import Deadline
from app_adapters.errors import ApplicationError
from app_adapters.process import resident_mib
from app_adapters.redis_client import RedisClient, ServerError
from app_adapters.redis_plan import (
    MIB,
    NO_EVICTION,
    Figures,
    counts,
    figures,
    fork_running,
    limit_for,
    next_limit,
    number,
    steps,
)

SETTLE_S = 1.0
DEFRAG_S = 10.0
STALL_S = 5.0
ROUNDS = 4
LOOK_S = 0.01
WRITE_ROOM_MIB = 4.0
PROGRAMS = ("redis-server", "valkey-server")


def descend(
    client: RedisClient,
    before: Figures,
    wanted_mib: float,
    patience_s: float,
    defragmenting: bool,
    deadline: Deadline,
) -> None:
    """Lower the limit, and again where fragments keep more resident than the target."""
    goal_mib = wanted_mib + tolerance_mib(wanted_mib)
    limit_mib, rss_mib = limit_for(before, wanted_mib), before.rss
    lowest_mib = limit_for(before, 0.0)
    for _ in range(ROUNDS):
        used_mib = _look_again(client).used
        _lower(client, limit_mib, deadline)
        now_mib = _settle(client, goal_mib, patience_s, defragmenting, deadline)
        evicted_mib = max(used_mib - limit_mib, 1.0)
        efficiency, rss_mib = (rss_mib - now_mib) / evicted_mib, now_mib
        lower_mib = next_limit(limit_mib, lowest_mib, rss_mib, goal_mib, efficiency)
        if lower_mib > limit_mib - 1 or deadline.passed:
            return
        limit_mib, patience_s = lower_mib, 0.0


def rss_mib_of(info: dict[str, str]) -> float:
    """Resident size as the kernel says, under either name: Valkey may be installed under the name of Redis."""
    pid = int(number(info, "process_id"))
    try:
        return resident_mib(pid, PROGRAMS[0])
    except ApplicationError:
        return resident_mib(pid, PROGRAMS[1])


def _look_again(client: RedisClient) -> Figures:
    info = client.info()
    return figures(info, rss_mib_of(info), info.get("maxmemory_policy", NO_EVICTION))


def tolerance_mib(size_mib: float) -> float:
    return max(8.0, 0.03 * size_mib)


def _lower(client: RedisClient, limit_mib: float, deadline: Deadline) -> None:
    """Lower the limit step by step, each one as soon as the last has been evicted down to.

    Raises: ApplicationError where the deadline passes or nothing more can be evicted; the limit is then one that lets
    writes go on.
    """
    for step_mib in steps(_look_again(client), limit_mib):
        while fork_running(client.info()):
            if deadline.wait(0.1):
                raise ApplicationError("a save was under way until the deadline passed")
        client.config_set("maxmemory", int(step_mib * MIB))
        for info, found in _until_evicted(client, step_mib):
            if info.get("maxmemory_policy", "").startswith("volatile-") and counts(info)[1] == 0:
                raise _give_room(client, found, "no key that expires is left")
            if deadline.wait(LOOK_S):
                raise _give_room(client, found, "the deadline passed")


def _until_evicted(client: RedisClient, step_mib: float) -> Iterator[tuple[dict[str, str], Figures]]:
    lowest_mib, moved_at = float("inf"), time.monotonic()
    while True:
        info = client.info()
        found = figures(info, 0.0, info.get("maxmemory_policy", NO_EVICTION))
        if found.used <= step_mib:
            return
        if found.used < lowest_mib:
            lowest_mib, moved_at = found.used, time.monotonic()
        elif time.monotonic() - moved_at > STALL_S:
            raise _give_room(client, found, f"nothing was evicted for {STALL_S:g} s")
        yield info, found


def _give_room(client: RedisClient, found: Figures, why: str) -> ApplicationError:
    """Raise the limit over what is used: with nothing to evict, writes would fail. Returns the error to raise."""
    client.config_set("maxmemory", int((found.used + WRITE_ROOM_MIB) * MIB))
    return ApplicationError(f"{why} with {found.used:.0f} MiB in use")


def _settle(client: RedisClient, goal_mib: float, patience_s: float, defragmenting: bool, deadline: Deadline) -> float:
    """Wait for the allocator, then purge; returns the resident size."""
    rss_mib = _wait_for(client, goal_mib, patience_s, deadline)
    if rss_mib > goal_mib:
        client.call("MEMORY", "PURGE")
        rss_mib = _wait_for(client, goal_mib, SETTLE_S, deadline)
    if rss_mib > goal_mib and defragmenting:
        end = time.monotonic() + DEFRAG_S
        while time.monotonic() < end and not deadline.wait(0.2):
            if number(client.info(), "active_defrag_running") == 0:
                break
        client.call("MEMORY", "PURGE")
        rss_mib = _wait_for(client, goal_mib, SETTLE_S, deadline)
    return rss_mib


def _wait_for(client: RedisClient, goal_mib: float, limit_s: float, deadline: Deadline) -> float:
    pid_info = client.info()
    end = time.monotonic() + limit_s
    rss_mib = rss_mib_of(pid_info)
    while rss_mib > goal_mib and time.monotonic() < end and not deadline.wait(0.05):
        rss_mib = rss_mib_of(pid_info)
    return rss_mib


def defragment(client: RedisClient) -> bool:
    """Let it move its data together, where it was built for that."""
    try:
        if client.config_get("activedefrag") == "no":
            client.config_set("activedefrag", "yes")
        return client.config_get("activedefrag") == "yes"
    except ServerError:
        return False
