"""The rules that never bend, over the agent's own code: any order of commands, faults, kills and passing of time.

The agent, its operations, its watch, its journal and its conversations with guests are the real ones; hypervisor,
guests, threads and time are make-believe (`tests.hostagent.local_world`), so that thousands of steps with all
their waiting take seconds.
"""

from __future__ import annotations

import asyncio
import shutil
import tempfile
from collections.abc import Awaitable, Callable
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
)

from ebbtide.deflation.cascade.instructions import Mode
from ebbtide.deflation.errors import InvalidField
from ebbtide.deflation.resources import ZERO, ResourceVector
from ebbtide.deflation.sharing.harvest import HARVEST_PACE
from ebbtide.messages.commands import Budget, Command, CreateCommand, ReclaimCommand, ReinflateCommand, TargetCommand
from ebbtide.messages.common import Vector
from ebbtide.messages.operations import Operation
from ebbtide.messages.vms import VMSpec
from hostagent.control.reconciler import OWNERS_S
from hostagent.errors import HostAgentError, HypervisorError, RequestRefused
from hostagent.libvirt.definitions import usable_boot_mib
from hostagent.libvirt.hypervisor import domain_name
from hostagent.operations.agent import Agent
from hostagent.state.intents import Phase
from hostagent.vm.host import Host, Slice
from hostagent.vm.managed_vm import ManagedVM
from tests.hostagent import random_parts as parts
from tests.hostagent.faked_loop import FakedLoop
from tests.hostagent.local_faults import FAULTS, started
from tests.hostagent.local_guest import Application
from tests.hostagent.local_hypervisor import KILLED, Faults, Fence, FencedJournal, LocalHypervisor
from tests.hostagent.local_world import ROUNDING, LocalWorld
from tests.hostagent.random_parts import CAPACITY, ERRORS, HOST, Count, deadlines, indices, moments, shares, specs


