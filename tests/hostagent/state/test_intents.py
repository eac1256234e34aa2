"""Intents that an agent of an earlier version has written."""

from __future__ import annotations

import json

import pytest

from hostagent.state.intents import from_element

SPEC = {"name": "web", "priority": "deflatable", "minimum": {"cpu_cores": 0.25, "memory_mib": 256}}


def element(spec: dict[str, object], **sizes: float) -> str:
    size = {name: {"cpu_cores": cores, "memory_mib": 1000} for name, cores in sizes.items()}
    body = {"owner": "host-a", "spec": SPEC | spec, "boot_mib": 512, "phase": "settled", **size}
    return f"<intent>{json.dumps(body)}</intent>"


@pytest.mark.parametrize("priority", ["deflatable", "harvest"])
def test_a_size_with_more_digits_than_are_sold_can_be_charged(priority: str) -> None:
    sold: dict[str, object] = {"nominal": {"cpu_cores": 1 / 3, "memory_mib": 1000}, "priority": priority}
    top = {"ceiling": {"cpu_cores": 7 / 3, "memory_mib": 1000}} if priority == "harvest" else {}
    cores = 2.333333 if top else 0.333333
    intent = from_element(element(sold | top, target=cores, committed=cores, held=cores))
    assert intent is not None
    assert intent.held is not None
    charged = intent.spec.allocation(intent.committed.vector()).current.cpu_cores
    assert charged == intent.target.cpu_cores == intent.held.cpu_cores == pytest.approx(cores, abs=1e-4)


def test_other_sizes_stay_as_they_are() -> None:
    intent = from_element(element({"nominal": {"cpu_cores": 2, "memory_mib": 1000}}, target=2.5, committed=1.25))
    assert intent is not None
    assert (intent.target.cpu_cores, intent.committed.cpu_cores) == (2.5, 1.25)
