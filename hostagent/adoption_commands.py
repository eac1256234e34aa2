"""Adopts domains that somebody else has made, and gives them back as they were (docs/lifecycle.md)."""

from __future__ import annotations

import contextlib
import time
from typing import Any, Final

from deflation.allocations import Priority, check_sizes
from deflation.explanations import DecisionKind
from deflation.lifecycle_messages import ADOPTED_TEMPLATE, AdoptCommand, ReleaseCommand
from deflation.messages import Operation, OperationState, Vector, VMOutcome, VMSpec
from deflation.modes import HostEvent
from deflation.resources import ZERO, ResourceVector
from deflation.respec import fallen_short, returning
from hostagent.commands import Commands, comparable
from hostagent.errors import DomainGone, HypervisorError, RequestRefused
from hostagent.history import sizes
from hostagent.host import RESIZING, Host
from hostagent.intents import Cause, Intent, Phase
from hostagent.lifecycle_commands import NEAR, cause_for, cause_of, done, present
from hostagent.resuming import GREETING_S, Resume
from hostagent.vms import ManagedVM

#: Phases in which a domain that is paused was paused by us.
_PAUSED_BY_US: Final = (Phase.ADMITTING, Phase.STOPPED, Phase.STARTING)


class AdoptionCommands:
    """Takes commands about domains that were not made here."""

    def __init__(self, host: Host, commands: Commands) -> None:
        self._host = host
        self._commands = commands

    def resumed(self) -> dict[str, Resume]:
        """How each kind is gone on with after a kill."""
        return {"adopt": self._resume_adopt, "release": self._resume_release}

    async def adopt(self, command: AdoptCommand) -> Operation:
        """Look after a running domain of somebody else at the size that it has.

        :raises RequestRefused: it cannot be looked after, the name is taken, or the slice has no room for it.
        """
        body = comparable(command)
        await self._commands.follow(command)
        operations = self._commands.operations
        if known := operations.known(command.request_id, "adopt", body):
            return known
        try:
            found = await self._host.hypervisor.examine(command.domain)
        except DomainGone as error:
            raise RequestRefused(404, f"there is no domain {command.domain} on this host", "domain") from error
        if known := operations.known(command.request_id, "adopt", body):
            return known
        self._host.modes.check(HostEvent.CREATE)
        there = self._host.vms.get(command.name)
        if there is not None and there.domain == command.domain:

            async def answer(operation: Operation) -> Operation:
                return done(operation, f"{command.domain} is adopted already")

            return operations.begin(command.request_id, "adopt", body, answer, vm=command.name)
        if there is not None:
            raise RequestRefused(409, f"there is a VM {command.name} on this host already", "name")
        if any(vm.domain == command.domain for vm in self._host.vms.values()):
            # Its metadata may not be written yet, so that the examination finds nothing.
            raise RequestRefused(409, f"{command.domain} is adopted already", "domain")
        if found.why_not:
            raise RequestRefused(409, f"{command.domain} cannot be adopted: {found.why_not}", "domain")
        if command.priority is Priority.HARVEST:
            raise RequestRefused(400, "priority: a domain is adopted as fixed or deflatable", "priority")
        nominal = ResourceVector(cpu_cores=float(found.vcpus), memory_mib=float(int(found.memory_mib)))
        check_sizes(command.priority, nominal, command.minimum.vector(), None)
        spec = VMSpec(
            name=command.name,
            priority=command.priority,
            nominal=Vector.of(nominal),
            minimum=command.minimum,
            template=ADOPTED_TEMPLATE,
        )
        row = spec.allocation(nominal, self._host.slice.vm_overhead_mib)
        charges = sum((vm.allocation().charge for vm in self._host.vms.values()), ZERO)
        # Its memory is in use already, so only the slice has to have room.
        if not row.charge.fits_in(self._host.slice.capacity.less(charges)):
            left = self._host.slice.capacity.less(charges)
            raise RequestRefused(409, f"{row.charge} does not fit into what the slice has left ({left})", "domain")
        cause = Cause(
            request_id=command.request_id, kind="adopt", body=body, started_at=time.time(), before=Vector.of(nominal)
        )
        intent = Intent(
            owner=self._host.slice.host_id,
            spec=spec,
            boot_mib=found.boot_mib,
            generation=1,
            phase=Phase.SETTLED,
            target=spec.nominal,
            committed=spec.nominal,
            cause=cause,
            adopted=found.before.model_copy(update={"size": spec.nominal}),
        )
        vm = self._host.adopt(command.domain, intent, running=True)

        async def run(operation: Operation) -> Operation:
            async with vm.lock:
                try:
                    await self._host.hypervisor.take_over(vm.domain, intent)
                except BaseException:
                    await self._host.drop(vm)
                    raise
                await self._host.record_change(vm.name, ZERO, nominal, operation.request_id)
            vm.start()
            sentence = f"{command.domain} is looked after as {vm.name} with {nominal}"
            self._host.note(vm.name, DecisionKind.ADMIT, sentence, {"size": sizes(nominal)})
            self._host.changed.set()
            return done(operation, sentence)

        return operations.begin(command.request_id, "adopt", body, run, vm=command.name)

    async def _resume_adopt(self, operation: Operation, vm: ManagedVM) -> Operation:
        await self._host.record_change(vm.name, ZERO, vm.allocation().current, operation.request_id)
        vm.start()
        return done(operation, f"{vm.domain} is looked after as {vm.name}")

    async def release(self, name: str, command: ReleaseCommand) -> Operation:
        """Give an adopted domain back: everything that was taken, its shares and its quota, and our metadata out of it.

        :raises RequestRefused: no such VM, or it was not adopted.
        """
        body = comparable(command) | {"name": name}
        await self._commands.follow(command)
        operations = self._commands.operations
        if known := operations.known(command.request_id, "release", body):
            return known
        vm = self._host.vm(name)
        if vm.intent.adopted is None:
            raise RequestRefused(409, f"{name} was made here: it can be deleted, not released", "name")
        await self._host.sample()
        if known := operations.known(command.request_id, "release", body):
            return known

        async def run(operation: Operation) -> Operation:
            return await self._release(operation, vm, command.deadline_s, body)

        return operations.begin(command.request_id, "release", body, run, vm=name)

    async def _release(
        self, operation: Operation, vm: ManagedVM, deadline_s: float, body: dict[str, Any] | None
    ) -> Operation:
        """:param body: of the command; None: an earlier agent had begun, and the intent is half way."""
        host = self._host
        async with vm.lock:
            present(host, vm)
            before = vm.intent.adopted
            if before is None:
                raise RequestRefused(409, f"{vm.name} was made here: it can be deleted, not released", "name")
            old, current = vm.intent.was or vm.intent.spec, vm.allocation().current
            size = (before.size or old.nominal).vector()
            # A resize may have changed what it is sold; what it gets back is what it had when it was adopted.
            differs = vm.intent.phase in RESIZING or not (size.fits_in(current + NEAR) and current.fits_in(size + NEAR))
            resizes = vm.running and differs
            states = {domain.name: domain.state for domain in await host.hypervisor.domains()}
            if body is not None:
                cause = cause_for(operation, body, current)
                await self._begin_release(vm, returning(old, size), size if resizes else None, cause)
            outcomes = []
            if resizes:
                outcomes.append(await host.resize_one(vm, deadline_s))
                reached = vm.intent.committed.vector()
                if vm.intent.phase in RESIZING or not (size.fits_in(reached + NEAR) and reached.fits_in(size + NEAR)):
                    return await self._kept(operation, vm, old, outcomes[0])
            try:
                # Whoever starts it later, it comes up as it was.
                await host.hypervisor.prepare_start(vm.domain, size)
                if vm.intent.phase in _PAUSED_BY_US and states.get(vm.domain) == "paused":
                    # While it still bears our intent: a kill after that leaves nobody who would let it run.
                    await host.hypervisor.resume(vm.domain)
                await host.hypervisor.give_back(vm.domain, before)
            except HypervisorError:
                # It is answered as failed, so a later agent must not carry it out either.
                with contextlib.suppress(HypervisorError):
                    await vm.store(spec=fallen_short(old, vm.intent.committed.vector()), was=None)
                raise
            if vm.intent.phase is not Phase.STOPPED:
                await host.record_change(vm.name, size, ZERO, operation.request_id)
            await host.drop(vm)
        sentence = f"{vm.domain} is as it was when it was adopted, and nobody looks after it any more"
        host.note(vm.name, DecisionKind.REMOVE, sentence, {})
        return operation.model_copy(update={"state": OperationState.DONE, "sentence": sentence, "vms": tuple(outcomes)})

    async def _begin_release(self, vm: ManagedVM, spec: VMSpec, target: ResourceVector | None, cause: Cause) -> None:
        """Store what is going to happen.

        :param target: the size to give back; None: it has it, or is off.
        :raises RequestRefused: there is no room.
        :raises HypervisorError: it could not be stored; all is as it was.
        """
        host, before = self._host, vm.intent
        row = vm.allocation()
        if target is None:
            await vm.store(was=before.was or before.spec, cause=cause)
            return
        grown = spec.allocation(row.current.larger(target), host.slice.vm_overhead_mib)
        if not target.fits_in(row.current) and not host.fits(grown, row.charge):
            raise RequestRefused(409, f"{target} needs more than what is free ({host.free()})", "name")
        vm.intent = before.changed(spec=spec, was=before.was or before.spec)
        vm.plan(target, cause)
        try:
            await vm.persist()
        except HypervisorError:
            vm.intent = before
            with contextlib.suppress(HypervisorError):
                await vm.persist()
            raise

    async def _kept(self, operation: Operation, vm: ManagedVM, old: VMSpec, outcome: VMOutcome) -> Operation:
        """It is looked after as before, with the size that was reached."""
        reached = vm.intent.committed.vector()
        size = Vector.of(reached)
        await vm.store(spec=fallen_short(old, reached), was=None, phase=Phase.SETTLED, committed=size, target=size)
        vm.stir()
        sentence = f"{vm.name} was not given back: {outcome.sentence}"
        return operation.model_copy(update={"state": OperationState.PARTIAL, "sentence": sentence, "vms": (outcome,)})

    async def _resume_release(self, operation: Operation, vm: ManagedVM) -> Operation:
        vm.start()
        if vm.intent.was is None:
            # It had ended, or it would be gone.
            sentence = f"{vm.name} was not given back: {vm.summary().sentence}"
            return operation.model_copy(update={"state": OperationState.PARTIAL, "sentence": sentence})
        if vm.intent.phase in RESIZING:
            await vm.greeted(GREETING_S)
        return await self._release(operation, vm, float(cause_of(vm).body["deadline_s"]), None)
