"""One VM moved by chosen means only: the agent's own state machines and executor, with all other means blocked."""

from __future__ import annotations

import asyncio
import contextlib
import uuid
from collections.abc import AsyncIterator, Collection

from benchmarks.figures import BenchmarkFailed
from ebbtide.deflation.cascade.cascade import Cascade
from ebbtide.deflation.cascade.instructions import Outcome
from ebbtide.deflation.cascade.mechanisms import Mechanism, Mechanisms
from ebbtide.deflation.cascade.reinflation import Reinflation
from ebbtide.deflation.resources import ResourceVector
from hostagent.vm.executor import Executor
from hostagent.vm.managed_vm import ManagedVM
from hostagent.vm.running import Interrupt, run

DEADLINE_S = 600.0
#: How often a guest that was hardly running is looked at whether it answers again, and after how many seconds.
BACK_LOOKS, BACK_LOOK_S = 600, 0.2
LEFT_OUT = "left out by the benchmark"


class VMDriver:
    """A VM in hand; see `driven`."""

    def __init__(self, vm: ManagedVM) -> None:
        self.vm = vm

    async def take(self, size: ResourceVector, means: Collection[Mechanism] = tuple(Mechanism)) -> Outcome:
        """Deflate to a size by these means, or as far as they reach."""
        executor = self.executor()
        # As the agent takes: by what the guest's kernel says of a moment after the latest step.
        executor.taking = True
        before, _ = await executor.measure()
        found = await self.vm.resizer.mechanisms()
        blocked = [mechanism for mechanism in Mechanism if mechanism not in means]
        return await run(Cascade(before, size, DEADLINE_S, found.without(blocked, LEFT_OUT)), executor, Interrupt())

    async def give_back(self) -> None:
        """Bring the VM back to its nominal size. Raises BenchmarkFailed where it does not get there."""
        nominal = self.vm.intent.spec.nominal.vector()
        # A guest that was mostly in swap may have been given up as silent, and says hello again.
        for _ in range(BACK_LOOKS):
            if self.vm.link.connected:
                break
            await asyncio.sleep(BACK_LOOK_S)
        executor = self.executor()
        before, _ = await executor.measure()
        if nominal.fits_in(before.size):
            return
        vcpus = (await self.vm.host.hypervisor.sizes.read(self.vm.domain)).vcpus
        mechanisms: Mechanisms = await self.vm.resizer.mechanisms()
        machine = Reinflation(before, nominal, self.vm.intent.boot_mib, vcpus, DEADLINE_S, mechanisms)
        outcome = await run(machine, executor, Interrupt())
        if not outcome.reached:
            raise BenchmarkFailed(f"{self.vm.name} did not get back to its size: {outcome.sentence}")

    def executor(self) -> Executor:
        nominal = self.vm.intent.spec.nominal.vector()
        request_id = f"bench-{uuid.uuid4().hex[:12]}"
        return Executor(self.vm.domain, self.vm.host.hypervisor.sizes, self.vm.link, request_id, nominal)


@contextlib.asynccontextmanager
async def driven(vm: ManagedVM) -> AsyncIterator[VMDriver]:
    """Keep the agent's own upkeep, which would put all of this right, away from a VM; its size is given back."""
    async with vm.lock:
        driver = VMDriver(vm)
        try:
            yield driver
        finally:
            await driver.give_back()
