"""Migrations through the manager's API: whatever fails, the VM runs in one place in the end, or it says why not."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from ebbtide.deflation.modes import HostMode
from ebbtide.messages.hosts import HostTemplate
from ebbtide.messages.operations import OperationState
from ebbtide.messages.vms import VMState
from tests.manager.cluster import Cluster, cluster_of, vm
from tests.manager.fake_agent import FakeAgent
from tests.manager.fake_lifecycle import runs
from tests.manager.lifecycle import ask, consistent, seen, send, watch_for_two
from tests.waiting import until

pytestmark = pytest.mark.usefixtures("each_store")


@pytest.fixture
async def cluster(tmp_path: Path) -> AsyncIterator[Cluster]:
    """host-a with two low-priority VMs of 3 cores on its 6, and host-b, which has room for one."""
    first = FakeAgent("host-a", cpu_cores=6.0, memory_mib=2400.0)
    second = FakeAgent("host-b", cpu_cores=4.0, memory_mib=1500.0)
    async with cluster_of(tmp_path, first, second) as made:
        for name in ("low-1", "low-2"):
            assert (await made.create(vm(name), policy="first-fit")).host == "host-a"
        yield made


async def fill(cluster: Cluster, agent: FakeAgent) -> None:
    """A VM on the agent's host, so that there is no room without a deflation."""
    for other in cluster.agents:
        names = ("lab", "here") if other is agent else ("lab",)
        other.templates = tuple(HostTemplate(name=name) for name in names)
    await cluster.ready()
    made = await cluster.create(vm("low-3", cpu_cores=3.0, memory_mib=900.0, template="here"))
    assert made.host == agent.id


async def test_a_migration_finds_room_first_and_never_runs_two(cluster: Cluster) -> None:
    first, second = cluster.agents
    await fill(cluster, second)
    status, problem = await send(cluster, "low-1", "migrate", host="host-b", request_id="r1")
    assert (status, problem["field"]) == (409, "lose_disk")
    both = watch_for_two(cluster.agents, "low-1")
    moved = await ask(cluster, "low-1", "migrate", host="host-b", lose_disk=True)
    assert moved.state is OperationState.DONE, moved.sentence
    assert moved.sentence == "moved low-1 from host-a to host-b"
    assert both == []
    assert [kind for kind, _ in second.done][-2:] == ["reclaim", "create"]
    assert [kind for kind, name in first.done if name == "low-1"] == ["create", "stop", "delete"]
    await consistent(cluster)
    row = await seen(cluster, "low-1")
    assert (row["state"], row["host"]) == ("running", "host-b")


async def test_a_shared_disk_needs_no_leave_to_be_lost(cluster: Cluster) -> None:
    first, second = cluster.agents
    first.templates = second.templates = (HostTemplate(name="lab", shared_disk=True),)
    await cluster.ready()
    moved = await ask(cluster, "low-1", "migrate")
    assert (moved.state, moved.host) == (OperationState.DONE, "host-b")


async def test_a_vm_that_cannot_be_stopped_runs_where_it_was(cluster: Cluster) -> None:
    first, second = cluster.agents
    first.trouble.fails["stop"] = "the guest is stuck"
    failed = await ask(cluster, "low-1", "migrate", lose_disk=True)
    assert (failed.state, "the guest is stuck" in failed.sentence) == (OperationState.FAILED, True)
    assert runs(first.vms["low-1"])
    assert "low-1" not in second.vms
    await consistent(cluster)


async def test_a_vm_that_does_not_start_elsewhere_is_off_where_it_was_and_its_owner_starts_it_there(
    cluster: Cluster,
) -> None:
    first, second = cluster.agents
    second.trouble.fails["create"] = "it does not boot"
    failed = await ask(cluster, "low-1", "migrate", lose_disk=True)
    assert (failed.state, "it does not boot" in failed.sentence) == (OperationState.FAILED, True)
    assert "off on host-a, where it can be started" in failed.sentence
    assert "low-1" in first.vms, "with its disk"
    assert "low-1" not in second.vms
    row = await seen(cluster, "low-1")
    assert (row["state"], row["host"], row["sentence"]) == ("stopped", "host-a", failed.sentence)
    assert (await ask(cluster, "low-1", "start")).state is OperationState.DONE
    assert runs(first.vms["low-1"])
    await consistent(cluster)


