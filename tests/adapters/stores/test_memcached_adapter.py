"""The memcached adapter against a real memcached, through the REST hook."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from app_adapters.adapter import Refusal
from app_adapters.errors import ApplicationError
from app_adapters.memcached.adapter import MemcachedAdapter, _started_limit_mib, _steps
from app_adapters.memcached.client import MIB, Busy, Item, MemcachedClient, SlabClass, Slabs
from app_adapters.memcached.pages import pages_to_move
from app_adapters.processes.process import resident_mib
from app_adapters.server import HookServer
from tests.adapters.cache import Cache, free_port
from tests.adapters.rest import Rest

pytestmark = pytest.mark.service


@contextlib.contextmanager
def hooked(
    tmp_path: Path, limit_mib: int = 400, options: tuple[str, ...] = (), malloc_setting: bool = True
) -> Iterator[tuple[Cache, Rest]]:
    """A memcached, and the hook of its adapter."""
    token = tmp_path / "token"
    token.write_text("t")
    cache = Cache(limit_mib, options, malloc_setting)
    try:
        server = HookServer(MemcachedAdapter("127.0.0.1", cache.port), port=0, token_file=str(token)).start()
        try:
            yield cache, Rest(server.address, "t")
        finally:
            server.stop()
    finally:
        cache.stop()


@pytest.mark.parametrize("size", [1000, 4096, 300000])
def test_a_deflated_memcached_is_small_keeps_what_was_read_and_grows_back(tmp_path: Path, size: int) -> None:
    with hooked(tmp_path) as (cache, rest):
        count = cache.fill(260, size)
        hot = range(0, count // 5)
        assert cache.right(hot, size) == len(hot)
        before_mib = cache.rss_mib()
        assert before_mib > 260
        memory = rest.capabilities()["resources"]["memory_mib"]
        assert memory["current"] == pytest.approx(before_mib, abs=2)
        assert memory["minimum"] == 64
        assert 400 < memory["maximum"] < 440

        status, answer = rest.target("down", "deflate", 140)
        assert status == 202
        assert answer["promised"]["memory_mib"] == pytest.approx(before_mib - 140, abs=2)
        done = rest.finished("down")
        assert done["state"] == "released", done
        after_mib = cache.rss_mib()
        assert after_mib <= 140 + 10
        assert done["released"]["memory_mib"] == pytest.approx(before_mib - after_mib, abs=3)
        assert cache.limit_mib() < 140
        assert int(cache.stats("slabs")["total_malloced"]) <= cache.limit_mib() * MIB
        assert cache.right(hot, size) >= 0.97 * len(hot)

        cache.fill(200, size, start=count)
        assert cache.rss_mib() <= 140 + 15  # it does not grow past its limit

        assert rest.target("up", "reinflate", memory["maximum"])[0] == 202
        done = rest.finished("up")
        assert (done["state"], done["released"]) == ("released", {"memory_mib": 0.0})
        assert cache.limit_mib() == 400
        more = cache.fill(200, size, start=2 * count)
        assert cache.rss_mib() > 250
        assert cache.right(range(2 * count, 2 * count + more), size) == more


def test_it_shrinks_again_and_again(tmp_path: Path) -> None:
    with hooked(tmp_path) as (cache, rest):
        for i, size in enumerate((4096, 2000, 9000)):
            cache.fill(250, size)
            assert rest.target(f"down{i}", "deflate", 120)[0] == 202
            rest.finished(f"down{i}")
            assert cache.rss_mib() <= 130
            assert rest.target(f"up{i}", "reinflate", 500)[0] == 202
            rest.finished(f"up{i}")


def test_a_newer_attempt_takes_over_from_one_in_the_middle(tmp_path: Path) -> None:
    with hooked(tmp_path) as (cache, rest):
        cache.fill(300, 1000)
        assert rest.target("down", "deflate", 200)[0] == 202
        status, answer = rest.target("down#2", "deflate", 120)
        assert status == 202, answer
        assert rest.finished("down")["reason"].startswith("called off for down#2: ")
        assert rest.finished("down%232")["state"] == "released"
        assert cache.rss_mib() <= 130


def test_the_coldest_go_first(tmp_path: Path) -> None:
    with hooked(tmp_path) as (cache, rest):
        count = cache.fill(250)
        second = int(cache.stats()["time"])
        while int(cache.stats()["time"]) < second + 2:  # its times of access are whole seconds of its own clock
            pass
        younger = cache.fill(60, start=count)
        rest.target("down", "deflate", 150)
        rest.finished("down")
        assert cache.right(range(count, count + younger)) >= 0.97 * younger
        assert cache.right(range(0, count)) < 0.5 * count


def test_a_target_above_what_it_holds_lowers_the_limit_and_deletes_nothing(tmp_path: Path) -> None:
    with hooked(tmp_path) as (cache, rest):
        count = cache.fill(100)
        status, answer = rest.target("down", "deflate", 200)
        assert (status, answer["promised"]) == (202, {"memory_mib": 0.0})
        assert rest.finished("down")["state"] == "released"
        assert 180 <= cache.limit_mib() <= 200
        assert cache.right(range(0, count)) == count
        rest.target("wide", "deflate", 1000)
        rest.finished("wide")
        assert cache.limit_mib() <= 200  # a deflation never raises


def test_a_deflation_that_was_broken_off_in_its_last_step_is_finished_by_the_next(tmp_path: Path) -> None:
    with hooked(tmp_path) as (cache, rest):
        cache.fill(260)
        client = MemcachedClient("127.0.0.1", cache.port)
        client.set_limit(100)
        client.close()
        assert rest.target("down", "deflate", 130)[0] == 202
        assert rest.finished("down")["state"] == "released"
        assert int(cache.stats("slabs")["total_malloced"]) <= cache.limit_mib() * MIB
        assert cache.rss_mib() <= 140


def test_a_cold_one_is_kept_below_its_target_while_it_fills(tmp_path: Path) -> None:
    with hooked(tmp_path) as (cache, rest):
        assert cache.rss_mib() < 64
        status, answer = rest.target("down", "deflate", 120)
        assert (status, answer["promised"]) == (202, {"memory_mib": 0.0})
        assert rest.finished("down")["state"] == "released"
        cache.fill(250)
        assert cache.rss_mib() <= 120 + 15


def test_its_own_maximum_always_restores_the_whole_limit(tmp_path: Path) -> None:
    with hooked(tmp_path, 200) as (cache, rest):
        cache.fill(150)
        for i in range(10):
            rest.target(f"down{i}", "deflate", 140.0 - i)
            rest.finished(f"down{i}")
            maximum_mib = rest.capabilities()["resources"]["memory_mib"]["maximum"]
            rest.target(f"up{i}", "reinflate", maximum_mib)
            rest.finished(f"up{i}")
            assert cache.limit_mib() == 200


def test_the_minimum_bounds_the_promise_and_is_the_floor(tmp_path: Path) -> None:
    with hooked(tmp_path) as (cache, rest):
        status, answer = rest.target("small", "deflate", 1)
        assert (status, answer["state"], answer["floor"]) == (409, "refused", {"memory_mib": 64})
        assert cache.limit_mib() == 400
        cache.fill(120)
        before_mib = cache.rss_mib()
        status, answer = rest.target("down", "deflate", 1)
        assert answer["promised"]["memory_mib"] == pytest.approx(before_mib - 64, abs=2)
        rest.finished("down")
        assert 50 < cache.rss_mib() <= 74


def test_a_deadline_ends_the_work_with_what_was_measured(tmp_path: Path) -> None:
    with hooked(tmp_path) as (cache, rest):
        cache.fill(300)
        before_mib = cache.rss_mib()
        rest.target("down", "deflate", 80, deadline_s=0.1)
        done = rest.finished("down")
        assert "deadline passed" in done["reason"]
        assert done["released"]["memory_mib"] == pytest.approx(before_mib - cache.rss_mib(), abs=3)
        rest.target("on", "deflate", 80)
        rest.finished("on")
        assert cache.rss_mib() <= 90


@pytest.mark.parametrize(
    ("options", "reason"),
    [(("-o", "no_slab_reassign"), "slab reassignment disabled"), (("-L",), "cannot change its limit")],
)
def test_a_memcached_that_cannot_give_pages_back_refuses_with_the_reason(
    tmp_path: Path, options: tuple[str, ...], reason: str
) -> None:
    with hooked(tmp_path, 128, options) as (cache, rest):
        count = cache.fill(70)
        status, answer = rest.target("down", "deflate", 70)
        assert (status, answer["state"]) == (409, "refused")
        assert reason in answer["reason"]
        assert cache.limit_mib() == 128
        assert cache.right(range(0, count)) == count


def test_a_memcached_without_the_malloc_setting_says_so(tmp_path: Path) -> None:
    with hooked(tmp_path, 200, malloc_setting=False) as (cache, rest):
        cache.fill(100)
        _, answer = rest.target("down", "deflate", 80)
        assert "MALLOC_MMAP_THRESHOLD_" in answer["reason"]
        before_mib = cache.rss_mib()
        done = rest.finished("down")
        assert "MALLOC_MMAP_THRESHOLD_" in done["reason"]
        assert done["released"]["memory_mib"] <= before_mib


def test_without_dumps_pages_still_come_back_and_it_says_so(tmp_path: Path) -> None:
    with hooked(tmp_path, 300, ("-X",)) as (cache, rest):
        cache.fill(200)
        rest.target("down", "deflate", 100)
        done = rest.finished("down")
        assert "items cannot be listed" in done["reason"]
        assert cache.rss_mib() <= 110


def test_a_memcached_that_is_gone_is_a_refusal(tmp_path: Path) -> None:
    with hooked(tmp_path, 100) as (cache, rest):
        cache.process.terminate()
        cache.process.wait(20)
        status, answer = rest.target("down", "deflate", 70)
        assert (status, answer["state"]) == (409, "refused")
        assert "cannot be reached" in answer["reason"]
        assert rest.send("GET", "/deflation/v1/capabilities")[0] == 503


def test_a_new_adapter_still_knows_the_full_size(tmp_path: Path) -> None:
    with hooked(tmp_path, 300) as (cache, rest):
        cache.fill(200)
        rest.target("down", "deflate", 100)
        rest.finished("down")
        token = tmp_path / "token"
        server = HookServer(MemcachedAdapter("127.0.0.1", cache.port), port=0, token_file=str(token)).start()
        second = Rest(server.address, "t")
        second.target("up", "reinflate", 1000)
        second.finished("up")
        server.stop()
        assert cache.limit_mib() == 300


def test_a_limit_that_its_owner_has_set_stays_where_nothing_was_taken(tmp_path: Path) -> None:
    with hooked(tmp_path, 300) as (cache, rest):
        maximum_mib = rest.capabilities()["resources"]["memory_mib"]["maximum"]
        owner = MemcachedClient("127.0.0.1", cache.port)
        owner.set_limit(200)
        assert "nothing had been taken" in rest.target("up", "reinflate", maximum_mib)[1]["reason"]
        rest.finished("up")
        assert cache.limit_mib() == 200
        cache.fill(150)
        rest.target("down", "deflate", 100)
        rest.finished("down")
        assert cache.limit_mib() < 100
        rest.target("up+2", "reinflate", maximum_mib)
        rest.finished("up+2")
        assert cache.limit_mib() == 200
        owner.set_limit(150)
        rest.target("up+3", "reinflate", maximum_mib)
        rest.finished("up+3")
        assert cache.limit_mib() == 150
        owner.close()


def dumped(client: MemcachedClient) -> list[Item]:
    """All items, as soon as memcached's crawler has time."""
    for _ in range(200):
        try:
            return [item for part in client.metadump() for item in part]
        except Busy:
            time.sleep(0.05)
    raise AssertionError("memcached's crawler has no time")


