"""The executor of instructions by itself: which hosts it chooses by their reports, and what it leaves of an answer."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from typing import Any

import numpy as np
import pytest

from cluster_manager.errors import AgentError, AgentRefused, AgentUnreachable
from cluster_manager.execution.host_ranking import HostRanking
from cluster_manager.execution.instruction_executor import InstructionExecutor
from cluster_manager.inventory.hosts import Hosts
from cluster_manager.plans.live_migrations import start_live_migration
from cluster_manager.plans.plans import (
    AwaitHost,
    ChooseHosts,
    HostBack,
    HostFailed,
    OperationEnded,
    PlanEnded,
    Preempt,
    PreemptTogether,
    ReadHost,
    Reclaim,
    finish,
)
from cluster_manager.plans.preemption import PreemptionReason
from cluster_manager.plans.removals import start_cancel, start_target
from cluster_manager.settings import AgentLimits
from cluster_manager.store.database import Database
from cluster_manager.store.rows import StoredPlan
from cluster_manager.store.store import Store
from ebbtide.deflation.placement.policy_names import PlacementPolicy
from ebbtide.deflation.resources import ResourceVector
from ebbtide.messages.commands import Command, TargetCommand
from ebbtide.messages.common import LARGEST, PartialVector, Vector
from ebbtide.messages.hosts import HostReport
from ebbtide.messages.migrations import MigrationAddress
from ebbtide.messages.operations import Operation, OperationState
from ebbtide.messages.problem_codes import ReasonCode
from ebbtide.messages.requests import MigrateRequest, TargetRequest
from tests.manager.outcomes import outcome_of
from tests.manager.plan_events import ended, operation, placement, report_of, spec_of, status_of
from tests.manager.plans.test_live_migration_plans import HERE, SPEC, read


@pytest.fixture
async def store(database: Database) -> AsyncIterator[Store]:
    store = Store(database, time.time)
    await store.open()
    yield store
    await store.close()


@pytest.fixture
def hosts(store: Store) -> Hosts:
    return Hosts(store, 10.0, lambda: 5.0, lambda: 100.0)


@pytest.fixture
def executor(store: Store, hosts: Hosts) -> InstructionExecutor:
    unused: Any = None
    return InstructionExecutor(unused, hosts, store, AgentLimits(), np.random.default_rng(0), 1)


async def test_a_vm_that_runs_goes_where_all_of_it_fits_not_only_what_it_could_start_with(
    hosts: Hosts, executor: InstructionExecutor
) -> None:
    for host, cores in (("b", 1.0), ("c", 1.0), ("d", 1.0), ("e", 32.0)):
        await hosts.take(report_of(host, cpu_cores=cores, memory_mib=3000.0))
    request = MigrateRequest(request_id="request", live=True, deadline_s=60.0)
    begun = start_live_migration("plan", request, SPEC, "home", policy=PlacementPolicy.FIRST_FIT)
    state = begun.next_step(read("home", HERE)).state
    assert isinstance(state.instruction, ChooseHosts)
    chosen, seen = executor.ranking.choices(state, state.instruction)
    assert (chosen.hosts, len(seen)) == (("e",), 1)


async def test_a_host_that_reports_an_address_it_has_not_proved_has_no_room_for_vms_that_move(
    hosts: Hosts, store: Store
) -> None:
    here = MigrationAddress(uri="qemu+tls://127.0.0.1/system", listen="127.0.0.1", disk_dir="/d", image_dir="/i")
    there = here.model_copy(update={"uri": "qemu+tls://127.0.0.9/system", "listen": "127.0.0.9"})
    await hosts.take(report_of("b").model_copy(update={"migration": here}))
    await hosts.take(report_of("c").model_copy(update={"migration": there, "url": "http://127.0.0.9:1"}))
    agents: Any = _Agents()
    assert list(HostRanking(agents, hosts, np.random.default_rng(0)).rooms("a").hosts) == ["b"]


async def test_after_a_start_a_host_that_is_waited_for_has_the_time_to_report_before_it_is_given_up(
    hosts: Hosts, store: Store
) -> None:
    await hosts.take(report_of("b"))
    now_s = 100.0
    again = Hosts(store, 10.0, lambda: 5.0, lambda: now_s)
    await again.load()
    unused: Any = None
    executor = InstructionExecutor(unused, again, store, AgentLimits(retry_s=0.0), np.random.default_rng(0), 2)
    state = placement(spec_of("high-1")).having(instruction=AwaitHost(host="b", until_s=60.0))
    waits = asyncio.create_task(executor.perform(state, True, lambda: 70.0))
    for _ in range(10):
        await asyncio.sleep(0)
    assert not waits.done()
    await again.take(report_of("b"))
    assert isinstance(await waits, HostBack)
    now_s = 111.0
    assert isinstance(await executor.perform(state, True, lambda: 70.0), HostFailed)


async def test_of_a_vm_that_is_not_on_record_only_counts_that_a_call_failed(executor: InstructionExecutor) -> None:
    state = placement(spec_of("high-1"))
    reclaim = Reclaim(host="a", step=1, need=Vector(cpu_cores=1.0), deadline_s=1.0)
    size = ResourceVector(3.0, 1000.0)
    broken = outcome_of("theirs", 2, size, size, size).model_copy(update={"errors": ("no", "again no")})
    fine = broken.model_copy(update={"name": "other", "errors": ()})
    event = await executor._ended(state, reclaim, ended("reclaim", OperationState.PARTIAL, vms=(broken, fine)))
    assert (event.operation.vms, event.failed) == ((), (("theirs", "no"),))


async def test_what_a_host_refuses_or_another_plan_keeps_it_from_is_not_that_it_does_not_answer(
    hosts: Hosts, store: Store
) -> None:
    agents: Any = _Read(AgentRefused(400, "a refuses to be read"))
    executor = InstructionExecutor(agents, hosts, store, AgentLimits(), np.random.default_rng(0), 1)
    state = placement(spec_of("high-1")).having(instruction=ReadHost(host="a"))
    refused = [await executor.perform(state, False, lambda: 0.0)]
    wanted = TargetRequest(request_id="request", target=PartialVector(cpu_cores=1.0))
    refused.append(await executor.perform(start_target("plan.2", "low", "b", wanted, 2), False, lambda: 0.0))
    executor.call_off(state.request_id)
    refused.append(await executor._read(state, "a", lambda: 0.0))
    expected = [("a refuses to be read", ReasonCode.FAILED)] * 2 + [("a is busy with another plan", ReasonCode.FAILED)]
    assert [(event.sentence, event.code) for event in refused if isinstance(event, HostFailed)] == expected
    agents.found = AgentUnreachable("a does not answer")
    silent = await executor.perform(state.having(request_id="other"), False, lambda: 0.0)
    assert isinstance(silent, HostFailed)
    assert silent.code is ReasonCode.HOST_UNAVAILABLE


async def test_a_vm_that_got_its_last_number_meanwhile_is_refused_another_size_and_that_is_no_defect(
    hosts: Hosts, store: Store
) -> None:
    low = status_of(spec_of("low", "deflatable"), "a").model_copy(update={"generation": LARGEST})
    agents: Any = _Read(report_of("a", low))
    executor = InstructionExecutor(agents, hosts, store, AgentLimits(), np.random.default_rng(0), 1)
    wanted = TargetRequest(request_id="request", target=PartialVector(cpu_cores=1.0))
    event = await executor.perform(start_target("plan", "low", "a", wanted, 2), False, lambda: 0.0)
    none_left = HostFailed(0.0, "generation: there is none left", uncertain=False, code=ReasonCode.FAILED)
    assert event == none_left


async def test_what_a_target_waits_for_its_host_is_of_its_own_time(hosts: Hosts, store: Store) -> None:
    agents, now_s = _Resizes(report_of("a", status_of(spec_of("low", "deflatable"), "a"))), 0.0
    unused: Any = agents
    executor = InstructionExecutor(unused, hosts, store, AgentLimits(), np.random.default_rng(0), 1)
    wanted = TargetRequest(request_id="request", target=PartialVector(cpu_cores=1.0), deadline_s=60.0)
    assert await hosts.locks.hold("another plan", "a")
    waits = asyncio.create_task(executor.perform(start_target("plan", "low", "a", wanted, 2), False, lambda: now_s))
    await asyncio.sleep(0)
    now_s = 20.0
    hosts.locks.release("another plan")
    event = await waits
    assert isinstance(event, OperationEnded)
    assert (event.waited_s, [body.deadline_s for body in agents.sent]) == (20.0, [40.0])


async def test_a_target_that_was_begun_by_an_earlier_run_is_not_sent_again_after_its_deadline(
    hosts: Hosts, store: Store
) -> None:
    agents = _Resizes(report_of("a", status_of(spec_of("low", "deflatable"), "a")))
    unused: Any = agents
    executor = InstructionExecutor(unused, hosts, store, AgentLimits(), np.random.default_rng(0), 1)
    wanted = TargetRequest(request_id="request", target=PartialVector(cpu_cores=1.0), deadline_s=60.0)
    state = start_target("plan", "low", "a", wanted, 2)
    late = await executor.perform(state, True, lambda: 61.0)
    assert isinstance(late, HostFailed)
    assert (late.uncertain, agents.sent) == (True, [])
    assert isinstance(await executor.perform(state, True, lambda: 50.0), OperationEnded)
    assert [body.deadline_s for body in agents.sent] == [10.0]


async def test_a_target_that_its_host_had_before_a_restart_has_not_waited_for_it_after_that(
    hosts: Hosts, store: Store
) -> None:
    agents, now_s = _Resizes(report_of("a", status_of(spec_of("low", "deflatable"), "a"))), 10.0
    agents.known = operation("target")
    unused: Any = agents
    executor = InstructionExecutor(unused, hosts, store, AgentLimits(), np.random.default_rng(0), 1)
    wanted = TargetRequest(request_id="request", target=PartialVector(cpu_cores=1.0), deadline_s=60.0)
    assert await hosts.locks.hold("another plan", "a")
    waits = asyncio.create_task(executor.perform(start_target("plan", "low", "a", wanted, 2), True, lambda: now_s))
    await asyncio.sleep(0)
    now_s = 100.0
    hosts.locks.release("another plan")
    event = await waits
    assert isinstance(event, OperationEnded)
    assert (event.waited_s, agents.sent) == (0.0, [])


async def test_who_waits_for_a_placement_to_end_does_not_read_it_at_every_report(
    hosts: Hosts, executor: InstructionExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    running = placement(spec_of("high-1"))
    over = finish(running, OperationState.FAILED, "called off").state
    reads: list[str] = []

    async def read_it(request_id: str) -> StoredPlan:
        reads.append(request_id)
        return StoredPlan(over if ends.is_set() else running, "", 0.0, 0.0)

    ends = asyncio.Event()
    monkeypatch.setattr(executor._store, "plan", read_it)
    state = start_cancel("plan.2", "cancel", "high-1", "request")
    begun = asyncio.get_running_loop().time()
    waits = asyncio.create_task(executor.perform(state, False, lambda: 0.0))
    for number in range(50):
        await hosts.take(report_of(f"host-{number}"))
        await asyncio.sleep(0)
    assert set(reads) == {"request"}
    # One a second, however slow this machine is.
    assert len(reads) <= 2 + asyncio.get_running_loop().time() - begun
    ends.set()
    assert isinstance(await waits, PlanEnded)


async def test_when_one_of_several_commands_side_by_side_raises_the_others_are_not_gone_on_with(
    hosts: Hosts, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    agents = _Agents()
    unused: Any = agents
    executor = InstructionExecutor(unused, hosts, store, AgentLimits(), np.random.default_rng(0), 1)
    low_1, low_2 = (
        Preempt(host="a", step=step, vm=f"low-{step}", reason=PreemptionReason.MINIMUM, notice_s=0.0) for step in (1, 2)
    )
    both = PreemptTogether(host="a", step=1, victims=(low_1, low_2))

    async def fails(host: str) -> frozenset[str]:
        await agents.holds.wait()
        raise KeyError("a defect")

    monkeypatch.setattr(store, "recorded", fails)
    before = asyncio.all_tasks()
    with pytest.raises(KeyError, match="a defect"):
        await executor.perform(placement(spec_of("high-1")).having(instruction=both), False, lambda: 0.0)
    left = asyncio.all_tasks() - before
    agents.forgets.set()
    await asyncio.gather(*left, return_exceptions=True)
    assert (left, agents.sent) == (set(), ["/v1/vms/low-1/stop", "/v1/vms/low-2/stop"])


class _Read:
    """Of hosts that are read."""

    def __init__(self, found: AgentError | HostReport) -> None:
        self.found = found

    async def host(self, host: str) -> HostReport:
        if isinstance(self.found, AgentError):
            raise self.found
        return self.found


class _Resizes:
    """Of one host, which does all that it is told at once."""

    def __init__(self, found: HostReport) -> None:
        self._found = found
        self.known: Operation | None = None
        self.sent: list[TargetCommand] = []

    async def host(self, host: str, retry: bool = True) -> HostReport:
        return self._found

    async def operation(self, host: str, request_id: str) -> Operation | None:
        return self.known

    async def command(self, host: str, method: str, path: str, body: TargetCommand) -> Operation:
        self.sent.append(body)
        return operation("target")

    async def follow(self, host: str, begun: Operation, limit_s: float, tell: object) -> Operation | None:
        return begun


class _Agents:
    """Of one host: it has ended the first command, and holds the second until it forgets it."""

    def __init__(self) -> None:
        self.sent: list[str] = []
        self.holds, self.forgets = asyncio.Event(), asyncio.Event()

    def proven(self, report: HostReport) -> HostReport:
        return report.model_copy(update={"url": "http://127.0.0.1:1"})

    async def command(
        self, host: str, method: str, path: str, body: Command, without: frozenset[str] = frozenset()
    ) -> Operation:
        self.sent.append(path)
        return operation("stop", OperationState.RUNNING).model_copy(update={"request_id": body.request_id})

    async def follow(self, host: str, begun: Operation, limit_s: float, tell: object) -> Operation | None:
        if begun.request_id == "plan.1":
            size = ResourceVector(3.0, 1000.0)
            return operation("stop", vms=(outcome_of("low-1", 2, size, size, size),))
        self.holds.set()
        await self.forgets.wait()
        return None
