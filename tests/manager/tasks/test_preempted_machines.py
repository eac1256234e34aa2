"""Tasks on a VM that is preempted, at the manager: told by a signal, ended in time, begun again at their place."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from cluster_manager.execution import operations
from cluster_manager.plans.returns import Returns
from ebbtide.deflation.sharing.return_queue import ReturnPace
from ebbtide.matcher.match.notices import PREEMPTED
from ebbtide.messages.operations import OperationState
from tests.manager.cluster import Cluster, cluster_of, vm
from tests.manager.fake_agent import FakeAgent
from tests.manager.fake_engine import FakeEngine, settings
from tests.manager.tasks.test_tasks import becomes, condition, looked_since, submit, task
from tests.waiting import until

pytestmark = pytest.mark.usefixtures("each_store", "quick_returns")
RIGID: Any = {"minimum": {"cpu_cores": 3.0, "memory_mib": 600.0}, "memory_mib": 600.0}
SAVING: Any = {"cores": 3, "restartable": True, "checkpoint_signal": "USR1"}


@pytest.fixture
def quick_returns(monkeypatch: pytest.MonkeyPatch) -> None:
    pace = ReturnPace(hold_s=0.1, rest_s=0.1, pause_s=0.1, longest_s=0.2)
    monkeypatch.setattr(operations, "Returns", lambda: Returns(pace))
    monkeypatch.setattr(operations, "SHARE_S", 0.05)


@pytest.fixture
def engine() -> FakeEngine:
    return FakeEngine(n1=3, n2=3)


@pytest_asyncio.fixture
async def cluster(engine: FakeEngine, tmp_path: Path) -> AsyncIterator[Cluster]:
    """Two VMs at their minimums, and nothing free beside them."""
    agent = FakeAgent("host-a", cpu_cores=6.0, memory_mib=4000.0)
    async with cluster_of(tmp_path, agent, **settings(engine)) as cluster:
        for name in ("n1", "n2"):
            await cluster.create(vm(name, **RIGID))
        yield cluster


async def preempting(cluster: Cluster, notice_s: float = 1.0) -> str:
    """A fixed VM arrives; the VM that has to go for it, and that has not gone yet."""
    cluster.agents[0].trouble.never_ends = True
    body = {"request_id": "high", "vm": vm("high-1", "fixed", 3.0, 600.0), "deadline_s": notice_s}
    assert (await cluster.call("POST", "/v1/vms", json=body))[0] == 202

    async def begun() -> bool:
        return bool(await cluster.events("preempting"))

    await until(begun)
    (event,) = await cluster.events("preempting")
    return str(event["vm"])


async def two_run(cluster: Cluster, **fields: Any) -> None:
    """One task on each machine, and two that wait."""
    for name in ("first", "second", "third", "fourth"):
        await submit(cluster, name, **{**SAVING, **fields})
    for name in ("first", "second"):
        await becomes(cluster, name, "running")


async def on(cluster: Cluster, machine: str) -> str:
    for name in ("first", "second"):
        if (await task(cluster, name))["machine"] == machine:
            return name
    raise AssertionError(machine)


async def drained(cluster: Cluster, machine: str) -> str:
    status = await cluster.get("/v1/engine")
    (found,) = [row["drained"] for row in status["machines"] if row["name"] == machine]
    return str(found)


async def test_a_task_is_told_ended_and_begun_again_at_its_place_and_the_machine_comes_back(
    cluster: Cluster, engine: FakeEngine
) -> None:
    await two_run(cluster)
    victim = await preempting(cluster)
    hit = await on(cluster, victim)
    (other,) = {"first", "second"} - {hit}
    await until(condition(lambda: bool(engine.signals)))
    assert engine.machines[victim].drained == PREEMPTED
    waiting = await becomes(cluster, hit, "waiting")
    assert (waiting["attempts"], waiting["preemptions"]) == (1, 1)
    assert f"the VM {victim} is being preempted" in waiting["sentence"]
    (warned,) = await cluster.events("task-warned")
    assert f"{hit}: the VM {victim} is being preempted: its command got USR1" in warned["sentence"]
    assert [(name.split(".")[1], signal) for name, signal in engine.signals] == [(hit, "USR1")]
    # Before those that were submitted after it, and nowhere but on the other machine.
    assert (await cluster.get(f"/v1/tasks/{hit}/explanation"))["ahead"] == 0
    engine.end(other)
    again = await becomes(cluster, hit, "running")
    assert (again["machine"] != victim, again["attempts"], again["told_at"]) == (True, 2, None)
    cluster.agents[0].end_pending()
    assert (await cluster.ended("high")).state is OperationState.DONE
    assert (await cluster.get(f"/v1/vms/{victim}"))["state"] == "preempted"
    await until(condition(lambda: engine.machines[victim].usable_cores == 0))
    assert await drained(cluster, victim) == PREEMPTED
    assert (await task(cluster, "third"))["state"] == "waiting"
    await cluster.delete("high-1")
    back = await becomes(cluster, "third", "running")
    assert (back["machine"], engine.machines[victim].drained) == (victim, "")
    assert len(engine.begun) == len(set(engine.begun)) == 4


async def test_a_clock_that_is_set_forward_in_a_notice_takes_no_time_to_save_from_a_task(
    cluster: Cluster, engine: FakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert cluster.manager is not None
    await two_run(cluster)
    victim = await preempting(cluster, notice_s=120.0)
    hit = await on(cluster, victim)
    await until(condition(lambda: bool(engine.signals)))
    for one in (cluster.manager.tasks, cluster.manager.operations):
        monkeypatch.setattr(one, "_clock", lambda: time.time() + 180.0)
    for _ in range(2):
        await looked_since(cluster, engine)
    assert (await task(cluster, hit))["state"] == "running"
    assert not any(call[0] == "cancel" for call in engine.calls)


async def test_a_clock_that_was_set_back_does_not_leave_a_task_to_the_end_of_its_machine(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert cluster.manager is not None
    await two_run(cluster, checkpoint_signal=None)
    # As if it were set back when the step had been stored.
    monkeypatch.setattr(cluster.manager.tasks, "_clock", lambda: time.time() - 300.0)
    hit = await on(cluster, await preempting(cluster, notice_s=120.0))
    assert (await becomes(cluster, hit, "waiting"))["preemptions"] == 1


async def test_a_preemption_that_comes_to_nothing_leaves_the_task_where_it_is(
    cluster: Cluster, engine: FakeEngine
) -> None:
    await two_run(cluster)
    victim = await preempting(cluster, notice_s=30.0)
    hit = await on(cluster, victim)
    await until(condition(lambda: bool(engine.signals)))
    assert "has 15 s to save its work" in (await task(cluster, hit))["sentence"]
    cluster.agents[0].trouble.fails["stop"] = "room has appeared"
    cluster.agents[0].end_pending()
    assert (await cluster.ended("high")).state is OperationState.FAILED

    async def goes_on() -> bool:
        found = await task(cluster, hit)
        return found["state"] == "running" and "not preempted after all" in found["sentence"]

    await until(goes_on)
    await until(condition(lambda: engine.machines[victim].drained == ""))
    # It had saved its work, and ends with what says so: then it is begun again.
    engine.end(hit, 75)

    async def begun_again() -> bool:
        return bool((await task(cluster, hit))["attempts"] == 2)

    await until(begun_again)
    assert "failed" not in {(await task(cluster, name))["state"] for name in ("first", "second", "third", "fourth")}


@pytest.mark.parametrize("on_preemption", ["stop", "delete"])
async def test_a_host_that_fails_at_a_preemption_ends_no_task(
    tmp_path: Path, engine: FakeEngine, on_preemption: str
) -> None:
    agent = FakeAgent("host-a", cpu_cores=6.0, memory_mib=4000.0)
    async with cluster_of(tmp_path, agent, **settings(engine)) as cluster:
        for name in ("n1", "n2"):
            await cluster.create(vm(name, **RIGID, on_preemption=on_preemption))
        await two_run(cluster)
        agent.trouble.refuses = 500
        operation = await cluster.create(vm("high-1", "fixed", 3.0, 600.0), "high")
        assert operation.state is OperationState.FAILED
        agent.trouble.refuses = None
        for _ in range(3):
            await looked_since(cluster, engine)
        for name in ("first", "second"):
            found = await task(cluster, name)
            assert (found["state"], found["preemptions"]) == ("running", 0), found["sentence"]
        assert not any(call[0] == "cancel" for call in engine.calls)
        assert agent.running == {"n1", "n2"}


@pytest.mark.parametrize("done", [False, True], ids=["before-the-signal", "after-it"])
async def test_a_manager_that_is_killed_in_the_notice_tells_and_ends_what_is_left(
    cluster: Cluster, engine: FakeEngine, monkeypatch: pytest.MonkeyPatch, done: bool
) -> None:
    await two_run(cluster)
    reached = asyncio.Event()
    real = engine.signal

    async def then_die(*words: Any) -> None:
        if done or reached.is_set():
            await real(*words)
        if not reached.is_set():
            reached.set()
            raise asyncio.CancelledError

    monkeypatch.setattr(engine, "signal", then_die)
    victim = await preempting(cluster, notice_s=10.0)
    hit = await on(cluster, victim)
    async with asyncio.timeout(20):
        await reached.wait()
    assert len(engine.signals) == int(done)
    await cluster.kill_manager()
    await cluster.start_manager()
    await cluster.ready()
    await until(condition(lambda: len(engine.signals) == 1))
    again = await becomes(cluster, hit, "waiting")
    assert (again["attempts"], again["preemptions"]) == (1, 1)
    assert len(engine.signals) == 1, "once for one notice"
    cluster.agents[0].end_pending()
    await cluster.ended("high")
    for name in ("first", "second", "third", "fourth"):
        if name != hit:
            engine.end(name)
    assert (await becomes(cluster, hit, "running"))["attempts"] == 2
    assert len(engine.begun) == len(set(engine.begun))


async def test_who_asked_for_nothing_is_ended_at_once_and_who_may_not_be_begun_again_at_the_end(
    cluster: Cluster, engine: FakeEngine
) -> None:
    await two_run(cluster, checkpoint_signal=None, restartable=False)
    victim = await preempting(cluster, notice_s=30.0)
    hit = await on(cluster, victim)
    await until(condition(lambda: engine.machines[victim].drained == PREEMPTED))
    assert (await task(cluster, hit))["state"] == "running"
    engine.end(hit, None)
    assert "not restartable" in (await becomes(cluster, hit, "failed"))["sentence"]
    assert engine.signals == []


async def test_a_vm_that_is_deleted_gives_its_tasks_their_time_too(tmp_path: Path, engine: FakeEngine) -> None:
    agent = FakeAgent("host-a", cpu_cores=6.0, memory_mib=4000.0)
    async with cluster_of(tmp_path, agent, **settings(engine)) as cluster:
        for name in ("n1", "n2"):
            await cluster.create(vm(name, **RIGID, on_preemption="delete"))
        await two_run(cluster)
        victim = await preempting(cluster, notice_s=30.0)
        hit = await on(cluster, victim)
        assert (await becomes(cluster, hit, "waiting"))["preemptions"] == 1
        assert [signal for _, signal in engine.signals] == ["USR1"]
        agent.end_pending()
        assert (await cluster.ended("high")).state is OperationState.DONE


async def test_a_grace_goes_with_a_signal_and_both_are_kept(cluster: Cluster) -> None:
    found = await submit(cluster, "train", checkpoint_signal="TERM", checkpoint_grace_s=5.0)
    assert (found["checkpoint_signal"], found["checkpoint_grace_s"], found["told_at"]) == ("TERM", 5.0, None)
    body: Any = {"name": "x", "command": ["true"]}
    for fields, field in (
        ({"checkpoint_grace_s": 5.0}, "checkpoint_grace_s"),
        ({"checkpoint_signal": "KILL"}, "checkpoint_signal"),
        ({"checkpoint_signal": "TERM", "checkpoint_grace_s": 0.0}, "checkpoint_grace_s"),
    ):
        status, problem = await cluster.call("POST", "/v1/tasks", json={"request_id": "x", "task": {**body, **fields}})
        assert (status, problem["field"]) == (400, f"task.{field}")
    assert cluster.manager is not None
    await submit(cluster, "plain")
    stored = await cluster.manager.store.task(name="plain")
    assert stored is not None
    # As stores of earlier versions have it.
    assert "checkpoint" not in stored.fingerprint