def test_keys_with_odd_bytes_are_deleted_as_well(tmp_path: Path) -> None:
    with hooked(tmp_path, 300) as (cache, _):
        client = MemcachedClient("127.0.0.1", cache.port)
        keys = [b"a%20b", b"\xc3\xa9", b"plain", b"a=b&c"]
        for key in keys:
            cache._socket.sendall(b"set %b 0 0 1 noreply\r\nx\r\n" % key)
        cache._socket.sendall(b"mn\r\n")
        cache._read_to(b"MN\r\n")
        items = dumped(client)
        assert len(items) == len(keys)
        client.delete_quietly([item[0] for item in items])
        client.settle()
        assert cache.stats()["curr_items"] == "0"
        assert dumped(client) == []
        client.close()


def test_another_program_under_the_pid_is_not_measured() -> None:
    with pytest.raises(ApplicationError, match="not memcached"):
        resident_mib(os.getpid(), "memcached")
    with pytest.raises(ApplicationError, match="cannot be seen"):
        resident_mib(2**30, "memcached")


@pytest.mark.parametrize(
    ("options", "limit_mib"),
    [
        ([], 64),
        (["-m", "300"], 300),
        (["-m300"], 300),
        (["--memory-limit=200"], 200),
        (["--memory-limit", "200"], 200),
        (["-u", "nobody", "-m", "100", "-m", "120"], 120),
        (["-m"], 64),
        (["-M"], 64),
        (["-dm", "1024"], 1024),
        (["-vvm1024"], 1024),
        (["-dUm", "300", "-P", "-m", "-m", "200m"], 200),
        (["-m", "100", "-l", "-m200"], 100),
        (["--memory-l=200", "--memory-file", "/m"], 200),
        (["-m", "100", "--", "-m", "200"], 100),
    ],
)
def test_the_limit_of_a_command_line(options: list[str], limit_mib: int) -> None:
    assert _started_limit_mib(["memcached", *options]) == limit_mib


