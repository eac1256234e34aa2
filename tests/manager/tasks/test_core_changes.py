"""From a deflation to a ranking of machines: the whole chain over HTTP."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from cluster_manager.inventory.hosts import Hosts
from cluster_manager.plans.plans import VMPhase
from cluster_manager.store.database import Database
from cluster_manager.store.store import Store
from cluster_manager.tasks.core_changes import CoreChanges
from ebbtide.deflation.modes import HostMode
from ebbtide.messages.machines import CoreChange
from ebbtide.messages.operations import OperationState
from ebbtide.messages.vms import VMState
from ebbtide.rest.credentials import report_token
from tests.manager.cluster import cluster_of, vm
from tests.manager.fake_agent import HOSTS_KEY, FakeAgent
from tests.manager.plan_events import record, report_of
from tests.manager.plans.test_live_migration_plans import HERE, SPEC, begun, read
from tests.waiting import until

#: Once on each kind of store.
pytestmark = pytest.mark.usefixtures("each_store")

REPORT_TOKEN = report_token(HOSTS_KEY, "host-a")


def host() -> FakeAgent:
    return FakeAgent("host-a", cpu_cores=6.0, memory_mib=2400.0)


async def test_a_deflation_and_a_reinflation_become_changes_and_a_ranking(tmp_path: Path) -> None:
    async with cluster_of(tmp_path, agent := host()) as cluster:
        for name in ("low-1", "low-2"):
            await cluster.create(vm(name))
        before = (await cluster.get("/v1/machines"))["machines"]
        assert [row["completion_probability"] for row in before] == [None, None]
        await cluster.create(vm("high-1", "fixed", 3.0, 800.0))
        await cluster.delete("high-1")
        await agent.send_report()
        changes = (await cluster.get("/v1/core-changes?machine=low-1"))["core_changes"]
        assert [(row["cores_before"], row["cores_after"]) for row in changes] == [(1.5, 3.0), (3.0, 1.5), (0.0, 3.0)]
        rows = (await cluster.get("/v1/machines?duration_s=0"))["machines"]
        assert [(row["machine"], row["cores"], row["last_change"]) for row in rows] == [
            ("low-1", 3, "growth"),
            ("low-2", 3, "growth"),
        ]
        one = await cluster.get("/v1/machines/low-2?duration_s=30")
        assert (one["machine"], one["duration_s"]) == ("low-2", 30.0)
        assert one["since_change_s"] >= 0


async def test_the_probability_is_equation_1_over_the_pool(tmp_path: Path) -> None:
    async with cluster_of(tmp_path, agent := host()) as cluster:
        assert cluster.manager is not None
        await record(cluster.manager.store, "before", agent.id, VMPhase.ENDED)
        now = time.time()
        agent.add_change("before", 0.0, 2.0, at=now - 1700.0)
        # Eight changes, 1000 s after its start and then every 100 s, a shrink first, a growth last.
        for number in range(8):
            before, after = (1.0, 2.0) if number % 2 else (2.0, 1.0)
            agent.add_change("before", before, after, at=now - 700.0 + 100.0 * number)
        await agent.send_report()
        for name in ("low-1", "low-2"):
            await cluster.create(vm(name, cpu_cores=2.0))
        await agent.send_report()
        rows = {row["machine"]: row for row in (await cluster.get("/v1/machines?duration_s=50"))["machines"]}
        # Eight intervals, none of which ends within 50 s of a change.
        assert rows["low-1"]["completion_probability"] == 1.0
        assert rows["low-1"]["since_change_s"] < 50.0
        rows = {row["machine"]: row for row in (await cluster.get("/v1/machines?duration_s=500"))["machines"]}
        # Only shrinks followed on growths, and one interval of eight is longer than 500 s: P_c = 1 - 1 * (1 - 1/8).
        assert rows["low-1"]["completion_probability"] == pytest.approx(1 / 8)
        assert rows["low-2"]["completion_probability"] == pytest.approx(1 / 8)


async def test_changes_are_acknowledged_once_and_outlive_a_restart(tmp_path: Path) -> None:
    async with cluster_of(tmp_path, agent := host()) as cluster:
        await cluster.create(vm("low-1"))
        await agent.send_report()
        assert agent.changes == []
        report = agent.report().model_dump(mode="json")
        agent.add_change("low-1", 3.0, 1.0)
        late = {**report, "core_changes": [change.model_dump(mode="json") for change in agent.changes]}
        for _ in range(3):
            url = "/v1/hosts/host-a/report"
            status, reply = await cluster.call("POST", url, token=REPORT_TOKEN, json=late)
            assert (status, reply["acknowledged"]) == (200, 2)
        await cluster.kill_manager()
        await cluster.start_manager()
        status, reply = await cluster.call("POST", "/v1/hosts/host-a/report", token=REPORT_TOKEN, json=report)
        assert (reply["acknowledged"], reply["epoch"]) == (2, 2)
        assert len((await cluster.get("/v1/core-changes"))["core_changes"]) == 2


async def test_a_deletion_by_its_owner_is_no_shrink_but_a_preemption_is(tmp_path: Path) -> None:
    async with cluster_of(tmp_path, agent := host()) as cluster:
        assert cluster.manager is not None
        await cluster.create(vm("low-1"))
        await cluster.delete("low-1")
        for name in ("low-2", "low-3"):
            await cluster.create(vm(name))
        await cluster.create(vm("high-1", "fixed", 5.3, 800.0))
        await agent.send_report()
        stored = await cluster.manager.store.core_changes_since(0.0)
        ends = {row.machine: row.by_owner for row in stored if row.cores_after == 0}
        (preempted,) = {"low-2", "low-3"} - agent.running
        assert ends == {"low-1": True, preempted: False}
        fixed = {row.machine for row in stored if not row.variable}
        assert fixed == {"high-1"}


async def test_a_deletion_that_was_refused_makes_a_later_preemption_no_owners_wish(tmp_path: Path) -> None:
    async with cluster_of(tmp_path, agent := host()) as cluster:
        assert cluster.manager is not None
        await cluster.create(vm("low-1"))
        agent.trouble.refuses = 409
        assert (await cluster.delete("low-1")).state is OperationState.FAILED
        agent.trouble.refuses = None
        assert (await cluster.create(vm("high-1", "fixed", 6.0, 800.0))).state is OperationState.DONE
        assert "low-1" not in agent.running
        await agent.send_report()
        stored = await cluster.manager.store.core_changes_since(0.0)
        newest = [row for row in stored if row.machine == "low-1"][-1]
        assert (newest.cores_after, newest.by_owner) == (0.0, False)


async def test_a_deletion_that_failed_on_its_way_is_its_owners_wish_when_its_host_ends_it(tmp_path: Path) -> None:
    async with cluster_of(tmp_path, agent := host()) as cluster:
        assert cluster.manager is not None
        await cluster.create(vm("low-1"))
        agent.trouble.fails["delete"] = "its disk is busy"
        assert (await cluster.delete("low-1")).state is OperationState.FAILED
        agent.add_change("low-1", 3.0, 0.0, cause=agent.bodies[-1]["request_id"])
        await agent.send_report()
        stored = await cluster.manager.store.core_changes_since(0.0)
        newest = [row for row in stored if row.machine == "low-1"][-1]
        assert (newest.cores_after, newest.by_owner) == (0.0, True)


async def test_a_fixed_vm_shows_its_last_change_but_neither_teaches_nor_has_a_probability(tmp_path: Path) -> None:
    async with cluster_of(tmp_path, agent := host()) as cluster:
        await cluster.create(vm("low-1"))
        await cluster.create(vm("high-1", "fixed", 2.0, 500.0))
        now = time.time()
        for number, (before, after) in enumerate([(2.0, 1.0), (1.0, 2.0), (2.0, 1.0)]):
            agent.add_change("high-1", before, after, at=now + number + 1.0)
        await agent.send_report()
        rows = {row["machine"]: row for row in (await cluster.get("/v1/machines?duration_s=0"))["machines"]}
        assert (rows["high-1"]["last_change"], rows["high-1"]["since_change_s"]) == ("shrink", 0.0)
        assert rows["high-1"]["completion_probability"] is None
        # The only completed intervals are the fixed VM's.
        assert rows["low-1"]["completion_probability"] is None


async def test_machines_that_are_gone_with_their_host_teach_no_more(tmp_path: Path) -> None:
    agent, other = host(), FakeAgent("host-b", cpu_cores=6.0, memory_mib=2400.0)
    async with cluster_of(tmp_path, agent, other) as cluster:
        for name in ("low-1", "low-2"):
            await cluster.create(vm(name), policy="first-fit")
        agent.mode = HostMode.DRAINING
        await cluster.ready()
        await cluster.create(vm("low-3"))
        assert set(agent.vms) == {"low-1", "low-2"}
        await cluster.ready()
        await agent.die()

        async def silent() -> bool:
            return bool((await cluster.get("/v1/hosts/host-a"))["state"] == "silent")

        await until(silent)
        assert cluster.manager is not None
        gone_at = time.time()
        assert (await cluster.call("DELETE", "/v1/hosts/host-a?lost_vms=true"))[0] == 200
        for _ in range(2):
            lasts = cluster.manager.core_changes.predictor.lasts()
            assert {name: (last.cores, last.gone) for name, last in lasts.items()} == {
                "low-1": (0, True),
                "low-2": (0, True),
                "low-3": (3, False),
            }
            assert lasts["low-1"].at < gone_at, "nobody has seen its cores since"
            # As nobody took them away, that is no shrink.
            newest = {row.machine: row for row in await cluster.manager.store.core_changes_since(0.0)}
            assert {name: (row.cores_before, row.by_owner) for name, row in newest.items()} == {
                "low-1": (3.0, True),
                "low-2": (3.0, True),
                "low-3": (0.0, False),
            }
            await cluster.kill_manager()
            await cluster.start_manager()


async def test_where_a_vm_is_to_move_nothing_is_said_of_it_as_long_as_its_host_says_that_it_runs(
    database: Database,
) -> None:
    store, now_s = Store(database, time.time), 100.0
    await store.open()
    hosts = Hosts(store, 10.0, time.time, lambda: now_s)
    changes = CoreChanges(store, hosts, time.time)
    await record(store, SPEC.name, "home")
    await store.add_plan(begun(), "")
    await store.save_step(begun().next_step(read("home", HERE)).state, ())

    async def taken(sequence: int) -> bool:
        told = CoreChange(
            sequence=sequence, machine=SPEC.name, host="away", at=time.time(), cores_before=3.0, cores_after=0.0,
            cause="told",
        )  # fmt: skip
        await changes.take(report_of("away").model_copy(update={"core_changes": (told,)}))
        return sequence in {change.sequence for change in await store.core_changes_of("away", 0)}

    for sequence, state in enumerate((VMState.RUNNING, VMState.PAUSED, VMState.MIGRATING, VMState.STOPPED), 1):
        await hosts.take(report_of("home", HERE.model_copy(update={"state": state})))
        assert await taken(sequence) == (state in (VMState.MIGRATING, VMState.STOPPED))
    await hosts.take(report_of("home", HERE))
    assert not await taken(5)
    # It may have moved since its host was last heard.
    now_s += 60.0
    assert await taken(6)
    await store.close()
