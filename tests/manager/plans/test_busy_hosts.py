"""Placements and targets at hosts that other plans have: they have no longer than their deadline, and say why."""

from __future__ import annotations

from pathlib import Path

import pytest

from cluster_manager.execution.running_plans import arrival_of
from cluster_manager.plans.live_migrations import start_live_migration
from cluster_manager.plans.placements import PlacementPlan
from cluster_manager.plans.plans import Arrive, ChooseHosts, Event, Finish, HostFailed, HostRead, ReadHost, Reclaim
from cluster_manager.plans.reading import read_plan
from cluster_manager.plans.removals import start_target
from cluster_manager.plans.waits import PATIENCE_S, hold_s
from ebbtide.deflation.placement.policy_names import PlacementPolicy
from ebbtide.messages.common import PartialVector, Vector
from ebbtide.messages.operations import OperationState
from ebbtide.messages.problem_codes import ReasonCode
from ebbtide.messages.requests import MigrateRequest, TargetRequest
from tests.hostagent.fake_moves import ADDRESS
from tests.manager.cluster import cluster_of, vm
from tests.manager.fake_agent import FakeAgent
from tests.manager.plan_events import chosen, ended, placement, read, report_of, spec_of, status_of
from tests.manager.plans.test_live_migration_plans import HERE, SPEC
from tests.waiting import until

each_store = pytest.mark.usefixtures("each_store")
FAILED, DONE = OperationState.FAILED, OperationState.DONE
LOW = spec_of("low-1", "deflatable")


def host(name: str) -> FakeAgent:
    return FakeAgent(name, cpu_cores=6.0, memory_mib=2400.0)


def busy(name: str, at: float) -> HostFailed:
    said = f"{name} is busy with another plan"
    return HostFailed(at, said, uncertain=False, code=ReasonCode.FAILED, busy=True)


def looking(*events: Event, deadline_s: float = 60.0) -> PlacementPlan:
    state = placement(LOW, deadline_s)
    for event in events:
        state = state.next_step(event).state  # type: ignore[assignment]
        assert isinstance(state, PlacementPlan)
    return state


# --- the plan --------------------------------------------------------------------------------------------------------


def test_a_host_that_others_have_is_come_back_to_while_there_is_time() -> None:
    state = looking(chosen("a", "b"), busy("a", 30.0))
    assert (state.instruction, state.hosts_left) == (ReadHost(host="b"), ("a",))
    full = read("b", status_of(spec_of("other", cpu_cores=6.0), "b"), at=31.0)
    state = looking(chosen("a", "b"), busy("a", 30.0), full)
    assert (state.instruction, state.hosts_left) == (ReadHost(host="a"), ())
    state = looking(chosen("a", "b"), busy("a", 30.0), full, busy("a", 60.0))
    assert isinstance(state.instruction, Finish)
    assert state.instruction.reason is ReasonCode.NO_ROOM, "b had none"


def test_a_refusal_for_hosts_that_others_had_says_so_once_each_and_nothing_of_room() -> None:
    state = looking(chosen("a", "b"), busy("a", 20.0), busy("b", 40.0), busy("a", 60.0))
    assert isinstance(state.instruction, Finish)
    assert (state.instruction.state, state.instruction.reason) == (FAILED, ReasonCode.FAILED)
    said = "a is busy with another plan; b is busy with another plan; the deadline has passed"
    assert said in state.instruction.sentence
    assert state.progress.count("a is busy with another plan") == 1


def test_who_has_to_preempt_comes_to_an_end_where_every_host_stays_busy() -> None:
    state = placement(spec_of("high-1")).next_step(chosen("a", "b")).state
    state = state.next_step(busy("a", 30.0)).state.next_step(busy("b", 60.0)).state
    assert state.instruction == ChooseHosts(purpose="preempt")
    for event in (chosen("a", "b", at=60.0), busy("a", 90.0), busy("b", 120.0), busy("a", 120.1)):
        state = state.next_step(event).state
    assert isinstance(state.instruction, Finish)
    assert state.instruction.reason is ReasonCode.FAILED


@pytest.mark.parametrize(
    ("left", "at", "free", "seconds"),
    [
        ((), 0.0, False, 60.0),
        ((), 50.0, False, 10.0),
        (("b",), 0.0, False, 30.0),
        (("b", "c", "d", "e", "f"), 0.0, False, 15.0),
        (("b",), 0.0, True, PATIENCE_S),
        (("b",), 59.0, True, 1.0),
        (("b",), 61.0, False, 0.0),
    ],
)
def test_one_busy_host_is_waited_for_a_share_of_the_deadline_and_shortly_where_others_are_free(
    left: tuple[str, ...], at: float, free: bool, seconds: float
) -> None:
    assert hold_s(placement(LOW).having(hosts_left=left), at, free) == seconds


def test_nobody_is_preempted_for_the_sake_of_a_moment_and_a_host_that_was_had_is_waited_for() -> None:
    state = placement(spec_of("high-1")).having(hosts_left=("b",))
    assert hold_s(state.having(purpose="preempt"), 0.0, True) == 30.0
    assert hold_s(state.having(host="a", waited_for=("low-1",)), 0.0, True) == 60.0