async def test_a_migration_without_a_place_stops_nothing(cluster: Cluster) -> None:
    first, second = cluster.agents
    await cluster.create(vm("high-1", "fixed", 3.5, 1300.0), policy="best-fit")
    assert "high-1" in second.vms
    failed = await ask(cluster, "low-1", "migrate", lose_disk=True)
    assert failed.state is OperationState.FAILED
    assert "no ready host has 3 cores" in failed.sentence
    assert "(host-b has " in failed.sentence
    assert "stop" not in first.arrived
    assert (await seen(cluster, "low-1"))["state"] == "running"


async def test_a_migration_says_so_where_no_other_host_is_ready(cluster: Cluster) -> None:
    cluster.agents[1].mode = HostMode.DRAINING
    await cluster.ready()
    failed = await ask(cluster, "low-1", "migrate", lose_disk=True)
    assert failed.sentence == "low-1 stays on host-a: no other host is ready"


async def test_a_start_whose_answer_is_lost_is_waited_for_and_not_tried_twice(cluster: Cluster) -> None:
    _, second = cluster.agents
    both = watch_for_two(cluster.agents, "low-1")
    second.trouble.hangs_at = len(second.arrived) + 1
    assert (await send(cluster, "low-1", "migrate", lose_disk=True))[0] == 202
    await second.hanging.wait()
    second.trouble.mute = True

    async def waiting() -> bool:
        progress = (await cluster.get("/v1/operations/migrate-low-1"))["progress"]
        return any("waiting for host-b" in sentence for sentence in progress)

    await until(waiting)
    assert (await cluster.get("/v1/vms/low-1"))["state"] == "migrating"
    second.trouble.mute, second.trouble.hangs_at = False, None
    moved = await cluster.ended("migrate-low-1")
    assert moved.state is OperationState.DONE, moved.sentence
    assert both == []
    await consistent(cluster)


async def test_a_vm_that_is_off_moves_and_starts_there(cluster: Cluster) -> None:
    _, second = cluster.agents
    await ask(cluster, "low-1", "stop")
    moved = await ask(cluster, "low-1", "migrate", lose_disk=True)
    assert moved.state is OperationState.DONE
    assert runs(second.vms["low-1"])
    await consistent(cluster)


@pytest.mark.parametrize("verb", ["migrate", "start"])
async def test_a_vm_that_powered_off_by_itself_is_kept_off_before_it_is_started_elsewhere(
    cluster: Cluster, verb: str
) -> None:
    first, second = cluster.agents
    # Whoever has started it again since that report would have it run twice.
    first.vms["low-1"] = first.vms["low-1"].model_copy(update={"state": VMState.STOPPED})
    if verb == "start":
        first.mode = HostMode.DRAINING
    await cluster.ready()
    moved = await ask(cluster, "low-1", verb, lose_disk=True, **({"anywhere": True} if verb == "start" else {}))
    assert moved.state is OperationState.DONE, moved.sentence
    assert [kind for kind, name in first.done if name == "low-1"] == ["create", "stop", "delete"]
    assert runs(second.vms["low-1"])
    await consistent(cluster)


async def test_a_migration_to_nowhere_is_refused(cluster: Cluster) -> None:
    for host, status in (("host-a", 409), ("host-z", 404)):
        answer = await send(cluster, "low-1", "migrate", host=host, lose_disk=True, request_id=f"to-{host}")
        assert (answer[0], answer[1]["field"]) == (status, "host")
    assert (await send(cluster, "nobody", "migrate", lose_disk=True))[0] == 404


# --- when a host does not answer -------------------------------------------------------------------------------------


async def moving(cluster: Cluster, **body: Any) -> None:
    """Ask for low-1 to be moved to host-b, and go on at once."""
    status, answer = await send(cluster, "low-1", "migrate", lose_disk=True, **body)
    assert status == 202, answer


async def told(cluster: Cluster, said: str) -> None:
    """Until the migration says so."""

    async def says() -> bool:
        progress = (await cluster.get("/v1/operations/migrate-low-1"))["progress"]
        return any(said in sentence for sentence in progress)

    await until(says)


async def runs_on(cluster: Cluster, host: str) -> None:
    """Until low-1 runs there, by its host and by the manager, with every plan at its end."""
    assert cluster.manager is not None
    manager = cluster.manager

    async def there() -> bool:
        row = await seen(cluster, "low-1")
        return (row["state"], row["host"]) == ("running", host) and not await manager.store.unfinished_plans()

    await until(there)
    await consistent(cluster)


