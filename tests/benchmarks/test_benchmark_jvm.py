"""The benchmark `jvm`: its parts, and one short pass with a real JVM under a real limit."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from benchmarks.engines import jvm
from benchmarks.engines.jvm import Window
from benchmarks.host.memory_group import UNLIMITED, memory_group
from benchmarks.host.swapfile import place
from benchmarks.passes import Pass


def test_ratios_are_taken_within_a_run_and_below_one_is_better() -> None:
    def windows(*means: float) -> list[Window]:
        return [Window(1.0, 1.0, mean / 2, mean * 10, mean) for mean in means]

    found = {
        (follows, share): windows(20, 40) if follows else windows(40, 50)
        for share in (1.0, *jvm.SHARES)
        for follows in (True, False)
    }
    figures = jvm._figures(found, "here")
    assert figures["follows_to_stays_50_mean"].runs == (0.5, 0.8)
    assert figures["follows_to_stays_75_p99"].value == 0.65
    assert "follows_to_stays_100_mean" not in figures
    assert figures["stays_50_mean_us"].value == 45


def test_both_are_warmed_up_and_get_the_limits_of_the_first(monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    full_mib = iter([400.0, 800.0])

    class Service:
        def warm(self, size: jvm.Size) -> float:
            said.append("warm")
            return next(full_mib)

        def at(self, limit_mib: float, follows: bool, size: jvm.Size) -> Window:
            said.append(f"{limit_mib:g}")
            return Window(1.0, 1.0, 1.0, 1.0, 1.0)

    @contextlib.contextmanager
    def service(*arguments: Any) -> Iterator[Service]:
        yield Service()

    monkeypatch.setattr(jvm, "service", service)
    group: Any = None
    jvm._run(0, group, Path(), jvm.QUICK, Pass(runs=1))
    assert said == ["warm", f"{UNLIMITED:g}", "300", "200"] * 2


@pytest.mark.service
def test_a_short_pass_measures_both_and_leaves_nothing_behind() -> None:
    figures = jvm.run(Pass(runs=1, quick=True))
    for share in (75, 50):
        assert figures[f"follows_to_stays_{share}_mean"].value > 0
        assert 0 < figures[f"follows_{share}_hit_ratio"].value <= 1
        assert figures[f"stays_{share}_hit_ratio"].value == 1
    assert not place().exists()
    with memory_group(jvm.GROUP) as group:
        path = group.path
        assert (path / "cgroup.procs").read_text() == ""
    assert not path.exists()
