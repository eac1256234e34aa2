"""Rows of the store that cannot be read, damaged or of a later version: told of, and the rest goes on."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import Table, select, update

from cluster_manager.store import schema
from ebbtide.messages.operations import OperationState
from tests.manager.cluster import Cluster, cluster_of, vm
from tests.manager.fake_agent import FakeAgent
from tests.manager.fake_engine import FakeEngine, settings
from tests.waiting import until

pytestmark = pytest.mark.usefixtures("each_store")


def host(name: str) -> FakeAgent:
    return FakeAgent(name, cpu_cores=6.0, memory_mib=2400.0)


async def damage(cluster: Cluster, table: Table, name: str, stored: str) -> None:
    """Have the row of a VM, or of a request's plan, unreadable; ``later``: by a field of a later version."""
    assert cluster.manager is not None
    store, plans = cluster.manager.store, table is schema.plans
    column, mine = ("state", table.c.request_id == name) if plans else ("spec", table.c.name == name)
    (row,) = await store.rows(select(table.c[column]).where(mine))
    text = json.dumps({**json.loads(row[0]), "of_a_later_version": 1}) if stored == "later" else stored
    await store._write(lambda connection: connection.execute(update(table).where(mine).values({column: text})))


async def change(cluster: Cluster, table: Table, name: str, **columns: str) -> None:
    """Have columns of a row be otherwise."""
    assert cluster.manager is not None
    statement = update(table).where(table.c.name == name).values(**columns)
    await cluster.manager.store._write(lambda connection: connection.execute(statement))


async def started_again(cluster: Cluster) -> None:
    await cluster.kill_manager()
    await cluster.start_manager()
    await cluster.ready()


async def shown(cluster: Cluster, path: str, key: str, by: str) -> dict[str, Any]:
    return {row[by]: row for row in (await cluster.get(path))[key]}


async def running(cluster: Cluster) -> set[str]:
    return {name for name, row in (await shown(cluster, "/v1/vms", "vms", "name")).items() if row["state"] == "running"}


@pytest.mark.parametrize(
    ("stored", "why"), [("{", "EOF"), ("later", "of_a_later_version"), ("[]", "should be an object")]
)
async def test_a_vm_whose_stored_spec_cannot_be_read_is_shown_as_its_host_has_it_and_nothing_is_decided_by_it(
    tmp_path: Path, stored: str, why: str
) -> None:
    agent = host("host-a")
    async with cluster_of(tmp_path, agent) as cluster:
        for name in ("low-1", "low-2"):
            assert (await cluster.create(vm(name, cpu_cores=2.0, on_preemption="delete"))).state is OperationState.DONE
        await damage(cluster, schema.vms, "low-1", stored)
        await started_again(cluster)
        rows = await shown(cluster, "/v1/vms", "vms", "name")
        assert (rows["low-1"]["state"], rows["low-1"]["nominal"]["cpu_cores"]) == ("running", 2.0)
        assert "what it is sold as cannot be read in the manager's store" in rows["low-1"]["sentence"]
        assert why in rows["low-1"]["sentence"]
        assert "cannot be read" not in rows["low-2"]["sentence"]
        for method, path, asked in (
            ("PATCH", "", {"nominal": {"cpu_cores": 1.0}}),
            ("POST", "/migrate", {}),
            ("POST", "/release", {}),
        ):
            body = {"request_id": "asked", **asked}
            status, problem = await cluster.call(method, f"/v1/vms/low-1{path}", json=body)
            assert (status, "it can be stopped or deleted" in problem["detail"]) == (409, True), (path, problem)
        assert (await cluster.call("POST", "/v1/vms/low-1/stop", json={"request_id": "stop"}))[0] == 202
        assert (await cluster.ended("stop")).state is OperationState.DONE
        status, problem = await cluster.call("POST", "/v1/vms/low-1/start", json={"request_id": "start"})
        assert (status, "it can be stopped or deleted" in problem["detail"]) == (409, True), problem
        assert (await cluster.create(vm("low-3", cpu_cores=1.0))).state is OperationState.DONE
        assert (await cluster.delete("low-1")).state is OperationState.DONE
        assert set(agent.vms) == {"low-2", "low-3"}


@pytest.mark.parametrize("stored", ["{", "later"])
async def test_a_vm_whose_stored_spec_cannot_be_read_is_not_preempted_by_this_record(
    tmp_path: Path, stored: str
) -> None:
    agent = FakeAgent("host-a", cpu_cores=6.0, memory_mib=2400.0)
    async with cluster_of(tmp_path, agent) as cluster:
        for name in ("low-1", "low-2"):
            assert (await cluster.create(vm(name))).state is OperationState.DONE
        await damage(cluster, schema.vms, "low-1", stored)
        await started_again(cluster)
        # Without both of them there is no room for it, with one there is.
        refused = await cluster.create(vm("high-1", "fixed", 6.0, 2000.0))
        assert (refused.state, await running(cluster)) == (OperationState.FAILED, {"low-1", "low-2"}), refused.sentence
        placed = await cluster.create(vm("high-2", "fixed", 5.2, 1500.0))
        assert (placed.state, await running(cluster)) == (OperationState.DONE, {"low-1", "high-2"}), placed.sentence


