"""What must not be taken for a VM of ours, and what the manager owes until it is done."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

import pytest

from cluster_manager.execution import operations
from cluster_manager.execution.running_plans import defect, how_ended, looks
from cluster_manager.plans.lifecycle import start_stop
from cluster_manager.plans.plans import (
    ChooseHosts,
    Create,
    Effect,
    Finish,
    Forgotten,
    HostFailed,
    Plan,
    PlanEnded,
    ReadHost,
    Reinflate,
    ReinflationPending,
    Remove,
    SetPreempted,
    SetVM,
    VMPhase,
)
from cluster_manager.plans.preemption import PreemptionReason
from cluster_manager.plans.reading import read_plan
from cluster_manager.plans.removals import RemovalPlan, start_calling_off, start_removal
from cluster_manager.store.rows import StoredPlan
from ebbtide.messages.common import Vector
from ebbtide.messages.hosts import HostTemplate
from ebbtide.messages.operations import OperationState
from ebbtide.messages.vms import VMState
from tests.manager.cluster import QUICK, Cluster, cluster_of, vm
from tests.manager.fake_agent import FakeAgent
from tests.manager.fake_lifecycle import runs
from tests.manager.lifecycle import ask, consistent, one_record, seen, send
from tests.manager.plan_events import chosen, ended, placement, read, spec_of, status_of
from tests.waiting import until

each_store = pytest.mark.usefixtures("each_store")


def two_hosts() -> tuple[FakeAgent, FakeAgent]:
    first = FakeAgent("host-a", cpu_cores=6.0, memory_mib=2400.0)
    second = FakeAgent("host-b", cpu_cores=3.0, memory_mib=1200.0)
    second.templates = (HostTemplate(name="lab"), HostTemplate(name="there"))
    first.templates = (HostTemplate(name="lab"),)
    return first, second


@each_store
async def test_a_namesake_of_a_vm_elsewhere_is_no_victim(tmp_path: Path) -> None:
    first, second = two_hosts()
    async with cluster_of(tmp_path, first, second) as cluster:
        assert (await cluster.create(vm("low-1"), policy="first-fit")).host == "host-a"
        # host-b has one of that name, too: left there by somebody, at its minimum.
        second.vms["low-1"] = first.vms["low-1"].model_copy(
            update={"host": "host-b", "minimum": first.vms["low-1"].current}
        )
        await cluster.ready()
        placed = await cluster.create(vm("high-1", "fixed", 3.0, 1000.0, template="there"))
        assert placed.state is OperationState.FAILED, "of what stands in its way the record has nothing there"
        assert "low-1" in second.vms
        row = await seen(cluster, "low-1")
        assert (row["state"], row["host"]) == ("running", "host-a")


# --- debts -----------------------------------------------------------------------------------------------------------


async def a_lost_start(cluster: Cluster) -> None:
    """low-1 runs on host-a, and the client was told that it does not and will be removed."""
    (agent,) = cluster.agents
    assert isinstance(agent, FakeAgent)
    agent.trouble.hangs_at = len(agent.arrived) + 1
    request = {"request_id": "create-low-1", "vm": vm("low-1"), "deadline_s": 3.0}
    assert (await cluster.call("POST", "/v1/vms", json=request))[0] == 202
    async with asyncio.timeout(10):
        await agent.hanging.wait()
    agent.trouble.mute = True
    failed = await cluster.ended("create-low-1")
    assert "it is removed there as soon as the host answers" in failed.sentence
    agent.trouble.hangs_at = None


@each_store
@pytest.mark.parametrize("how", ["refused", "failed"])
async def test_a_removal_that_is_owed_and_refused_once_is_owed_still(
    tmp_path: Path, how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(operations, "RETRY_S", 0.1)
    agent = FakeAgent("host-a", cpu_cores=6.0, memory_mib=2400.0)
    async with cluster_of(tmp_path, agent, agents=replace(QUICK, answer_s=2.5)) as cluster:
        await a_lost_start(cluster)
        assert runs(agent.vms["low-1"])
        if how == "refused":
            agent.trouble.refuses = 409
        else:
            agent.trouble.fails["delete"] = "the guest is stuck"
        agent.trouble.mute = False

        async def tried() -> bool:
            return agent.arrived.count("delete") >= 2

        await until(tried)
        row = await cluster.get("/v1/vms/low-1")
        assert row["state"] in ("failed", "deleting"), "it was never said to run"
        agent.trouble.refuses = None
        agent.trouble.fails.clear()

        async def gone() -> bool:
            return (await cluster.call("GET", "/v1/vms/low-1"))[0] == 404

        await until(gone)
        assert "low-1" not in agent.vms


@each_store
@pytest.mark.parametrize("how", ["refused", "failed"])
async def test_a_removal_that_is_owed_is_owed_still_where_its_owners_deletion_comes_to_nothing(
    tmp_path: Path, how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    agent = FakeAgent("host-a", cpu_cores=6.0, memory_mib=2400.0)
    async with cluster_of(tmp_path, agent, agents=replace(QUICK, answer_s=2.5)) as cluster:
        await a_lost_start(cluster)
        # What is owed cannot be seen to yet, and its owner is first.
        with monkeypatch.context() as patched:
            patched.setattr(operations.Operations, "_owes", lambda self, host: False)
            if how == "refused":
                agent.trouble.refuses = 403
            else:
                agent.trouble.fails["delete"] = "the guest is stuck"
            agent.trouble.mute = False
            await cluster.ready()
            deleted = await cluster.delete("low-1")
            assert (deleted.state, "is still to be removed" in deleted.sentence) == (OperationState.FAILED, True)
            assert cluster.manager is not None
            assert await cluster.manager.store.owed_removals() == {"low-1": "host-a"}
            assert (await cluster.get("/v1/vms/low-1"))["state"] == "failed", "it was never said to run"
        agent.trouble.refuses = None
        agent.trouble.fails.clear()

        async def gone() -> bool:
            return (await cluster.call("GET", "/v1/vms/low-1"))[0] == 404

        await until(gone)
        assert "low-1" not in agent.vms


@each_store
async def test_a_vm_that_is_to_be_removed_is_not_moved_or_started_meanwhile(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(operations, "RETRY_S", 0.1)
    agent = FakeAgent("host-a", cpu_cores=6.0, memory_mib=2400.0)
    async with cluster_of(tmp_path, agent, agents=replace(QUICK, answer_s=2.5)) as cluster:
        await a_lost_start(cluster)
        # It is heard of again, and what is owed cannot be seen to yet.
        monkeypatch.setattr(operations.Operations, "_owes", lambda self, host: False)
        agent.trouble.mute = False
        await cluster.ready()
        for verb, body in (("migrate", {"lose_disk": True}), ("stop", {}), ("start", {}), ("resize", {"nominal": {}})):
            status, problem = await send(cluster, "low-1", verb, **body)
            assert (status, problem["field"]) == (409, "name"), verb
            assert "is removed as soon as host-a answers" in problem["detail"]
        deleted = await cluster.delete("low-1")
        assert deleted.state is OperationState.DONE, "its owner may have it removed at once"


@each_store
async def test_a_vm_that_is_to_be_removed_and_was_preempted_is_not_brought_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    agent = FakeAgent("host-a", cpu_cores=6.0, memory_mib=2400.0)
    async with cluster_of(tmp_path, agent, agents=replace(QUICK, answer_s=2.5)) as cluster:
        await a_lost_start(cluster)
        monkeypatch.setattr(operations.Operations, "_owes", lambda self, host: False)
        off = {"state": VMState.STOPPED, "start_size": agent.vms["low-1"].current, "current": Vector()}
        agent.vms["low-1"] = agent.vms["low-1"].model_copy(update=off)
        agent.trouble.mute = False
        await cluster.ready()
        assert cluster.manager is not None
        store, running = cluster.manager.store, cluster.manager.operations
        other = placement(spec_of("high-1"))
        await store.add_plan(other, "")
        await store.save_step(other, [SetPreempted("low-1", "host-a", PreemptionReason.MINIMUM, "preempted")])
        await running.waiting.read()
        assert running.waiting.names == frozenset()
        row = await seen(cluster, "low-1")
        assert row["preempted"]["sentence"] == "in no line: it is removed as soon as host-a answers"
        await running._bring_back("low-1", "host-a")
        assert not running._running, "it is not started again"
        assert await store.owed_removals() == {"low-1": "host-a"}


def test_an_owners_deletion_that_is_refused_leaves_the_vm_and_the_managers_own_stays_owed() -> None:
    for request_id, phase, owed in (("request", VMPhase.RUNNING, False), ("plan", VMPhase.FAILED, True)):
        state = start_removal("plan", request_id, "low-1", "host-a")
        step = state.next_step(HostFailed(0.0, "host-a refused", uncertain=False))
        (row,) = [effect for effect in step.effects if isinstance(effect, SetVM)]
        assert (row.phase, row.host, row.owed) == (phase, "host-a", owed)


@pytest.mark.parametrize("placed", [True, False])
def test_a_deletion_that_waited_for_a_placement_owes_the_removal_of_what_was_not_placed(placed: bool) -> None:
    waiting = start_calling_off("plan", "request", "low-1", "placement")
    state = waiting.next_step(PlanEnded(0.0, "host-a", done=placed)).state
    state = read_plan(state.model_dump_json())
    step = state.next_step(HostFailed(0.0, "host-a refused: 403", uncertain=False))
    (row,) = [effect for effect in step.effects if isinstance(effect, SetVM)]
    assert (row.phase, row.owed) == ((VMPhase.RUNNING, False) if placed else (VMPhase.FAILED, True))


def test_a_placement_that_may_have_started_its_vm_has_not_placed_it() -> None:
    starting = placement(spec_of("high-1")).next_step(chosen("host-a")).state.next_step(read("host-a")).state
    lost = starting.next_step(HostFailed(1.0, "host-a is silent", uncertain=True)).state
    placed = starting.next_step(ended("create")).state
    for state, done in ((lost, False), (placed, True)):
        assert state.finished
        assert how_ended(2.0, StoredPlan(state, "", 0.0, 0.0)) == PlanEnded(2.0, "host-a", done=done)
    assert how_ended(2.0, None) == PlanEnded(2.0, None)


def test_a_deletion_that_an_earlier_version_has_stored_owes_nothing() -> None:
    stored = start_removal("plan", "request", "low-1", "host-a").model_dump(mode="json", exclude={"owed"})
    state = read_plan(json.dumps(stored))
    assert isinstance(state, RemovalPlan)
    assert not state.owed


@pytest.mark.parametrize("phase", [VMPhase.PREEMPTED, VMPhase.STOPPED, VMPhase.RUNNING])
def test_what_a_vm_was_it_is_again_where_its_deletion_is_refused(phase: VMPhase) -> None:
    state = read_plan(start_removal("plan", "request", "low-1", "host-a", phase).model_dump_json())
    step = state.next_step(HostFailed(0.0, "host-a refused: 403", uncertain=False))
    (row,) = [effect for effect in step.effects if isinstance(effect, SetVM)]
    assert (row.phase, row.host, row.owed) == (phase, "host-a", False)


def test_a_defect_before_the_start_has_nobody_elses_vm_removed() -> None:
    spec = spec_of("high-1")
    looking = placement(spec).next_step(chosen("host-a")).state
    assert isinstance(looking.instruction, ReadHost)
    starting = looking.next_step(read("host-a")).state
    assert isinstance(starting.instruction, Create)
    for state, owed in ((placement(spec), False), (looking, False), (starting, True)):
        (row,) = [effect for effect in defect(state, KeyError("x")).effects if isinstance(effect, SetVM)]
        assert (row.owed, row.host) == (owed, "host-a" if owed else None), state.instruction
    assert isinstance(placement(spec).instruction, ChooseHosts)


def test_a_defect_while_room_is_shared_changes_nothing_of_what_became_of_the_vm() -> None:
    """A VM that was placed and whose owner was to hear so is not removed because the sharing behind it failed."""
    low, spec = spec_of("low-1", "deflatable", 6.0, 2000.0), spec_of("high-1", memory_mib=2200.0)
    state = placement(spec).next_step(chosen()).state.next_step(chosen("host-a")).state
    for event in (
        read("host-a", status_of(low, "host-a")),
        ended("reclaim", OperationState.PARTIAL),
        read("host-a", status_of(low, "host-a")),
        ended("delete"),
        read("host-a"),
        ended("create"),
    ):
        state = state.next_step(event).state
    deleting = start_removal("plan", "request", "low-1", "host-a").next_step(ended("delete")).state
    stopping = start_stop("plan", "request", "low-1", "host-a", 1.0).next_step(ended("stop")).state
    for sharing in (state, deleting, stopping):
        assert isinstance(sharing.instruction, Reinflate)
        step = defect(sharing, KeyError("x"))
        assert not [effect for effect in step.effects if isinstance(effect, SetVM)]
        assert ReinflationPending("host-a", True) in step.effects
        assert isinstance(end := step.state.instruction, Finish)
        assert (end.state, "the manager failed" in end.sentence) == (OperationState.DONE, False)


# --- records that fail -----------------------------------------------------------------------------------------------


@each_store
async def test_a_step_that_the_store_refuses_ends_the_plan_with_a_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    agent = FakeAgent("host-a", cpu_cores=6.0, memory_mib=2400.0)
    # Writing such a defect down can take longer than a host may be silent in other tests.
    async with cluster_of(tmp_path, agent, silent_after_s=30.0) as cluster:
        await cluster.create(vm("low-1"))
        assert cluster.manager is not None
        store = cluster.manager.store
        save = store.save_step
        refused: list[Plan] = []

        async def once(state: Plan, effects: Iterable[Effect]) -> float:
            if not refused and state.kind == "stop":
                refused.append(state)
                raise OverflowError("a number that the store cannot hold")
            return await save(state, effects)

        monkeypatch.setattr(store, "save_step", once)
        stopped = await ask(cluster, "low-1", "stop")
        assert refused
        assert stopped.state is OperationState.FAILED
        assert "the manager failed at" in stopped.sentence
        # Nothing is held by it any more.
        assert (await ask(cluster, "low-1", "stop", request_id="again")).state is OperationState.DONE


# --- a host that others want, too ------------------------------------------------------------------------------------


@each_store
async def test_a_vm_that_has_started_is_not_given_up_because_its_host_is_busy_after_a_restart(tmp_path: Path) -> None:
    agent = FakeAgent("host-a", cpu_cores=6.0, memory_mib=2400.0)
    async with cluster_of(tmp_path, agent) as cluster:
        await cluster.create(vm("low-1"))
        agent.trouble.hangs_at = len(agent.arrived) + 1
        request = {"request_id": "create-low-2", "vm": vm("low-2"), "deadline_s": 1.0}
        assert (await cluster.call("POST", "/v1/vms", json=request))[0] == 202
        async with asyncio.timeout(10):
            await agent.hanging.wait()
        assert (await cluster.call("DELETE", "/v1/vms/low-1?request_id=delete-low-1"))[0] == 202
        await cluster.kill_manager()
        # The agent has forgotten the start: the plan is to look whether the VM is there, and is killed once more.
        agent.trouble.hangs_at, agent.trouble.mute = None, True
        agent.forget()
        await cluster.start_manager()
        reading = asyncio.create_task(one_record(cluster), name="one record")
        await asyncio.sleep(0)
        agent.trouble.mute = False
        await reading
        await cluster.kill_manager()
        agent.trouble.never_ends = True
        await cluster.start_manager()
        await cluster.ready()
        made = await cluster.ended("create-low-2")
        assert (made.state, made.host) == (OperationState.DONE, "host-a"), made.sentence
        agent.end_pending()
        assert (await cluster.ended("delete-low-1")).state is OperationState.DONE
        await consistent(cluster)


def test_only_a_plan_that_may_go_elsewhere_looks_for_no_longer_than_its_deadline() -> None:
    looking = placement(spec_of("high-1")).next_step(chosen("host-a")).state
    assert looks(looking)
    starting = looking.next_step(read("host-a")).state
    assert not looks(starting), "it commands"
    again = starting.next_step(Forgotten(0.0, lapse=True)).state
    assert isinstance(again.instruction, ReadHost)
    assert not looks(again), "its VM may be there"


@pytest.mark.parametrize("state", [VMState.STARTING, VMState.STOPPING, VMState.STOPPED])
def test_a_start_that_is_found_on_its_way_down_counts_for_nothing(state: VMState) -> None:
    spec = spec_of("high-1")
    starting = placement(spec).next_step(chosen("host-a")).state.next_step(read("host-a")).state
    again = starting.next_step(Forgotten(0.0, lapse=True)).state
    found = again.next_step(read("host-a", status_of(spec, "host-a", state=state))).state
    assert isinstance(found.instruction, Remove)
    assert (found.instruction.vm, found.instruction.host) == ("high-1", "host-a")