class HostMachine(RuleBasedStateMachine):
    """One host, one agent after another."""

    def __init__(self) -> None:
        super().__init__()
        self.loop = FakedLoop()
        asyncio.set_event_loop(self.loop)
        self.directory = Path(tempfile.mkdtemp(prefix="ebb-rules-"))
        self.requests = 0
        self.epoch = 0
        #: How each request was sent, to send it again.
        self.sent: list[Callable[[], Awaitable[Operation]]] = []
        self.broken: list[str] = []
        self.faults = Faults()
        self.world = Count.world = LocalWorld(self.loop, Random(0))
        self.agent: Agent | None = None

    @initialize(
        seed=st.integers(0, 2**16), swap_mib=st.sampled_from([0.0, 512.0]), slowest=st.sampled_from([0.01, 0.2])
    )
    def begin(self, seed: int, swap_mib: float, slowest: float) -> None:
        self.world.random.seed(seed)
        self.world.swap_mib, self.world.slowest_s = swap_mib, slowest
        self._start()

    # --- commands ------------------------------------------------------------------------------------------------

    @rule(spec=specs(), share=st.none() | shares, wait_s=moments)
    def create(self, spec: VMSpec, share: float | None, wait_s: float) -> None:
        start_size = None if share is None else parts.between(spec.least_start(), spec.nominal.vector(), share)
        command = CreateCommand(request_id=self._request_id(), epoch=self.epoch, vm=spec, start_size=start_size)
        self._send(lambda: self.host_agent.creations.create(command), wait_s)

    @rule(share=shares, newer=st.sampled_from([1, 1, 1, 0, -1]), wait_s=moments)
    def budget(self, share: float, newer: int, wait_s: float) -> None:
        number = max(self.host.journal.budget.number + newer, 1)
        budget = Budget(number=number, epoch=self.epoch, room=Vector.of(CAPACITY * share))
        self._try(lambda: self.host_agent.harvest.grant(budget))
        self._go(wait_s)

    @rule(which=indices, wait_s=moments)
    def delete(self, which: int, wait_s: float) -> None:
        if (vm := self._vm(which)) is None:
            return self._go(wait_s)
        command, name = Command(request_id=self._request_id(), epoch=self.epoch), vm.name

        def send() -> Awaitable[Operation]:
            # An agent that was started since does not know the request of a VM that is gone: it counts for the next.
            if name in self.host.vms:
                self.world.terminating.add(domain_name(HOST, name))
            return self.host_agent.creations.delete(name, command, "delete")

        self._send(send, wait_s)

    @rule(which=indices, cpu=shares, memory=shares, disk=shares, newer=st.sampled_from([1, 1, 1, 1, 0, -1, 7]),
          deadline_s=deadlines, mode=st.sampled_from(Mode), wait_s=moments)  # fmt: skip
    def target(
        self,
        which: int,
        cpu: float,
        memory: float,
        disk: float,
        newer: int,
        deadline_s: float,
        mode: Mode,
        wait_s: float,
    ) -> None:
        if (vm := self._vm(which)) is None:
            return self._go(wait_s)
        low, high, name = vm.allocation().minimum, vm.allocation().upper, vm.name
        shares = (cpu, memory, disk, disk)
        size = [round(a + (b - a) * share, 2) for a, b, share in zip(low, high, shares, strict=True)]
        command = TargetCommand(
            request_id=self._request_id(),
            epoch=self.epoch,
            generation=max(vm.intent.generation + newer, 1),
            target=Vector.of(ResourceVector(*size)),
            deadline_s=deadline_s,
            mode=mode,
        )
        self._send(lambda: self.host_agent.sizes.target(name, command), wait_s)

    @rule(cpu=shares, memory=shares, disk=shares, deadline_s=deadlines, mode=st.sampled_from(Mode), wait_s=moments)
    def reclaim(self, cpu: float, memory: float, disk: float, deadline_s: float, mode: Mode, wait_s: float) -> None:
        need = Vector(cpu_cores=cpu * 6, memory_mib=memory * 3000, disk_mib_s=disk * 80, network_mib_s=disk * 80)
        command = ReclaimCommand(
            request_id=self._request_id(), epoch=self.epoch, need=need, deadline_s=deadline_s, mode=mode
        )
        self._send(lambda: self.host_agent.sizes.reclaim(command), wait_s)

    @rule(share=st.none() | shares, deadline_s=deadlines, wait_s=moments)
    def reinflate(self, share: float | None, deadline_s: float, wait_s: float) -> None:
        room = None if share is None else Vector.of(CAPACITY * share)
        command = ReinflateCommand(request_id=self._request_id(), epoch=self.epoch, room=room, deadline_s=deadline_s)
        self._send(lambda: self.host_agent.sizes.reinflate(command), wait_s)

    @precondition(lambda self: self.sent)
    @rule(back=st.integers(0, 5), wait_s=moments)
    def send_again(self, back: int, wait_s: float) -> None:
        """The same request once more: it is known, and nothing is done twice."""
        if self.agent is not None:
            ids = len(self.host_agent.requests.operations._records)
            self._try(self.sent[-1 - min(back, len(self.sent) - 1)])
            assert ids <= len(self.host_agent.requests.operations._records) <= ids + 1
        self._go(wait_s)

    @rule()
    def another_manager_leads(self) -> None:
        self.epoch += 1
        self._go(0.0)

    # --- time, ends and beginnings -------------------------------------------------------------------------------

    @rule(seconds=st.sampled_from([0.05, 0.3, 1.0, 3.0, 10.0, 40.0]))
    def time_passes(self, seconds: float) -> None:
        self._go(seconds)

    @rule()
    def agent_is_killed(self) -> None:
        self._kill()
        self._go(0.0)

    @rule(calls=st.integers(1, 12), after_effect=st.booleans(), wait_s=moments)
    def agent_will_die(self, calls: int, after_effect: bool, wait_s: float) -> None:
        """At one of its next calls, before or after that has had its effect."""
        self.fence.calls_left, self.fence.after_effect = calls, after_effect
        self._go(wait_s)

    @rule()
    def agent_ends_and_starts(self) -> None:
        assert self.agent is not None
        self._run(self.agent.close())
        self._kill()
        self._go(0.0)

    @rule()
    def calm(self) -> None:
        """Nothing is wrong any more: soon all is as it should be."""
        Count.steps += 1
        self._calm()

    # --- what befalls VMs and host -------------------------------------------------------------------------------

    @rule(what=st.sampled_from(sorted(FAULTS)), which=indices, wait_s=moments)
    def befall(self, what: str, which: int, wait_s: float) -> None:
        """Faults of one VM, of its guest, or of the hypervisor."""
        if names := self._names():
            name = names[which % len(names)]
            self.world.note(name, what)
            FAULTS[what](self.world, self.faults, name)
        self._go(wait_s)

    @rule(which=indices, wait_s=moments)
    def application_takes_memory(self, which: int, wait_s: float) -> None:
        if names := self._names():
            self.world.fill(self.world.domains[names[which % len(names)]], 600.0)
        self._go(wait_s)

    @rule(which=indices)
    def cure(self, which: int) -> None:
        if names := self._names():
            self.world.cure(names[which % len(names)])
        self.faults.clear()
        self._go(0.4)

    # --- what must hold ------------------------------------------------------------------------------------------

    @invariant()
    def rules_hold(self) -> None:
        self.world.judge_all()
        # In a process that was killed nobody is left to retrieve what its tasks ended with.
        self.broken += [one for one in self.loop.complaints if KILLED not in one] + ERRORS
        self.loop.complaints.clear()
        ERRORS.clear()
        assert not self.broken, "\n".join(self.broken)
        assert not self.world.blames, "\n".join([*self.world.blames, *self.world.diary])
        if self.agent is None:
            return
        host, charged, excused = self.agent.host, ZERO, ZERO
        for vm in host.vms.values():
            allocation, domain = vm.allocation(), self.world.domains.get(vm.domain)
            least = f"{vm.name} is charged with {allocation.current}, below {allocation.minimum}"
            gone = vm.intent.phase is Phase.DELETING and (domain is None or domain.state == "stopped")
            off = gone or vm.intent.phase is Phase.STOPPED
            assert off or allocation.minimum.fits_in(allocation.current + ROUNDING), least
            charged += allocation.current + ResourceVector(memory_mib=parts.OVERHEAD_MIB)
            if domain is None or domain.state != "running" or domain.intent.owner != HOST:
                continue
            if domain.disturbed:
                excused += allocation.upper
            else:
                held = domain.may_hold()
                if vm.intent.phase is not Phase.SETTLED:
                    # CPUs come on line under a quota that is spread over them only once it is known how many came.
                    held = held.with_component("cpu_cores", 0.0)
                assert held.fits_in(allocation.current + ROUNDING), (
                    f"{vm.name} may hold {held}, but is charged with {allocation.current} ({vm.intent.phase}):\n"
                    + "\n".join(self.world.diary)
                )
        assert charged.fits_in(CAPACITY + excused + ROUNDING), f"{charged} are charged, the host has {CAPACITY}"

    def teardown(self) -> None:
        try:
            if self.agent is not None and not self.broken and not self.world.blames:
                self._end()
        finally:
            self._kill()
            self.loop.run_until_complete(parts.ended(self.world.tasks))
            self.loop.close()
            shutil.rmtree(self.directory)

    def _end(self) -> None:
        """Faults cured, operations ended, room enough: every VM gets back all that it was sold."""
        for name in self._names():
            started(self.world, self.faults, name)
        self._calm()
        total = ZERO
        for vm in sorted(self.host.vms.values(), key=lambda vm: vm.name):
            allocation = vm.allocation()
            needs = allocation.upper + ResourceVector(memory_mib=parts.OVERHEAD_MIB)
            if (total + needs).fits_in(CAPACITY):
                total += needs
                continue
            command, name = Command(request_id=self._request_id(), epoch=self.epoch), vm.name
            self.world.terminating.add(vm.domain)
            self._try(partial(self.host_agent.creations.delete, name, command, "delete"))
        self._calm()
        for name in self._names():
            guest = self.world.domains[name].guest
            guest.application = Application.PROMISES
        # By name: what a target holds grows by no other reinflation.
        command = ReinflateCommand(request_id=self._request_id(), epoch=self.epoch, vms=tuple(self.host.vms))
        self._try(lambda: self.host_agent.sizes.reinflate(command))
        self._calm()
        # Harvest VMs need a budget, and have patience.
        self._try(
            lambda: self.host_agent.harvest.grant(Budget(number=10**6, epoch=self.epoch, room=Vector.of(CAPACITY)))
        )
        self._run(asyncio.sleep(HARVEST_PACE.hold_s + HARVEST_PACE.rest_s + 30.0))
        self._calm()
        for vm in self.host.vms.values():
            parts.assert_whole(vm, self.world.domains[vm.domain], self._last())

    # --- hands ---------------------------------------------------------------------------------------------------

    @property
    def host(self) -> Host:
        return self.host_agent.host

    @property
    def host_agent(self) -> Agent:
        assert self.agent is not None
        return self.agent

    def _request_id(self) -> str:
        self.requests += 1
        return f"r{self.requests}"

    def _names(self) -> list[str]:
        """Domains of ours, as the hypervisor has them."""
        return [name for name, domain in self.world.domains.items() if domain.intent.owner == HOST]

    def _vm(self, which: int) -> ManagedVM | None:
        vms = list(self.host.vms.values())
        return vms[which % len(vms)] if vms else None

    def _send(self, send: Callable[[], Awaitable[Operation]], wait_s: float) -> None:
        self.sent.append(send)
        self._try(send)
        self._go(wait_s)

    def _try(self, send: Callable[[], Awaitable[object]]) -> None:
        try:
            self._run(send())
        except (RequestRefused, InvalidField):
            pass
        except HostAgentError:
            assert self.faults.any or self.fence.dead

    def _go(self, seconds: float) -> None:
        """Let time pass; an agent that died meanwhile is started again."""
        Count.steps += 1
        self._run(asyncio.sleep(seconds))
        if self.fence.dead:
            self._kill()
        if self.agent is None:
            self._start()

    def _run(self, work: Awaitable[Any]) -> Any:
        return self.loop.run_until_complete(work)

    def _start(self) -> None:
        """Start an agent, again and again until the hypervisor answers it, as a service manager would."""
        for _ in range(60):
            self.fence = Fence()
            part = Slice(HOST, "http://127.0.0.1:1", CAPACITY, "qemu", parts.OVERHEAD_MIB)
            hypervisor = LocalHypervisor(self.world, HOST, self.fence, self.faults)
            journal = FencedJournal(self.directory, self.fence, self.faults)
            agent = Agent(Host(part, hypervisor, journal, lambda: 1e6), usable_boot_mib)
            try:
                self._run(agent.start())
            except HypervisorError:
                self._kill()
                self._run(asyncio.sleep(2.0))
                continue
            self.agent = agent
            return
        raise AssertionError("no agent could be started")

    def _kill(self) -> None:
        """As SIGKILL does: nothing that the agent does from here on has any effect."""
        self.fence.dead = True
        self.agent = None
        self.world.note(HOST, "killed")
        self.world.listeners.clear()
        for _ in range(50):
            tasks = [task for task in asyncio.all_tasks(self.loop) if task not in self.world.tasks]
            if not tasks:
                return
            for task in tasks:
                task.cancel()
            self._run(asyncio.wait(tasks, timeout=0.001))
        raise AssertionError(f"tasks that cannot be cancelled: {tasks}")

    def _calm(self) -> None:
        self.faults.clear()
        self.fence.calls_left = None
        for name in self._names():
            self.world.cure(name)
        deadline = self.loop.time() + parts.PATIENCE_S
        while not self._quiet():
            assert self.loop.time() < deadline, f"not at rest after {parts.PATIENCE_S:g} s: {self._last()}"
            self._run(asyncio.sleep(1.0))
        self._run(asyncio.sleep(16.0))
        # Everything that was disturbed has been put right, or is charged.
        for name in self._names():
            self.world.find(name).disturbed = False
        self.rules_hold()
        # Whether a domain is still ours is asked now and then only.
        while parts.known(self.host) != set(self._names()) and self.loop.time() < deadline + OWNERS_S:
            self._run(asyncio.sleep(1.0))
        assert parts.known(self.host) == set(self._names()), "\n".join([self._last(), *self.world.diary])

    def _quiet(self) -> bool:
        records = self.host_agent.requests.operations._records.values()
        return (
            not self.world.tasks
            and all(record.ended.is_set() for record in records)
            and all(
                # What has stopped in the middle of a resize waits with it until it is started again.
                not vm.running or (vm.link.connected and vm.intent.phase is Phase.SETTLED and not vm.pressure.sentence)
                for vm in self.host.vms.values()
            )
        )

    def _last(self) -> str:
        states = [f"{vm.name} {vm.intent.phase} {vm.running}" for vm in self.host.vms.values()]
        operations = [record.operation for record in self.host_agent.requests.operations._records.values()]
        return "; ".join([*states, *(f"{o.kind} {o.state}: {o.sentence}" for o in operations[-3:])])


@pytest.mark.service
@pytest.mark.timeout(3600)
# A task that is cancelled before its first step never comes to await what it was to run.
@pytest.mark.filterwarnings("ignore:coroutine .* was never awaited:RuntimeWarning")
@pytest.mark.parametrize(
    ("examples", "least_steps"), [parts.RUN, pytest.param(*parts.DEEP_RUN, marks=pytest.mark.deep)], ids=["run", "deep"]
)
def test_the_rules_hold_whatever_happens_in_whatever_order(examples: int, least_steps: int) -> None:
    Count.steps = 0
    parts.run_machine(HostMachine, examples, parts.STEPS_EACH)
    assert Count.steps >= least_steps
