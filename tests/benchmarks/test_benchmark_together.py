"""The benchmark `together`: one short pass with real applications under real limits."""

from __future__ import annotations

import re

import pytest

from benchmarks.deflating import together
from benchmarks.engines import jvm
from benchmarks.host import swapfile
from benchmarks.host.confined import CGROUPS
from benchmarks.passes import Pass
from tests.benchmarks.swaps import SwapsIn


def test_a_jvm_is_offered_more_than_its_core_can_answer() -> None:
    """At a load below that, what it keeps is decided by how far below."""
    threads, interval_ns = (
        int(re.search(rf"{name} = ([0-9_]+);", jvm.SOURCE.read_text())[1].replace("_", ""))  # type: ignore[index]
        for name in ("THREADS", "INTERVAL_NS")
    )
    assert threads * 1e9 / interval_ns == together.OFFERED_S
    assert together.OFFERED_S * together.WORK_US / 1e6 >= 1.2 * together.CORES


@pytest.mark.service
def test_a_short_pass_measures_all_applications_and_leaves_nothing_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(swapfile, "PROC_SWAPS", SwapsIn(swapfile.place()))
    said: list[str] = []
    figures = together.run(Pass(runs=1, quick=True, report=said.append))
    shares = [f"{share:.0%}".removesuffix("%") for share in together.SHARES]
    names = ("memcached", "jvm", "jvm_response", "compile")
    beside = {"memcached_begun_again", "jvm_begun_again", "jvm_cores"}
    assert set(figures) == {f"{name}_{share}" for name in names for share in shares} | beside
    # A load that hardly uses what is taken would keep all of its requests.
    assert figures["jvm_cores"].value > 0.1
    # Two processes of a compile that have a quarter of a core take longer than with all of it.
    assert 0 < figures["compile_75"].value < 0.7
    assert sum("keeps" in sentence for sentence in said) == len(shares)
    assert not swapfile.place().exists()
    assert not list(CGROUPS.glob("*/ebbtide-bench-together"))
