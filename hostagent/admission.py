"""A VM that somebody else has started: it runs on only at its committed size, or not at all.

docs/contracts.md, accounting: every start is admitted at the VM's committed size before its vCPUs run. The persistent
definition carries the limits, so that a start by anybody comes up with them; what it cannot carry (the balloon, which
only a running guest can fill) must fit into what is free, or the VM stays paused.
"""

from __future__ import annotations

from deflation.messages import Vector
from deflation.reconcile import SLACK
from hostagent.errors import HypervisorError
from hostagent.host import Host
from hostagent.intents import Phase
from hostagent.vms import ManagedVM


async def admit(host: Host, vm: ManagedVM) -> bool:
    """Pause the VM, hold it to its committed size from outside, and let it run if what it may touch fits.

    Under the VM's lock; repeated by the watch as long as the VM is not admitted.

    :returns: whether the VM runs.
    :raises HypervisorError: it could not be limited; it stays paused.
    """
    if vm.intent.phase is Phase.STOPPED and not await _charged(host, vm):
        return False
    if vm.intent.phase is not Phase.ADMITTING:
        await vm.store(phase=Phase.ADMITTING)
    await host.hypervisor.suspend(vm.domain)
    await vm.enforce_at_start()
    await host.sample()
    reading = await host.hypervisor.read(vm.domain)
    committed = vm.intent.committed.vector()
    more_mib = reading.bound(None).memory_mib - committed.memory_mib
    free_mib = host.free().memory_mib
    inputs = {"committed_mib": committed.memory_mib, "more_mib": round(more_mib, 1), "free_mib": round(free_mib, 1)}
    if more_mib > SLACK.memory_mib:
        if more_mib > free_mib:
            host.note(vm.name, "refused", "started by somebody else and paused: its memory does not fit", inputs)
            return False
        # Charged with what it can touch until its guest has given it back.
        grown = committed.with_component("memory_mib", committed.memory_mib + more_mib)
        # In the turn in which the room was found: nobody else counts on it while this is being written.
        before, vm.intent = vm.intent, vm.intent.changed(committed=Vector.of(grown.smaller(vm.allocation().upper)))
        try:
            await vm.persist()
        except HypervisorError:
            vm.intent = before
            raise
    await vm.store(phase=Phase.SETTLED)
    await host.hypervisor.resume(vm.domain)
    host.note(vm.name, "admit", "started by somebody else and admitted at its committed size", inputs)
    vm.stir()
    return True


async def _charged(host: Host, vm: ManagedVM) -> bool:
    """Pause a VM that was stopped on command, and so holds no room, and find it some."""
    await host.hypervisor.suspend(vm.domain)
    await host.sample()
    size = vm.intent.spec.allocation(vm.intent.committed.vector(), host.slice.vm_overhead_mib)
    if not host.fits(size):
        inputs = {"size": str(size.charge), "free": str(host.free())}
        host.note(vm.name, "refused", "started by somebody else and paused: there is no room for it", inputs)
        return False
    before, vm.intent = vm.intent, vm.intent.changed(phase=Phase.ADMITTING)
    try:
        await vm.persist()
    except HypervisorError:
        vm.intent = before
        raise
    return True
