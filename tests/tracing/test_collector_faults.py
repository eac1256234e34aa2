"""A collector that is away, silent or broken changes nothing of what is done, and holds up no end of a daemon."""

from __future__ import annotations

from pathlib import Path

import pytest

from ebbtide.lab.cluster import free_ports
from ebbtide.messages.operations import Operation, OperationState
from tests.manager.cluster import vm
from tests.tracing.collector import collecting
from tests.tracing.traced import Traced, traced

pytestmark = pytest.mark.service


def told(operation: Operation) -> list[tuple[str, float, float]]:
    """What the layers verified of what they were asked for."""
    return [(f"{row.layer} {row.resource}", row.asked, row.verified) for row in operation.vms[0].ledger]


async def deflated(cluster: Traced) -> Operation:
    assert (await cluster.create(vm("shop"))).state is OperationState.DONE
    await cluster.connected("shop")
    return await cluster.shrink("shop", "smaller", 600.0)


@pytest.mark.parametrize("fault", ["away", "silent", "broken"])
async def test_a_deflation_is_the_same_whatever_the_collector_does(tmp_path: Path, fault: str) -> None:
    async with collecting() as collector:
        environment = {}
        match fault:
            case "away":
                environment["OTEL_EXPORTER_OTLP_ENDPOINT"] = f"http://127.0.0.1:{free_ports(1)[0]}"
            case "silent":
                collector.answers.clear()
                environment["OTEL_EXPORTER_OTLP_TIMEOUT"] = "60"
            case "broken":
                collector.status = 500
        async with traced(tmp_path, collector, **environment) as cluster:
            operation = await deflated(cluster)
            assert operation.state is OperationState.DONE, operation.sentence
            assert told(operation) == [
                ("application memory_mib", 400.0, 100.0),
                ("guest memory_mib", 400.0, 400.0),
                ("hypervisor memory_mib", 0.0, 0.0),
            ]
            assert (collector.requests > 0) == (fault != "away")
            # What waits is given up after FLUSH_S; a daemon that waited for the collector would not end in time.
            assert [await cluster.end(name) for name in ("agent", "manager")] == [0, 0]
            for name in ("agent", "manager"):
                said = cluster.log(name)
                assert "Traceback" not in said, said[-2000:]
                assert said.count("spans are not sent") <= 1, "one complaint a minute"
            if fault == "silent":
                assert "the last spans were not sent" in cluster.log("manager")
            else:
                assert "spans are not sent" in cluster.log("manager")
    assert not collector.spans
