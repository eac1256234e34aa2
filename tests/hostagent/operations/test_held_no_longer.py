"""A VM is held no longer than its own work takes, however long another VM of the same operation takes.

Hypervisor, guests and time are make-believe (`tests.hostagent.local_world`).
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from random import Random
from typing import Any

import pytest

from ebbtide.deflation.cascade.instructions import Mode
from ebbtide.deflation.trimming import Step, Trimmer, TrimRow
from ebbtide.messages.commands import CreateCommand, ReclaimCommand, ReinflateCommand, TargetCommand
from ebbtide.messages.common import Vector
from ebbtide.messages.guest import GuestStatus
from ebbtide.messages.migrations import DepartureCommand
from ebbtide.messages.operations import Operation, OperationState, VMOutcome
from ebbtide.messages.vms import VMSpec
from hostagent.control import reconciler
from hostagent.libvirt.definitions import usable_boot_mib
from hostagent.operations.agent import Agent
from hostagent.state.intents import Cause, Phase, Request
from hostagent.state.journal import Journal
from hostagent.vm.host import Host, Slice, plan_all
from hostagent.vm.managed_vm import ManagedVM
from tests.hostagent import random_parts as parts
from tests.hostagent.fake_moves import ADDRESS
from tests.hostagent.faked_loop import FakedLoop
from tests.hostagent.local_guest import Application, Manner
from tests.hostagent.local_hypervisor import Faults, Fence, LocalHypervisor
from tests.hostagent.local_world import Domain, LocalWorld
from tests.hostagent.random_parts import CAPACITY, HOST, OVERHEAD_MIB, Count
from tests.waiting import until

#: A test, in faked time.
Body = Callable[[LocalWorld, Agent, Path], Awaitable[None]]


@pytest.fixture
def faked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[Body], None]:
    """Run something over an agent with low-1 and low-2 of 1024 MiB, 700 of them in their applications."""
    monkeypatch.setattr(asyncio, "open_unix_connection", parts.connect)

    async def main(body: Body) -> None:
        world = Count.world = LocalWorld(asyncio.get_running_loop(), Random(0))
        async with agent_over(world, tmp_path) as agent:
            for name in ("low-1", "low-2"):
                nominal, minimum = Vector(cpu_cores=2.0, memory_mib=1024.0), Vector(cpu_cores=0.5, memory_mib=320.0)
                spec = VMSpec(name=name, nominal=nominal, minimum=minimum)
                await ended(agent, await agent.creations.create(CreateCommand(request_id=f"c-{name}", vm=spec)))
                await agent.host.vms[name].wait_for_hello(60.0)
                guest = domain_of(world, agent.host.vms[name]).guest
                guest.cache_mib, guest.application = 700.0, Application.HANGS
            await body(world, agent, tmp_path)
        await parts.ended(world.tasks)

    def run(body: Body) -> None:
        with asyncio.Runner(loop_factory=FakedLoop) as runner:
            runner.run(main(body))

    return run


@contextlib.asynccontextmanager
async def agent_over(world: LocalWorld, directory: Path) -> AsyncIterator[Agent]:
    part = Slice(HOST, "http://127.0.0.1:1", CAPACITY, "qemu", OVERHEAD_MIB)
    hypervisor = LocalHypervisor(world, HOST, Fence(), Faults())
    agent = Agent(Host(part, hypervisor, Journal(directory), lambda: 1e6), usable_boot_mib)
    await agent.start()
    try:
        yield agent
    finally:
        await agent.close()


async def ended(agent: Agent, operation: Operation) -> Operation:
    found = await agent.requests.operations.get(operation.request_id, 900.0)
    assert found is not None
    assert found.state is not OperationState.RUNNING
    return found


async def under_way(agent: Agent, request_id: str) -> bool:
    found = await agent.requests.operations.get(request_id)
    assert found is not None
    return found.state is OperationState.RUNNING


def domain_of(world: LocalWorld, vm: ManagedVM) -> Domain:
    return world.domains[vm.domain]


def vms_of(agent: Agent) -> tuple[ManagedVM, ManagedVM]:
    return agent.host.vms["low-1"], agent.host.vms["low-2"]


async def asked_both(world: LocalWorld, agent: Agent, deadline_s: float, **need: float) -> None:
    """A reclaim has begun, and both applications hang over it."""
    await agent.sizes.reclaim(ReclaimCommand(request_id="r", need=Vector(**need), deadline_s=deadline_s))
    await until(lambda: all(domain.guest.releases for domain in world.domains.values()))


async def press(world: LocalWorld, vm: ManagedVM) -> None:
    """The guest is short of memory, and is heard."""
    domain = domain_of(world, vm)
    domain.guest.pressed_at, domain.guest.used_mib = world.now(), domain.held_mib - domain.guest.cache_mib - 8.0
    vm.pressure.observe(await vm.link.call("status", {}, GuestStatus, 5.0))


def test_a_vm_under_pressure_gets_memory_while_another_vm_of_its_reclaim_still_shrinks(
    faked: Callable[[Body], None],
) -> None:
    async def body(world: LocalWorld, agent: Agent, _: Path) -> None:
        low_1, low_2 = vms_of(agent)
        for domain in world.domains.values():
            domain.guest.application = Application.NONE
        need = ReclaimCommand(request_id="before", need=Vector(memory_mib=200.0), deadline_s=60.0)
        assert (await ended(agent, await agent.sizes.reclaim(need))).state == "done"
        assert low_1.allocation().current.memory_mib <= 924
        for domain in world.domains.values():
            domain.guest.application = Application.HANGS
        await asked_both(world, agent, 600.0, memory_mib=600.0)
        await press(world, low_1)
        await until(lambda: low_1.allocation().current.memory_mib == 1024 and low_1.lock.is_free, limit_s=15.0)
        assert await under_way(agent, "r")
        assert (low_1.intent.phase, low_2.intent.phase) == (Phase.SETTLED, Phase.DEFLATING)
        operation = await ended(agent, Operation.model_validate(await agent.requests.operations.get("r")))
        outcomes = {outcome.name: outcome for outcome in operation.vms}
        assert "under memory pressure" in outcomes["low-1"].sentence
        assert outcomes["low-2"].after.memory_mib < 924, "the other one went on"

    faked(body)


def test_a_vm_whose_own_step_of_steady_mode_gave_way_is_free_while_another_one_is_still_trimmed(
    faked: Callable[[Body], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    short: list[str] = []

    def steps(trimmer: Trimmer, now: float, rows: list[TrimRow], *sizes: float) -> dict[str, Step]:
        return {row.allocation.name: Step(900.0, "it lies idle") for row in rows if row.may_trim}

    monkeypatch.setattr(Trimmer, "steps", steps)
    monkeypatch.setattr(Trimmer, "fell_short", lambda self, now, name: short.append(name))

    async def body(world: LocalWorld, agent: Agent, _: Path) -> None:
        low_1, low_2 = vms_of(agent)
        for domain in world.domains.values():
            domain.guest.cache_mib, domain.speed_mib_s = 0.0, 1.0
        await until(lambda: low_1.lock.is_free and low_2.lock.is_free)
        step = asyncio.create_task(agent.steady._step())
        await until(lambda: low_1.resizer._taking and low_2.resizer._taking)
        began = world.now()
        target = TargetCommand(
            request_id="t", generation=99, target=Vector(cpu_cores=1.0, memory_mib=1024.0), deadline_s=60.0
        )
        operation = await ended(agent, await agent.sizes.target("low-1", target))
        assert operation.state == "done", operation.sentence
        assert world.now() - began < 5.0
        assert (low_2.resizer._taking, short) == (True, [])
        await step
        assert short == ["low-2"], "low-1 was not given the time"

    faked(body)


def test_every_busy_vm_is_told_that_an_operation_waits_and_not_only_the_first(faked: Callable[[Body], None]) -> None:
    async def body(world: LocalWorld, agent: Agent, _: Path) -> None:
        host, (low_1, low_2) = agent.host, vms_of(agent)
        domain_of(world, low_2).guest.cache_mib, domain_of(world, low_2).speed_mib_s = 0.0, 1.0

        async def trim() -> VMOutcome:
            async with low_2.lock:
                target = low_2.allocation().current.with_component("memory_mib", 900.0)
                plan_all(host, {"low-2": target}, Request("steady-1", "reinflate", {"gently": True}, 0.0))
                return await host.resize_one(low_2, 20.0)

        async with low_1.lock:
            step = asyncio.create_task(trim())
            await until(lambda: low_2.resizer._taking)
            need = ReclaimCommand(request_id="r", need=Vector(cpu_cores=1.0), deadline_s=60.0)
            waits = asyncio.create_task(agent.sizes.reclaim(need))
            async with asyncio.timeout(5.0):
                assert "an operation waits for the VM" in (await step).sentence
            assert low_2.lock.is_wanted, "what comes to it meanwhile gives way, too"
        assert (await ended(agent, await waits)).state == "done"
        assert not low_1.lock.is_wanted
        assert not low_2.lock.is_wanted

    faked(body)


async def _begun_and_killed(world: LocalWorld, directory: Path) -> None:
    """An agent over the same domains begins a reclaim and is gone; low-2's guest says nothing any more."""
    async with agent_over(world, directory) as agent:
        await asyncio.gather(*(vm.wait_for_hello(60.0) for vm in vms_of(agent)))
        await asked_both(world, agent, 600.0, memory_mib=360.0)
    for domain in world.domains.values():
        domain.hang_up()
        domain.guest.application = Application.PROMISES
        domain.guest.releases, domain.guest.cache_mib = {}, 300.0
    silent = next(domain for domain in world.domains.values() if domain.intent.spec.name == "low-2")
    silent.guest.manner = Manner.SILENT


