"""The work on a Redis: evict down to a limit, and wait until the memory is back."""

from __future__ import annotations

import contextlib
import time
from typing import Callable, Iterator

from app_adapters.adapter import Deadline
from app_adapters.errors import ApplicationError
from app_adapters.processes.process import resident_mib
from app_adapters.redis.client import RedisClient, ServerError
from app_adapters.redis.plan import (
    LEAST_STEP_MIB,
    MIB,
    NO_EVICTION,
    Figures,
    counts,
    figures,
    fork_running,
    in_vain,
    limit_for,
    next_limit,
    number,
    steps,
)

SETTLE_S = 3.0
#: Without a purge: jemalloc gives back over 10 s what is no longer used (dirty_decay_ms).
ALONE_S = 12.0
SAMPLED_EVERY_S = 0.15  # longer than the 100 ms after which it samples its allocator again
SAMPLE_S = 2.0
DEFRAG_S = 10.0
STALL_S = 5.0
ROUNDS = 60
CORRECTIONS = 3
LOOK_S = 0.01
WRITE_ROOM_MIB = 4.0
SLACK_MIB = 0.5  # INFO counts the buffers of its own answer
PROGRAMS = ("redis-server", "valkey-server")
#: What helps while it is deflated, where the server accepts it. The samples make it evict what is old indeed; active
#: defragmentation needs a build with the server's own jemalloc, and starts at 100 MiB of fragments by default.
HELPFUL = {
    "maxmemory-samples": "10",
    "activedefrag": "yes",
    "active-defrag-ignore-bytes": "10485760",
    "active-defrag-threshold-lower": "5",
}


def rss_mib_of(info: dict[str, str]) -> float:
    """Resident size as the kernel says, under either name: Valkey may be installed under the name of Redis."""
    pid = int(number(info, "process_id"))
    try:
        return resident_mib(pid, PROGRAMS[0])
    except ApplicationError:
        return resident_mib(pid, PROGRAMS[1])


def tolerance_mib(size_mib: float) -> float:
    """How far over a target is near enough."""
    return max(8.0, 0.03 * size_mib)


def _help_along(client: RedisClient) -> bool:
    """Set what helps; returns whether it moves its data together now."""
    for name, value in HELPFUL.items():
        with contextlib.suppress(ServerError):
            if client.config_get(name) is not None:
                client.config_set(name, value)
    return client.config_get("activedefrag") == "yes"


def shrink(
    client: RedisClient,
    first: Figures,
    wanted_mib: float,
    patience_s: float,
    force: bool,
    deadline: Deadline,
    note_limits: Callable[[list[int]], None],
) -> str:
    """Evict, wait for the allocator and purge; again where more stays resident than it said.

    `note_limits` is given limits, in bytes, before they are set. Returns why it ended above `wanted_mib`, empty where
    there is nothing to say. The memory is purged also on an error.

    Raises: ApplicationError.
    """
    defragmenting = _help_along(client)
    near_mib, aim_mib = wanted_mib + tolerance_mib(wanted_mib), wanted_mib
    for _ in range(CORRECTIONS):
        try:
            note = _descend(client, first, aim_mib, defragmenting, force, deadline, note_limits)
        finally:
            found, refused = _settle(client, near_mib, patience_s, deadline)
        if note or found.rss <= near_mib or deadline.passed:
            return note
        if found.purgeable > near_mib - wanted_mib:  # not fragments, so that more eviction would be for nothing
            note = f"the allocator has still to give {found.purgeable:.0f} MiB back"
            return f"{note}; MEMORY PURGE was refused: {refused}" if refused else note
        aim_mib, patience_s = max(aim_mib - (found.rss - wanted_mib), 0.0), 0.0
    return ""


