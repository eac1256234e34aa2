"""Commands of live migrations, as operations: keep room for a VM that is to come, and send one that runs.

The source's intent says LEAVING before its hypervisor is told, so that an agent that is started again in the middle
looks where the VM is; the target's says ARRIVING until the VM runs there, which its hypervisor lets it once it does not
run on the source any more. While it moves, its lock is held: nothing changes its size.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from functools import partial
from typing import Final

from ebbtide.deflation.modes import HostEvent
from ebbtide.deflation.resources import ZERO
from ebbtide.messages.explanations import DecisionKind
from ebbtide.messages.migrations import ArrivalCommand, DepartureCommand
from ebbtide.messages.operations import Operation
from ebbtide.messages.problem_codes import ProblemCode
from hostagent.clock import now
from hostagent.control.harvest import Harvest
from hostagent.errors import (
    DomainGone,
    HostAgentError,
    HypervisorError,
    RequestRefused,
    already_exists,
    busy,
    no_room,
    wrong_state,
)
from hostagent.libvirt.hypervisor import Departure, Whereabouts, domain_name
from hostagent.operations.operations import Run, done, failed
from hostagent.operations.requests import Requests, cause_of
from hostagent.operations.resuming import ASK_AGAIN_S, HELLO_S, Resume, state_of
from hostagent.state.history import sizes
from hostagent.state.intents import Intent, Phase, Request
from hostagent.vm.host import Host
from hostagent.vm.managed_vm import ManagedVM

#: For so long libvirt keeps a move waiting behind another job, also for an agent that is gone (30 s), and some more.
QUEUED_S: Final = 35.0


class MigrationCommands:
    """Takes the commands of both sides of a live migration."""

    def __init__(self, host: Host, requests: Requests, harvest: Harvest) -> None:
        self._host = host
        self._requests = requests
        self._harvest = harvest

    def resumed(self) -> dict[str, Resume]:
        """How each kind is resumed after a kill."""
        return {"arrive": self._resume_arrival, "depart": self._resume_departure}

    # --- the target ----------------------------------------------------------------------------------------------

    async def arrive(self, name: str, command: ArrivalCommand) -> Operation:
        """Charge a VM that is to come, and define it with an empty disk.

        :raises RequestRefused: it does not fit, the name is taken, or this host takes part in no live migration.
        """
        host, spec = self._host, command.vm

        async def accept(request: Request) -> Run:
            if spec.name != name:
                raise RequestRefused(400, f"vm.name: is {spec.name}, but the path is of {name}", "vm.name")
            if host.hypervisor.moves.address is None:
                raise RequestRefused(
                    409,
                    f"{host.slice.host_id} takes part in no live migration (--migration-uri)",
                    code=ProblemCode.NOT_CONFIGURED,
                )
            await host.hypervisor.check(spec)
            await self._harvest.revoke(f"{name} is to come")
            await host.sample()
            self._requests.leadership.check(command)
            host.modes.check(HostEvent.CREATE)
            if name in host.vms:
                raise already_exists(f"there is a VM {name} already", "name")
            row = spec.allocation(command.size.vector(), host.slice.vm_overhead_mib)
            if not host.fits(row):
                raise no_room(f"{row.charge} exceeds what is free ({host.free()})", "size")
            intent = Intent(
                owner=host.slice.host_id,
                spec=spec,
                boot_mib=command.boot_memory_mib,
                generation=command.generation,
                phase=Phase.ARRIVING,
                target=command.size,
                committed=command.size,
                cause=request.cause(ZERO),
            )
            # Charged from this moment on, so that no other operation counts on the room.
            vm = host.adopt(domain_name(host.slice.host_id, name), intent, running=False)
            return partial(self._receive, vm=vm, uuid=command.uuid)

        return await self._requests.take("arrive", command, accept, name=name)

    async def _receive(self, operation: Operation, vm: ManagedVM, uuid: str) -> Operation:
        async with vm.lock:
            try:
                await self._host.hypervisor.moves.receive(vm.domain, uuid, vm.intent)
            except BaseException as error:
                if isinstance(error, HypervisorError):
                    # It may still be defined: then it is removed, by a later agent, too.
                    await self._host.mark_failed(operation.request_id)
                await self._host.drop(vm)
                raise
        self._host.changed.set()
        return done(operation, f"{self._host.slice.host_id} has room for {vm.name}")

    async def _resume_arrival(self, operation: Operation, vm: ManagedVM) -> Operation:
        host = self._host
        if host.has_failed(operation):
            async with vm.lock:
                # Nobody sends it. But one that runs here runs nowhere else: the reconciler looks after that.
                if await state_of(host, vm) == "stopped" and host.holds(vm) and vm.intent.phase is Phase.ARRIVING:
                    await host.clear_away(vm)
            why = "as was answered before this agent started"
            return failed(operation, f"{host.slice.host_id} could not take {vm.name}, {why}")
        return done(operation, f"{self._host.slice.host_id} has room for {vm.name}")

    # --- the source ----------------------------------------------------------------------------------------------

    async def depart(self, name: str, command: DepartureCommand) -> Operation:
        """Move a running VM to another host, which has room for it. It runs here until it runs there.

        :raises RequestRefused: no such VM, or it cannot be moved while it runs.
        """

        async def accept(request: Request) -> Run:
            vm = self._host.vm(name)
            if vm.intent.adopted is not None:
                raise wrong_state(f"{name} is adopted: its domain stays where it is", "name")
            if command.to == self._host.slice.host_id:
                raise already_exists(f"to: {name} is on {command.to} already", "to")
            self._host.check_resizable(vm)
            return partial(self._depart, vm=vm, command=command, request=request)

        return await self._requests.take("depart", command, accept, name=name)

    async def _depart(
        self, operation: Operation, vm: ManagedVM, command: DepartureCommand, request: Request
    ) -> Operation:
        host, until = self._host, now() + command.deadline_s
        if vm.awaits_hello:
            # What was under way before this agent started goes on then.
            await vm.wait_for_hello(min(HELLO_S, command.deadline_s))
        async with host.locked_until(vm, until):
            host.check_resizable(vm)
            if vm.intent.phase is not Phase.SETTLED or vm.record.uncertain:
                raise busy(f"{vm.name} cannot move now: a change of its size is not settled", "name")
            has = vm.allocation().current
            if command.size is not None and not has.fits_in(room := command.size.vector()):
                raise no_room(
                    f"{vm.name} cannot move now: it has grown to {has}, and {command.to} has room for {room}", "size"
                )
            if (await host.hypervisor.sizes.read(vm.domain)).limit_mib is not None:
                # The limit is this host's, and what it pushed out is in this host's swap.
                raise wrong_state(f"{vm.name} cannot move now: swap backs a part of its memory here", "name")
            await vm.record.store(phase=Phase.LEAVING, cause=request.cause(vm.allocation().current))
            host.changed.set()
            move = Departure(
                domain_name(command.to, vm.name),
                vm.intent.changed(owner=command.to, phase=Phase.ARRIVING, cause=None, held=None),
                command.address,
                command.copy_storage,
                command.bandwidth_mib_s,
                command.deadline_s,
            )
            say = partial(self._requests.operations.progress, operation.request_id)
            try:
                how, where = await host.hypervisor.moves.send(vm.domain, move, say), "left"
            except HypervisorError as error:
                how, where = str(error), await self._whereabouts(vm, until)
            return await self._ended(operation, vm, how, where)

    async def _whereabouts(self, vm: ManagedVM, until: float, queued_until: float = 0.0) -> Whereabouts:
        """Where a VM is whose move has ended; waits for that, and for a hypervisor that does not say.

        :param until: when its move is stopped, by the loop's clock.
        :param queued_until: until when its move may wait behind another program's job, by the same clock.
        """
        moves, held = self._host.hypervisor.moves, False
        while True:
            try:
                where = await moves.whereabouts(vm.domain)
                held = held or where == "held"
                here = where in ("here", "held")
                if where != "moving" and not (here and held and now() < queued_until):
                    return "here" if here else where
                if now() > until:
                    await moves.stop_move(vm.domain)
            except DomainGone:
                return "off"
            except HypervisorError:
                pass  # it is asked again: an error says nothing of where the VM is
            await asyncio.sleep(ASK_AGAIN_S)

    async def _ended(self, operation: Operation, vm: ManagedVM, how: str, where: str) -> Operation:
        """Under the VM's lock."""
        here, to, size = self._host.slice.host_id, cause_of(vm).body["to"], vm.allocation().current
        vm.running = where == "here"
        # Where it is is known; what cannot be written now, the reconciler writes later.
        vm.record.intent = vm.intent.changed(phase=Phase.SETTLED if vm.running else Phase.STOPPED)
        with contextlib.suppress(HostAgentError):
            await vm.record.persist()
        vm.request_check()
        self._host.changed.set()
        if vm.running:
            vm.start()
            sentence = f"{vm.name} stays on {here}: {how}"
            self._host.note(vm.name, DecisionKind.REFUSED, sentence, {})
            return failed(operation, sentence)
        if where == "off":
            return failed(operation, f"{_is_off(vm, here, to)}: {how}")
        self._host.note(vm.name, DecisionKind.REMOVE, f"it has moved to {to}: {how}", {"size": sizes(size)})
        return done(operation, f"{vm.name} runs on {to}: {how}")

    async def _resume_departure(self, operation: Operation, vm: ManagedVM) -> Operation:
        if vm.intent.phase is Phase.STOPPED:
            # It may have ended here as well: what was known of that went with the earlier agent.
            return failed(operation, _is_off(vm, self._host.slice.host_id, cause_of(vm).body["to"]))
        if vm.intent.phase is not Phase.LEAVING:
            return failed(operation, f"{vm.name} stays on {self._host.slice.host_id}")
        async with vm.lock:
            cause, how = cause_of(vm), "found after a restart of the agent"
            deadline_s = float(cause.body["deadline_s"])
            # The wall clock alone knows of an earlier agent.
            until = now() + deadline_s - max(time.time() - cause.started_at, 0.0)
            where = await self._whereabouts(vm, until, now() + QUEUED_S)
            if where == "here" and now() > until:
                how = f"it had not converged after {deadline_s:g} s, {how}"
            return await self._ended(operation, vm, how, where)


def _is_off(vm: ManagedVM, here: str, to: str) -> str:
    return f"{vm.name} is off on {here}, and {to} has to say whether it moved"
