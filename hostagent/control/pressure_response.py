"""Response to pressure: a VM gets at once what its host can spare, ahead of other work (rule 6).

See docs/internals/pressure.md.
"""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import Collection
from typing import Final

import structlog

from ebbtide.deflation.cascade.reconcile import SLACK
from ebbtide.deflation.modes import HostEvent
from ebbtide.deflation.resources import ZERO, ResourceVector
from ebbtide.deflation.sharing.pressure_response import Neighbours, respond_to_pressure
from ebbtide.messages.explanations import DecisionKind
from hostagent.clock import now as _now
from hostagent.errors import HostAgentError
from hostagent.state.intents import Phase, Request
from hostagent.vm.host import RESIZING, Host, persist_all, plan_all
from hostagent.vm.managed_vm import ManagedVM

#: Time for another VM to shrink, and for the VM under pressure to grow, in seconds.
SHRINK_S: Final = 20.0
GROW_S: Final = 30.0

log = structlog.get_logger()


async def respond_to_pressure_of(host: Host, vm: ManagedVM, neighbours: Neighbours) -> None:
    """Shrink others if need be, then grow the VM in one step. What is left over stands in the host's report.

    Where some fell short and it still lacks, the others are asked once more, without those.

    :raises HypervisorError: a size could not be read or stored.
    """
    # A guest's own request moves what is free; that its kernel is short of memory moves its neighbours.
    asked = neighbours.may_give(_now(), vm.name, host.vms) if vm.pressure.short_of_memory else set()
    if await _respond(host, vm, neighbours, asked):
        await _respond(host, vm, neighbours, asked)


async def _respond(host: Host, vm: ManagedVM, neighbours: Neighbours, asked: Collection[str]) -> bool:
    """Ask the others, and give what is free then.

    :param asked: names of deflatable VMs that may be asked.
    :returns: whether the VM lacks something that others fell short of.
    """
    if vm.pressure.wants.is_zero():
        vm.asks = ZERO
        return False
    # One that moves or goes can be given nothing: its neighbours keep what they have.
    if not vm.resizable or vm.resizer.terminating:
        return False
    await host.sample()
    unable = neighbours.unable(_now())
    others = [other for other in host.resizable() if other is not vm and other.name not in unable]
    pressed = [other.name for other in others if other.pressure.sentence]
    rows = [other.allocation() for other in others]
    plan = respond_to_pressure(vm.allocation(), vm.pressure.wants, host.free(), rows, pressed, asked)
    request_id = f"pressure-{uuid.uuid4().hex[:12]}"
    donors = {name: size for name, size in plan.donors.items() if name in host.vms}
    await asyncio.gather(
        *(_give(host, host.vms[name], size, vm.name, request_id, neighbours) for name, size in donors.items())
    )
    # Whatever the reason: it is busy, its call failed, or its guest has nothing to spare.
    short = [
        name
        for name, size in donors.items()
        if name in host.vms and not host.vms[name].allocation().current.fits_in(size + SLACK)
    ]
    for name in short:
        neighbours.fell_short(_now(), name)
    async with vm.lock:
        if not host.modes.does(HostEvent.PRESSURE) or not host.holds(vm) or vm not in host.resizable():
            return False
        await host.sample()
        given = respond_to_pressure(vm.allocation(), vm.pressure.wants, host.free())
        inputs = {"wants": str(vm.pressure.wants), "free": str(host.free()), "why": vm.pressure.sentence}
        vm.asks = given.remaining
        host.note(vm.name, DecisionKind.PRESSURE, given.sentence, inputs)
        if vm.intent.phase in RESIZING or not given.target.fits_in(vm.allocation().current):
            await _resize(host, vm, given.target, request_id, GROW_S)
    return bool(short) and not given.remaining.is_zero()


async def _give(
    host: Host, donor: ManagedVM, size: ResourceVector, receiver: str, request_id: str, neighbours: Neighbours
) -> None:
    """Shrink one VM for another one's sake, unless it is busy: the other is not kept waiting for it."""
    try:
        async with asyncio.timeout(SHRINK_S):
            await donor.lock.acquire()
    except TimeoutError:
        return
    try:
        # Another operation may have taken more of it since, and sold that: no VM grows here.
        target = size.smaller(donor.allocation().current)
        shrinks = not donor.allocation().current.fits_in(target)
        if not shrinks or not host.modes.does(HostEvent.PRESSURE) or donor not in host.resizable():
            return
        if donor.pressure.sentence:
            return
        less = donor.allocation().current.less(target)
        host.note(
            donor.name, DecisionKind.PRESSURE, f"{less} are asked of it for {receiver}, which is under pressure", {}
        )
        neighbours.gave(_now(), donor.name)
        await _resize(host, donor, target, request_id, SHRINK_S)
    except HostAgentError as error:
        log.warning("a VM could not shrink for another one", vm=donor.name, receiver=receiver, why=str(error))
    finally:
        donor.lock.release()


async def _resize(host: Host, vm: ManagedVM, target: ResourceVector, request_id: str, deadline_s: float) -> None:
    body = {"request_id": request_id, "deadline_s": deadline_s}
    await persist_all(plan_all(host, {vm.name: target}, Request(request_id, "reinflate", body, time.time())))
    await host.resize_one(vm, deadline_s)
    if vm.intent.phase is Phase.SETTLED:
        vm.drift_repair.pace.held()
