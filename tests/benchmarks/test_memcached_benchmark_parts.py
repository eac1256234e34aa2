"""The pure parts of the benchmark `memcached`: its keys, the ideal cache, its figures, table and picture."""

from __future__ import annotations

import contextlib
import csv
import socketserver
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from benchmarks.caches import memcached, memcached_client
from benchmarks.caches.memcached_client import Client, Load
from benchmarks.caches.memcached_report import Row, curve, write
from benchmarks.caches.zipf import Keys, Workload, get_bytes, gets, least_recently_used, popularity
from benchmarks.passes import Pass


def workload(count: int = 1000, exponent: float = 0.99) -> Workload:
    return Workload(count, exponent, np.random.default_rng(1))


def test_popularity_falls_with_the_rank_and_adds_up() -> None:
    found = popularity(1000, 0.99)
    assert found.sum() == pytest.approx(1)
    assert found[0] / found[9] == pytest.approx(10**0.99)
    assert np.allclose(popularity(10, 0.0), 0.1)


def test_keys_are_drawn_as_often_as_they_are_popular() -> None:
    some = workload()
    drawn = some.draw(200_000)
    assert drawn.min() >= 0
    assert drawn.max() < 1000
    often = np.bincount(drawn, minlength=1000) / len(drawn)
    assert np.abs(often - some.by_key).max() < 0.01
    assert some.mass(np.arange(1000)) == pytest.approx(1)
    assert some.best(100) == pytest.approx(np.sort(some.by_key)[::-1][:100].sum())


def test_the_same_seed_asks_for_the_same_keys() -> None:
    assert np.array_equal(workload().draw(100), workload().draw(100))


def test_an_ideal_lru_holds_what_was_used_last() -> None:
    held = least_recently_used(10, np.array([3, 4, 3, 0]), 4)
    assert sorted(held) == [0, 3, 4, 9]  # 9 was stored last of those that were not asked for
    assert sorted(least_recently_used(3, np.array([], dtype=np.int64), 2)) == [1, 2]


def test_an_ideal_lru_is_like_one_that_is_played_through() -> None:
    requests = workload(50).draw(500)
    order = list(range(50))
    for key in requests:
        order.remove(key)
        order.append(key)
    assert sorted(least_recently_used(50, requests, 20)) == sorted(order[-20:])


def test_what_is_drawn_while_one_arm_takes_longer_changes_nothing_of_what_comes_then() -> None:
    one, other = (Workload(100, 0.99, np.random.default_rng(3)) for _ in range(2))
    meanwhile = one.drawn_by(np.random.default_rng(4))
    # The same keys are popular.
    assert np.bincount(meanwhile.draw(2000)).argmax() == other.by_key.argmax()
    assert np.array_equal(one.draw(50), other.draw(50))


def test_an_ideal_cache_sees_what_is_read_while_the_real_one_is_deflated(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Keys] = []

    def ideal(stored: int, requests: Keys, places: int) -> Keys:
        seen.append(requests)
        return requests[:1]

    monkeypatch.setattr(memcached, "least_recently_used", ideal)
    stub: Any = SimpleNamespace(
        run=lambda keys, *rest: ([over() for over in rest[2:]] and Load(1.0, 8, 8)) or Load(1.0, 8, 8),
        store=lambda keys: None, close=lambda: None, limit=lambda mib: None, cap_reads=lambda cap: None,
        usage_mib=100.0, port=0, reads=lambda: 0, major_faults=lambda: 0, status_mib=lambda field: 0.0,
    )  # fmt: skip
    monkeypatch.setattr(memcached, "server", lambda *arguments: contextlib.nullcontext(stub))
    monkeypatch.setattr(memcached, "Client", lambda *arguments: stub)
    monkeypatch.setattr(memcached, "_train", lambda *arguments: np.arange(8))
    meanwhile = [np.array([61, 62]), np.array([63])]
    monkeypatch.setattr(memcached, "_under_load", lambda *arguments: contextlib.nullcontext(meanwhile))
    case = memcached.Case("zipf_4k", 64, 4096, 0.99, (0.5,), (None,))
    list(memcached._measure(stub, case, 0.5, "hypervisor", 0, Pass(runs=1, quick=True)))
    assert list(seen[0][-11:]) == [*range(8), 61, 62, 63]


def test_requests_are_commands_of_one_length() -> None:
    text = gets(np.array([1, 23, 4567, 89, 5]), 2)
    assert text == b"get k0000001 k0000023\r\nget k0004567 k0000089\r\n"
    assert len(text) == 2 * get_bytes(2)


def row(arm: str, run: int, hits_s: float, stores: bool = False, cap: int | None = 5000) -> Row:
    return Row(
        "zipf_4k", arm, 0.5, run, 1000.0, 100.0, 1.0, 0.92, 0.94, cap, stores, hits_s, hits_s + 1, 0.9, 0.1, 50.0
    )


