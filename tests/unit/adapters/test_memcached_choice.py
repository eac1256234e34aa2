"""Which of memcached's items go, which pages move and how fast: the decisions alone."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from app_adapters.memcached.adapter import _dumps_hash, _kept_by_allocator
from app_adapters.memcached.client import MIB, Item, SlabClass, Slabs
from app_adapters.memcached.items import Border, _cold_keys, border, item_bytes, rank, surplus_bytes, used_bytes
from app_adapters.memcached.pages import LONGEST_LOOK_S, LOOK_S, MOST_PAUSE_S, Pace

TAKEN = {b"1": 1024}


def item(key: bytes, accessed_s: int, fetched: bool = False, size: int = 1000) -> Item:
    return key, b"%d" % accessed_s, b"yes" if fetched else b"no", b"1", b"%d" % size


def slabs(malloced_mib: int, *used: int) -> Slabs:
    made = {i: SlabClass(i, 1024, chunks // 1024 + 1, 0, chunks) for i, chunks in enumerate(used, 1)}
    return Slabs(made, malloced_mib * MIB)


def test_seen_is_warmer_than_fetched_than_younger_than_older() -> None:
    seen = {b"a": 1, b"b": 2}
    coldest_first = [item(b"e", 100), item(b"d", 200), item(b"c", 100, True), item(b"a", 1), item(b"b", 1)]
    ranks = [rank(one, seen) for one in coldest_first]
    assert ranks == sorted(set(ranks))


def test_an_item_takes_its_chunk_or_all_of_its_chunks() -> None:
    assert item_bytes(item(b"a", 1, size=900), TAKEN) == 1024
    assert item_bytes(item(b"a", 1, size=5000), TAKEN) == 5000
    assert item_bytes(item(b"a", 1, size=900), {}) == 900


@given(
    st.dictionaries(st.integers(0, 50), st.integers(1, 1000), min_size=1, max_size=20),
    st.floats(0.01, 0.99),
)
def test_the_border_parts_off_its_share(by_rank: dict[int, int], share: float) -> None:
    found = border(dict(by_rank), share)
    below = sum(size for at, size in by_rank.items() if at < found.rank)
    assert below + found.at_rank_bytes == pytest.approx(share * sum(by_rank.values()))
    assert 0 <= found.at_rank_bytes <= by_rank[found.rank] + 1e-6


def test_the_border_of_everything_is_the_warmest() -> None:
    assert border({1: 10, 2: 10}, 1.0) == Border(2, 10.0)


def test_keys_go_below_the_border_and_some_of_those_at_it() -> None:
    items = [item(b"cold", 1), item(b"at1", 5), item(b"at2", 5), item(b"warm", 9)]
    keys, surplus, at_border = _cold_keys(items, {}, TAKEN, 5, 10_000.0, 1000.0)
    assert keys == [b"cold", b"at1"]
    assert (surplus, at_border) == (10_000 - 2048, 1000 - 1024)


def test_no_more_keys_go_than_the_surplus() -> None:
    items = [item(b"%d" % i, 1) for i in range(10)]
    keys, surplus, _ = _cold_keys(items, {}, TAKEN, 5, 2000.0, 1e9)
    assert len(keys) == 2
    assert surplus <= 0


def test_the_surplus_leaves_room_for_pages_that_are_not_full() -> None:
    held = slabs(200, 100 * 1024, 50 * 1024)
    assert used_bytes(held) == 150 * MIB
    assert surplus_bytes(held, 100) == pytest.approx((150 - 99 + 2) * MIB)
    assert surplus_bytes(held, 200) < 0
    many = slabs(200, *[10] * 60)
    assert surplus_bytes(many, 100) == pytest.approx(used_bytes(many) - (99 - 5) * MIB)


def test_the_pace_waits_only_where_answers_are_slow() -> None:
    pace = Pace(0.0001)
    for _ in range(100):
        pace.answered(0.0005)
    assert pace.pause_s == 0
    for _ in range(100):
        pace.answered(0.01)
    assert pace.pause_s == MOST_PAUSE_S
    for _ in range(10):
        pace.answered(0.0001)
    assert pace.pause_s == 0


def test_a_page_is_looked_at_by_what_pages_take_and_a_wait_teaches_nothing() -> None:
    pace = Pace(0.0001)
    assert pace.look_s(0) == pace.look_s(1) == LOOK_S
    for _ in range(40):
        pace.moved(0.01, looks=1)
    assert pace.look_s(0) == pytest.approx(0.007, rel=0.01)
    assert pace.look_s(1) < pace.look_s(0) / 4
    for _ in range(40):
        # Done at the first look: maybe at once.
        pace.moved(pace.look_s(0), looks=0)
    assert pace.look_s(0) == LOOK_S
    for _ in range(40):
        pace.moved(10.0, looks=3)
    assert pace.look_s(0) == LONGEST_LOOK_S


def test_where_every_answer_is_slow_that_is_usual() -> None:
    pace = Pace(0.02)
    pace.answered(0.05)
    assert pace.pause_s == 0


@pytest.mark.parametrize(
    ("version", "can"),
    [("1.6.18", True), ("1.6.9", True), ("1.6.8", False), ("1.5.22", False), ("2.0", True), ("", False)],
)
def test_dumps_in_the_order_of_the_hash_table_came_with_1_6_9(version: str, can: bool) -> None:
    assert _dumps_hash({"version": version}) is can


def test_kept_pages_are_an_obstacle_only_without_the_malloc_setting() -> None:
    held = slabs(100)
    assert "150 MiB are resident beyond" in _kept_by_allocator(250, held, {})
    assert _kept_by_allocator(130, held, {}) == ""
    assert _kept_by_allocator(250, held, {b"MALLOC_MMAP_THRESHOLD_": b"131072"}) == ""
    assert _kept_by_allocator(250, held, None) == ""