@pytest.mark.parametrize("stored", ["{", "later"])
async def test_a_preempted_vm_whose_stored_spec_cannot_be_read_waits_on_and_the_next_one_comes_back(
    tmp_path: Path, stored: str
) -> None:
    agent = FakeAgent("host-a", cpu_cores=6.0, memory_mib=2400.0)
    async with cluster_of(tmp_path, agent) as cluster:
        for name in ("low-1", "low-2"):
            assert (await cluster.create(vm(name))).state is OperationState.DONE
        assert (await cluster.create(vm("high-1", "fixed", 6.0, 2000.0))).state is OperationState.DONE
        await damage(cluster, schema.vms, "low-1", stored)
        await started_again(cluster)
        assert (await cluster.delete("high-1")).state is OperationState.DONE

        async def back() -> bool:
            return bool((await cluster.get("/v1/vms/low-2"))["state"] == "running")

        await until(back)
        found = await cluster.get("/v1/vms/low-1")
        assert (found["state"], "until it can be read" in found["preempted"]["sentence"]) == ("preempted", True)


@pytest.mark.parametrize(("stored", "why"), [("{", "EOF"), ("later", "of_a_later_version")])
async def test_a_plan_that_cannot_be_read_keeps_its_vm_and_stops_no_other_until_somebody_ends_it(
    tmp_path: Path, stored: str, why: str
) -> None:
    agent = host("host-a")
    async with cluster_of(tmp_path, agent) as cluster:
        for name in ("low-1", "low-2"):
            assert (await cluster.create(vm(name, cpu_cores=2.0))).state is OperationState.DONE
        agent.trouble.pend = ("stop",)
        status, _ = await cluster.call("POST", "/v1/vms/low-1/stop", json={"request_id": "stop-it"})
        assert status == 202

        async def commanded() -> bool:
            return "stop" in " ".join(agent.arrived)

        await until(commanded)
        assert cluster.manager is not None
        await cluster.manager.operations.stop()
        await damage(cluster, schema.plans, "stop-it", stored)
        await started_again(cluster)
        operations = await shown(cluster, "/v1/operations", "operations", "request_id")
        assert operations["create-low-2"]["state"] == "done"
        assert operations["stop-it"]["state"] == "running"
        assert "its stored plan cannot be read" in operations["stop-it"]["sentence"]
        assert why in operations["stop-it"]["sentence"]
        assert "`ebb plan cancel stop-it` ends it" in operations["stop-it"]["sentence"]
        assert (await cluster.create(vm("low-3", cpu_cores=1.0))).state is OperationState.DONE
        status, problem = await cluster.call("DELETE", "/v1/vms/low-1?request_id=d")
        assert (status, "stop-it" in problem["detail"]) == (409, True)
        status, _ = await cluster.call("POST", "/v1/operations/stop-it/cancel", json={"request_id": "end-it"})
        assert status == 202
        ended = await cluster.ended("end-it")
        assert (ended.state, "what came of it is not known" in ended.sentence) == (OperationState.DONE, True)
        assert (await cluster.ended("stop-it")).state is OperationState.FAILED
        assert (await cluster.get("/v1/vms/low-1"))["state"] == "running"
        assert set(agent.vms) == {"low-1", "low-2", "low-3"}
        assert (await cluster.delete("low-1")).state is OperationState.DONE


@pytest.mark.parametrize("failed", [True, False])
async def test_the_end_of_a_plan_that_cannot_be_read_can_be_asked_for_again_when_only_that_was_recorded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, failed: bool
) -> None:
    agent = host("host-a")
    async with cluster_of(tmp_path, agent) as cluster:
        assert (await cluster.create(vm("low-1"))).state is OperationState.DONE
        if failed:
            agent.trouble.pend = ("stop",)
        assert (await cluster.call("POST", "/v1/vms/low-1/stop", json={"request_id": "stop-it"}))[0] == 202
        if not failed:
            assert (await cluster.ended("stop-it")).state is OperationState.DONE
        assert cluster.manager is not None
        await cluster.manager.operations.stop()
        await damage(cluster, schema.plans, "stop-it", "{")
        await started_again(cluster)
        body = {"request_id": "end-it"}
        if failed:
            with monkeypatch.context() as patched:

                async def refuse(state: object, fingerprint: str) -> None:
                    raise RuntimeError("this record is lost")

                patched.setattr(cluster.manager.store, "add_plan", refuse)
                assert (await cluster.call("POST", "/v1/operations/stop-it/cancel", json=body))[0] == 500
            assert (await cluster.ended("stop-it")).state is OperationState.FAILED
        status, answer = await cluster.call("POST", "/v1/operations/stop-it/cancel", json=body)
        assert (status, answer.get("state")) == ((202, "done") if failed else (409, None)), answer


