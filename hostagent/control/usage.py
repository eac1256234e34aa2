"""Usage of this host's VMs as the manager's history is told of it: from what the agent knows; nobody is asked."""

from __future__ import annotations

import asyncio
from typing import Final

from ebbtide.deflation.bounds import held_by_guest
from ebbtide.messages.history import HostUsage, VMUsage
from hostagent.state.tallies import Tally
from hostagent.vm.host import Host
from hostagent.vm.managed_vm import ManagedVM

#: What a guest said of its pressure counts for so long, seconds: it is asked once a minute or so where it rests.
SAID_FOR_S: Final = 180.0


def usage_of(host: Host) -> HostUsage:
    """What the VMs that run use at this moment."""
    running = (vm for vm in host.vms.values() if vm.running)
    return HostUsage(vms=tuple(_usage_of(vm, host.tallies.of(vm.name)) for vm in running))


def _usage_of(vm: ManagedVM, tally: Tally) -> VMUsage:
    figures: dict[str, float] = {}
    if vm.resident_mib is not None:
        figures["resident_memory_mib"] = float(round(vm.resident_mib))
    said = vm.pressure.said
    now = asyncio.get_running_loop().time()
    if said is not None and now - said[1] < SAID_FOR_S and (psi := said[0].pressure) is not None:
        figures["cpu_pressure_percent"] = round(psi.cpu_some_avg10, 1)
        figures["memory_pressure_percent"] = round(psi.memory_some_avg10, 1)
    if (bound := vm.resizer.bound) is not None:
        allocation = vm.allocation()
        guest = held_by_guest(allocation.nominal, allocation.current, bound, vm.intent.boot_mib)
        figures |= {"guest_cpu_cores": round(guest.cpu_cores, 4), "guest_memory_mib": round(guest.memory_mib, 3)}
        if (given := tally.application_holds(guest)) is not None:
            figures["application_cpu_cores"] = round(given.cpu_cores, 4)
            figures["application_memory_mib"] = round(given.memory_mib, 3)
    return VMUsage(name=vm.name, **figures)
