"""Free room: VMs that start deflated, VMs that grow when room appears, and harvest VMs within their budgets."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from cluster_manager.execution import operations
from cluster_manager.plans.growth import FIRST_PAUSE_S, Growth, budget_for
from cluster_manager.plans.placements import PlacementPlan
from cluster_manager.plans.plans import Arrival, Create, Finish, HostRead, Preempt, Reclaim
from cluster_manager.plans.report_queries import room_to_share
from ebbtide.deflation.resources import ZERO, ResourceVector
from ebbtide.deflation.sharing.hysteresis import Pace
from ebbtide.messages.common import Vector
from ebbtide.messages.operations import OperationState
from ebbtide.messages.vms import VMSpec
from ebbtide.rest.credentials import command_token
from tests.manager.cluster import Cluster, cluster_of, vm
from tests.manager.fake_agent import HOSTS_KEY, FakeAgent
from tests.manager.plan_events import chosen, ended, placement, read, report_of, spec_of, status_of
from tests.waiting import until

each_store = pytest.mark.usefixtures("each_store")


def host(name: str = "host-a", cpu_cores: float = 6.0, memory_mib: float = 2400.0) -> FakeAgent:
    return FakeAgent(name, cpu_cores=cpu_cores, memory_mib=memory_mib)


HARVEST = {
    "name": "spare",
    "priority": "harvest",
    "nominal": {"cpu_cores": 1.0, "memory_mib": 500.0},
    "minimum": {"cpu_cores": 0.5, "memory_mib": 400.0},
    "ceiling": {"cpu_cores": 8.0, "memory_mib": 800.0},
}
LATER: Any = {"start": "deflated"}


@pytest.fixture(autouse=True)
def often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(operations, "SHARE_S", 0.1)


async def when(cluster: Cluster, agent: FakeAgent, name: str, **sizes: float) -> None:
    """Wait until a VM has these sizes."""

    async def there() -> bool:
        current = agent.vms[name].current.model_dump()
        return all(abs(current[component] - value) < 0.02 for component, value in sizes.items())

    await until(there)


# --- starting deflated -----------------------------------------------------------------------------------------------


@each_store
async def test_a_vm_may_start_deflated_and_takes_part_in_the_split(tmp_path: Path) -> None:
    async with cluster_of(tmp_path, agent := host("host-a", 3.5, 4000.0)) as cluster:
        await cluster.create(vm("low-1"))
        # Its nominal size would take more than low-1 has above its minimum.
        operation = await cluster.create(vm("low-2", cpu_cores=3.2, **LATER))
        assert operation.state is OperationState.DONE, operation
        assert "(deflated, 1.8 cores, 1000 MiB of 3.2 cores, 1000 MiB)" in operation.sentence
        # 2.7 cores too much, split over 2.5 and 2.7 above the minimums.
        assert (agent.cores("low-1"), agent.cores("low-2")) == (1.7, 1.8)
        assert agent.free().cpu_cores == pytest.approx(0)
        assert (await cluster.get("/v1/vms/low-2"))["current"]["cpu_cores"] == 1.8
        # It is a deflated VM as any other: what a departure frees is for it, too.
        await cluster.delete("low-1")
        assert agent.cores("low-2") == 3.2


@each_store
async def test_it_starts_at_nominal_where_a_host_can_hold_that_by_deflating_others(tmp_path: Path) -> None:
    first, second = host("host-a", 3.0, 4000.0), host("host-b", 3.5, 4000.0)
    async with cluster_of(tmp_path, first, second) as cluster:
        await cluster.create(vm("low-1"), policy="first-fit")
        await cluster.create(vm("low-2"), policy="first-fit")
        assert (await cluster.create(vm("low-3", **LATER), policy="first-fit")).host == "host-b"
        assert second.cores("low-3") == 3.0


@each_store
async def test_where_not_even_its_minimum_fits_it_is_refused_with_the_reason(tmp_path: Path) -> None:
    async with cluster_of(tmp_path, agent := host()) as cluster:
        await cluster.create(vm("high-1", "fixed", 5.8, 800.0))
        operation = await cluster.create(vm("low-1", **LATER))
        assert operation.state is OperationState.FAILED
        assert "0.5 cores, 384 MiB are the least that it can start with" in operation.sentence
        assert agent.done == [("create", "high-1")]


@each_store
async def test_without_the_wish_it_is_refused_as_ever(tmp_path: Path) -> None:
    async with cluster_of(tmp_path, agent := host()) as cluster:
        await cluster.create(vm("high-1", "fixed", 4.0, 800.0))
        assert (await cluster.create(vm("low-1"))).state is OperationState.FAILED
        assert (await cluster.create(vm("low-1", **LATER), "again")).state is OperationState.DONE
        assert agent.cores("low-1") == 2.0


@each_store
async def test_a_fixed_vm_that_is_to_start_deflated_is_a_bad_request(tmp_path: Path) -> None:
    async with cluster_of(tmp_path, host()) as cluster:
        body = {"request_id": "r", "vm": vm("high-1", "fixed", **LATER)}
        status, problem = await cluster.call("POST", "/v1/vms", json=body)
        assert (status, problem["field"]) == (400, "vm.start")


@each_store
async def test_a_share_as_minimum_is_shown_as_the_size_that_it_is(tmp_path: Path) -> None:
    async with cluster_of(tmp_path, host()) as cluster:
        body = {"name": "low-1", "nominal": {"cpu_cores": 3.0, "memory_mib": 1000.0}, "minimum_share": 0.3}
        await cluster.create(body)
        assert (await cluster.get("/v1/vms/low-1"))["minimum"] == {**Vector(cpu_cores=0.9, memory_mib=300).model_dump()}


LOW = spec_of("low-1", "deflatable", 3.0, 1000.0)
NEW = VMSpec.model_validate(vm("new", **LATER))


def deflated_start() -> Any:
    """A placement that is at host a, to start deflated, and has read it: full with one VM of 3 of 3 cores."""
    state = placement(NEW).next_step(chosen()).state
    assert isinstance(state, PlacementPlan)
    assert state.purpose == "deflated"
    state = state.next_step(chosen("a", "b")).state
    return state.next_step(read("a", status_of(LOW, "a"), cpu_cores=3.0)).state


def test_the_room_for_it_is_reclaimed_before_it_is_created_at_its_share() -> None:
    state = deflated_start()
    assert isinstance(state.instruction, Reclaim)
    assert state.instruction.need == Vector(cpu_cores=1.5)
    state = state.next_step(ended("reclaim")).state
    shrunk = status_of(LOW, "a", Vector(cpu_cores=1.5, memory_mib=1000.0))
    state = state.next_step(read("a", shrunk, cpu_cores=3.0)).state
    assert isinstance(state.instruction, Create)
    assert state.instruction.start_size == Vector(cpu_cores=1.5, memory_mib=1000.0)
    state = state.next_step(ended("create")).state
    assert isinstance(state.instruction, Finish)
    assert state.instruction.state is OperationState.DONE


def test_it_makes_do_with_what_the_layers_gave_if_that_is_enough_to_start_with() -> None:
    state = deflated_start().next_step(ended("reclaim", OperationState.PARTIAL)).state
    fell_short = status_of(LOW, "a", Vector(cpu_cores=2.2, memory_mib=1000.0))
    state = state.next_step(read("a", fell_short, cpu_cores=3.0)).state
    assert isinstance(state.instruction, Create)
    assert state.instruction.start_size == Vector(cpu_cores=0.8, memory_mib=1000.0)


def test_where_the_layers_gave_too_little_it_is_undone_and_the_next_host_is_tried() -> None:
    state = deflated_start().next_step(ended("reclaim", OperationState.PARTIAL)).state
    nothing = status_of(LOW, "a", Vector(cpu_cores=2.9, memory_mib=1000.0))
    state = state.next_step(read("a", nothing, cpu_cores=3.0)).state
    assert state.instruction.do == "reinflate"
    state = state.next_step(ended("reinflate")).state
    assert (state.instruction.do, state.host) == ("read-host", "b")
    assert isinstance(state, PlacementPlan)
    assert state.start_size is None


def test_a_guest_under_pressure_is_a_shortfall_of_its_layer_and_no_minimum() -> None:
    state = placement(spec_of("high-1")).next_step(chosen()).state.next_step(chosen("a")).state
    pressed = status_of(LOW, "a").model_copy(update={"pressure": "under memory pressure"})
    report = report_of("a", pressed, cpu_cores=4.0).model_copy(update={"deflatable": Vector()})
    state = state.next_step(HostRead(0.0, report, frozenset({"low-1"}))).state
    assert isinstance(state.instruction, Preempt)
    assert (state.instruction.vm, state.instruction.reason) == ("low-1", "shortfall")
    assert "in layer guest (low-1 under pressure gives nothing)" in state.progress[-1]


# --- growing when room appears ---------------------------------------------------------------------------------------


async def squeezed(cluster: Cluster) -> None:
    """Two low VMs of 3 cores at 1.5 each, beside a fixed one."""
    for name in ("low-1", "low-2"):
        await cluster.create(vm(name))
    assert (await cluster.create(vm("high-1", "fixed", 3.0, 800.0))).state is OperationState.DONE


@each_store
async def test_vms_grow_when_a_report_shows_more_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(operations, "Growth", lambda: Growth(Pace(hold_s=0.5, rest_s=0.5)))
    async with cluster_of(tmp_path, agent := host()) as cluster:
        await squeezed(cluster)
        # Somebody else's processes end.
        agent.capacity = ResourceVector(9.0, 4000.0)
        await when(cluster, agent, "low-1", cpu_cores=3.0, memory_mib=1000.0)
        await when(cluster, agent, "low-2", cpu_cores=3.0, memory_mib=1000.0)
        # Started, shrunk once and grown once.
        assert [agent.vms[name].generation for name in ("low-1", "low-2")] == [3, 3]

        async def told() -> bool:
            return {row["vm"] for row in await cluster.events("reinflated")} >= {"low-1", "low-2"}

        await until(told)


@each_store
async def test_vms_of_a_host_that_was_away_grow_when_it_is_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(operations, "Growth", lambda: Growth(Pace(hold_s=0.5, rest_s=0.5)))
    async with cluster_of(tmp_path, agent := host()) as cluster:
        await squeezed(cluster)
        await agent.die()
        del agent.vms["high-1"]
        await agent.revive()
        await when(cluster, agent, "low-1", cpu_cores=3.0, memory_mib=1000.0)


@each_store
async def test_a_size_that_an_operator_has_set_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(operations, "Growth", lambda: Growth(Pace(hold_s=0.2, rest_s=0.2)))
    async with cluster_of(tmp_path, agent := host()) as cluster:
        await squeezed(cluster)
        body = {"request_id": "t", "generation": 9, "target": {"cpu_cores": 0.5, "memory_mib": 650.0}}
        assert (await cluster.call("PUT", "/v1/vms/low-1/target", json=body))[0] == 202
        assert (await cluster.ended("t")).state is OperationState.DONE
        # The core that it leaves is for the other one.
        await when(cluster, agent, "low-2", cpu_cores=2.5)
        assert agent.cores("low-1") == 0.5


def test_vms_that_do_not_grow_when_told_to_are_told_ever_more_rarely() -> None:
    growth, now, told = Growth(Pace(hold_s=1.0, rest_s=1.0)), 0.0, []
    small = status_of(LOW, "a", Vector(cpu_cores=1.0, memory_mib=1000.0))
    while now < 400.0:
        due = growth.due(report_of("a", small), ZERO, now)
        if due is not None:
            assert (due.vms, due.room) == (("low-1",), ResourceVector(2.0))
            growth.tried("a", due, now)
            told.append(now)
        now += 2.0
    assert told == [0.0, FIRST_PAUSE_S, 3 * FIRST_PAUSE_S, 7 * FIRST_PAUSE_S]


def test_a_host_on_which_nobody_lacks_anything_is_passed_over_but_not_forgotten() -> None:
    growth = Growth(Pace(hold_s=10.0, rest_s=20.0))
    small = status_of(LOW, "a", Vector(cpu_cores=1.0, memory_mib=1000.0))
    for now in range(0, 60, 2):
        assert growth.due(report_of("a", status_of(LOW, "a")), ZERO, float(now)) is None
    # It was shrunk just now, so it rests.
    assert growth.due(report_of("a", small), ZERO, 60.0) is None
    assert growth.due(report_of("a", small), ZERO, 70.0) is None
    assert growth.due(report_of("a", small), ZERO, 80.0) is not None


def test_disk_that_was_taken_is_given_back_on_a_host_that_declares_none() -> None:
    size = LOW.nominal.model_copy(update={"disk_mib_s": 100.0})
    small = status_of(LOW.model_copy(update={"nominal": size}), "a", size.model_copy(update={"disk_mib_s": 20.0}))
    report = report_of("a", small)
    due = Growth().due(report, ZERO, 0.0)
    assert due is not None
    assert (due.vms, due.room) == (("low-1",), ResourceVector(disk_mib_s=80.0))
    arrival = Arrival("new", ResourceVector(1.0), ResourceVector(1.0), 60.0)
    room = room_to_share(report, (arrival,), None)
    assert room is not None
    assert room.disk_mib_s == 80.0
    assert Growth().due(report.model_copy(update={"capacity": Vector(disk_mib_s=200.0)}), ZERO, 0.0) is None


def test_a_budget_has_the_disk_that_harvest_vms_lack_where_their_host_declares_none() -> None:
    sizes = {
        "nominal": {"cpu_cores": 1.0, "memory_mib": 500.0, "disk_mib_s": 10.0},
        "ceiling": {"cpu_cores": 8.0, "memory_mib": 800.0, "disk_mib_s": 50.0},
    }
    spare = VMSpec.model_validate(HARVEST | sizes)
    budget = budget_for(report_of("a", status_of(spare, "a").model_copy(update={"ceiling": spare.ceiling})), ZERO, 1)
    assert budget is not None
    assert budget.room.disk_mib_s == 49.0, "all above its minimum"


def test_room_that_a_plan_has_chosen_is_not_shared() -> None:
    small = status_of(LOW, "a", Vector(cpu_cores=1.0, memory_mib=1000.0))
    report = report_of("a", small, cpu_cores=3.0)
    assert Growth().due(report, ResourceVector(2.0), 0.0) is None
    assert Growth().due(report, ZERO, 0.0) is not None


def test_vms_do_not_grow_into_what_steady_mode_keeps_free() -> None:
    small = status_of(LOW, "a", Vector(cpu_cores=3.0, memory_mib=400.0))
    report = report_of("a", small, cpu_cores=3.0)
    due = Growth().due(report, ZERO, 0.0)
    assert due is not None
    assert due.room.memory_mib == 600.0
    free_mib = report.free.memory_mib
    kept = report.model_copy(update={"reserve_mib": free_mib - 300.0})
    due = Growth().due(kept, ZERO, 0.0)
    assert due is not None
    assert due.room.memory_mib == 300.0
    assert Growth().due(report.model_copy(update={"reserve_mib": free_mib}), ZERO, 0.0) is None
    assert room_to_share(kept, (), None) == kept.free.model_copy(update={"memory_mib": 300.0})
    assert room_to_share(report, (), None) is None


def test_what_a_vm_under_pressure_asks_for_is_left_to_it_where_it_does_not_grow_by_this() -> None:
    small = status_of(LOW, "a", Vector(cpu_cores=1.0, memory_mib=1000.0))
    asking = {"held": True, "pressure": "under CPU pressure", "asks": Vector(cpu_cores=2.0)}
    pressed = status_of(spec_of("low-2", "deflatable", 3.0, 1000.0), "a", small.current).model_copy(update=asking)
    due = Growth().due(report_of("a", small, pressed, cpu_cores=5.0), ZERO, 0.0)
    # Of 3 cores that are free.
    assert due is not None
    assert (due.vms, due.room) == (("low-1",), ResourceVector(1.0))
    calm = pressed.model_copy(update={"pressure": None})
    due = Growth().due(report_of("a", small, calm, cpu_cores=5.0), ZERO, 0.0)
    assert due is not None
    assert due.room == ResourceVector(2.0)


def test_a_report_on_which_nothing_could_be_done_is_watched_all_the_same() -> None:
    growth = Growth(Pace(hold_s=10.0, rest_s=20.0))
    small = status_of(LOW, "a", Vector(cpu_cores=1.0, memory_mib=1000.0))
    assert growth.due(report_of("a", status_of(LOW, "a")), ZERO, 0.0) is None
    for now in range(2, 22, 2):
        assert growth.due(report_of("a", small), ZERO, float(now), decide=False) is None
    # It was shrunk at 2 s, though nobody asked then.
    assert growth.due(report_of("a", small), ZERO, 21.0) is None
    assert growth.due(report_of("a", small), ZERO, 22.0) is not None


# --- harvest VMs -----------------------------------------------------------------------------------------------------


@each_store
async def test_a_harvest_vm_gets_a_budget_and_others_take_it_back(tmp_path: Path) -> None:
    async with cluster_of(tmp_path, agent := host("host-a", 6.0, 2400.0)) as cluster:
        await cluster.create(HARVEST)
        # All but the reserve of a twentieth.
        await when(cluster, agent, "spare", cpu_cores=5.7)
        (budget,) = agent.budgets
        assert (budget.number, budget.epoch) == (1, 1)
        assert budget.order == agent.fence.order, "counted with the commands"
        operation = await cluster.create(vm("high-1", "fixed", 4.0, 800.0))
        assert operation.state is OperationState.DONE, operation
        assert agent.cores("spare") == pytest.approx(2.0)
        assert not await cluster.events("preempted")
        await cluster.delete("high-1")
        await when(cluster, agent, "spare", cpu_cores=5.7)
        assert [budget.number for budget in agent.budgets] == list(range(1, len(agent.budgets) + 1))

        async def learnt() -> bool:
            changes = (await cluster.get("/v1/core-changes?machine=spare"))["core_changes"]
            return [row["cores_after"] for row in changes][:3] == [5.7, 2.0, 5.7]

        await until(learnt)


@each_store
async def test_a_budget_that_a_command_has_overtaken_is_refused(tmp_path: Path) -> None:
    async with cluster_of(tmp_path, agent := host("host-a", 6.0, 2400.0)) as cluster:
        await cluster.create(HARVEST)
        await when(cluster, agent, "spare", cpu_cores=5.7)
        assert (await cluster.create(vm("high-1", "fixed", 4.0, 800.0))).state is OperationState.DONE
        late = agent.budgets[0].model_copy(update={"number": 1000})
        headers = {"Authorization": f"Bearer {command_token(HOSTS_KEY, agent.id)}"}
        url = f"{agent.report().url}/v1/budget"
        async with cluster.session.put(url, json=late.model_dump(mode="json"), headers=headers) as response:
            assert (response.status, (await response.json())["field"]) == (409, "order")
        assert agent.cores("spare") <= 2.0


@each_store
async def test_deflated_vms_grow_before_harvest_vms_get_anything(tmp_path: Path) -> None:
    async with cluster_of(tmp_path, agent := host("host-a", 6.0, 4000.0)) as cluster:
        await cluster.create(vm("low-1"))
        await cluster.create(HARVEST)
        await cluster.create(vm("high-1", "fixed", 4.0, 800.0))
        assert (agent.cores("spare"), agent.cores("low-1")) == (0.5, 1.5)
        assert agent.budget == ZERO
        await cluster.delete("high-1")
        assert agent.cores("low-1") == 3.0
        await when(cluster, agent, "spare", cpu_cores=2.7)


@each_store
async def test_a_manager_that_starts_again_goes_on_with_the_numbers(tmp_path: Path) -> None:
    async with cluster_of(tmp_path, agent := host()) as cluster:
        await cluster.create(HARVEST)
        await when(cluster, agent, "spare", cpu_cores=5.7)
        await cluster.stop_manager()
        agent.capacity = ResourceVector(8.0, 2400.0)
        await cluster.start_manager()
        await when(cluster, agent, "spare", cpu_cores=7.6)
        assert [(budget.number, budget.epoch) for budget in agent.budgets] == [(1, 1), (2, 2)]


@each_store
async def test_no_budget_is_granted_while_a_plan_holds_the_host(tmp_path: Path) -> None:
    async with cluster_of(tmp_path, agent := host()) as cluster:
        await cluster.create(vm("low-1"))
        await cluster.create({**HARVEST, "ceiling": HARVEST["nominal"]})
        agent.trouble.never_ends = True
        body = {"request_id": "r", "vm": vm("high-1", "fixed", 3.0, 800.0), "deadline_s": 30.0}
        assert (await cluster.call("POST", "/v1/vms", json=body))[0] == 202
        async with asyncio.timeout(10):
            await agent.polled.wait()
        granted, agent.capacity = len(agent.budgets), ResourceVector(12.0, 4800.0)
        agent.vms["spare"] = agent.vms["spare"].model_copy(update={"ceiling": Vector(cpu_cores=8, memory_mib=500)})
        for _ in range(5):
            await agent.send_report()
        assert len(agent.budgets) == granted
        agent.end_pending()
        assert (await cluster.ended("r")).state is OperationState.DONE

        async def more() -> bool:
            return len(agent.budgets) > granted

        await until(more)


@each_store
async def test_a_harvest_vm_is_preempted_only_below_its_minimum(tmp_path: Path) -> None:
    async with cluster_of(tmp_path, agent := host("host-a", 6.0, 2400.0)) as cluster:
        await cluster.create(HARVEST)
        await when(cluster, agent, "spare", cpu_cores=5.7)
        assert (await cluster.create(vm("high-1", "fixed", 5.5, 800.0))).state is OperationState.DONE
        assert agent.cores("spare") == 0.5
        assert (await cluster.delete("high-1")).state is OperationState.DONE
        operation = await cluster.create(vm("high-2", "fixed", 5.6, 800.0))
        assert operation.state is OperationState.DONE, operation
        assert agent.reasons["spare"] == "minimum"
        assert agent.running == {"high-2"}


def test_a_host_without_harvest_vms_or_with_the_right_budget_gets_none() -> None:
    low = status_of(LOW, "a")
    assert budget_for(report_of("a", low), ZERO, 3) is None
    spare = status_of(VMSpec.model_validate(HARVEST), "a").model_copy(
        update={"ceiling": Vector(cpu_cores=8, memory_mib=800)}
    )
    report = report_of("a", low, spare)
    budget = budget_for(report, ZERO, 3)
    assert budget is not None
    assert (budget.number, budget.epoch) == (1, 3)
    # It holds half a core above its minimum; two are free, less 0.3 that stay so.
    assert budget.room.cpu_cores == pytest.approx(0.5 + 2.0 - 0.3)
    assert budget_for(report.model_copy(update={"budget": budget.room, "budget_number": 1}), ZERO, 3) is None
    paused = report.model_copy(update={"mode": "paused"})
    assert budget_for(paused, ZERO, 3) is None
