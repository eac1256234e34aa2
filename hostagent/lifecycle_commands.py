"""The commands of a VM's lifecycle as operations: stop, start, resize (docs/lifecycle.md).

Each writes its intent before its first action, and is gone on with after a kill by what the intent says.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from typing import Any, Final

from deflation.allocations import Priority
from deflation.errors import InvalidField
from deflation.explanations import DecisionKind
from deflation.instructions import Mode
from deflation.lifecycle_messages import RESERVED_TEMPLATES, SpecCommand, StopCommand
from deflation.messages import Command, Operation, OperationState, Vector, VMSpec
from deflation.modes import HostEvent
from deflation.resources import ZERO, ResourceVector
from deflation.respec import Respec, fallen_short, respec
from hostagent.admission import charge_memory
from hostagent.commands import Commands, comparable
from hostagent.errors import DomainGone, HostAgentError, HypervisorError, RequestRefused
from hostagent.history import sizes
from hostagent.host import RESIZING, Host
from hostagent.intents import Cause, Phase
from hostagent.next_start import BootMib, off, resized_while_off
from hostagent.resuming import GREETING_S, Resume
from hostagent.vms import ManagedVM

#: Less than this of a size that was to be reached is missing to nobody.
NEAR: Final = ResourceVector(cpu_cores=0.02, memory_mib=4.0, disk_mib_s=1.0, network_mib_s=1.0)
_OFF: Final = (Phase.STOPPED, Phase.SETTLED)
_GOING: Final = (Phase.CREATING, Phase.STOPPING, Phase.DELETING)


class LifecycleCommands:
    """Takes commands about VMs that exist.

    :param boot_mib: how much of a VM's memory is boot memory, given nominal and wished-for boot memory.
    """

    def __init__(self, host: Host, commands: Commands, boot_mib: BootMib) -> None:
        self._host = host
        self._commands = commands
        self._boot_mib = boot_mib

    def resumed(self) -> dict[str, Resume]:
        """How each kind is gone on with after a kill."""
        return {
            "stop": self._resume_stop,
            "start": self._resume_start,
            "resize": self._resume_resize,
        }

    # --- stop ----------------------------------------------------------------------------------------------------

    async def stop(self, name: str, command: StopCommand) -> Operation:
        """Have a VM power off; it keeps its name, its definition and its disk, and holds no room any more.

        :raises RequestRefused: no such VM, or the request is not acceptable.
        """
        body = comparable(command) | {"name": name}
        await self._commands.follow(command)
        if known := self._commands.operations.known(command.request_id, "stop", body):
            return known
        vm = self._host.vm(name)
        if vm.intent.phase in (Phase.CREATING, Phase.DELETING):
            raise RequestRefused(409, f"{name} is being {'made' if vm.intent.phase is Phase.CREATING else 'removed'}")
        vm.condemn("it is being stopped")

        async def run(operation: Operation) -> Operation:
            return await self._stop(operation, vm, body)

        return self._commands.operations.begin(command.request_id, "stop", body, run, vm=name)

    async def _stop(self, operation: Operation, vm: ManagedVM, body: dict[str, Any] | None = None) -> Operation:
        """:param body: of the command; None: an earlier agent had begun, and it stands in the intent."""
        host = self._host
        vm.condemn("it is being stopped")
        try:
            async with vm.lock:
                present(host, vm)
                if vm.intent.phase is Phase.STOPPED:
                    await self._define(vm)
                    return done(operation, f"{vm.name} is stopped")
                size = vm.allocation().current
                if body is not None:
                    cause = cause_for(operation, body, size)
                    await vm.store(phase=Phase.STOPPING, cause=cause)
                cause = cause_of(vm)
                try:
                    how = await host.hypervisor.shut_down(vm.domain, float(cause.body["limit_s"]))
                    vm.running = False
                    await host.record_change(vm.name, size, ZERO, operation.request_id)
                    intent = off(vm.intent, self._boot_mib)
                    if not intent.redefine:
                        await host.hypervisor.prepare_start(vm.domain, intent.committed.vector())
                    fields = {"spec", "committed", "target", "boot_mib", "at_next_start", "redefine"}
                    await vm.store(phase=Phase.STOPPED, **{field: getattr(intent, field) for field in fields})
                except HostAgentError:
                    # Nobody would look after one that is being stopped; it stays charged. What cannot be written now,
                    # the watch writes later.
                    vm.intent = vm.intent.changed(phase=Phase.SETTLED)
                    with contextlib.suppress(HostAgentError):
                        await vm.persist()
                    vm.stir()
                    raise
                await self._define(vm)
        finally:
            vm.condemned = ""
        sentence = f"{vm.name} is stopped ({how}): {size} came free"
        host.note(vm.name, DecisionKind.REMOVE, sentence, {"size": sizes(size)})
        host.changed.set()
        return done(operation, sentence)

    async def _define(self, vm: ManagedVM) -> None:
        """Write the definition of a VM that is off, so that whoever starts it, it comes up as what it is sold as."""
        if not vm.intent.redefine:
            return
        try:
            await self._host.hypervisor.redefine(vm.domain, vm.intent)
            await vm.store(redefine=False)
        except HypervisorError as error:
            self._host.note(vm.name, DecisionKind.RESIZE, f"it will be defined anew at its next start: {error}", {})

    async def _resume_stop(self, operation: Operation, vm: ManagedVM) -> Operation:
        # Whoever starts it again, its guest is heard.
        vm.start()
        if vm.intent.phase not in (Phase.STOPPING, Phase.STOPPED):
            return self._as_found(operation, vm)
        return await self._stop(operation, vm)

    # --- start ---------------------------------------------------------------------------------------------------

    async def start(self, name: str, command: Command) -> Operation:
        """Start a VM that is off, at its committed size; one that runs already stays as it is.

        :raises RequestRefused: no such VM, no room for it, it is on its way down, or the request is not acceptable.
        """
        body = comparable(command) | {"name": name}
        await self._commands.follow(command)
        operations = self._commands.operations
        if known := operations.known(command.request_id, "start", body):
            return known
        await self._host.sample()
        if known := operations.known(command.request_id, "start", body):
            return known
        vm = self._host.vm(name)
        self._host.modes.check(HostEvent.CREATE)
        if vm.condemned or vm.intent.phase in _GOING:
            # One that is to go down runs for a while yet: "it runs" would be no longer true a moment later.
            why = vm.condemned or f"it is {vm.status().state}"
            raise RequestRefused(409, f"{name} cannot be started now: {why}; try again when that has ended", "name")
        if vm.running:

            async def answer(operation: Operation) -> Operation:
                return done(operation, f"{name} runs already")

            return operations.begin(command.request_id, "start", body, answer, vm=name)
        if vm.intent.phase not in _OFF or vm.lock.locked():
            raise RequestRefused(409, f"{name} cannot be started now: it is {vm.status().state}", "name")
        before = vm.intent
        intent = off(before, self._boot_mib) if before.phase is not Phase.STOPPED else before
        row = intent.spec.allocation(intent.committed.vector(), self._host.slice.vm_overhead_mib)
        if not self._host.fits(row, vm.allocation().charge):
            free = self._host.free()
            raise RequestRefused(409, f"{name} ({row.charge}) needs more than what is free ({free})", "name")
        started_at = time.time()
        cause = Cause(
            request_id=command.request_id, kind="start", body=body, started_at=started_at, before=Vector.of(ZERO)
        )
        # Charged from this moment on, so that nobody else counts on the room.
        vm.intent = intent.changed(phase=Phase.STARTING, cause=cause)

        async def run(operation: Operation) -> Operation:
            async with vm.lock:
                try:
                    await vm.persist()
                except HypervisorError:
                    vm.intent = before
                    raise
                return await self._start(operation, vm)

        return operations.begin(command.request_id, "start", body, run, vm=name)

    async def _start(self, operation: Operation, vm: ManagedVM, state: str = "stopped") -> Operation:
        """Under the VM's lock; its intent says that it is being started."""
        host = self._host
        try:
            if state == "stopped":
                await host.hypervisor.start(vm.domain, vm.intent)
                vm.intent = vm.intent.changed(redefine=False)
            if state == "running":
                # By an earlier agent, or past it: nobody knows any more how.
                await host.hypervisor.suspend(vm.domain)
            # Held to its committed size before its vCPUs run.
            await vm.enforce_at_start()
            # Its definition may be another's by now.
            fits, found = await charge_memory(host, vm)
            if not fits:
                more, free = found["more_mib"], found["free_mib"]
                raise HypervisorError(f"{vm.name} came up with {more:g} MiB more than its size; {free:g} are free")
            await host.hypervisor.resume(vm.domain)
            size = vm.allocation().current
            await host.record_change(vm.name, ZERO, size, operation.request_id)
            await vm.store(phase=Phase.SETTLED)
        except Exception:
            await self._off_again(vm)
            raise
        vm.running = True
        vm.start()
        vm.stir()
        sentence = f"{vm.name} runs with {size}"
        host.note(vm.name, DecisionKind.ADMIT, sentence, {"size": sizes(size), "free": sizes(host.free())})
        host.changed.set()
        return done(operation, sentence)

    async def _off_again(self, vm: ManagedVM) -> None:
        """A VM that could not be started is off; where even that fails, it stays charged."""
        try:
            await self._host.hypervisor.shut_down(vm.domain, 0.0)
            await vm.store(phase=Phase.STOPPED)
        except DomainGone:
            await self._host.drop(vm)
        except HostAgentError as error:
            self._host.note(vm.name, DecisionKind.STOPPED, f"it could not be stopped again: {error}", {})

    async def _resume_start(self, operation: Operation, vm: ManagedVM) -> Operation:
        async with vm.lock:
            if vm.intent.phase is not Phase.STARTING:
                vm.start()
                return self._as_found(operation, vm)
            state = "stopped"
            found = {domain.name: domain.state for domain in await self._host.hypervisor.domains()}
            state = found.get(vm.domain, state)
            return await self._start(operation, vm, state)

    # --- resize --------------------------------------------------------------------------------------------------

    async def resize(self, name: str, command: SpecCommand) -> Operation:
        """Sell a VM something else: its size follows, what the running domain cannot take waits for its next start.

        :raises RequestRefused: no such VM, no room to grow, or the request is not acceptable.
        """
        body = comparable(command) | {"name": name}
        await self._commands.follow(command)
        operations = self._commands.operations
        if known := operations.known(command.request_id, "resize", body):
            return known
        vm = self._host.vm(name)
        if command.spec.name != name:
            raise RequestRefused(400, f"spec.name: is {command.spec.name}, but the path is of {name}", "spec.name")
        if vm.intent.spec.template not in RESERVED_TEMPLATES:
            await self._host.hypervisor.check(command.spec)
        await self._host.sample()
        if known := operations.known(command.request_id, "resize", body):
            return known
        self._host.modes.check(HostEvent.SHRINK if vm.running else HostEvent.READING)

        async def run(operation: Operation) -> Operation:
            return await self._resize(operation, vm, command, body)

        return operations.begin(command.request_id, "resize", body, run, vm=name)

    async def _resize(
        self, operation: Operation, vm: ManagedVM, command: SpecCommand, body: dict[str, Any] | None
    ) -> Operation:
        """:param body: of the command; None: an earlier agent had begun, and the intent is half way."""
        until = _now() + command.deadline_s
        async with vm.lock:
            present(self._host, vm)
            # A template or XML cannot be changed by a resize.
            new = command.spec.model_copy(update={"template": vm.intent.spec.template, "xml": None})
            if vm.intent.phase in _OFF and not vm.running:
                return await self._resize_off(operation, vm, new, body)
            if vm not in self._host.resizable():
                raise RequestRefused(409, f"{vm.name} cannot be resized now: it is {vm.status().state}", "name")
            old, current = vm.intent.spec, vm.allocation().current
            if body is None:
                old, current = vm.intent.was or old, cause_of(vm).before.vector()
            most = (await self._host.hypervisor.most(vm.domain)).larger(current)
            way = respec(old, new, current, most)
            if way.at_next_start is not None and vm.intent.adopted is not None:
                raise RequestRefused(409, f"the running domain has no room for {way.why}, and is not ours to define")
            if body is not None:
                await self._begin_resize(vm, way, cause_for(operation, body, current))
            return await self._settle_spec(operation, vm, way, old, max(until - _now(), 0.0))

    async def _begin_resize(self, vm: ManagedVM, way: Respec, cause: Cause) -> None:
        """Store what is going to happen.

        :raises RequestRefused: there is no room.
        :raises HypervisorError: it could not be stored; all is as it was.
        """
        await self._host.sample()
        before, charge = vm.intent, vm.allocation().charge
        row = way.meanwhile.allocation(vm.allocation().current.larger(way.target), self._host.slice.vm_overhead_mib)
        if not way.target.fits_in(vm.allocation().current) and not self._host.fits(row, charge):
            raise RequestRefused(
                409, f"{way.target} needs more than what is free ({self._host.free()})", "spec.nominal"
            )
        vm.intent = before.changed(spec=way.meanwhile, was=before.spec)
        vm.plan(way.target, cause)
        try:
            await vm.persist()
        except HypervisorError:
            vm.intent = before
            with contextlib.suppress(HypervisorError):
                await vm.persist()
            raise

    async def _settle_spec(
        self, operation: Operation, vm: ManagedVM, way: Respec, old: VMSpec, deadline_s: float
    ) -> Operation:
        """Bring the VM to its target; only then does it count as what it is sold as. Else it stays what it was."""
        host = self._host
        outcome = await host.resize_one(vm, deadline_s, Mode.ASK)
        reached = vm.intent.committed.vector()
        now = way.now.allocation(way.now.nominal.vector())
        fits = reached.fits_in(now.upper + NEAR) and now.minimum.fits_in(reached + NEAR)
        if way.now.priority is Priority.FIXED:
            fits = fits and now.nominal.fits_in(reached + NEAR)
        if vm.intent.phase is not Phase.SETTLED or not fits:
            # Also where it grew, or may have: what it may hold is charged.
            kept, stays = reached, Vector.of(reached)
            kept_as = fallen_short(old, kept)
            await vm.store(spec=kept_as, was=None, phase=Phase.SETTLED, committed=stays, target=stays)
            sentence = f"{vm.name} stays what it was and has {kept}: {outcome.sentence}"
            return operation.model_copy(
                update={"state": OperationState.PARTIAL, "sentence": sentence, "vms": (outcome,)}
            )
        size = reached.smaller(now.upper)
        redefine = vm.intent.redefine or (vm.intent.adopted is None and _defined(old) != _defined(way.now))
        await vm.store(
            spec=way.now,
            was=None,
            at_next_start=way.at_next_start,
            committed=Vector.of(size),
            target=Vector.of(size),
            redefine=redefine,
        )
        vm.stir()
        host.changed.set()
        sentence = f"{vm.name} is sold {way.now.nominal.vector()} and has {size}"
        if way.at_next_start is not None:
            sentence += f"; the running domain has no room for {way.why}: that takes effect at its next start"
        host.note(vm.name, DecisionKind.RESIZE, sentence, {"size": sizes(size)})
        return operation.model_copy(update={"state": OperationState.DONE, "sentence": sentence, "vms": (outcome,)})

    async def _resize_off(
        self, operation: Operation, vm: ManagedVM, new: VMSpec, body: dict[str, Any] | None
    ) -> Operation:
        if vm.intent.adopted is not None:
            raise RequestRefused(409, f"{vm.name} is adopted and off: its definition is not ours", "name")
        before = vm.allocation()
        intent = resized_while_off(vm.intent, new, self._boot_mib)
        if vm.intent.phase is not Phase.STOPPED:
            row = intent.spec.allocation(intent.committed.vector(), before.overhead_mib)
            if not self._host.fits(row, before.charge):
                raise RequestRefused(409, f"{row.charge} needs more than what is free ({self._host.free()})")
        cause = cause_for(operation, body, before.current) if body is not None else cause_of(vm)
        fields = ("spec", "committed", "target", "boot_mib", "redefine")
        await vm.store(cause=cause, at_next_start=None, **{field: getattr(intent, field) for field in fields})
        await self._define(vm)
        self._host.changed.set()
        size = intent.committed.vector()
        return done(operation, f"{vm.name} is sold {new.nominal.vector()} and comes up with {size}")

    async def _resume_resize(self, operation: Operation, vm: ManagedVM) -> Operation:
        vm.start()
        if vm.intent.was is None:
            async with vm.lock:
                if vm.intent.phase is Phase.STOPPED:
                    await self._define(vm)
            return self._as_found(operation, vm)
        cause = cause_of(vm)
        command = SpecCommand.model_validate({key: cause.body[key] for key in ("request_id", "spec", "deadline_s")})
        if vm.intent.phase in RESIZING:
            await vm.greeted(GREETING_S)
        return await self._resize(operation, vm, command, None)

    def _as_found(self, operation: Operation, vm: ManagedVM) -> Operation:
        return done(operation, f"{vm.name} {vm.summary().sentence}")


def _defined(spec: VMSpec) -> tuple[float, float, Vector | None]:
    """What of a spec stands in a domain's definition."""
    return spec.nominal.cpu_cores, spec.nominal.memory_mib, spec.ceiling


def present(host: Host, vm: ManagedVM) -> None:
    """:raises RequestRefused: the VM went while one waited for it."""
    if not host.holds(vm):
        raise RequestRefused(404, f"there is no VM {vm.name} any more", "name")


def cause_of(vm: ManagedVM) -> Cause:
    if vm.intent.cause is None:
        raise InvalidField("cause", f"of {vm.name} is missing")
    return vm.intent.cause


def cause_for(operation: Operation, body: dict[str, Any], before: ResourceVector) -> Cause:
    return Cause(
        request_id=operation.request_id,
        kind=operation.kind,
        body=body,
        started_at=operation.started_at,
        before=Vector.of(before),
    )


def done(operation: Operation, sentence: str) -> Operation:
    return operation.model_copy(update={"state": OperationState.DONE, "sentence": sentence})


def _now() -> float:
    return asyncio.get_running_loop().time()
