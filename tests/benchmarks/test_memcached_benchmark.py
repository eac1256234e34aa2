"""`make bench NAME=memcached --quick`: real swap, a real control group, a real memcached. Needs root."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from benchmarks.__main__ import app
from benchmarks.host import swapfile
from benchmarks.host.confined import CGROUPS, NAME
from tests.benchmarks.swaps import SwapsIn

pytestmark = pytest.mark.service


def test_a_quick_pass_measures_both_arms_and_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EBB_STATE_DIR", str(tmp_path / "state"))
    monkeypatch.setattr(swapfile, "PROC_SWAPS", SwapsIn(tmp_path))
    done = CliRunner().invoke(app, ["memcached", "--quick", "--runs", "1", "--output", str(tmp_path), "--json"])
    assert done.exit_code == 0, done.output
    figures = json.loads((tmp_path / "memcached.json").read_text())["figures"]
    assert figures["application_to_hypervisor_zipf_4k_50_5000"]["value"] > 1
    assert figures["application_zipf_4k_50_5000_major_faults_per_get"]["value"] < 0.001
    assert figures["hypervisor_zipf_4k_50_5000_major_faults_per_get"]["value"] > 0.05
    assert 0.8 < figures["application_zipf_4k_50_5000_to_ideal_lru"]["value"] < 1.1
    assert figures["shrink_errors"]["value"] == 0
    assert {path.name for path in tmp_path.glob("memcached.*")} == {"memcached.json", "memcached.csv", "memcached.png"}
    # Other tests beside this one have swap files of their own.
    assert str(tmp_path) not in Path("/proc/swaps").read_text()
    assert not (CGROUPS / "memory" / NAME).exists()