@contextlib.asynccontextmanager
async def restarted(world: LocalWorld, agent: Agent, directory: Path) -> AsyncIterator[Agent]:
    """The agent that comes after that."""
    await agent.close()
    await _begun_and_killed(world, directory)
    async with agent_over(world, directory) as successor:
        yield successor


def test_after_a_restart_a_vm_whose_guest_says_nothing_keeps_no_other_of_its_reclaim_locked(
    faked: Callable[[Body], None],
) -> None:
    async def body(world: LocalWorld, agent: Agent, directory: Path) -> None:
        async with restarted(world, agent, directory) as successor:
            low_1, low_2 = vms_of(successor)
            await until(lambda: low_1.intent.phase is Phase.SETTLED and low_1.lock.is_free)
            assert low_1.allocation().current.memory_mib <= 844
            assert await under_way(successor, "r")
            assert low_2.intent.phase is Phase.DEFLATING, "nothing is tried before its guest has said hello"
            assert low_2.lock.is_free
            domain_of(world, low_2).guest.manner = Manner.HONEST
            domain_of(world, low_2).hang_up()
            operation = await ended(successor, Operation.model_validate(await successor.requests.operations.get("r")))
            assert operation.state == "done", operation.sentence
            assert [outcome.name for outcome in operation.vms] == ["low-1", "low-2"]
            assert low_2.allocation().current.memory_mib <= 844

    faked(body)


