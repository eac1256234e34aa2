"""A VM that moves to a host with room before anyone is preempted: by hand-worked figures, and through the API."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cluster_manager.plans.dry_run_plan import Known, dry_run_plan
from cluster_manager.plans.live_migrations import start_live_migration
from cluster_manager.plans.placements import PlacementPlan
from cluster_manager.plans.plans import (
    CalledOff,
    Create,
    Effect,
    Event,
    Finish,
    HostRead,
    MoveAway,
    Moved,
    Plan,
    Preempt,
    ReadHost,
    Reclaim,
    Reinflate,
    Step,
)
from ebbtide.deflation.modes import HostMode
from ebbtide.deflation.placement.policy_names import PlacementPolicy
from ebbtide.deflation.placement.rebalancing import Rooms
from ebbtide.messages.common import Vector
from ebbtide.messages.hosts import HostTemplate
from ebbtide.messages.operations import OperationState
from ebbtide.messages.requests import MigrateRequest
from ebbtide.messages.vms import VMState, VMStatus
from tests.hostagent.fake_moves import ADDRESS
from tests.manager.cluster import Cluster, cluster_of, vm
from tests.manager.fake_agent import FakeAgent
from tests.manager.lifecycle import consistent, seen
from tests.manager.plan_events import chosen, ended, placement, read, spec_of, status_of
from tests.waiting import until

UUID = "00000000-0000-0000-0000-000000000001"
SHARED = (HostTemplate(name="lab", shared_disk=True),)
#: Of 6 cores and 2400 MiB with two VMs at their minimums a fixed one wants more than their 5 and 1600 leave.
HIGH = spec_of("high-1", cpu_cores=5.5)
LEAST = Vector(cpu_cores=0.5, memory_mib=300.0)


def low(name: str, current: Vector | None = None, **more: Any) -> VMStatus:
    return status_of(spec_of(name, "deflatable", 3.0, 1000.0), "a", current).model_copy(
        update={"uuid": UUID, "template": "lab", **more}
    )


def at_a(*vms: VMStatus, at: float = 0.0, room: float = 1.0, **more: Any) -> HostRead:
    """Host a, and b with as many cores and GiB for one more VM."""
    event = read("a", *vms, at=at)
    report = event.report.model_copy(update={"migration": ADDRESS, "templates": SHARED, **more})
    rooms = Rooms(["b"], np.array([[room, room * 1024, np.inf, np.inf]]))
    sold = {vm.name: spec_of(vm.name, "deflatable", 3.0, 1000.0) for vm in vms}
    return replace(event, report=report, rooms=rooms, sold=sold)


FULL = at_a(low("low-1"), low("low-2"))
SHRUNK = at_a(low("low-1", LEAST), low("low-2", LEAST), at=5.0)
RECLAIMED = (FULL, ended("reclaim", at=5.0))


def after(*events: Event) -> Step:
    """A fixed VM that finds no host by deflation, and comes to a where preemption would do."""
    state = placement(HIGH)
    for event in (chosen(), chosen("a"), *events):
        step = state.next_step(event)
        assert isinstance(step.state, PlacementPlan)
        state = step.state
    return step


def test_all_gives_what_it_can_then_one_moves_and_nobody_is_preempted() -> None:
    assert isinstance(after(FULL).state.instruction, Reclaim)
    step = after(*RECLAIMED, SHRUNK)
    # Of the 55 s that are left 27.5 are kept for the notice of those that may have to go all the same.
    at = step.state.step - 1
    assert step.state.instruction == MoveAway(vm="low-1", source="a", to="b", step=at, deadline_s=13.75, until_s=32.5)
    assert step.state.host == "a", "what is free there stays this VM's"
    done = (*RECLAIMED, SHRUNK, Moved(12.0, True, "moved low-1 from a to b"))
    assert after(*done).state.instruction == ReadHost(host="a")
    create = after(*done, at_a(low("low-2", LEAST), at=12.0))
    assert isinstance(create.state.instruction, Create)
    placed = create.state.next_step(ended("create", at=15.0))
    assert "after deflating" in placed.state.progress[-1]
    assert placed.state.progress[-1].endswith("and moving low-1 to b")


@pytest.mark.parametrize(
    "event",
    [
        at_a(low("low-1", LEAST), low("low-2", LEAST), room=0.4),
        at_a(low("low-1", LEAST, pressure="it swaps"), low("low-2", LEAST, uuid=None)),
        at_a(low("low-1", LEAST), low("low-2", LEAST), migration=None),
        at_a(low("low-1", LEAST), low("low-2", LEAST), templates=None),
        replace(SHRUNK, rooms=None),
        replace(SHRUNK, recorded=frozenset({"low-9"})),
        replace(SHRUNK, elapsed_s=52.0),
    ],
    ids=["no-room", "pressure", "no-address", "disk-of-its-own", "never", "not-on-record", "too-late"],
)
def test_where_nobody_can_move_somebody_is_preempted_or_nobody(event: HostRead) -> None:
    instruction = after(*RECLAIMED, event).state.instruction
    assert not isinstance(instruction, MoveAway)
    assert isinstance(instruction, Preempt) == bool(event.recorded & {"low-1"})


@pytest.mark.parametrize(("mib_s", "moves"), [(21.0, False), (22.0, True)])
def test_one_moves_whose_memory_the_link_copies_in_time(mib_s: float, moves: bool) -> None:
    """300 MiB in 13.75 s."""
    step = after(*RECLAIMED, replace(SHRUNK, move_mib_s=mib_s))
    assert isinstance(step.state.instruction, MoveAway) is moves


def test_one_whose_disk_must_be_copied_moves_by_choice() -> None:
    alone = at_a(low("low-1", LEAST), low("low-2", LEAST), templates=None)
    move = after(*RECLAIMED, replace(alone, copies=True)).state.instruction
    assert isinstance(move, MoveAway)
    assert move.copy_storage
    shared = after(*RECLAIMED, replace(SHRUNK, copies=True)).state.instruction
    assert isinstance(shared, MoveAway)
    assert not shared.copy_storage


@pytest.mark.parametrize(("second", "goes"), [({}, "low-2"), ({"held": True}, "low-1"), ({"uuid": None}, "low-1")])
def test_one_whose_size_a_target_holds_moves_only_where_no_other_one_can(second: dict[str, Any], goes: str) -> None:
    least = at_a(low("low-1", LEAST, held=True), low("low-2", LEAST, **second), at=5.0)
    move = after(*RECLAIMED, least).state.instruction
    assert isinstance(move, MoveAway)
    assert move.vm == goes


def test_one_that_does_not_move_is_not_asked_again_and_the_time_is_the_same() -> None:
    events: tuple[Event, ...] = (*RECLAIMED, SHRUNK, Moved(10.0, False, "low-1 stays on a"))
    second = after(*events, replace(SHRUNK, elapsed_s=10.0)).state.instruction
    assert isinstance(second, MoveAway)
    assert (second.vm, second.deadline_s) == ("low-2", 12.5)
    events = (*events, replace(SHRUNK, elapsed_s=10.0), Moved(20.0, False, "low-2 stays on a"))
    assert isinstance(after(*events, replace(SHRUNK, elapsed_s=20.0)).state.instruction, Preempt)


def test_one_that_is_still_moving_when_time_is_up_is_left_alone() -> None:
    late = Moved(32.5, False, "low-1 is still moving to b")
    moving = at_a(low("low-1", LEAST, state=VMState.MIGRATING), low("low-2", LEAST), at=32.5, room=0.1)
    instruction = after(*RECLAIMED, SHRUNK, late, moving).state.instruction
    assert isinstance(instruction, Preempt)
    assert instruction.vm == "low-2"


def test_a_placement_that_is_called_off_meanwhile_gives_back_what_it_took() -> None:
    step = after(*RECLAIMED, SHRUNK, CalledOff(8.0))
    assert isinstance(step.state.instruction, Reinflate)


# --- through the API -------------------------------------------------------------------------------------------------


@asynccontextmanager
async def crowded(tmp_path: Path, **settings: Any) -> AsyncIterator[Cluster]:
    """a: 2.5 cores fixed, low-1 at its minimum of 2, 1.5 free. b: 2.5 free, which are not enough for 3."""
    a, b = (FakeAgent(name, cpu_cores=6.0, memory_mib=4000.0) for name in ("host-a", "host-b"))
    a.peers, b.peers = {"host-b": b}, {"host-a": a}
    a.templates = b.templates = SHARED
    async with cluster_of(tmp_path, a, b, **settings) as cluster:
        await cluster.ready()
        rigid: Any = {"minimum": {"cpu_cores": 2.0, "memory_mib": 300.0}}
        await cluster.create(vm("fixed-a", "fixed", 2.5, 500.0), policy="first-fit")
        await cluster.create(vm("low-1", cpu_cores=3.0, memory_mib=600.0, **rigid), policy="first-fit")
        await cluster.create(vm("fixed-b", "fixed", 3.5, 500.0), policy="first-fit")
        assert (set(a.vms), set(b.vms)) == ({"fixed-a", "low-1"}, {"fixed-b"})
        yield cluster


@pytest.mark.usefixtures("each_store")
async def test_a_fixed_vm_gets_its_room_by_a_move(tmp_path: Path) -> None:
    async with crowded(tmp_path) as cluster:
        dry = await cluster.call("POST", "/v1/vms", json=body("high-1", dry_run=True))
        assert dry[0] == 200, dry
        assert (dry[1]["would"], dry[1]["preempted"]) == ("done", [])
        assert "would move low-1 from host-a to host-b" in dry[1]["steps"]
        operation = await cluster.create(vm("high-1", "fixed", 3.0, 500.0), deadline_s=30.0)
        assert (operation.state, operation.host) == (OperationState.DONE, "host-a"), operation
        assert operation.sentence.endswith("and moving low-1 to host-b")
        row = await seen(cluster, "low-1")
        assert (row["state"], row["host"]) == ("running", "host-b")
        assert row["sentence"] == "moved low-1 from host-a to host-b: so that nobody is preempted for high-1"
        assert await cluster.events("preempting") == await cluster.events("preempted") == []
        await consistent(cluster)


@pytest.mark.usefixtures("each_store")
async def test_where_the_move_fails_the_vm_is_preempted_as_before(tmp_path: Path) -> None:
    async with crowded(tmp_path) as cluster:
        cluster.agents[0].sticks = "it had not converged"
        operation = await cluster.create(vm("high-1", "fixed", 3.0, 500.0), deadline_s=30.0)
        assert operation.state is OperationState.DONE, operation
        assert any("it had not converged" in said for said in operation.progress)
        assert (await seen(cluster, "low-1"))["state"] == "preempted"
        assert set(cluster.agents[1].vms) == {"fixed-b"}, "what was kept for it there is given back"


@pytest.mark.usefixtures("each_store")
async def test_nobody_moves_where_the_operator_says_never(tmp_path: Path) -> None:
    async with crowded(tmp_path, move_first="never") as cluster:
        dry = await cluster.call("POST", "/v1/vms", json=body("high-1", dry_run=True))
        assert dry[1]["preempted"] == ["low-1"]
        await cluster.create(vm("high-1", "fixed", 3.0, 500.0), deadline_s=30.0)
        assert (await seen(cluster, "low-1"))["state"] == "preempted"


@pytest.mark.usefixtures("each_store")
@pytest.mark.parametrize("mode", [HostMode.DRAINING, HostMode.PAUSED, HostMode.OFF])
async def test_nobody_moves_to_a_host_that_takes_no_new_vm(tmp_path: Path, mode: HostMode) -> None:
    async with crowded(tmp_path) as cluster:
        cluster.agents[1].mode = mode
        await cluster.ready()
        dry = await cluster.call("POST", "/v1/vms", json=body("high-1", dry_run=True))
        await cluster.create(vm("high-1", "fixed", 3.0, 500.0), deadline_s=30.0)
        assert (await seen(cluster, "low-1"))["state"] == "preempted"
        assert dry[1]["preempted"] == ["low-1"], dry[1]["steps"]


@pytest.mark.usefixtures("each_store")
async def test_nobody_moves_to_room_that_another_placement_has_chosen(tmp_path: Path) -> None:
    async with crowded(tmp_path) as cluster:
        second = cluster.agents[1]
        second.trouble.pend = ("create",)
        other = {"request_id": "other", "vm": vm("other", "fixed", 2.2, 500.0), "policy": "first-fit"}
        assert (await cluster.call("POST", "/v1/vms", json=other))[0] == 202

        async def starts() -> bool:
            return bool(second._pending)

        await until(starts)
        dry = await cluster.call("POST", "/v1/vms", json=body("high-1", dry_run=True))
        await cluster.create(vm("high-1", "fixed", 3.0, 500.0), deadline_s=30.0)
        assert (await seen(cluster, "low-1"))["state"] == "preempted"
        assert dry[1]["preempted"] == ["low-1"], dry[1]["steps"]
        second.end_pending()
        assert (await cluster.ended("other")).host == "host-b"


@pytest.mark.parametrize("xml", [None, "<domain/>"])
def test_a_dry_run_moves_no_vm_that_was_made_from_xml(xml: str | None) -> None:
    least = at_a(low("low-1", LEAST), low("low-2", LEAST)).report
    other = read("b").report.model_copy(update={"migration": ADDRESS, "templates": SHARED})
    made = {"xml": xml, "template": None} if xml else {}
    sold = {vm.name: spec_of(vm.name, "deflatable", 3.0, 1000.0).model_copy(update=made) for vm in least.vms}
    steps = dry_run_plan(
        placement(HIGH),
        {"a": least, "b": other},
        lambda state, now: chosen("a") if now.purpose == "preempt" else chosen(),
        known=Known({"a": sold}, {}, 0.0),
        move_first="shared",
    )
    told = None
    while told is None:
        try:
            next(steps)
        except StopIteration as end:
            told = end.value
    assert bool(told.preempted) == (xml is not None), told.steps


@pytest.mark.usefixtures("each_store")
@pytest.mark.parametrize("at", ["departing", "arriving"])
async def test_a_manager_that_dies_during_the_move_goes_on_with_it(tmp_path: Path, at: str) -> None:
    async with crowded(tmp_path) as cluster:
        agent = cluster.agents[0 if at == "departing" else 1]
        agent.trouble.hangs_at, agent.trouble.carries_out = len(agent.arrived) + 1, True
        if at == "departing":
            # Its first command is the deflation that comes before.
            agent.trouble.hangs_at += 1
        assert (await cluster.call("POST", "/v1/vms", json=body("high-1")))[0] == 202
        async with asyncio.timeout(10):
            await agent.hanging.wait()
        await cluster.kill_manager()
        agent.trouble.hangs_at = None
        await cluster.start_manager()
        await cluster.ready()
        operation = await cluster.ended("high-1")
        assert operation.state is OperationState.DONE, operation
        assert (await seen(cluster, "low-1"))["host"] == "host-b"
        assert await cluster.events("preempted") == []
        await consistent(cluster)


@pytest.mark.usefixtures("each_store")
async def test_nobody_moves_for_a_placement_that_is_called_off_while_that_is_written_down(tmp_path: Path) -> None:
    async with crowded(tmp_path) as cluster:
        assert cluster.manager is not None
        store, writing, goes_on = cluster.manager.store, asyncio.Event(), asyncio.Event()
        save = store.save_step

        async def slowly(state: Plan, effects: Iterable[Effect]) -> float:
            if isinstance(state.instruction, MoveAway):
                writing.set()
                await goes_on.wait()
            return await save(state, effects)

        store.save_step = slowly  # type: ignore[method-assign]
        assert (await cluster.call("POST", "/v1/vms", json=body("high-1")))[0] == 202
        async with asyncio.timeout(10):
            await writing.wait()
        assert (await cluster.call("DELETE", "/v1/vms/high-1?request_id=off"))[0] == 202
        goes_on.set()
        assert (await cluster.ended("off")).state is OperationState.DONE
        assert (await seen(cluster, "low-1"))["host"] == "host-a"
        assert "arrive" not in cluster.agents[1].arrived
        await consistent(cluster)


def body(name: str, **more: Any) -> dict[str, Any]:
    return {"request_id": name, "vm": vm(name, "fixed", 3.0, 500.0), "deadline_s": 30.0, **more}


@pytest.mark.parametrize("says", [{"cpu_cores": 3.5}, {"memory_mib": 1100.0}])
def test_a_vm_that_its_host_calls_larger_than_it_was_sold_does_not_move(says: dict[str, float]) -> None:
    """A host that lies would have the VMs of the next one shrink for it."""
    wanted = spec_of("low-1", "deflatable", 3.0, 1000.0)
    request = MigrateRequest(request_id="m", host="b", live=True)
    state = start_live_migration("plan", request, wanted, "a", policy=PlacementPolicy.BEST_FIT)
    honest = state.next_step(at_a(low("low-1"))).state
    assert isinstance(honest.instruction, ReadHost)
    assert honest.instruction.host == "b"
    size = Vector(**{"cpu_cores": 3.0, "memory_mib": 1000.0} | says)
    liar = low("low-1", size, nominal=size)
    ended_at = state.next_step(at_a(liar)).state.instruction
    assert isinstance(ended_at, Finish)
    assert ended_at.state is OperationState.FAILED
    assert "were sold" in ended_at.sentence
