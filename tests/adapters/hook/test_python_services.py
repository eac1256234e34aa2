"""Services of Python give their memory back while a client asks on: by the hook inside, and by a command beside."""

from __future__ import annotations

import contextlib
import runpy
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from app_adapters.processes.command import CommandAdapter
from app_adapters.server import HookServer
from tests.adapters.proc import children, pss_mib
from tests.adapters.python_load import ROOT, Service, client
from tests.adapters.rest import Rest

pytestmark = pytest.mark.service

TARGET_MIB = 55.0
CYCLES = 10
Record = Callable[[str, object], None]


@contextlib.contextmanager
def embedded(tmp_path: Path) -> Iterator[tuple[Service, Rest]]:
    """The example with the hook inside."""
    (tmp_path / "token").write_text("t")
    with tempfile.TemporaryDirectory(prefix="ebb") as short:
        command = [str(ROOT / "examples/embed_python.py"), f"{short}/hook.sock", str(tmp_path / "token")]
        service = Service(command, hooked=True)
        try:
            yield service, Rest(service.hook, "t")
        finally:
            service.stop()


@contextlib.contextmanager
def commanded(tmp_path: Path) -> Iterator[tuple[Service, Rest]]:
    """A service that knows of no hook, and a program that can talk to it."""
    (tmp_path / "token").write_text("t")
    here, pid_file = Path(__file__).parents[1], str(tmp_path / "pid")
    service = Service([str(here / "limited_service.py"), pid_file])
    try:
        argv = [sys.executable, str(here / "limit_program.py"), str(service.address[1]), pid_file]
        # Plenty of time for a program in Python on a busy machine.
        adapter = CommandAdapter(argv, pid_file=pid_file, answer_limit_s=30)
        server = HookServer(adapter, port=0, token_file=str(tmp_path / "token")).start()
        try:
            yield service, Rest(server.address, "t")
        finally:
            server.stop()
    finally:
        service.stop()


@pytest.mark.parametrize("made", [embedded, commanded])
def test_it_shrinks_and_grows_ten_times_while_a_client_asks_on(
    tmp_path: Path,
    record_property: Record,
    made: Callable[[Path], contextlib.AbstractContextManager[tuple[Service, Rest]]],
) -> None:
    with made(tmp_path) as (service, rest), client(service.address) as load:
        small, full = [], []
        for cycle in range(CYCLES):
            service.fill(70 if cycle == 0 else 40, start=cycle % 2 * 50_000)
            before_mib = service.pss_mib()
            full.append(before_mib)
            status, answer = rest.target(f"down{cycle}", "deflate", TARGET_MIB)
            assert status == 202, answer
            assert answer["promised"]["memory_mib"] == pytest.approx(before_mib - TARGET_MIB, abs=5)
            done = rest.finished(f"down{cycle}")
            assert done["state"] == "released", done
            after_mib = service.pss_mib()
            small.append(after_mib)
            fall_mib = before_mib - after_mib
            assert fall_mib > 25, done
            assert done["released"]["memory_mib"] == pytest.approx(fall_mib, rel=0.1, abs=4), done
            assert rest.capabilities()["resources"]["memory_mib"]["current"] == pytest.approx(after_mib, abs=15)
            assert rest.target(f"up{cycle}", "reinflate", 400)[0] == 202
            assert rest.finished(f"up{cycle}")["released"] == {"memory_mib": 0.0}
        assert all(size_mib <= TARGET_MIB + 8 for size_mib in small), small
        # It grew back every time, and the later cycles end where the earlier ones did.
        assert min(full) > TARGET_MIB + 25, full
        assert max(small[-3:]) - min(small[:3]) < 10, small
        assert max(full[-3:]) - min(full[1:4]) < 20, full
    record_property("small_mib", [round(size_mib, 1) for size_mib in small])
    record_property("p50_ms", round(load.percentile_ms(0.5), 2))
    record_property("p99_ms", round(load.percentile_ms(0.99), 2))
    print(f"p50 {load.percentile_ms(0.5):.2f} ms, p99 {load.percentile_ms(0.99):.2f} ms of {len(load.seconds)}")
    print("small", small, "full", full)
    assert load.errors == []
    assert len(load.seconds) > 100
    assert load.percentile_ms(0.99) < 2000


def test_a_python_service_stays_small_until_it_may_grow(tmp_path: Path) -> None:
    with embedded(tmp_path) as (service, rest):
        service.fill(65)
        assert rest.target("down", "deflate", TARGET_MIB)[0] == 202
        rest.finished("down")
        service.fill(30, start=50_000)
        # Its heap is given back a moment later: what replaces values takes other pages first.
        end = time.monotonic() + 60
        while service.pss_mib() > TARGET_MIB + 10:
            assert time.monotonic() < end, service.pss_mib()
            time.sleep(0.05)
        assert rest.target("up", "reinflate", 400)[0] == 202
        rest.finished("up")
        service.fill(45, start=100_000)
        assert service.pss_mib() > TARGET_MIB + 25


def test_the_examples_cache_serves_on_where_it_may_grow_to_less_than_it_began_with() -> None:
    cache = runpy.run_path(str(ROOT / "examples/embed_python.py"))["cache"]
    cache.grow(1.0)
    assert cache.get("key") == cache.get("key")


#: Has 64 MiB before it forks three workers, each with the hook.
PRELOADED = """
import os, sys
from app_adapters.processes.python_memory import PythonAdapter
from app_adapters.shared import SharedHookServer
loaded = b"x" * (64 * 1024 * 1024)
for _ in range(3):
    if not os.fork():
        SharedHookServer(PythonAdapter(500, shrink=print), *sys.argv[1:]).start()
        sys.stdin.read()
        os._exit(0)
sys.stdin.read()
"""


def test_pages_that_processes_share_since_they_were_forked_count_once(tmp_path: Path) -> None:
    (tmp_path / "token").write_text("t")
    with tempfile.TemporaryDirectory(prefix="ebb") as short:
        command = [sys.executable, "-c", PRELOADED, f"{short}/hook.sock", str(tmp_path / "token")]
        parent = subprocess.Popen(command, stdin=subprocess.PIPE, cwd=ROOT)
        assert parent.stdin is not None
        try:
            end, never = time.monotonic() + 60, threading.Event()
            while True:
                with contextlib.suppress(OSError):
                    memory = Rest(f"{short}/hook.sock", "t").capabilities()["resources"]["memory_mib"]
                    if memory["maximum"] == 3 * 500:
                        break
                assert time.monotonic() < end, "not all of them answer"
                never.wait(0.05)
            assert memory["current"] < 1.5 * pss_mib(children(parent.pid))
        finally:
            parent.stdin.close()
            parent.kill()
            parent.wait(20)


def test_at_its_minimum_it_refuses_with_its_floor(tmp_path: Path) -> None:
    with embedded(tmp_path) as (service, rest):
        before_mib = service.pss_mib()
        assert before_mib < 32
        status, answer = rest.target("down", "deflate", 5)
        assert (status, answer["state"]) == (409, "refused")
        assert "its minimum is 32 MiB" in answer["reason"]
        assert answer["floor"]["memory_mib"] == pytest.approx(before_mib, abs=5)
