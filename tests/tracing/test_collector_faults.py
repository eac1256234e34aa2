"""A collector that is away, broken or silent changes nothing of what is done, and holds up no end of a daemon."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from ebbtide.messages.operations import OperationState
from ebbtide.tracing.exporting import exporting
from ebbtide.tracing.otlp import COMPLAINT_S
from ebbtide.tracing.spans import operation
from tests.manager.cluster import vm
from tests.tracing.collector import Collector, collecting
from tests.tracing.traced import Traced, traced
from tests.waiting import until

pytestmark = pytest.mark.service


async def deflates(cluster: Traced, fault: str, memory_mib: float) -> None:
    """By 100 MiB more, of which each is verified."""
    ended = await cluster.shrink("shop", fault, memory_mib)
    assert ended.state is OperationState.DONE, f"{fault}: {ended.sentence}"
    (outcome,) = ended.vms
    verified = {row.layer.value: row.verified for row in outcome.ledger if row.resource == "memory_mib"}
    assert verified["guest"] + verified["hypervisor"] == 100.0, fault
    assert outcome.after.memory_mib == memory_mib, fault


async def test_deflations_are_the_same_whatever_the_collector_does(tmp_path: Path) -> None:
    began = asyncio.get_running_loop().time()
    brief = {"OTEL_EXPORTER_OTLP_TIMEOUT": "1"}
    async with collecting() as collector, traced(tmp_path, collector, **brief) as cluster:
        await collector.go_away()
        assert (await cluster.create(vm("shop"))).state is OperationState.DONE
        await cluster.connected("shop")
        await deflates(cluster, "away", 900.0)
        await until(lambda: all("spans are not sent" in cluster.log(name) for name in ("agent", "manager")))

        collector.status = 500
        await collector.come_back()
        await deflates(cluster, "broken", 800.0)
        await until(lambda: collector.requests > 0)

        collector.answers.clear()
        await deflates(cluster, "silent", 700.0)
        await until(lambda: collector.held > 0)
        # A daemon that waited for the collector would not end in time.
        assert [await cluster.end(name) for name in ("agent", "manager")] == [0, 0]
        most = 1 + (asyncio.get_running_loop().time() - began) // COMPLAINT_S
        for name in ("agent", "manager"):
            said = cluster.log(name)
            assert "Traceback" not in said, said[-2000:]
            assert said.count("spans are not sent") <= most, "one complaint a minute"
        assert not collector.spans


async def test_a_collector_that_comes_back_gets_what_is_done_from_then_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "20")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "1")

    def done(collector: Collector) -> bool:
        with operation("operation target"):
            pass
        return bool(collector.spans)

    async with collecting() as collector:
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", collector.url)
        await collector.go_away()
        async with exporting(True, "ebb-manager"):
            assert not done(collector)
            await collector.come_back()
            await until(lambda: done(collector))