def slabs(malloced_mib: int, **classes: tuple[int, int]) -> Slabs:
    made = {int(id_[1:]): SlabClass(int(id_[1:]), 100, pages, free) for id_, (pages, free) in classes.items()}
    return Slabs(made, malloced_mib * MIB)


def test_pages_are_taken_where_most_is_free_and_each_class_keeps_one() -> None:
    assert pages_to_move(slabs(9, c1=(3, 250), c2=(5, 0), c3=(1, 90)), 9) == [1, 1, 2, 2, 2, 2]
    assert pages_to_move(slabs(1, c1=(1, 90)), 1) == []


def test_the_limit_goes_down_in_steps_to_its_end_and_never_up() -> None:
    assert list(_steps(400, 200, slabs(360))) == [320, 280, 240, 200]
    assert list(_steps(400, 200, slabs(100))) == [200]
    assert list(_steps(400, 200, slabs(210))) == [200]
    assert list(_steps(200, 400, slabs(100))) == []
    assert list(_steps(200, 200, slabs(200))) == []


def test_pages_that_an_earlier_deflation_left_are_returned_at_the_limit_of_now() -> None:
    assert list(_steps(200, 200, slabs(360))) == [200]
    assert list(_steps(200, 400, slabs(300))) == []


def test_a_refusal_comes_without_a_running_memcached() -> None:
    adapter = MemcachedAdapter("127.0.0.1", free_port())
    with pytest.raises(ApplicationError, match="cannot be reached"):
        adapter.capabilities()
    assert Refusal("x").floor == {}


