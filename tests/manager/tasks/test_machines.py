"""Tasks on machines whose VMs move to another host or stand still, on both kinds of stores."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from cluster_manager.plans.plans import SetPreempted, SetVM, VMPhase
from cluster_manager.plans.preemption import PreemptionReason
from cluster_manager.plans.returns import start_return
from cluster_manager.tasks import tasks
from cluster_manager.tasks.machines import TaskMachines
from ebbtide.matcher.match.attempts import AttemptState, EngineMachine
from ebbtide.matcher.match.tasks import SILENCE_LIMIT_S
from ebbtide.matcher.match.turns import DRAINING, MOVING
from ebbtide.messages.common import Vector
from ebbtide.messages.vms import VMState
from tests.manager.cluster import Cluster, cluster_of, vm
from tests.manager.fake_agent import FakeAgent
from tests.manager.fake_engine import FakeEngine, settings
from tests.manager.plan_events import placement, spec_of
from tests.manager.tasks.test_tasks import becomes, condition, looked_since, submit, task
from tests.waiting import until

each_store = pytest.mark.usefixtures("each_store")


@pytest.fixture
def dates_count(monkeypatch: pytest.MonkeyPatch) -> None:
    """How long a record is silent is believed at once."""
    monkeypatch.setattr(tasks, "measured", lambda look, *rest: (look, {}))


def two_agents() -> tuple[FakeAgent, FakeAgent]:
    """Two hosts between which VMs can move."""
    first = FakeAgent("host-a", cpu_cores=6.0, memory_mib=2400.0)
    second = FakeAgent("host-b", cpu_cores=6.0, memory_mib=2400.0)
    first.peers, second.peers = {"host-b": second}, {"host-a": first}
    return first, second


async def migrate(cluster: Cluster, **fields: Any) -> None:
    # A busy machine may take its time between two of its steps.
    body = {"request_id": "move", "deadline_s": 120.0, **fields}
    status, answer = await cluster.call("POST", "/v1/vms/low-1/migrate", json=body)
    assert status == 202, answer


async def test_of_its_machines_a_round_reads_no_more_than_it_looks_at() -> None:
    asked: list[set[str]] = []

    async def rows(query: Any) -> list[Any]:
        asked.append(set(query.selected_columns.keys()))
        return []

    store: Any = SimpleNamespace(rows=rows)
    assert await TaskMachines(store, cast(Any, None), cast(Any, None)).cores(["low-1"]) == {}
    (columns,) = asked
    assert columns == {"name", "host", "phase", "priority", "preemption_unsure", "plan_kind", "plan_host"}


@each_store
async def test_a_task_goes_on_while_its_machine_moves_and_runs_all_the_time(tmp_path: Path) -> None:
    first, second = two_agents()
    engine = FakeEngine(**{"low-1": 4})
    async with cluster_of(tmp_path, first, second, **settings(engine)) as cluster:
        await cluster.create(vm("low-1"), policy="first-fit")
        await submit(cluster, "train", cores=2, restartable=True)
        await becomes(cluster, "train", "running")
        first.trouble.pend, second.trouble.pend = ("depart",), ("arrive",)
        await migrate(cluster, live=True, copy_storage=True)
        await until(condition(lambda: "arrive" in second.arrived))
        await looked_since(cluster, engine)
        # Others may begin there, too.
        await submit(cluster, "short", cores=1)
        await becomes(cluster, "short", "running")
        second.end_pending()
        await until(condition(lambda: "depart" in first.arrived))
        # It has moved, and its row does not say so yet.
        here, there = first.vms["low-1"], second.vms["low-1"]
        first.vms["low-1"] = here.model_copy(update={"state": VMState.STOPPED, "current": Vector()})
        second.vms["low-1"] = there.model_copy(update={"state": VMState.RUNNING})
        await looked_since(cluster, engine)
        assert (await cluster.get("/v1/vms/low-1"))["state"] == "migrating"
        assert engine.machines["low-1"] == EngineMachine("low-1", 4, 3)
        first.end_pending()
        assert (await cluster.ended("move")).host == "host-b"
        await looked_since(cluster, engine)
        found = await task(cluster, "train")
        assert (found["state"], found["preemptions"]) == ("running", 0)
        assert engine.machines["low-1"] == EngineMachine("low-1", 4, 3)


@pytest.mark.usefixtures("dates_count")
@each_store
async def test_a_task_on_a_vm_that_stands_still_where_it_has_just_moved_is_not_given_up(tmp_path: Path) -> None:
    first, second = two_agents()
    engine = FakeEngine(**{"low-1": 4})
    async with cluster_of(tmp_path, first, second, **settings(engine)) as cluster:
        await cluster.create(vm("low-1"), policy="first-fit")
        await submit(cluster, "train", cores=2, restartable=True)
        await becomes(cluster, "train", "running")
        first.trouble.pend, second.trouble.pend = ("depart",), ("arrive",)
        await migrate(cluster, live=True, copy_storage=True)
        await until(condition(lambda: "arrive" in second.arrived))
        second.end_pending()
        await until(condition(lambda: "depart" in first.arrived))
        here, there = first.vms["low-1"], second.vms["low-1"]
        first.vms["low-1"] = here.model_copy(update={"state": VMState.STOPPED, "current": Vector()})
        second.vms["low-1"] = there.model_copy(update={"state": VMState.PAUSED})
        # Long before its silence is too long.
        await second.send_report()
        await first.send_report()
        await looked_since(cluster, engine)
        (attempt,) = engine.attempts.values()
        attempt.seen = replace(attempt.seen, silent_s=SILENCE_LIMIT_S + 60.0)
        await looked_since(cluster, engine)
        await looked_since(cluster, engine)
        found = await task(cluster, "train")
        assert (found["state"], found["preemptions"]) == ("running", 0)
        assert not any(call[0] == "cancel" for call in engine.calls)
        first.end_pending()


@each_store
async def test_nothing_begins_on_a_machine_that_is_to_be_stopped_and_moved_and_what_runs_goes_on(
    tmp_path: Path,
) -> None:
    first, second = two_agents()
    engine = FakeEngine(**{"low-1": 4})
    async with cluster_of(tmp_path, first, second, **settings(engine)) as cluster:
        await cluster.create(vm("low-1"), policy="first-fit")
        await submit(cluster, "train", cores=2, restartable=True)
        await becomes(cluster, "train", "running")
        first.trouble.pend = ("stop",)
        await migrate(cluster, lose_disk=True)
        await until(condition(lambda: "stop" in first.arrived))
        await submit(cluster, "short", cores=1)
        await looked_since(cluster, engine)
        assert engine.machines["low-1"] == EngineMachine("low-1", 4, 3, drained=MOVING)
        assert [(await task(cluster, name))["state"] for name in ("train", "short")] == ["running", "waiting"]
        first.end_pending()
        await becomes(cluster, "short", "running")

        async def begun_again() -> bool:
            train = await task(cluster, "train")
            return bool((train["state"], train["preemptions"]) == ("running", 1))

        await until(begun_again)
        assert (await cluster.ended("move")).host == "host-b"


def _is_drained_with(engine: FakeEngine, machine: str, reason: str) -> bool:
    return engine.machines[machine].drained == reason


@each_store
async def test_nothing_begins_on_a_draining_hosts_vms_and_what_runs_there_goes_on(tmp_path: Path) -> None:
    agent, engine = FakeAgent("host-a", cpu_cores=6.0, memory_mib=2400.0), FakeEngine(**{"low-1": 4})
    async with cluster_of(tmp_path, agent, **settings(engine)) as cluster:
        await cluster.create(vm("low-1"))
        await submit(cluster, "train", cores=2)
        await becomes(cluster, "train", "running")
        for mode, drained in (("draining", DRAINING), ("active", "")):
            command = {"request_id": mode, "mode": mode}
            status, answer = await cluster.call("PUT", "/v1/hosts/host-a/mode", json=command)
            assert status == 202, answer
            await until(condition(partial(_is_drained_with, engine, "low-1", drained)))
            if drained:
                await submit(cluster, "short", cores=1)
                await looked_since(cluster, engine)
                assert [(await task(cluster, name))["state"] for name in ("train", "short")] == ["running", "waiting"]
        await becomes(cluster, "short", "running")


@each_store
async def test_a_vm_that_may_have_been_preempted_has_the_cores_that_its_host_says(tmp_path: Path) -> None:
    """For an error no task is ended; of a preemption that came about a report may be older."""
    first, _ = two_agents()
    engine = FakeEngine(**{"low-1": 4})
    async with cluster_of(tmp_path, first, **settings(engine)) as cluster:
        await cluster.create(vm("low-1"))
        assert cluster.manager is not None
        store, machines = cluster.manager.store, cast(TaskMachines, cluster.manager.tasks._known)
        arrival, back = placement(spec_of("high-1")), start_return("return", spec_of("low-1", "deflatable"), "host-a")
        await store.add_plan(arrival, "")
        gone = SetPreempted("low-1", "host-a", PreemptionReason.MINIMUM, "perhaps", unsure=True)
        await store.save_step(arrival, [gone])
        assert await machines.cores(["low-1"]) == {"low-1": 3}
        await store.add_plan(back, "")
        assert await machines.cores(["low-1"]) == {"low-1": 3}, "also while its host is asked"
        await store.save_step(back, [SetVM("low-1", VMPhase.PREEMPTED, "host-a", "it does not answer")])
        assert await machines.cores(["low-1"]) == {"low-1": 3}
        await store.save_step(arrival, [replace(gone, unsure=False)])
        assert machines.off == frozenset()
        assert await machines.cores(["low-1"]) == {"low-1": 0}
        assert machines.off == {"low-1"}


@each_store
async def test_a_vm_is_off_that_was_stopped_or_has_powered_off_and_none_that_is_to_be_up_soon(tmp_path: Path) -> None:
    first, _ = two_agents()
    async with cluster_of(tmp_path, first, **settings(FakeEngine())) as cluster:
        await cluster.create(vm("low-1"))
        assert cluster.manager is not None
        machines = cast(TaskMachines, cluster.manager.tasks._known)
        assert await machines.cores(["low-1"]) == {"low-1": 3}
        assert machines.off == frozenset()
        running = first.vms["low-1"]
        first.vms["low-1"] = running.model_copy(update={"state": VMState.STOPPED, "current": Vector()})
        await first.send_report()
        assert await machines.cores(["low-1"]) == {"low-1": 0}
        assert machines.off == {"low-1"}
        first.vms["low-1"] = running
        await first.send_report()
        for verb, is_off in (("stop", True), ("start", False)):
            status, answer = await cluster.call("POST", f"/v1/vms/low-1/{verb}", json={"request_id": verb})
            assert status == 202, answer
            await cluster.ended(verb)
            await machines.cores(["low-1"])
            assert machines.off == ({"low-1"} if is_off else frozenset())


@pytest.mark.usefixtures("dates_count")
@each_store
async def test_a_task_on_a_vm_that_stands_still_is_not_given_up_and_goes_on_with_it(tmp_path: Path) -> None:
    first, _ = two_agents()
    engine = FakeEngine(**{"low-1": 4})
    async with cluster_of(tmp_path, first, **settings(engine)) as cluster:
        await cluster.create(vm("low-1"))
        await submit(cluster, "train", cores=2)
        await becomes(cluster, "train", "running")
        first.vms["low-1"] = first.vms["low-1"].model_copy(update={"state": VMState.PAUSED})
        await looked_since(cluster, engine)
        (attempt,) = engine.attempts.values()
        attempt.seen = replace(attempt.seen, silent_s=SILENCE_LIMIT_S + 60.0)
        await looked_since(cluster, engine)
        # It runs again, and has not been heard of yet.
        first.vms["low-1"] = first.vms["low-1"].model_copy(update={"state": VMState.RUNNING})
        await looked_since(cluster, engine)
        assert (await task(cluster, "train"))["state"] == "running"
        assert not any(call[0] == "cancel" for call in engine.calls)
        engine.end("train")
        await becomes(cluster, "train", "done")


@pytest.mark.usefixtures("dates_count")
@each_store
async def test_a_task_whose_engine_loses_a_vm_that_stands_still_is_not_begun_again_beside_it(tmp_path: Path) -> None:
    first, _ = two_agents()
    engine = FakeEngine(**{"low-1": 4})
    async with cluster_of(tmp_path, first, **settings(engine)) as cluster:
        await cluster.create(vm("low-1"))
        await submit(cluster, "train", cores=2, restartable=True)
        await becomes(cluster, "train", "running")
        # The engine loses the machine before the VM is first seen to stand still.
        lost, (attempt,) = engine.machines.pop("low-1"), engine.attempts.values()
        attempt.seen = replace(attempt.seen, state=AttemptState.ENDED, silent_s=1.0)
        await looked_since(cluster, engine)
        first.vms["low-1"] = first.vms["low-1"].model_copy(update={"state": VMState.PAUSED})
        await looked_since(cluster, engine)
        attempt.seen = replace(attempt.seen, silent_s=SILENCE_LIMIT_S + 60.0)
        await looked_since(cluster, engine)
        found = await task(cluster, "train")
        assert (found["state"], found["preemptions"], len(engine.attempts)) == ("running", 0, 1)
        engine.machines["low-1"] = lost
        attempt.seen = replace(attempt.seen, exit_code=0)
        await becomes(cluster, "train", "done")
