"""On which host a fixed VM preempts: where a layer failed, before where a minimum is in the way."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from cluster_manager.execution import operations
from cluster_manager.plans.placements import PlacementPlan
from cluster_manager.plans.plans import PreemptTogether, VMPhase
from cluster_manager.plans.preemption import costs
from cluster_manager.plans.returns import Returns
from ebbtide.deflation.resources import ResourceVector
from ebbtide.deflation.sharing.return_queue import ReturnPace
from ebbtide.messages.common import Vector
from ebbtide.messages.hosts import HostReport
from ebbtide.messages.operations import OperationState
from tests.manager.cluster import QUICK, cluster_of, vm
from tests.manager.fake_agent import FakeAgent
from tests.manager.outcomes import outcome_of
from tests.manager.plan_events import chosen, ended, placement, read, spec_of, status_of
from tests.waiting import until

pytestmark = pytest.mark.usefixtures("each_store")


async def test_nobody_is_preempted_for_a_minimum_while_minimums_allow_elsewhere(tmp_path: Path) -> None:
    first, second = (FakeAgent(f"host-{name}", cpu_cores=6.0, memory_mib=4000.0) for name in "ab")
    async with cluster_of(tmp_path, first, second) as cluster:
        # host-a: both at their minimums. host-b: nobody gives what the minimums would allow.
        for name in ("low-1", "low-2"):
            rigid: Any = {"minimum": {"cpu_cores": 3.0, "memory_mib": 600.0}}
            await cluster.create(vm(name, memory_mib=600.0, **rigid), policy="first-fit")
        for name in ("low-3", "low-4"):
            await cluster.create(vm(name, memory_mib=600.0), policy="first-fit")
        assert set(second.vms) == {"low-3", "low-4"}
        second.trouble.gives = {"low-3": 0.1, "low-4": 0.1}
        operation = await cluster.create(vm("high-2", "fixed", 3.0, 600.0), policy="first-fit")
        assert (operation.state, operation.host) == (OperationState.DONE, "host-b"), operation
        (event,) = await cluster.events("preempted")
        assert "reason shortfall" in event["sentence"]


def test_who_came_to_the_host_while_a_placement_waited_is_not_farthest_from_a_target_it_never_had() -> None:
    lows = [spec_of(f"low-{at}", "deflatable", 2.0, 300.0) for at in (1, 2, 3)]
    came = spec_of("came", "deflatable", 1.4, 300.0).with_minimum(ResourceVector(1.4, 300.0))
    least, stuck = Vector(cpu_cores=0.5, memory_mib=300.0), ResourceVector(2.0, 300.0)
    before = read("a", *(status_of(low, "a") for low in lows), cpu_cores=10.0, memory_mib=9000.0)
    gave = outcome_of("low-2", 2, stuck, least.vector(), least.vector())
    short = [outcome_of(name, 2, stuck, stuck, ResourceVector(1.0, 300.0)) for name in ("low-1", "low-3")]
    there = (status_of(lows[0], "a"), status_of(lows[1], "a", least), status_of(lows[2], "a"), status_of(came, "a"))
    state: Any = placement(spec_of("high-1", cpu_cores=7.0))
    reclaimed = ended("reclaim", OperationState.PARTIAL, vms=(gave, *short))
    for event in (chosen(), chosen("a"), before, reclaimed, read("a", *there, cpu_cores=10.0, memory_mib=9000.0)):
        state = state.next_step(event).state
    assert isinstance(state, PlacementPlan)
    assert isinstance(state.instruction, PreemptTogether), state.progress
    assert {victim.vm for victim in state.instruction.victims} == {"low-1", "low-3"}


@pytest.mark.parametrize(("started_s", "older"), [(-60.0, False), (5.0, False), (3600.0, True), (None, True)])
def test_a_vm_that_was_started_by_a_clock_that_was_ahead_is_not_the_one_with_the_least_work(
    started_s: float | None, older: bool
) -> None:
    now, sold = 1.7e9, {name: spec_of(name, "deflatable", 2.0, 300.0) for name in ("long", "short")}
    started = {"long": None if started_s is None else now + started_s, "short": now - 600.0}
    vms = [status_of(spec, "a").model_copy(update={"started_at": started[name]}) for name, spec in sold.items()]
    found = costs(vms, sold, now)
    assert (found["long"] > found["short"]) is older


class Pressed(FakeAgent):
    """A host whose guests are all under pressure: its agent says that nothing can be taken."""

    def report(self) -> HostReport:
        report = super().report()
        vms = tuple(vm.model_copy(update={"pressure": "tasks wait for memory"}) for vm in report.vms)
        return report.model_copy(update={"deflatable": Vector(), "vms": vms})


async def test_what_guests_under_pressure_do_not_give_is_a_shortfall_and_no_minimum(tmp_path: Path) -> None:
    agent = Pressed("host-a", cpu_cores=6.0, memory_mib=4000.0)
    async with cluster_of(tmp_path, agent) as cluster:
        for name in ("low-1", "low-2"):
            await cluster.create(vm(name, memory_mib=600.0))
        operation = await cluster.create(vm("high-1", "fixed", 3.0, 600.0))
        assert operation.state is OperationState.DONE, operation
        (event,) = await cluster.events("preempting")
        assert "reason shortfall" in event["sentence"]
        assert "in layer guest (low-1, low-2 under pressure gives nothing)" in event["sentence"]


@pytest.mark.parametrize("trouble", ["command lost", "answer lost", 500, 503])
async def test_a_vm_that_may_have_been_preempted_and_deleted_runs_on_or_is_gone_as_its_host_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, trouble: str | int
) -> None:
    """The room for which it was to go is not needed any more: for an error it is not deleted."""
    pace = ReturnPace(hold_s=0.1, rest_s=0.1, pause_s=0.1, longest_s=0.2)
    monkeypatch.setattr(operations, "Returns", lambda: Returns(pace))
    monkeypatch.setattr(operations, "SHARE_S", 0.05)
    carried_out = trouble == "answer lost"
    agent = FakeAgent("host-a", cpu_cores=6.0, memory_mib=4000.0)
    async with cluster_of(tmp_path, agent, agents=replace(QUICK, answer_s=0.4)) as cluster:
        rigid: Any = {"minimum": {"cpu_cores": 3.0, "memory_mib": 600.0}}
        for name in ("low-1", "low-2"):
            await cluster.create(vm(name, memory_mib=600.0, on_preemption="delete", **rigid))
        if isinstance(trouble, int):
            agent.trouble.refuses = trouble
        else:
            agent.trouble.hangs_at, agent.trouble.carries_out = len(agent.arrived) + 1, carried_out
        body = {"request_id": "high", "vm": vm("high-1", "fixed", 3.0, 600.0), "deadline_s": 10.0}
        assert (await cluster.call("POST", "/v1/vms", json=body))[0] == 202
        if not isinstance(trouble, int):
            async with asyncio.timeout(5):
                await agent.hanging.wait()
            await agent.die()
        operation = await cluster.ended("high")
        assert operation.state is OperationState.FAILED
        agent.trouble.refuses = None
        if not isinstance(trouble, int):
            await agent.revive()

        async def agreed() -> bool:
            assert cluster.manager is not None
            rows = [row for row in await cluster.manager.store.vms() if row.host]
            return {row.name for row in rows} == set(agent.vms) and all(row.phase is VMPhase.RUNNING for row in rows)

        async with asyncio.timeout(20):
            await until(agreed)
        assert len(agent.vms) == (1 if carried_out else 2)
        (event,) = await cluster.events("preempting")
        assert "reason minimum" in event["sentence"]