def test_the_command_serves_and_ends_on_sigterm(tmp_path: Path) -> None:
    port = free_port()
    cache = Cache(100)
    (tmp_path / "token").write_text("t")
    command = [sys.executable, "-m", "app_adapters", "memcached", "--memcached", f"127.0.0.1:{cache.port}"]
    command += ["--listen", f"127.0.0.1:{port}", "--token-file", str(tmp_path / "token"), "--minimum-mib", "1"]
    process = subprocess.Popen(command, stderr=subprocess.PIPE)
    try:
        assert process.stderr is not None
        assert b"memcached on 127.0.0.1" in process.stderr.readline()
        memory = Rest(("127.0.0.1", port), "t").capabilities()["resources"]["memory_mib"]
        assert memory["current"] == pytest.approx(cache.rss_mib(), abs=2)
        assert memory["minimum"] == 1
        process.terminate()
        assert process.wait(20) == 0
    finally:
        process.kill()
        process.communicate()
        cache.stop()


@pytest.mark.parametrize(
    "arguments", [["--listen", "0.0.0.0:1"], ["--listen", "7070"], ["--minimum-mib", "nan"], ["--memcached", "x"]]
)
def test_bad_options_are_told(arguments: list[str]) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "app_adapters", "memcached", *arguments], capture_output=True, timeout=20
    )
    assert done.returncode == 2
    assert done.stderr
