"""`ebb plan rebalance --dry-run` and its route, with a manager on SQLite: what it says can be done; nothing changes."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from ebbtide.cli.main import app
from ebbtide.deflation.resources import ResourceVector
from ebbtide.errors import EbbError
from ebbtide.messages.common import Vector
from tests.manager.cluster import TOKEN, Cluster, cluster_of, vm
from tests.manager.execution.test_dry_runs import everything
from tests.manager.fake_agent import FakeAgent
from tests.manager.lifecycle import ask

SHRUNK = Vector(cpu_cores=1.5, memory_mib=650.0)


@pytest.fixture
async def cluster(quiet_logs: None, tmp_path: Path) -> AsyncIterator[Cluster]:
    """host-a is full of two deflated VMs; host-b is empty; host-c takes part in no live migration."""
    a, b, c = (FakeAgent(f"host-{name}", cpu_cores=6.0, memory_mib=2400.0) for name in "abc")
    async with cluster_of(tmp_path, a, b, c, silent_after_s=60.0) as made:
        for name in ("low-1", "low-2"):
            await made.create(vm(name), policy="first-fit")
        a.peers, b.peers = {"host-b": b}, {"host-a": a}
        a.capacity = ResourceVector(3.0, 1500.0)
        a.vms = {name: status.model_copy(update={"current": SHRUNK}) for name, status in a.vms.items()}
        await made.ready()
        yield made


async def ebb(cluster: Cluster, tmp_path: Path, *words: str) -> Any:
    token = tmp_path / "token"
    token.write_text(TOKEN)
    argv = ["plan", "rebalance", *words, "--manager", cluster.url, "--token-file", str(token)]
    return await asyncio.to_thread(CliRunner().invoke, app, argv)


async def test_the_moves_their_cost_and_what_they_give_back_are_shown_and_nothing_changes(
    cluster: Cluster, tmp_path: Path
) -> None:
    before = await everything(cluster)
    table = (await ebb(cluster, tmp_path, "--dry-run")).stdout
    assert "dry run, nothing is moved: 1 move, 650 MiB copied, 1.5 core-hours and 0.34 GiB-hours given back" in table
    assert "of 3 hosts 2 take part, 1 of them with deflated VMs, taken to have been so for 1800 s" in table
    (row,) = [line for line in table.splitlines() if line.startswith("low-1")]
    assert row.split()[:8] == ["low-1", "host-a", "host-b", "650", "MiB", "and", "its", "disk"]
    assert "2 VMs of host-a lack 3 cores, 700 MiB together, and host-b has 6 cores, 2400 MiB" in row
    assert "left out: host-c takes part in no live migration" in table
    printed = json.loads((await ebb(cluster, tmp_path, "--dry-run", "--lasted-s", "3600", "-o", "json")).stdout)
    assert (printed["lasted_s"], printed["core_hours"], printed["moves"][0]["vm"]) == (3600.0, 3.0, "low-1")
    assert await everything(cluster) == before


async def test_the_move_that_is_proposed_can_be_made_and_is_proposed_no_more(cluster: Cluster) -> None:
    async with cluster.client() as client:
        (move,) = (await client.dry_run_rebalancing()).moves
        moved = await ask(cluster, move.vm, "migrate", live=True, copy_storage=move.copies_disk, host=move.target)
        assert (moved.state, moved.host) == ("done", move.target)
        await cluster.ready()
        assert (await client.dry_run_rebalancing()).moves == ()


async def test_only_vms_of_the_managers_own_record_and_hosts_that_take_vms_count(cluster: Cluster) -> None:
    a, b, _ = cluster.agents
    a.vms["stranger"] = a.vms["low-1"].model_copy(update={"name": "stranger", "domain": "ebb-host-a.stranger"})
    del a.vms["low-1"]
    await cluster.ready()
    (move,) = (await cluster.get("/v1/rebalancing"))["moves"]
    assert move["vm"] == "low-2"
    b.unavailable = "it does not answer"
    await cluster.ready()
    found = await cluster.get("/v1/rebalancing")
    assert (found["moves"], found["hosts"], found["unready_hosts"]) == ([], 1, 1)


async def test_a_time_that_is_none_is_refused(cluster: Cluster) -> None:
    for value in ("-1", "86401", "long"):
        status, problem = await cluster.call("GET", f"/v1/rebalancing?lasted_s={value}")
        assert (status, problem["field"]) == (400, "lasted_s")


def test_without_dry_run_nothing_is_asked_and_how_to_move_one_is_said() -> None:
    result = CliRunner().invoke(app, ["plan", "rebalance", "--manager", "http://127.0.0.1:9"])
    assert result.exit_code == 1
    assert isinstance(result.exception, EbbError)
    assert "ebb vm migrate NAME --live" in str(result.exception)
    assert "--dry-run" in str(result.exception)