def _descend(
    client: RedisClient,
    first: Figures,
    wanted_mib: float,
    defragmenting: bool,
    force: bool,
    deadline: Deadline,
    note_limits: Callable[[list[int]], None],
) -> str:
    """Lower the limit until what will be resident is near the target; returns why it ended earlier, empty if not.

    Raises: ApplicationError where the deadline passes or nothing more can be evicted.
    """
    goal_mib = wanted_mib + tolerance_mib(wanted_mib) / 2
    planned_mib, lowest_mib = limit_for(first, wanted_mib), limit_for(first, 0.0)
    if first.predicted <= goal_mib:
        _lower(client, planned_mib, deadline, note_limits)
        return ""
    now = _now(client)[1]
    for _ in range(ROUNDS):
        if defragmenting and now.used <= planned_mib + 1:
            now = _defragmented(client, goal_mib, deadline)
        limit_mib = next_limit(now, goal_mib, lowest_mib)
        if limit_mib >= now.used - 0.01:
            break
        if not force and in_vain(first, now):
            return "fragments hold the rest: more eviction would cost data for little"
        _lower(client, limit_mib, deadline, note_limits)
        now = _sampled(client, deadline)
    return ""


def _settle(client: RedisClient, goal_mib: float, patience_s: float, deadline: Deadline) -> tuple[Figures, str]:
    """Wait for the allocator, then purge; returns what there is then, and why a purge was refused.

    A purge right beside the allocator's own decay was seen to do nothing, so that it is repeated. Where the user may
    not purge, the allocator has the time to give back by itself what was evicted already.
    """
    _wait_for(client, goal_mib, patience_s, deadline)
    end, refused = time.monotonic() + SETTLE_S, ""
    while True:
        found = _now(client)[1]
        if found.rss <= goal_mib:
            return found, refused
        if not refused:
            try:
                client.call("MEMORY", "PURGE")
            except ServerError as error:
                refused, end = str(error), time.monotonic() + ALONE_S
        late = time.monotonic() > end or deadline.wait(SAMPLED_EVERY_S)
        found = _now(client)[1]
        if late or found.rss <= goal_mib or found.purgeable < LEAST_STEP_MIB:
            return found, refused


def _now(client: RedisClient) -> tuple[dict[str, str], Figures]:
    info = client.info()
    return info, figures(info, rss_mib_of(info), info.get("maxmemory_policy", NO_EVICTION))


def _sampled(client: RedisClient, deadline: Deadline) -> Figures:
    """Figures of which the allocator's are no older than what was evicted: they are sampled every 100 ms."""
    end = time.monotonic() + SAMPLE_S
    while True:
        info, found = _now(client)
        used = number(info, "used_memory")
        if abs(number(info, "allocator_allocated") - used) < max(0.01 * used, 1.5 * MIB):
            return found
        if time.monotonic() > end or deadline.wait(2 * LOOK_S):
            return found


def _defragmented(client: RedisClient, goal_mib: float, deadline: Deadline) -> Figures:
    """Figures once it has moved its data together, or has had its time for it."""
    end = time.monotonic() + DEFRAG_S
    idle = 0
    while True:
        info, found = _now(client)
        idle = idle + 1 if number(info, "active_defrag_running") == 0 else 0
        # Whether to begin it decides about once a second.
        if found.predicted <= goal_mib or idle > 6 or time.monotonic() > end or deadline.wait(0.25):
            return found


def _lower(client: RedisClient, limit_mib: float, deadline: Deadline, note_limits: Callable[[list[int]], None]) -> None:
    """Lower the limit step by step, each one as soon as the last has been evicted down to.

    Raises: ApplicationError where the deadline passes or nothing more can be evicted; the limit is then one that lets
    writes go on.
    """
    limits_mib = list(steps(_now(client)[1], limit_mib))
    note_limits([int(step_mib * MIB) for step_mib in limits_mib])
    for step_mib in limits_mib:
        # A server that evicts within one call never waits below, and what is sampled after the deadline is stale.
        if deadline.passed:
            raise ApplicationError("the deadline passed")
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
        if found.used <= step_mib + SLACK_MIB:
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


def _wait_for(client: RedisClient, goal_mib: float, limit_s: float, deadline: Deadline) -> float:
    pid_info = client.info()
    end = time.monotonic() + limit_s
    rss_mib = rss_mib_of(pid_info)
    while rss_mib > goal_mib and time.monotonic() < end and not deadline.wait(0.05):
        rss_mib = rss_mib_of(pid_info)
    return rss_mib