async def later(cluster: Cluster, seconds: float) -> None:
    """Let time pass, as the test is about who has patience."""
    end = asyncio.get_running_loop().time() + seconds
    await until(lambda: asyncio.get_running_loop().time() >= end)


async def test_a_migration_that_fails_while_its_old_host_is_away_leaves_the_vm_to_its_owner(cluster: Cluster) -> None:
    first, second = cluster.agents
    second.trouble.never_ends = True
    await moving(cluster)
    async with asyncio.timeout(10):
        await second.polled.wait()
    await first.die()
    second.trouble.fails["create"] = "it does not boot"
    second.end_pending()
    failed = await cluster.ended("migrate-low-1")
    assert (failed.state, "it does not boot" in failed.sentence) == (OperationState.FAILED, True)
    await first.revive()
    row = await seen(cluster, "low-1")
    assert (row["state"], row["host"]) == ("stopped", "host-a")
    assert (await ask(cluster, "low-1", "start")).state is OperationState.DONE
    await runs_on(cluster, "host-a")


@pytest.mark.parametrize("carried_out", [False, True], ids=["not-started-there", "started-there"])
async def test_a_migration_to_a_host_that_goes_silent_ends_and_the_vm_can_be_started_on_its_host_once_that_is_safe(
    cluster: Cluster, carried_out: bool
) -> None:
    first, second = cluster.agents
    both = watch_for_two(cluster.agents, "low-1")
    second.trouble.hangs_at, second.trouble.carries_out = len(second.arrived) + 1, carried_out
    await moving(cluster, deadline_s=1.0)
    async with asyncio.timeout(10):
        await second.hanging.wait()
    await second.die()
    failed = await cluster.ended("migrate-low-1")
    assert failed.state is OperationState.FAILED
    assert "may have been started on host-b, which does not say" in failed.sentence
    assert not runs(first.vms["low-1"]), "as long as it may run elsewhere"
    status, problem = await send(cluster, "low-1", "start")
    assert (status, "low-1 is migrating" in problem["detail"]) == (409, True)
    await second.revive()

    async def safe() -> bool:
        return bool((await seen(cluster, "low-1"))["state"] == "stopped")

    await until(safe)
    assert (await ask(cluster, "low-1", "start", request_id="start-it")).state is OperationState.DONE
    await runs_on(cluster, "host-a")
    assert both == []


@pytest.mark.parametrize("carried_out", [False, True], ids=["not-stopped", "stopped"])
async def test_a_stop_whose_answer_is_lost_ends_the_migration_and_the_hosts_report_says_whether_the_vm_runs(
    cluster: Cluster, carried_out: bool
) -> None:
    first, second = cluster.agents
    first.trouble.hangs_at, first.trouble.carries_out = len(first.arrived) + 1, carried_out
    await moving(cluster)
    async with asyncio.timeout(10):
        await first.hanging.wait()
    await first.die(forget=not carried_out)
    failed = await cluster.ended("migrate-low-1")
    assert (failed.state, "host-a's next report says" in failed.sentence) == (OperationState.FAILED, True)
    await first.revive()
    row = await seen(cluster, "low-1")
    assert (row["state"], row["host"]) == ("stopped" if carried_out else "running", "host-a")
    assert "low-1" not in second.vms
    if carried_out:
        assert (await ask(cluster, "low-1", "start")).state is OperationState.DONE
    await runs_on(cluster, "host-a")


@pytest.mark.parametrize("left", [True, False], ids=["still-there", "gone"])
async def test_what_is_left_at_home_goes_when_its_host_is_back_and_nobody_waits_for_it(
    cluster: Cluster, left: bool
) -> None:
    first, second = cluster.agents
    second.trouble.never_ends = True
    await moving(cluster, deadline_s=1.0)
    async with asyncio.timeout(10):
        await second.polled.wait()
    await first.die()
    second.end_pending()
    moved = await cluster.ended("migrate-low-1")
    assert moved.state is OperationState.DONE
    assert "what is left on host-a goes when that answers" in moved.sentence
    row = await cluster.get("/v1/vms/low-1")
    assert (row["state"], row["host"]) == ("running", "host-b")
    if not left:
        del first.vms["low-1"]
    await first.revive()
    await runs_on(cluster, "host-b")
    assert first.done.count(("delete", "low-1")) == left