@pytest.mark.parametrize("left", [(), ("c",)])
def test_who_has_to_preempt_waits_for_a_busy_host_also_after_a_deflation_that_took_all_of_its_time(
    left: tuple[str, ...],
) -> None:
    state = placement(spec_of("high-1")).having(purpose="preempt", hosts_left=left, clock_from_s=10.0)
    assert hold_s(state, 130.0, True) == 15.0
    assert hold_s(state.having(deadline_s=0.0), 130.0, False) == 0.25


def test_the_time_of_a_live_migration_begins_when_its_host_is_free() -> None:
    def at(name: str, elapsed_s: float, *vms: object) -> HostRead:
        report = report_of(name, *vms).model_copy(update={"migration": ADDRESS})  # type: ignore[arg-type]
        return HostRead(elapsed_s, report)

    there = status_of(spec_of("other", "deflatable", cpu_cores=6.0, memory_mib=2000.0), "away")
    request = MigrateRequest(request_id="request", live=True, host="away", deadline_s=60.0)
    begun = start_live_migration("plan", request, SPEC, "home", policy=PlacementPolicy.FIRST_FIT)
    state = begun.next_step(at("home", 100.0, HERE)).state
    assert (arrival := arrival_of(state, 1000.0)) is not None
    assert arrival.until_s == 1160.0
    state = read_plan(state.model_dump_json()).next_step(at("away", 110.0, there)).state
    assert isinstance(state.instruction, Reclaim)
    assert state.instruction.deadline_s == 50.0
    # A move for an arrival is of no use after that.
    moves = start_live_migration("plan", request, SPEC, "home", policy=PlacementPolicy.FIRST_FIT, why="for db")
    state = moves.next_step(at("home", 100.0, HERE)).state
    assert isinstance(state.next_step(at("away", 110.0, there)).state.instruction, Finish)
    assert isinstance(state.next_step(at("away", 110.0)).state.instruction, Arrive)


def test_how_long_a_target_waited_for_its_host_is_told() -> None:
    wanted = TargetRequest(request_id="request", target=PartialVector(cpu_cores=1.0))
    state, size = start_target("plan", "low-1", "a", wanted, 2), Vector(cpu_cores=1.0)
    for waited_s, told in ((0.2, "target done"), (4.4, "target done; 4 s of its deadline were over before a was free")):
        event = ended("target", shortfall=size)
        step = state.next_step(type(event)(5.0, event.operation, waited_s=waited_s))
        assert isinstance(step.state.instruction, Finish)
        assert step.state.instruction.sentence == told


# --- the manager -----------------------------------------------------------------------------------------------------


@each_store
async def test_a_placement_whose_best_host_is_busy_goes_to_another_one_within_its_deadline(tmp_path: Path) -> None:
    async with cluster_of(tmp_path, host("host-a"), host("host-b")) as cluster:
        assert cluster.manager is not None
        locks = cluster.manager.hosts.locks
        assert await locks.hold("another plan", "host-a")
        operation = await cluster.create(vm("low-1"), policy="first-fit", deadline_s=30.0)
        assert (operation.state, operation.host) == (DONE, "host-b"), operation
        assert "host-a is busy with another plan" in operation.progress


@each_store
async def test_a_placement_waits_for_busy_hosts_no_longer_than_its_deadline(tmp_path: Path) -> None:
    async with cluster_of(tmp_path, host("host-a"), host("host-b")) as cluster:
        assert cluster.manager is not None
        locks = cluster.manager.hosts.locks
        assert await locks.hold("another plan", "host-a")
        assert await locks.hold("a third one", "host-b")
        operation = await cluster.create(vm("low-1"), policy="first-fit", deadline_s=1.0)
        assert (operation.state, operation.host) == (FAILED, None), operation
        assert {"host-a is busy with another plan", "host-b is busy with another plan"} <= set(operation.progress)
        assert operation.reason is not None
        assert operation.reason.code is ReasonCode.FAILED
        locks.release("another plan")
        assert (await cluster.create(vm("low-2"), policy="first-fit")).host == "host-a"


@each_store
async def test_a_target_whose_host_is_busy_until_its_deadline_has_failed_and_is_not_sent_later(tmp_path: Path) -> None:
    agent = host("host-a")
    async with cluster_of(tmp_path, agent) as cluster:
        assert cluster.manager is not None
        await cluster.create(vm("low-1"))
        locks = cluster.manager.hosts.locks
        assert await locks.hold("another plan", "host-a")
        body = {"request_id": "t", "target": {"cpu_cores": 1.0}, "deadline_s": 1.0}
        assert (await cluster.call("PUT", "/v1/vms/low-1/target", json=body))[0] == 202
        operation = await cluster.ended("t")
        assert (operation.state, operation.sentence) == (FAILED, "host-a was busy with another plan until the deadline")
        assert operation.reason is not None
        assert operation.reason.code is ReasonCode.FAILED
        locks.release("another plan")
        body = {"request_id": "later", "target": {"cpu_cores": 2.0}}
        assert (await cluster.call("PUT", "/v1/vms/low-1/target", json=body))[0] == 202
        assert (await cluster.ended("later")).state is DONE
        assert [sent["target"]["cpu_cores"] for sent in agent.bodies if sent["kind"] == "target"] == [2.0]
        await until(lambda: not locks.is_busy("host-a"))
