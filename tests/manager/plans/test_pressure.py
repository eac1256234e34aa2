"""What a VM under pressure wants beyond its host is heard by the manager, once."""

from __future__ import annotations

from pathlib import Path

import pytest

from ebbtide.messages.common import Vector
from ebbtide.messages.operations import OperationState
from tests.manager.cluster import cluster_of, vm
from tests.manager.fake_agent import FakeAgent

pytestmark = pytest.mark.usefixtures("each_store")


async def test_what_a_vm_asks_for_beyond_its_host_is_an_event_each_time_it_begins(tmp_path: Path) -> None:
    agent = FakeAgent("host-a", cpu_cores=6.0, memory_mib=2400.0)
    async with cluster_of(tmp_path, agent) as cluster:
        assert (await cluster.create(vm("low-1"))).state is OperationState.DONE
        calm = agent.vms["low-1"]
        asking = calm.model_copy(update={"pressure": "under memory pressure", "asks": Vector(memory_mib=300)})
        for status in (asking, asking, calm, asking):
            agent.vms["low-1"] = status
            await agent.send_report()
        sentences = [row["sentence"] for row in await cluster.events("pressure")]
        assert sentences == ["low-1 is under pressure and asks for 300 MiB beyond what host-a can spare"] * 2
