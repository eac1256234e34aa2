"""What an operator finds in the manager's log after an incident, without its event table and without Prometheus."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from structlog.testing import capture_logs

from cluster_manager.inventory.hosts import Hosts
from cluster_manager.inventory.silence import Silence
from cluster_manager.store.periodic import due_after
from cluster_manager.store.store import Store
from tests.manager import cluster as clusters
from tests.manager.cluster import cluster_of, vm
from tests.manager.fake_agent import FakeAgent
from tests.manager.inventory.test_hosts import report

pytestmark = pytest.mark.usefixtures("each_store")


def lines(logs: Sequence[Any], event: str) -> list[tuple[str, Any, Any]]:
    return [(line["log_level"], line.get("vm"), line.get("host")) for line in logs if line["event"] == event]


async def test_what_a_report_brings_is_logged_and_its_trouble_as_a_warning(tmp_path: Path) -> None:
    store = Store(clusters.database_in(tmp_path), lambda: 0.0)
    await store.open()
    hosts = Hosts(store, 10.0, lambda: 0.0, lambda: 0.0)
    fine = report("host-a")
    with capture_logs() as logs:
        for said in (fine, fine.model_copy(update={"unavailable": "it has gone"}), fine):
            await hosts.take(said)
    assert lines(logs, "hypervisor") == [("warning", None, "host-a"), ("info", None, "host-a")]
    await store.close()


async def test_a_host_that_falls_silent_is_told_once_and_when_it_reports_again(tmp_path: Path) -> None:
    store, now = Store(clusters.database_in(tmp_path), lambda: 0.0), [0.0]
    await store.open()
    hosts = Hosts(store, 10.0, lambda: 0.0, lambda: now[0])
    silence = Silence(hosts, lambda: now[0])
    await hosts.take(report("host-a"))
    with capture_logs() as logs:
        for at in (5.0, 15.0, 30.0):
            now[0] = at
            await silence.look()
        await hosts.take(report("host-a"))
        await silence.look()
    assert lines(logs, "a host is silent") == [("warning", None, "host-a")]
    (back,) = [line for line in logs if line["event"] == "a host reports again"]
    assert (back["host"], back["silent_s"]) == ("host-a", 15.0)
    await store.close()


async def test_the_lines_of_an_operation_have_its_host_its_request_and_its_end(tmp_path: Path) -> None:
    with capture_logs() as logs:
        async with cluster_of(tmp_path, FakeAgent("host-a", cpu_cores=6.0, memory_mib=2400.0)) as cluster:
            await cluster.create(vm("low-1"))
            too_large = await cluster.create(vm("large", "fixed", 6.0, 9000.0))
            assert too_large.state == "failed"
    plans = [line for line in logs if line["event"] == "plan"]
    done = next(line for line in plans if line.get("state") == "done")
    assert (done["log_level"], done["host"], done["vm"], bool(done["request_id"])) == ("info", "host-a", "low-1", True)
    assert [line["vm"] for line in plans if line["log_level"] == "warning" and line["state"] == "failed"] == ["large"]


def test_work_on_the_beat_begins_as_often_however_long_it_takes() -> None:
    assert [due_after(15.0, ended, 15.0, True) for ended in (15.2, 29.0, 44.0)] == [30.0, 30.0, 44.0]
    assert due_after(15.0, 15.2, 15.0, False) == 30.2
