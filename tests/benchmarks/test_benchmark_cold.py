"""The benchmark `cold`: what its guest holds besides the loads is idle, and nobody touches it but between two cases."""

from __future__ import annotations

import itertools
import json
import os
import re
import socket
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from benchmarks.deflating import cold
from ebbtide.deflation.bounds import Bound
from ebbtide.deflation.cascade.instructions import Outcome
from ebbtide.deflation.resources import ResourceVector

ANON_MIB = 32


def referenced_mib(pid: int) -> float:
    said = re.search(r"^Referenced: +(\d+) kB", Path(f"/proc/{pid}/smaps_rollup").read_text(), re.MULTILINE)
    assert said is not None
    return int(said[1]) / 1024


def connected(place: Path) -> socket.socket:
    """Once somebody listens there."""
    end_s = time.monotonic() + 30.0
    while True:
        asking = socket.socket(socket.AF_UNIX)
        try:
            asking.connect(str(place))
            return asking
        except OSError:
            asking.close()
            assert time.monotonic() < end_s
            time.sleep(0.02)


def test_idle_memory_is_touched_when_it_is_to_be_idle_anew(tmp_path: Path) -> None:
    java, file, place = tmp_path / "java", tmp_path / "file", tmp_path / "load"
    java.write_text("#!/bin/sh\necho ready\nexec cat >/dev/null\n")
    java.chmod(0o755)
    file.write_bytes(bytes(2**20))
    argv = [sys.executable, "-S", str(cold.LOAD), str(ANON_MIB), "1", str(place), str(file)]
    with subprocess.Popen(argv, env={**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}"}) as load:
        try:
            asking = connected(place)
            Path(f"/proc/{load.pid}/clear_refs").write_text("1")
            assert referenced_mib(load.pid) < ANON_MIB / 2
            with asking:
                asking.sendall(b"anew")
                assert json.loads(asking.recv(64)) == {}
            assert referenced_mib(load.pid) >= ANON_MIB
        finally:
            load.kill()


def test_the_same_files_are_compiled_in_the_same_order_each_time(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(sys, "argv", ["load", "1", "1", "/socket", "/file"])
    names: dict[str, Any] = {}
    exec(cold.LOAD.read_text().removesuffix("main()\n"), names)  # noqa: S102 - it is no module: it runs in a guest
    clock, seen = itertools.count(), list[str]()
    names["time"] = SimpleNamespace(monotonic=lambda: len(seen) % 5, perf_counter=lambda: next(clock) / 1000)
    names["compile"] = lambda text, *given: seen.append(text.decode())
    names["SOURCES"] = [tmp_path / name for name in "abc"]
    for path in names["SOURCES"]:
        path.write_text(path.name)
    for _ in range(2):
        assert names["compiles"](4) == {"compile_median_ms": pytest.approx(1.0), "compile_files": 4}
        seen.append("|")
    assert "".join(seen) == "abca|" * 2


async def test_what_is_cold_was_left_alone_while_the_loads_worked_before_it_is_counted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    said: list[str] = []

    async def in_guest(guest: Any, script: str) -> str:
        asked = re.search(r'sendall\(b"(.*?)"\)', script)
        said.append(asked[1] if asked else script.rpartition(" ")[2])
        return "{}" if asked else "workingset_refault_file 256\n"

    class Driver:
        async def take(self, size: ResourceVector, means: Any) -> Outcome:
            bound = Bound(2, None, 1024.0, 0.0)
            return Outcome(bound, bound, size, (), ResourceVector(), 1.0, "")

        async def give_back(self) -> None:
            said.append("given back")

    monkeypatch.setattr(cold, "in_guest", in_guest)
    row = await cold._once(Driver(), None, cold.Case(0.5, True, True), 3.0)  # type: ignore[arg-type]
    assert said == [f">{cold.LRU}", "anew", "3", "/proc/vmstat", "3", "/proc/vmstat", "given back"]
    assert row["refaulted_mib"] == 0
