"""What a Redis can give, from its own figures."""

from __future__ import annotations

import dataclasses
import itertools
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from app_adapters.processes.state_file import StateFile
from app_adapters.redis import adapter
from app_adapters.redis.plan import (
    MIB,
    SMALLEST_LIMIT_MIB,
    STEP_MIB,
    Figures,
    counts,
    evictable_share,
    figures,
    forks,
    in_vain,
    limit_for,
    limit_in,
    maximum_for,
    next_limit,
    obstacle,
    policy_to_use,
    steps,
)

INFO = {
    "role": "master",
    "mem_allocator": "jemalloc-5.3.0",
    "maxmemory_policy": "allkeys-lru",
    "maxmemory": str(300 * MIB),
    "used_memory": str(210 * MIB),
    "mem_not_counted_for_evict": str(4 * MIB),
    "used_memory_startup": str(1 * MIB),
    "allocator_active": str(220 * MIB),
    "allocator_resident": str(250 * MIB),
    "loading": "0",
    "rdb_bgsave_in_progress": "0",
    "db0": "keys=100,expires=25,avg_ttl=0",
    "db3": "keys=100,expires=75,avg_ttl=9,subexpiry=0",
    "dbx": "keys=7,expires=7",
}
SIZES = st.floats(0, 4000)


@st.composite
def servers(draw: st.DrawFn) -> Figures:
    used = draw(st.floats(2, 4000))
    return Figures(
        rss=draw(st.floats(1, 6000)),
        used=used,
        limit=draw(st.one_of(st.just(0.0), st.floats(2, 5000))),
        purgeable=draw(SIZES),
        evictable=draw(st.floats(0, used)),
    )


def test_figures_come_from_info() -> None:
    assert figures(INFO, 260.0, "allkeys-lru") == Figures(rss=260, used=206, limit=300, purgeable=30, evictable=205)
    assert figures(INFO, 260.0, "volatile-ttl").evictable == 102.5
    assert figures(INFO, 260.0, "noeviction").evictable == 0
    assert figures({}, 10.0, "allkeys-lru") == Figures(rss=10, used=0, limit=0, purgeable=0, evictable=0)


def test_keys_that_expire_are_counted_over_all_databases() -> None:
    assert counts(INFO) == (200, 100)
    assert counts({}) == (0, 0)
    assert evictable_share({}, "volatile-lru") == 0


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"loading": "1"}, "loading"),
        ({"role": "slave"}, "replica"),
        ({"mem_allocator": "libc"}, "allocator is libc"),
        ({"maxmemory_policy": "noeviction"}, "--policy"),
        ({"maxmemory_policy": "volatile-lru", "db0": "keys=9,expires=0", "db3": "keys=9,expires=0"}, "no key"),
        ({"rdb_bgsave_in_progress": "1"}, "saving (rdb_bgsave)"),
        ({"aof_rewrite_in_progress": "1"}, "saving (aof_rewrite)"),
    ],
)
def test_obstacles(changes: dict[str, str], words: str) -> None:
    assert words in obstacle({**INFO, **changes}, "")


def test_without_an_obstacle_there_is_none() -> None:
    assert obstacle(INFO, "") == ""
    assert obstacle({**INFO, "maxmemory_policy": "noeviction"}, "allkeys-lfu") == ""


def test_a_policy_stands_in_for_noeviction_only() -> None:
    assert policy_to_use({"maxmemory_policy": "noeviction"}, "allkeys-lru") == "allkeys-lru"
    assert policy_to_use({"maxmemory_policy": "noeviction"}, "") == "noeviction"
    assert policy_to_use({"maxmemory_policy": "volatile-ttl"}, "allkeys-lru") == "volatile-ttl"


def test_who_never_forks_needs_no_room_for_it() -> None:
    assert not forks(INFO, "")
    assert forks(INFO, "3600 1")
    assert forks(INFO, None)
    assert forks({**INFO, "aof_enabled": "1"}, "")
    assert forks({**INFO, "connected_slaves": "1"}, "")


def test_the_limit_leaves_room_for_what_is_beside_the_data() -> None:
    found = Figures(rss=260, used=200, limit=300, purgeable=30, evictable=190)
    assert found.beside == 30
    assert limit_for(found, 150) == 120
    assert limit_for(found, 250) == 220
    assert limit_for(found, 10) == pytest.approx(29)  # a tenth of what can be evicted stays
    assert maximum_for(found, 300) == 338


@given(servers(), SIZES)
def test_a_deflation_never_raises_a_limit_and_never_makes_it_none(found: Figures, resident_mib: float) -> None:
    limit_mib = limit_for(found, resident_mib)
    assert limit_mib >= min(SMALLEST_LIMIT_MIB, found.used)
    assert limit_mib > 0
    down = list(steps(found, limit_mib))
    if found.limit > 0:
        assert all(step < found.limit for step in down) or not down
    if down:
        assert down[-1] == limit_mib
    levels = [min(found.used, found.limit or found.used), *down]
    assert all(before - after <= STEP_MIB * 1.001 for before, after in itertools.pairwise(levels))
    assert down == sorted(down, reverse=True)


@given(servers(), SIZES)
def test_rounds_go_down_to_the_lowest_and_no_further(found: Figures, goal_mib: float) -> None:
    lowest_mib = limit_for(found, 0.0)
    now = found
    for _ in range(5000):
        limit_mib = next_limit(now, goal_mib, lowest_mib)
        assert min(lowest_mib, now.used) <= limit_mib <= now.used
        if limit_mib == now.used:
            break
        # The worst server: nothing comes free whatever is evicted.
        now = dataclasses.replace(now, used=limit_mib)
    assert now.predicted <= goal_mib or now.used <= lowest_mib + 1e-6


def test_eviction_that_frees_nothing_is_in_vain() -> None:
    first = Figures(rss=260, used=200, limit=300, purgeable=0, evictable=190)
    assert not in_vain(first, dataclasses.replace(first, used=150))  # too early to tell
    assert in_vain(first, dataclasses.replace(first, used=100))
    assert not in_vain(first, dataclasses.replace(first, used=100, rss=230))
    assert not in_vain(first, dataclasses.replace(first, used=100, purgeable=40))


@pytest.mark.parametrize(
    ("text", "limit"),
    [
        ("port 1\nmaxmemory 25201640\n", 25201640),
        ("maxmemory 100mb\nmaxmemory 3gb\n", 3 * 2**30),
        ("maxmemory 8kb \n", 8192),
        ("# maxmemory 100mb\nmaxmemory-policy noeviction\n maxmemory some\n", None),
    ],
)
def test_the_limit_of_a_file_is_read_as_config_rewrite_writes_it(text: str, limit: int | None) -> None:
    assert limit_in(text) == limit


def test_what_is_put_back_outlives_a_restart_of_the_machine_also_what_an_earlier_version_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert adapter.RedisAdapter()._state.path == "/var/lib/ebbtide/redis-127.0.0.1-6379.json"
    for name in ("STATE_DIRECTORY", "EARLIER_STATE_DIRECTORY"):
        monkeypatch.setattr(adapter, name, str(tmp_path / name))
    StateFile(f"{tmp_path}/EARLIER_STATE_DIRECTORY/redis-run-redis.sock.json").save({"run_id": "a"})
    state = adapter.RedisAdapter("/run/redis.sock")._state
    assert state.load() == {"run_id": "a"}
    state.save({"run_id": "b"})
    assert [str(file.relative_to(tmp_path)) for file in tmp_path.glob("*/*")] == [
        "STATE_DIRECTORY/redis-run-redis.sock.json"
    ]
