"""What a deflated memcached gives back, as the kernel says, while a client reads all the time."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from app_adapters import operations
from tests.adapters.cache import Cache
from tests.adapters.memcached_load import Reader
from tests.adapters.rest import Rest
from tests.adapters.stores.test_memcached_adapter import hooked

pytestmark = pytest.mark.service

Record = Callable[[str, object], None]


def deflated(cache: Cache, rest: Rest, request_id: str, target_mib: float) -> tuple[dict[str, object], float]:
    """The final answer, and what came back by the test's own reading."""
    before_mib = cache.rss_mib()
    status, answer = rest.target(request_id, "deflate", target_mib)
    assert status == 202, answer
    done = rest.finished(request_id)
    assert done["state"] == "released", done
    return done, before_mib - cache.rss_mib()


def released_mib(done: dict[str, object]) -> float:
    released = done["released"]
    assert isinstance(released, dict)
    return float(released["memory_mib"])


def test_half_of_the_memory_comes_back_while_a_client_reads(tmp_path: Path, record_property: Record) -> None:
    with hooked(tmp_path, 500) as (cache, rest):
        count = cache.fill(400)
        hot = range(0, count // 10)
        with Reader(cache, hot) as reader:
            maximum_mib = rest.capabilities()["resources"]["memory_mib"]["maximum"]
            target_mib = cache.rss_mib() / 2
            done, came_back_mib = deflated(cache, rest, "down", target_mib)
            assert released_mib(done) == pytest.approx(came_back_mib, rel=0.1, abs=4)
            assert came_back_mib >= target_mib - 10
            rest.target("up", "reinflate", maximum_mib)
            rest.finished("up")
            cache.fill(300, start=count)
        assert cache.limit_mib() == 500
        assert cache.rss_mib() > 300
        record_property("get_p99_ms", reader.percentile_ms(99))
        record_property("get_max_ms", reader.percentile_ms(100))
        record_property("errors", len(reader.errors))
        print(f"{len(reader.seconds)} gets, p99 {reader.percentile_ms(99):.2f} ms, {done['reason']}")
        assert reader.errors == []
        assert len(reader.seconds) > 100
        assert reader.percentile_ms(99) < 1000


def test_what_has_come_free_is_said_while_more_does(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A page at a time: the guest can unplug that before memcached has ended."""
    monkeypatch.setattr(operations, "LOOK_EVERY_S", 0.0)
    with hooked(tmp_path, 500) as (cache, rest):
        cache.fill(400)
        status, answer = rest.target("down", "deflate", cache.rss_mib() / 2)
        assert status == 202, answer
        said = [rest.send("GET", "/deflation/v1/targets/down")[1]]
        while said[-1]["state"] == "running":
            said.append(rest.send("GET", "/deflation/v1/targets/down")[1])
        promised, done = answer["promised"]["memory_mib"], released_mib(said[-1])
        parts = {released_mib(one) for one in said[:-1] if one["released"]}
        assert len([part for part in parts if 0.05 * promised < part < 0.95 * promised]) >= 3, sorted(parts)
        assert max(parts) <= promised
        assert done == pytest.approx(promised, rel=0.1)


def test_what_is_read_meanwhile_stays_though_its_time_of_access_is_old(tmp_path: Path) -> None:
    """All items were read twice, the hot ones first: by their times of access alone they are the coldest."""
    with hooked(tmp_path, 300) as (cache, rest):
        count = cache.fill(200)
        hot = range(0, 100)
        for _ in range(2):
            cache.right(hot)
        second = int(cache.stats()["time"])
        while int(cache.stats()["time"]) < second + 2:  # its times of access are whole seconds of its own clock
            pass
        for _ in range(2):
            cache.right(range(hot.stop, count))
        with Reader(cache, hot, pause_s=0.0001) as reader:
            deflated(cache, rest, "down", 100)
        assert reader.errors == []
        assert cache.right(hot) >= 0.9 * len(hot)
        assert cache.right(range(hot.stop, count)) < 0.6 * count


def test_a_memcached_that_must_not_be_watched_shrinks_all_the_same(tmp_path: Path) -> None:
    with hooked(tmp_path, 200, ("-W",)) as (cache, rest):
        cache.fill(120)
        done, came_back_mib = deflated(cache, rest, "down", 80)
        assert released_mib(done) == pytest.approx(came_back_mib, rel=0.1, abs=4)
        assert cache.rss_mib() <= 90


def test_ten_cycles_leave_nothing_behind(tmp_path: Path) -> None:
    with hooked(tmp_path, 150) as (cache, rest):
        sizes_mib = []
        maximum_mib = rest.capabilities()["resources"]["memory_mib"]["maximum"]
        for i in range(10):
            cache.fill(110, size=(4096, 1500)[i % 2])
            done, came_back_mib = deflated(cache, rest, f"down{i}", 75)
            assert released_mib(done) == pytest.approx(came_back_mib, rel=0.1, abs=4)
            sizes_mib.append(cache.rss_mib())
            rest.target(f"up{i}", "reinflate", maximum_mib)
            rest.finished(f"up{i}")
        print(" ".join(f"{size:.1f}" for size in sizes_mib))
        assert max(sizes_mib) <= 85
        assert sizes_mib[-1] <= sizes_mib[1] + 5


def test_cycles_without_the_malloc_setting_end_in_an_honest_refusal(tmp_path: Path) -> None:
    """glibc keeps freed pages after the first cycles: only what came back is told, then nothing is taken."""
    with hooked(tmp_path, 200, malloc_setting=False) as (cache, rest):
        maximum_mib = rest.capabilities()["resources"]["memory_mib"]["maximum"]
        for i in range(10):
            count = cache.fill(150, size=(4096, 1500)[i % 2])
            before_mib, items = cache.rss_mib(), cache.stats()["curr_items"]
            status, answer = rest.target(f"down{i}", "deflate", 90)
            assert "MALLOC_MMAP_THRESHOLD_" in answer["reason"]
            if status == 409:
                assert "its allocator keeps the pages" in answer["reason"]
                assert cache.stats()["curr_items"] == items
                break
            done = rest.finished(f"down{i}")
            assert released_mib(done) == pytest.approx(max(before_mib - cache.rss_mib(), 0), rel=0.1, abs=4)
            if cache.rss_mib() > 90 + 14:
                assert "stay resident" in str(done["reason"])
            rest.target(f"up{i}", "reinflate", maximum_mib)
            rest.finished(f"up{i}")
        else:
            pytest.fail(f"no cycle was refused; {count} items, {cache.rss_mib():.0f} MiB")
