"""Admission of starts and growth on this host: of VMs that the manager has placed, and of those started from outside.

docs/internals/contracts.md, accounting: every start is admitted at the VM's committed size before its vCPUs run. The
persistent definition carries the limits, so that a start from outside comes up with them; what it cannot carry (the
balloon, which only a running guest can fill) must fit into what is free, or the VM stays paused.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Final

from ebbtide.deflation.allocations import Allocation, check_target, lack, shareable, undeclared
from ebbtide.deflation.cascade.reconcile import SLACK
from ebbtide.deflation.errors import InvalidField
from ebbtide.deflation.resources import ZERO, ResourceVector
from ebbtide.deflation.sharing.harvest import without_harvest
from ebbtide.deflation.sharing.pressure_response import room_besides_pressure
from ebbtide.deflation.sharing.proportional import share_room
from ebbtide.deflation.sharing.suspension import RESTORE_MIB_S
from ebbtide.messages.commands import CreateCommand, ReinflateCommand
from ebbtide.messages.common import Vector
from ebbtide.messages.explanations import DecisionKind
from ebbtide.messages.vms import XML_TEMPLATE
from hostagent.errors import HostAgentError, HypervisorError, already_exists, no_room
from hostagent.libvirt.hypervisor import domain_name
from hostagent.state.intents import Cause, Intent, Phase
from hostagent.vm.host import RESIZING, Host
from hostagent.vm.managed_vm import ManagedVM

#: For saving again what could not go on where it was saved, seconds, and longer for each MiB (`RESTORE_MIB_S`).
SAVE_AGAIN_S: Final = 300.0
#: Phases in which a domain that is paused was paused by us.
PAUSED_BY_US: Final = (Phase.ADMITTING, Phase.STOPPED, Phase.STARTING)


async def admit(host: Host, vm: ManagedVM) -> bool:
    """Pause the VM, hold it to its committed size from outside, and let it run if what it may touch fits.

    Under the VM's lock; repeated by the reconciler as long as the VM is not admitted.

    :returns: whether the VM runs.
    :raises HypervisorError: it could not be limited; it stays paused.
    """
    if vm.intent.phase is Phase.STOPPED and not await _charged(host, vm):
        return False
    if vm.intent.phase is not Phase.ADMITTING:
        await vm.record.store(phase=Phase.ADMITTING)
    await host.hypervisor.suspend(vm.domain)
    await vm.enforce_at_start()
    fits, inputs = await charge_memory(host, vm)
    if not fits:
        host.note(vm.name, DecisionKind.REFUSED, "started from outside and paused: its memory does not fit", inputs)
        return False
    # Settled only when it runs: a settled VM that is found paused was paused by another program, and stays so.
    await host.hypervisor.resume(vm.domain)
    vm.paused = False
    await vm.record.store(phase=Phase.SETTLED, started_at=time.time())
    host.note(vm.name, DecisionKind.ADMIT, "started from outside and admitted at its committed size", inputs)
    vm.request_check()
    return True


async def charge_memory(host: Host, vm: ManagedVM) -> tuple[bool, dict[str, float]]:
    """Charge a paused VM with what it can touch, until its guest has given it back.

    :returns: whether that fits, and what was decided on.
    :raises HypervisorError: it could not be stored; all is as it was.
    """
    await host.sample()
    reading = await host.hypervisor.sizes.read(vm.domain)
    committed = vm.intent.committed.vector()
    more_mib = reading.bound(None).memory_mib - committed.memory_mib
    free_mib = host.free().memory_mib
    inputs = {"committed_mib": committed.memory_mib, "more_mib": round(more_mib, 1), "free_mib": round(free_mib, 1)}
    if more_mib <= SLACK.memory_mib:
        return True, inputs
    # What it is charged with already is no part of what is free.
    if more_mib - max(vm.allocation().current.memory_mib - committed.memory_mib, 0.0) > free_mib:
        return False, inputs
    # In the turn in which the room was found: no other operation counts on it while this is being written.
    await _charge(vm, committed.memory_mib + more_mib)
    return True, inputs


async def _charge(vm: ManagedVM, memory_mib: float) -> None:
    """:raises HypervisorError: it could not be stored; all is as it was."""
    record = vm.record
    sold_mib, before = record.upper.memory_mib, record.beyond
    if memory_mib > sold_mib + SLACK.memory_mib:
        record.beyond = before.larger(ResourceVector(memory_mib=memory_mib))
    size = record.intent.committed.vector().with_component("memory_mib", min(memory_mib, sold_mib))
    try:
        await record.charge(committed=Vector.of(size))
    except HypervisorError:
        record.beyond = before
        raise


async def admit_arrival(host: Host, vm: ManagedVM) -> None:
    """Look after a VM that has moved here and runs: it is charged what it can touch, whether that fits or not.

    Under the VM's lock.

    :raises HypervisorError: it could not be read or stored; the reconciler tries again.
    """
    inputs = await _charge_all(host, vm)
    committed = vm.intent.committed
    # Its definition here may have been made for its coming, and holds it to nothing then.
    await host.hypervisor.prepare_start(vm.domain, committed.vector())
    await vm.record.store(phase=Phase.SETTLED, target=committed)
    vm.running, vm.paused = True, False
    # It may have moved before it had all its memory.
    vm.resizer.late.started(asyncio.get_running_loop().time())
    vm.start()
    vm.request_check()
    host.note(vm.name, DecisionKind.ADMIT, f"it has moved here and runs with {committed.vector()}", inputs)
    host.changed.set()


async def let_run(host: Host, vm: ManagedVM) -> None:
    """Have a VM run that we have paused, whether what it may touch fits or not: it is charged that.

    Under the VM's lock.

    :raises HypervisorError: it stays paused, or runs and could not be stored yet.
    """
    if vm.intent.phase is Phase.STOPPED:
        await vm.record.charge(phase=Phase.ADMITTING)
        await host.tell_growth(vm, vm.allocation().current, "started from outside")
    inputs = await _charge_all(host, vm)
    await host.hypervisor.resume(vm.domain)
    vm.running, vm.paused = True, False
    if vm.intent.saved_mib is None and not vm.link.connected:
        vm.guest_boots()
    await vm.record.store(phase=Phase.SETTLED, started_at=time.time())
    size = vm.intent.committed.vector()
    sentence = f"started from outside, and runs with {size} whether that fits or not: {host.modes.sentence}"
    host.note(vm.name, DecisionKind.ADMIT, sentence, inputs)
    vm.request_check()
    host.changed.set()


async def _charge_all(host: Host, vm: ManagedVM) -> dict[str, float]:
    """Charge a VM with all the memory that it can touch, whether that fits or not.

    :returns: what that was reckoned from.
    :raises HypervisorError: as `charge_memory`.
    """
    fits, inputs = await charge_memory(host, vm)
    if not fits:
        await _charge(vm, inputs["committed_mib"] + inputs["more_mib"])
    return inputs


async def admit_later(host: Host, vm: ManagedVM) -> None:
    """Have the reconciler hold a VM to its size that is on although its start failed, as one started from outside."""
    assert vm.intent.cause is not None
    vm.record.intent = vm.intent.changed(phase=Phase.ADMITTING, saved_mib=None)
    # What cannot be written now, the reconciler writes later.
    with contextlib.suppress(HostAgentError):
        await vm.record.persist()
    await host.tell_growth(vm, vm.allocation().current, vm.intent.cause.request_id)
    vm.start()
    vm.request_check()


async def turn_off_again(host: Host, vm: ManagedVM) -> None:
    """Have a VM off whose start failed. Under its lock; until it is off it is STOPPING, and charged.

    One that was suspended and could not go on is saved again; as long as that fails it stays paused. One that runs may
    have worked since another program let it run: it goes on.

    :raises DomainGone: there is nothing to turn off.
    :raises HypervisorError: it may still be on; the reconciler tries again.
    """
    if (await host.domain_states()).get(vm.domain) == "running":
        await admit_later(host, vm)
        return
    saved_mib = vm.intent.saved_mib
    if saved_mib is not None:
        try:
            await host.hypervisor.save(vm.domain, SAVE_AGAIN_S + saved_mib / RESTORE_MIB_S)
        except HostAgentError:
            # Its memory is nowhere but in it.
            if (await host.domain_states()).get(vm.domain, "stopped") != "stopped":
                raise
    await host.hypervisor.shut_down(vm.domain, 0.0)
    if saved_mib is not None:
        saved_mib = await host.hypervisor.saved_mib(vm.domain)
    await vm.record.store(phase=Phase.STOPPED, saved_mib=saved_mib)
    vm.running = vm.paused = False
    host.changed.set()


def check_new(host: Host, command: CreateCommand, spare: ResourceVector = ZERO) -> ResourceVector:
    """Whether a VM may be started now.

    :param spare: what harvest VMs could give for it.
    :returns: its charge if harvest VMs have to give first; zero if it fits in what is free.
    :raises RequestRefused: its name is taken, or it does not fit.
    :raises InvalidField: it cannot be started at this size.
    """
    spec = command.vm
    if spec.name in host.vms:
        raise already_exists(f"there is a VM {spec.name} on {host.slice.host_id} already", "vm.name")
    allocation, free = _newcomer(host, command), host.free()
    anything = undeclared(host.slice.capacity, allocation.current)
    if allocation.charge.fits_in(free.larger(anything)):
        return ZERO
    if allocation.charge.fits_in((free + spare).larger(anything)):
        return allocation.charge
    what = "vm.nominal" if command.start_size is None else "start_size"
    raise no_room(f"{what} with its overhead ({allocation.charge}) exceeds what is free ({free})", what)


def adopt_new(
    host: Host, command: CreateCommand, cause: Cause, boot_mib: Callable[[float, float | None], float]
) -> ManagedVM:
    """Charge a VM that is to be started, from this moment on, so that no other operation counts on the room.

    Raises as `check_new`.
    """
    check_new(host, command)
    spec, size = command.vm, _newcomer(host, command).current
    boot = boot_mib(spec.nominal.memory_mib, spec.boot_memory_mib)
    for most_mib in (size.memory_mib, size.memory_mib - 1):
        # What it boots with must not exceed what it starts with; the layout rounds up by a MiB.
        if boot > size.memory_mib:
            boot = boot_mib(spec.nominal.memory_mib, most_mib)
    intent = Intent(
        owner=host.slice.host_id,
        # XML of a request is in the domain; its metadata need not hold it again.
        spec=spec if spec.xml is None else spec.model_copy(update={"xml": None, "template": XML_TEMPLATE}),
        boot_mib=boot,
        generation=1,
        phase=Phase.CREATING,
        target=Vector.of(size),
        committed=Vector.of(size),
        cause=cause,
    )
    return host.adopt(domain_name(host.slice.host_id, spec.name), intent, running=False)


def _newcomer(host: Host, command: CreateCommand) -> Allocation:
    """The row of a VM that is to be started, at the size that it starts with."""
    spec = command.vm
    row = spec.allocation(spec.nominal.vector(), host.slice.vm_overhead_mib)
    if command.start_size is None:
        return row
    start_size = command.start_size.vector()
    try:
        check_target(row, start_size)
    except InvalidField as error:
        raise InvalidField(error.field.replace("target", "start_size", 1), error.problem) from error
    if not spec.least_start().fits_in(start_size) or not start_size.fits_in(row.nominal):
        raise InvalidField("start_size", f"must be within [{spec.least_start()}, {row.nominal}], but is {start_size}")
    return spec.allocation(start_size, host.slice.vm_overhead_mib)


def reinflation_targets(host: Host, vms: Sequence[ManagedVM], command: ReinflateCommand) -> dict[str, ResourceVector]:
    """Who of these VMs grows to what: those that the command names, or all, up to what a target holds them to.

    Harvest VMs have a budget of their own.
    """
    rows = without_harvest([vm.allocation() if command.vms else vm.row_for_room() for vm in vms])
    room = shareable(host.free(), host.slice.capacity, lack(rows))
    if command.room is not None:
        room = room.smaller(command.room.vector())
    if command.vms:
        rows = [row for row in rows if row.name in command.vms]
    # A resize that failed is given up: otherwise it would be tried again after this. One that waits for its guest has
    # not.
    failed = (vm for vm in vms if vm.intent.phase in RESIZING and (vm.name in command.vms or not vm.awaits_hello))
    given_up = {vm.name: vm.allocation().current for vm in failed}
    return given_up | share_room(rows, *past_pressure(host, rows, room))


def past_pressure(
    host: Host, rows: Iterable[Allocation], room: ResourceVector
) -> tuple[ResourceVector, Collection[str]]:
    """VMs under pressure come first, also those that are not to grow now, or not to all that they want.

    :param rows: those that are, each up to its upper size.
    :returns: the room for them, and the names of the VMs under pressure.
    """
    lacks = {row.name: row.upper.less(row.current) for row in rows}
    pressed = {vm.name: vm.pressure.wants for vm in host.under_pressure()}
    besides = (wants.less(lacks.get(name, ZERO)) for name, wants in pressed.items())
    return room_besides_pressure(room, besides), pressed.keys()


async def _charged(host: Host, vm: ManagedVM) -> bool:
    """Pause a VM that was stopped on command, and so holds no room, and find it some."""
    await host.hypervisor.suspend(vm.domain)
    await host.sample()
    size = vm.intent.spec.allocation(vm.intent.committed.vector(), vm.host.overhead_mib)
    # Saved memory that was read back, or such as is allocated at once, is no more available, and this VM's own.
    loaded_mib = min(vm.resident_mib or 0.0, size.charge.memory_mib)
    if not host.fits(size, loaded_mib=loaded_mib):
        inputs = {"size": str(size.charge), "free": str(host.free(loaded_mib))}
        host.note(vm.name, DecisionKind.REFUSED, "started from outside and paused: there is no room for it", inputs)
        return False
    await vm.record.charge(phase=Phase.ADMITTING)
    await host.record_change(vm.name, ZERO, vm.allocation().current, "started from outside")
    return True
