"""The rules that never bend, with VMs that are stopped, started and sold something else in between."""

from __future__ import annotations

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import invariant, rule

from ebbtide.deflation.allocations import Priority
from ebbtide.messages.commands import SpecCommand, StartCommand, StopCommand
from ebbtide.messages.common import Vector
from hostagent.state.intents import Phase
from hostagent.vm.managed_vm import ManagedVM
from tests.hostagent import random_parts as parts
from tests.hostagent.random_parts import Count, indices, moments, shares
from tests.hostagent.test_rules_stateful import HostMachine

#: Together some twenty seconds.
EXAMPLES = 25
STEPS = 40


class LifecycleMachine(HostMachine):
    """One host whose VMs come and go without being removed."""

    @invariant()
    def rules_hold(self) -> None:
        if self.agent is None:
            return super().rules_hold()
        host = self.agent.host
        there = host.vms
        for vm in there.values():
            if vm.intent.phase is Phase.STOPPED:
                assert vm.allocation().charge.is_zero(), f"{vm.name} is off and charged"
        # What is off has no size that could be looked at; nor has what was off when its removal began.
        host.vms = {name: vm for name, vm in there.items() if not self._is_off(vm)}
        try:
            super().rules_hold()
        finally:
            host.vms = there

    def _is_off(self, vm: ManagedVM) -> bool:
        domain = self.world.domains.get(vm.domain)
        going = vm.intent.phase is Phase.DELETING and (domain is None or domain.state == "stopped")
        return vm.intent.phase is Phase.STOPPED or going

    def _end(self) -> None:
        # A stop that is under way would turn off what is started for the end.
        self._calm()
        super()._end()

    @rule(which=indices, wait_s=moments)
    def stop(self, which: int, wait_s: float) -> None:
        if (vm := self._vm(which)) is None:
            return self._go(wait_s)
        command, name = StopCommand(request_id=self._request_id(), epoch=self.epoch, limit_s=1.0), vm.name
        self._send(lambda: self.host_agent.lifecycle.stop(name, command), wait_s)

    @rule(which=indices, wait_s=moments)
    def start(self, which: int, wait_s: float) -> None:
        off = [vm for vm in self.host.vms.values() if vm.intent.phase is Phase.STOPPED]
        if not off:
            return self._go(wait_s)
        command, name = StartCommand(request_id=self._request_id(), epoch=self.epoch), off[which % len(off)].name
        self._send(lambda: self.host_agent.lifecycle.start(name, command), wait_s)

    @rule(which=indices, cpu=shares, memory=shares, priority=st.sampled_from([None, *Priority]), wait_s=moments)
    def resize(self, which: int, cpu: float, memory: float, priority: Priority | None, wait_s: float) -> None:
        if (vm := self._vm(which)) is None:
            return self._go(wait_s)
        spec = vm.intent.spec
        nominal = spec.nominal.model_copy(
            update={"cpu_cores": round(0.5 + cpu * 3, 2), "memory_mib": float(round(400 + memory * 1000))}
        )
        priority = priority or spec.priority
        changed = {
            "priority": priority,
            "nominal": nominal,
            "minimum": Vector.of(spec.minimum.vector().smaller(nominal.vector())),
            "ceiling": nominal if priority is Priority.HARVEST else None,
            "boot_memory_mib": None,
        }
        name, request_id = vm.name, self._request_id()
        command = SpecCommand(request_id=request_id, epoch=self.epoch, spec=spec.model_copy(update=changed))
        self._send(lambda: self.host_agent.lifecycle.resize(name, command), wait_s)


@pytest.mark.service
@pytest.mark.timeout(600)
# A task that is cancelled before its first step never comes to await what it was to run.
@pytest.mark.filterwarnings("ignore:coroutine .* was never awaited:RuntimeWarning")
def test_the_rules_hold_whoever_is_stopped_started_and_resized() -> None:
    parts.run_machine(LifecycleMachine, EXAMPLES, STEPS)
    assert Count.steps > 500
