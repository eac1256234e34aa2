"""Two host agents and six real guests: `ebb demo --cluster` in a lab of its own, and what its document must show."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from ebb import paths
from ebb.demo.cluster import CAPACITY
from ebb.lab.cluster import HostSlice, Lab
from tests.guests.test_demo import virsh

pytestmark = [pytest.mark.guest, pytest.mark.timeout(900)]

LAYERS = ("application", "guest", "hypervisor")


@pytest.fixture(scope="module")
def document() -> Iterator[dict[str, Any]]:
    """One run for all tests of this file; nothing of it is left."""
    directory = Path(tempfile.mkdtemp(prefix="ebbtide-test-", dir="/var/tmp"))
    tag = directory.name.removeprefix("ebbtide-test-").replace("_", "x").lower()
    home = Lab(directory / "lab", report=print)
    try:
        directory.chmod(0o711)
        home.up([HostSlice(f"test-{tag}-{letter}", CAPACITY) for letter in "ab"])
        done = subprocess.run(
            [sys.executable, "-m", "ebb.main", "demo", "--cluster", "--json"],
            capture_output=True,
            text=True,
            timeout=800,
            check=False,
            env=dict(os.environ) | {paths.STATE_VARIABLE: str(home.directory)},
        )
        print(done.stderr)
        assert done.stdout, done.stderr
        left = [name for name in (virsh("list", "--all", "--name") or "").split() if tag in name]
        yield json.loads(done.stdout) | {"left": left}
    finally:
        home.down()
        shutil.rmtree(directory)


def test_every_check_of_the_script_passes(document: dict[str, Any]) -> None:
    assert len(document["checks"]) >= 10
    assert [check for check in document["checks"] if not check["ok"]] == []


def test_the_ledgers_of_all_deflations_are_the_fall_of_all_bounds(document: dict[str, Any]) -> None:
    """Read from libvirt, cgroup files and guests, by none of the agents."""
    assert {row["cause"] for row in document["deflations"]} == {"high-1", "high-2", "high-3"}
    assert len(document["deflations"]) == 6
    for resource, tolerance in (("cpu_cores", 0.011), ("memory_mib", 2.0)):
        fell = sum(row["before"][resource] - row["after"][resource] for row in document["deflations"])
        rows = [row for deflation in document["deflations"] for row in deflation["ledger"]]
        given = sum(
            row["verified"] for row in rows if row["resource"] == resource and row["layer"] in ("guest", "hypervisor")
        )
        assert given > 0
        assert given == pytest.approx(fell, abs=6 * tolerance)
        assert all(row["layer"] in LAYERS for row in rows)


def test_the_one_preemption_is_by_shortfall_and_names_the_layer(document: dict[str, Any]) -> None:
    (sentence,) = document["preemptions"]
    assert "reason shortfall" in sentence
    (check,) = [check for check in document["checks"] if check["name"] == "each shortfall names the layer that failed"]
    assert any(f"in layer {layer}" in check["detail"] for layer in LAYERS), check


def test_the_script_leaves_no_guest_behind(document: dict[str, Any]) -> None:
    assert document["left"] == []