def test_a_resumed_reclaim_leaves_a_vm_alone_that_another_operation_has_taken_over_meanwhile(
    faked: Callable[[Body], None],
) -> None:
    async def body(world: LocalWorld, agent: Agent, directory: Path) -> None:
        async with restarted(world, agent, directory) as successor:
            _, low_2 = vms_of(successor)
            target = Vector(cpu_cores=1.0, memory_mib=1024.0)
            taken_over = TargetCommand(request_id="t", generation=99, target=target, deadline_s=60.0)
            began = world.now()
            assert (await ended(successor, await successor.sizes.target("low-2", taken_over))).state == "done"
            assert world.now() - began < 30.0, "before its guest was given up"
            operation = await ended(successor, Operation.model_validate(await successor.requests.operations.get("r")))
            assert operation.state == "partial", operation.sentence
            outcomes = {outcome.name: outcome for outcome in operation.vms}
            assert "another operation has taken it over" in outcomes["low-2"].sentence
            assert outcomes["low-2"].before == outcomes["low-2"].after
            assert low_2.allocation().current.cpu_cores == 1.0
            assert low_2.intent.cause is not None
            assert low_2.intent.cause.request_id == "t"

    faked(body)


def test_a_vm_whose_resumed_resize_waits_for_its_guest_is_moved_afterwards_and_kept_out_of_others_growth(
    faked: Callable[[Body], None],
) -> None:
    async def body(world: LocalWorld, agent: Agent, directory: Path) -> None:
        async with restarted(world, agent, directory) as successor:
            low_1, low_2 = vms_of(successor)
            await until(lambda: low_1.intent.phase is Phase.SETTLED and low_1.lock.is_free)
            target = low_2.intent.target
            grows = ReinflateCommand(request_id="g", vms=("low-1",), deadline_s=30.0)
            assert (await ended(successor, await successor.sizes.reinflate(grows))).state == "done"
            assert low_2.intent.target == target
            assert await under_way(successor, "r")
            room = Vector(cpu_cores=1.0, memory_mib=500.0)
            command = DepartureCommand(request_id="d", to="host-b", address=ADDRESS, size=room, deadline_s=120.0)
            move = asyncio.create_task(successor.migrations.depart("low-2", command))
            domain_of(world, low_2).guest.manner = Manner.HONEST
            domain_of(world, low_2).hang_up()
            # It was looked at when its size was settled, not refused before.
            assert "it has grown to 2 cores, 844 MiB" in (await ended(successor, await move)).sentence
            reclaimed = await ended(successor, Operation.model_validate(await successor.requests.operations.get("r")))
            assert reclaimed.state == "done", reclaimed.sentence

    faked(body)


