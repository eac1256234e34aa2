"""Which settings a PostgreSQL has at a size."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from app_adapters.postgresql.plan import (
    LEAST_KIB,
    allowed_mib,
    core_settings,
    in_kib,
    lowered,
    memory_settings,
    raised,
    restoring,
    sessions_to_end,
    share_of,
    statements,
)

DEFAULTS = {
    "work_mem": 4096,
    "maintenance_work_mem": 65536,
    "autovacuum_work_mem": -1,
    "effective_cache_size": 4194304,
}
ORIGINALS = st.fixed_dictionaries({name: st.one_of(st.just(-1), st.integers(64, 10**7)) for name in LEAST_KIB})


@pytest.mark.parametrize(
    ("setting", "unit", "kib"),
    [("4096", "kB", 4096), ("524288", "8kB", 4194304), ("143", "MB", 146432), ("-1", "kB", -1)],
)
def test_units(setting: str, unit: str, kib: int) -> None:
    assert in_kib(setting, unit) == kib


def test_what_the_settings_allow() -> None:
    assert allowed_mib(DEFAULTS, 100, 3) == 100 * (4 + 3) + 64 + 3 * 64
    assert allowed_mib({**DEFAULTS, "autovacuum_work_mem": 10240}, 0, 3) == 64 + 30


def test_shares() -> None:
    assert share_of(1000, 200, 1000) == 1
    assert share_of(900, 200, 1000) == 1  # near enough
    assert share_of(600, 200, 1000) == 0.5
    assert share_of(100, 200, 1000) == 0
    assert share_of(500, 700, 700) == 0


@given(ORIGINALS, st.floats(0, 1), st.floats(0, 1))
def test_settings_grow_with_the_share_between_their_least_and_the_original(
    original: dict[str, int], one: float, other: float
) -> None:
    small, large = (memory_settings(original, share) for share in sorted((one, other)))
    for name, value in small.items():
        assert min(LEAST_KIB[name], original[name]) <= value <= large[name] <= original[name]
    assert {name for name, value in original.items() if value > 0} == set(small)
    assert memory_settings(original, 1.0) == {name: value for name, value in original.items() if value > 0}


def test_cores_are_whole_parallel_workers_and_one_stays() -> None:
    original = {"max_parallel_workers": 8, "max_parallel_workers_per_gather": 2}
    for cores, (workers, gather) in {0.0: (1, 1), 1.9: (1, 1), 2.0: (2, 2), 5.0: (5, 2), 99.0: (8, 2)}.items():
        found = core_settings(original, cores)
        assert (found["max_parallel_workers"], found["max_parallel_workers_per_gather"]) == (workers, gather)
    none = {"max_parallel_workers": 0, "max_parallel_workers_per_gather": 0}
    assert core_settings(none, 4) == none


def test_a_deflation_only_lowers_and_a_reinflation_only_raises() -> None:
    now = {"a": 5, "b": 5, "c": 5}
    assert lowered(now, {"a": 4, "b": 5, "c": 6}) == {"a": 4}
    assert raised(now, {"a": 4, "b": 5, "c": 6}) == {"c": 6}


def test_the_largest_idle_sessions_go_until_it_is_enough() -> None:
    idle = {1: 10.0, 2: 40.0, 3: 20.0}
    assert sessions_to_end(idle, 0) == []
    assert sessions_to_end(idle, 30) == [2]
    assert sessions_to_end(idle, 50) == [2, 3]
    assert sessions_to_end(idle, 500) == [2, 3, 1]


def test_statements_and_how_they_are_undone() -> None:
    assert statements({"work_mem": 1024, "max_parallel_workers": 2}) == [
        "ALTER SYSTEM SET work_mem = '1024kB'",
        "ALTER SYSTEM SET max_parallel_workers = '2'",
    ]
    assert restoring({"work_mem": None, "maintenance_work_mem": "9'6MB"}) == [
        "ALTER SYSTEM RESET work_mem",
        "ALTER SYSTEM SET maintenance_work_mem = '9''6MB'",
    ]


@given(st.floats(0, 1))
def test_settings_are_whole_blocks_and_so_read_back_as_they_were_set(share: float) -> None:
    assert memory_settings(DEFAULTS, share)["effective_cache_size"] % 8 == 0
