"""Benchmarks in tests: any number at once, and none may take a real one's lab or swap for its own leftovers."""

from __future__ import annotations

import os

import pytest

from benchmarks.host import alone


@pytest.fixture(autouse=True)
def apart(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> None:
    monkeypatch.setenv("EBB_STATE_DIR", str(tmp_path_factory.mktemp("benchmarks") / "state"))
    monkeypatch.setattr(alone, "LOCK", f"\0ebbtide-benchmark-in-tests-{os.getpid()}")
