"""History as a real agent's VMs make it: what they use is told every two minutes, and after a change of size."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from cluster_manager.api.history import UNWANTED_S
from cluster_manager.history.packs import COLUMNS
from cluster_manager.history.recorder import Recorder
from tests.manager.cluster import vm
from tests.manager.with_agent import Lab, lab_of
from tests.waiting import until

pytestmark = pytest.mark.usefixtures("each_store")


@pytest.fixture
async def lab(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Lab]:
    monkeypatch.setattr("hostagent.control.reporter.USAGE_S", 0.1)
    async with lab_of(tmp_path) as made:
        yield made


async def sampled(lab: Lab, name: str) -> dict[str, float]:
    """What the recorder makes of a VM at this moment; NaN where it is not known."""
    assert lab.cluster.manager is not None
    recorder = lab.cluster.manager.recorder
    await recorder.look()
    known = recorder._hosts["host-a"]
    if known.sample is None or name not in known.names:
        return {}
    return dict(zip(COLUMNS, known.sample[known.names.index(name)].tolist(), strict=False))


async def test_layers_of_a_deflation_by_a_real_agent_add_up_to_what_is_missing(lab: Lab) -> None:
    await lab.create("low")
    made = await lab.cluster.create(vm("high", "fixed", cpu_cores=4.0, memory_mib=1400.0))
    assert made.state == "done", made.sentence
    found: dict[str, float] = {}

    async def told() -> bool:
        found.update(await sampled(lab, "low"))
        return found.get("bound_cpu_cores", 3.0) < 3.0 and found["guest_cpu_cores"] > 0

    await until(told)
    now = await lab.cluster.get("/v1/vms/low")
    for unit in ("cpu_cores", "memory_mib"):
        assert found[f"nominal_{unit}"] == now["nominal"][unit]
        assert found[f"bound_{unit}"] == now["current"][unit]
        held = found[f"guest_{unit}"] + found[f"hypervisor_{unit}"]
        assert found[f"nominal_{unit}"] - found[f"bound_{unit}"] == pytest.approx(held, abs=0.01)
        assert 0 <= found[f"application_{unit}"] <= found[f"guest_{unit}"]


async def test_an_agent_tells_a_manager_that_keeps_no_history_once_whatever_changes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hostagent.control.reporter.USAGE_S", 0.0)
    monkeypatch.setattr("cluster_manager.api.history.SAMPLED_EVERY_S", UNWANTED_S)
    told: list[str] = []
    monkeypatch.setattr(Recorder, "take", lambda self, host, usage: told.append(host))
    async with lab_of(tmp_path) as lab:
        await lab.create("low")
        await lab.cluster.delete("low")
        await lab.create("other")
    assert told == ["host-a"]
