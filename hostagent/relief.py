"""Gives a VM under pressure at once what its host can spare, ahead of other work (rule 6; docs/pressure.md)."""

from __future__ import annotations

import asyncio
import time
import uuid
from typing import Final

from deflation.messages import Vector
from deflation.modes import HostEvent
from deflation.relief import relieve
from deflation.resources import ResourceVector
from hostagent.errors import HypervisorError
from hostagent.host import RESIZING, Host
from hostagent.intents import Cause, Phase
from hostagent.vms import ManagedVM

#: Time for a harvest VM to shrink, and for the VM under pressure to grow, in seconds.
SHRINK_S: Final = 20.0
GROW_S: Final = 30.0


async def relieve_vm(host: Host, vm: ManagedVM) -> None:
    """Shrink harvest VMs if need be, then grow the VM in one step. What is left over stands in the host's report.

    :raises HypervisorError: a size could not be read or stored.
    """
    if vm.pressure.wants.is_zero():
        return
    await host.sample()
    others = [other for other in host.resizable() if other is not vm]
    pressed = [other.name for other in others if other.pressure.sentence]
    rows = [other.allocation() for other in others]
    plan = relieve(vm.allocation(), vm.pressure.wants, host.free(), rows, pressed)
    request_id = f"pressure-{uuid.uuid4().hex[:12]}"
    for name, size in plan.harvest.items():
        other = host.vms.get(name)
        if other is None:
            continue
        try:
            async with asyncio.timeout(SHRINK_S):
                await other.lock.acquire()
        except TimeoutError:
            continue  # busy: the VM under pressure is not kept waiting for it
        try:
            # Another operation may have taken more of it since, and sold that: nobody grows here.
            target = size.smaller(other.allocation().current)
            shrinks = not other.allocation().current.fits_in(target)
            if shrinks and host.modes.does(HostEvent.PRESSURE) and other in host.resizable():
                await _resize(host, other, target, request_id, SHRINK_S)
        finally:
            other.lock.release()
    async with vm.lock:
        if not host.modes.does(HostEvent.PRESSURE) or not host.holds(vm) or vm not in host.resizable():
            return
        await host.sample()
        given = relieve(vm.allocation(), vm.pressure.wants, host.free())
        inputs = {"wants": str(vm.pressure.wants), "free": str(host.free()), "why": vm.pressure.sentence}
        vm.asks = given.remaining
        host.note(vm.name, "pressure", given.sentence, inputs)
        if vm.intent.phase in RESIZING or not given.target.fits_in(vm.allocation().current):
            await _resize(host, vm, given.target, request_id, GROW_S)


async def _resize(host: Host, vm: ManagedVM, target: ResourceVector, request_id: str, deadline_s: float) -> None:
    before = Vector.of(vm.allocation().current)
    body = {"request_id": request_id, "deadline_s": deadline_s}
    cause = Cause(request_id=request_id, kind="reinflate", body=body, started_at=time.time(), before=before)
    vm.plan(target, cause)
    try:
        await vm.persist()
    except HypervisorError:
        await vm.unplan()
        raise
    await host.resize_one(vm, deadline_s)
    if vm.intent.phase is Phase.SETTLED:
        vm.upkeep.pace.held()