def test_a_check_that_waits_for_a_slot_holds_no_vm(
    faked: Callable[[Body], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reconciler, "CONCURRENT", 1)

    async def body(world: LocalWorld, agent: Agent, _: Path) -> None:
        low_1, low_2 = vms_of(agent)
        entered, go_on, checked = asyncio.Event(), asyncio.Event(), asyncio.Event()

        async def hangs(why_not: str) -> None:
            entered.set()
            await go_on.wait()

        async def notes(why_not: str) -> None:
            checked.set()

        monkeypatch.setattr(low_1.drift_repair, "check", hangs)
        monkeypatch.setattr(low_2.drift_repair, "check", notes)
        low_1.request_check()
        await entered.wait()
        low_2.request_check()
        waiting = "check:low-2"
        await until(lambda: any(task.get_name() == waiting for task in asyncio.all_tasks()))
        assert low_2.lock.is_free
        # One that is busy when its turn has come holds no slot for that, and is looked at afterwards.
        async with low_2.lock:
            go_on.set()
            await until(lambda: all(task.get_name() != waiting for task in asyncio.all_tasks()))
            assert not low_2.lock.is_wanted
            checked.clear()
        await checked.wait()

    faked(body)


def test_a_vm_that_waits_for_a_slot_gets_what_is_left_of_the_deadline(
    faked: Callable[[Body], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    async def body(world: LocalWorld, agent: Agent, _: Path) -> None:
        given: list[float] = []

        async def slow(self: Any, vm: ManagedVM, deadline_s: float, mode: Mode = Mode.ASK) -> VMOutcome:
            given.append(deadline_s)
            await asyncio.sleep(min(40.0, deadline_s))
            return vm.summary()

        monkeypatch.setattr(Host, "resize_one", slow)
        agent.host.slots = asyncio.Semaphore(1)
        began = world.now()
        outcomes = await agent.host.resize([*vms_of(agent), vms_of(agent)[0]], 60.0)
        assert given == pytest.approx([60.0, 20.0], abs=0.1)
        assert world.now() - began == pytest.approx(60.0, abs=0.1)
        # No shortfall, for which another VM might be preempted: it was not asked.
        assert [outcome.errors for outcome in outcomes] == [(), (), ("its turn came after the deadline",)]

    faked(body)


def test_one_whose_turn_came_too_late_leaves_its_decision_and_is_counted(
    faked: Callable[[Body], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    async def body(world: LocalWorld, agent: Agent, _: Path) -> None:
        busy, late = vms_of(agent)[:2]

        async def slow(deadline_s: float, mode: Mode = Mode.ASK) -> VMOutcome:
            await asyncio.sleep(deadline_s)
            return busy.summary()

        monkeypatch.setattr(busy, "resize", slow)
        size = late.intent.committed
        cause = Cause(request_id="r", kind="reclaim", body={}, started_at=0.0, before=size)
        late.record.plan(size.vector() * 0.5, cause)
        agent.host.slots = asyncio.Semaphore(1)
        outcomes = await agent.host.resize([busy, late], 60.0)
        assert outcomes[1].errors == ("its turn came after the deadline",)
        said = [decision for decision in agent.host.history.decisions(late.name) if decision.kind == "deflate"]
        assert "its turn came after the deadline" in said[-1].sentence
        assert agent.host.tallies.of(late.name).resizes["deflate", "error"] == 1

    faked(body)