def test_ratios_are_taken_within_each_run() -> None:
    rows = [
        row("hypervisor", 0, 100),
        row("application", 0, 800),
        row("application", 1, 600),
        row("hypervisor", 1, 200),
    ]
    found = memcached.figures(rows)
    assert found["application_to_hypervisor_zipf_4k_50_5000"].runs == (8, 3)
    assert found["application_zipf_4k_50_5000_of_full"].runs == (0.8, 0.6)
    assert found["application_zipf_4k_50_5000_to_ideal_lru"].value == pytest.approx(0.9 / 0.92, abs=1e-6)


def test_where_misses_are_stored_what_the_backend_gave_counts() -> None:
    found = memcached.figures([row("hypervisor", 0, 99, True), row("application", 0, 399, True)])
    assert found["application_to_hypervisor_zipf_4k_50_5000_stores"].value == 4
    assert found["application_zipf_4k_50_5000_stores_served_s"].unit == "values/s"


def test_a_curve_begins_at_full_size_and_tells_the_range() -> None:
    rows = [row("application", run, hits_s) for run, hits_s in enumerate((700, 900, 800))]
    assert curve(rows, "application", 5000, False) == [(1.0, 1.0, 1.0, 1.0), (0.5, 0.8, 0.7, 0.9)]


def test_a_table_and_a_picture_are_written(tmp_path: Path) -> None:
    rows = [row(arm, 0, 500, stores, cap) for arm in memcached.ARMS for stores, cap in ((False, 5000), (True, 5000))]
    rows += [row(arm, 0, 500, False, None) for arm in memcached.ARMS]
    said: list[str] = []
    table, picture = write(rows, tmp_path / "new", said.append)
    with table.open() as file:
        lines = list(csv.DictReader(file))
    assert len(lines) == len(rows)
    assert lines[0]["hits_s"] == "500"
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert said == []


@contextlib.contextmanager
def cache_of_nothing(answers: threading.Event) -> Iterator[int]:
    """A server on this port that answers each `get` with no value, from when it may."""

    class Handler(socketserver.StreamRequestHandler):
        def handle(self) -> None:
            while self.rfile.readline():
                answers.wait()
                self.wfile.write(b"END\r\n")

    class Server(socketserver.ThreadingTCPServer):
        daemon_threads = True

    with Server(("127.0.0.1", 0), Handler) as server:
        serving = threading.Thread(target=server.serve_forever, args=(0.01,))
        serving.start()
        try:
            yield server.server_address[1]
        finally:
            answers.set()
            server.shutdown()
            serving.join()


def test_the_end_of_a_window_is_told_before_what_is_under_way_is_answered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memcached_client, "ANSWER_LIMIT_S", 5.0)
    answers = threading.Event()
    with cache_of_nothing(answers) as port, contextlib.closing(Client(port, 64, connections=2, batch=2)) as client:
        load = client.run(np.arange(100), 0.05, over=answers.set)
    assert answers.is_set()
    assert load.gets == 0


def test_a_window_whose_keys_are_used_up_ends_with_the_last_answer() -> None:
    answers, told = threading.Event(), []
    answers.set()
    with cache_of_nothing(answers) as port, contextlib.closing(Client(port, 64, connections=2, batch=2)) as client:
        load = client.run(np.arange(10), over=lambda: told.append(1))
    assert told == [1]
    assert load.gets == 10


def test_the_rate_at_full_size_is_measured_after_a_warm_up_as_the_others_are(monkeypatch: pytest.MonkeyPatch) -> None:
    seconds: list[float] = []
    drawn = iter(range(9))

    class Stub:
        def run(self, keys: Keys, window_s: float, *rest: Any) -> Load:
            seconds.append(window_s)
            for over in rest[1:]:
                over()
            return Load(1.0, 8, 8)

        def __getattr__(self, name: str) -> Any:
            return lambda *arguments: next(drawn) if name in ("reads", "major_faults") else 0.0

    cache, inside = Stub(), Stub()
    inside.usage_mib = 100.0  # type: ignore[attr-defined]
    cache.port = 0  # type: ignore[attr-defined]
    monkeypatch.setattr(memcached, "server", lambda *arguments: contextlib.nullcontext(cache))
    monkeypatch.setattr(memcached, "Client", lambda *arguments: cache)
    monkeypatch.setattr(memcached, "_train", lambda *arguments: np.arange(8))
    monkeypatch.setattr(memcached, "_under_load", lambda *arguments: contextlib.nullcontext([]))
    case = memcached.Case("zipf_4k", 64, 4096, 0.99, (0.5,), (None,))
    list(memcached._measure(inside, case, 0.5, "hypervisor", 0, Pass(runs=1, quick=True)))  # type: ignore[arg-type]
    assert seconds == [memcached.WARM_UP_S, memcached.WINDOW_S / 4] * 3