async def test_a_placement_that_cannot_be_read_is_ended_before_its_vm_can_be_deleted(tmp_path: Path) -> None:
    agent = host("host-a")
    async with cluster_of(tmp_path, agent) as cluster:
        agent.trouble.pend = ("create",)
        request = {"request_id": "c", "vm": vm("low-1"), "deadline_s": 3.0}
        assert (await cluster.call("POST", "/v1/vms", json=request))[0] == 202

        async def commanded() -> bool:
            return "create" in agent.arrived

        await until(commanded)
        assert cluster.manager is not None
        await cluster.manager.operations.stop()
        await damage(cluster, schema.plans, "c", "{")
        await started_again(cluster)
        status, problem = await cluster.call("DELETE", "/v1/vms/low-1?request_id=d")
        assert (status, "`ebb plan cancel c` ends it" in problem["detail"]) == (409, True), problem
        assert (await cluster.call("POST", "/v1/operations/c/cancel", json={"request_id": "e"}))[0] == 202
        assert (await cluster.ended("e")).state is OperationState.DONE
        # Whether it was started is for its host to say: its name is not free.
        assert (await cluster.get("/v1/vms/low-1"))["host"] == "host-a"
        again = {"request_id": "c-2", "vm": vm("low-1"), "deadline_s": 3.0}
        assert (await cluster.call("POST", "/v1/vms", json=again))[0] == 409


async def test_a_vm_in_a_phase_of_a_later_version_is_shown_as_its_host_has_it_and_can_be_deleted(
    tmp_path: Path,
) -> None:
    agent = host("host-a")
    async with cluster_of(tmp_path, agent) as cluster:
        for name in ("low-1", "low-2"):
            assert (await cluster.create(vm(name, cpu_cores=2.0))).state is OperationState.DONE
        await change(cluster, schema.vms, "low-1", phase="hibernating")
        await change(cluster, schema.vms, "low-2", labels="[")
        await started_again(cluster)
        for query in ("", "?state=running", "?selector=a!%3Db"):
            rows = await shown(cluster, f"/v1/vms{query}", "vms", "name")
            assert "hibernating" in rows["low-1"]["sentence"] if "state" not in query else "low-2" in rows
            assert (rows["low-2"]["state"], rows["low-2"]["labels"]) == ("running", {})
        assert (await cluster.get("/v1/vms/low-1"))["state"] == "running"
        for method, path, asked in (
            ("PATCH", "", {"nominal": {"cpu_cores": 1.0}}),
            ("POST", "/migrate", {}),
        ):
            body = {"request_id": "asked", **asked}
            status, problem = await cluster.call(method, f"/v1/vms/low-1{path}", json=body)
            assert (status, "it can be stopped or deleted" in problem["detail"]) == (409, True), (path, problem)
        assert (await cluster.call("POST", "/v1/vms/low-1/start", json={"request_id": "asked"}))[0] == 409
        # Nor is it preempted: without both of them there would be room.
        refused = await cluster.create(vm("high-1", "fixed", 6.0, 2000.0))
        assert (refused.state, set(agent.vms)) == (OperationState.FAILED, {"low-1", "low-2"}), refused.sentence
        assert (await cluster.delete("low-1")).state is OperationState.DONE
        assert set(agent.vms) == {"low-2"}


async def test_a_task_that_cannot_be_read_is_shown_and_left_alone_and_holds_its_cores(tmp_path: Path) -> None:
    engine = FakeEngine(far=4)
    async with cluster_of(tmp_path, **settings(engine)) as cluster:

        async def submit(name: str, cores: int) -> None:
            task = {"name": name, "command": ["true"], "cores": cores, "duration_s": 60.0}
            assert (await cluster.call("POST", "/v1/tasks", json={"request_id": name, "task": task}))[0] == 202

        async def runs() -> bool:
            return bool((await cluster.get("/v1/tasks/train"))["state"] == "running")

        await submit("train", 3)
        await until(runs)
        await change(cluster, schema.tasks, "train", phase="newer", state='{"phase": "newer"}')
        await started_again(cluster)
        row = (await shown(cluster, "/v1/tasks", "tasks", "name"))["train"]
        assert (row["state"], row["machine"], row["cores"]) == ("running", "far", 3)
        assert "its stored state cannot be read" in row["sentence"]
        status, problem = await cluster.call("DELETE", "/v1/tasks/train")
        assert (status, "its stored state cannot be read" in problem["detail"]) == (409, True), problem
        assert (await cluster.get("/v1/engine"))["machines"][0]["tasks"] == ["train"]
        began = time.monotonic()
        assert (await cluster.get("/v1/tasks/train?wait_s=0.3"))["state"] == "running"
        assert time.monotonic() - began >= 0.3, "whoever waits for its end does not ask without a pause"
        await submit("large", 2)

        async def decided() -> bool:
            found = await cluster.get("/v1/tasks/large/explanation")
            return bool(found["waits_for"] or found["task"]["state"] != "waiting")

        await until(decided)
        assert {(call[0], call[1].split(".")[1]) for call in engine.calls if call[0] in ("release", "cancel")} == {
            ("release", "train")
        }
        assert cluster.manager is not None
        stored = await cluster.manager.store.rows(select(schema.tasks.c.state).where(schema.tasks.c.name == "train"))
        assert [row[0] for row in stored] == ['{"phase": "newer"}']
