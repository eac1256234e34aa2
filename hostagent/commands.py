"""The commands of a manager or operator, as operations: create, delete, target, reclaim, reinflate.

The VMs of an operation are worked on side by side, and so are operations on different VMs; what is done to one VM is
done one after another. Who gives how much is decided in :mod:`deflation.proportional`, in one turn of the event loop
with the plans that come of it, so that no room is counted twice.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Coroutine, Mapping
from functools import partial
from typing import Any, Final

import structlog

from deflation.allocations import check_target, undeclared
from deflation.messages import (
    Command,
    CreateCommand,
    Operation,
    OperationState,
    ReclaimCommand,
    ReinflateCommand,
    TargetCommand,
    Vector,
    VMOutcome,
)
from deflation.modes import HostEvent
from deflation.proportional import share_room, split_need
from deflation.resources import ZERO, ResourceVector
from hostagent.admission import adopt_new, check_new, growing, pressed
from hostagent.errors import DomainGone, RequestRefused
from hostagent.harvest import Harvest
from hostagent.history import sizes
from hostagent.host import RESIZING, Host
from hostagent.intents import Cause, Phase
from hostagent.leadership import Leadership
from hostagent.operations import Kind, Operations, concluded, split_told
from hostagent.vms import ManagedVM

#: How much of its deadline an operation on many VMs waits for one that is busy.
WAIT_SHARE: Final = 0.5

Run = Callable[[Operation], Coroutine[Any, Any, Operation]]
log = structlog.get_logger()


class Commands:
    """Takes commands for a host.

    :param boot_mib: how much of a VM's memory is boot memory, given nominal and wished-for boot memory.
    """

    def __init__(self, host: Host, boot_mib: Callable[[float, float | None], float]) -> None:
        self._host = host
        self._boot_mib = boot_mib
        self.leadership = Leadership(host.journal)
        self.operations = Operations(host.slice.host_id)
        self.harvest = Harvest(host)
        #: VMs that room is still being made for, and the requests that create them: nothing of them is charged yet.
        self._coming: dict[str, str] = {}

    async def create(self, command: CreateCommand) -> Operation:
        """Start a VM, at its nominal size or deflated; harvest VMs make room for it where they have to.

        :raises RequestRefused: it does not fit, the name is taken, or the request is not acceptable.
        """
        body = comparable(command)
        await self.follow(command)
        if known := self.operations.known(command.request_id, "create", body):
            return known
        spec = command.vm
        await self._host.hypervisor.check(spec)
        await self.harvest.revoke(f"{spec.name} is to be created")
        await self._host.sample()
        if known := self.operations.known(command.request_id, "create", body):
            return known
        self._host.modes.check(HostEvent.CREATE)
        if spec.name in self._coming:
            raise RequestRefused(409, f"{spec.name} is being made already", "vm.name")
        charge = check_new(self._host, command, self.harvest.spare())
        adopt = partial(adopt_new, self._host, command, self.cause(command, "create", body, ZERO), self._boot_mib)
        vm = adopt() if charge.is_zero() else None
        if vm is None:
            self._coming[spec.name] = command.request_id

        async def run(operation: Operation) -> Operation:
            if vm is not None:
                return await self.bring_up(operation, vm, fresh=True, xml=spec.xml)
            try:
                await self.harvest.make_room(charge, f"{spec.name} is to be started")
            finally:
                # After a deletion the name may be another creation's.
                deleted = self._coming.get(spec.name) != command.request_id
                if not deleted:
                    del self._coming[spec.name]
            if deleted:
                raise RequestRefused(409, f"{spec.name} was deleted meanwhile")
            return await self.bring_up(operation, adopt(), fresh=True, xml=spec.xml)

        return self.operations.begin(command.request_id, "create", body, run, vm=spec.name)

    async def delete(self, name: str, command: Command, reason: str) -> Operation:
        """Stop a VM and remove it.

        :raises RequestRefused: no such VM, or the request is not acceptable.
        """
        body = comparable(command) | {"name": name, "reason": reason}
        await self.follow(command)
        if known := self.operations.known(command.request_id, "delete", body):
            return known
        if command.request_id in self._host.journal.deleted:
            # Done before a restart: the VM that has the name now is another one.
            return self.operations.begin(command.request_id, "delete", body, _removed_before, vm=name)
        if name not in self._host.vms and self._coming.pop(name, None) is not None:

            async def call_off(operation: Operation) -> Operation:
                await asyncio.to_thread(self._host.journal.add_deleted, operation.request_id)
                sentence = f"{name} was still to be started, and will not be"
                return operation.model_copy(update={"state": OperationState.DONE, "sentence": sentence})

            return self.operations.begin(command.request_id, "delete", body, call_off, vm=name)
        vm = self._host.vm(name)
        return self.operations.begin(
            command.request_id,
            "delete",
            body,
            lambda operation: self.remove(operation, vm, self.cause(command, "delete", body, vm.allocation().current)),
            vm=name,
        )

    async def target(self, name: str, command: TargetCommand) -> Operation:
        """Bring one VM to a size.

        :raises RequestRefused: no such VM, an old generation, a target outside its range, or no room to grow.
        """
        body = comparable(command) | {"name": name}
        await self.follow(command)
        if known := self.operations.known(command.request_id, "target", body):
            return known
        await self._host.sample()
        if known := self.operations.known(command.request_id, "target", body):
            return known
        vm = self._host.vm(name)
        cause = vm.intent.cause
        if command.generation == vm.intent.generation and cause is not None and cause.kind == "target":
            earlier = {key: value for key, value in cause.body.items() if key != "request_id"}
            if earlier == {key: value for key, value in body.items() if key != "request_id"}:
                return self.operations.begin(command.request_id, "target", body, self._repeated(vm), vm=name)
        self.check_target(vm, command, self.harvest.spare(name))
        self._host.modes.check(target_event(vm, command))
        return self.operations.begin(
            command.request_id, "target", body, lambda operation: self._target(operation, vm, command, body), vm=name
        )

    def check_target(self, vm: ManagedVM, command: TargetCommand, spare: ResourceVector = ZERO) -> None:
        """Whether a VM may be brought to a size now.

        :param spare: what harvest VMs could give for it.
        :raises RequestRefused: an old generation, or no room to grow.
        :raises InvalidField: a target outside its range.
        """
        wanted, free = command.target.vector(), self._host.free() + spare
        check_target(vm.allocation(), wanted)
        if command.generation <= vm.intent.generation:
            raise RequestRefused(
                409,
                f"generation {command.generation} is not above {vm.intent.generation}, which {vm.name} has",
                "generation",
            )
        room = free.larger(undeclared(self._host.slice.capacity, vm.allocation().upper))
        if not wanted.less(vm.allocation().current).fits_in(room):
            raise RequestRefused(409, f"target ({wanted}) needs more than what is free ({free})", "target")

    async def reclaim(self, command: ReclaimCommand) -> Operation:
        """Free an amount by deflating this host's VMs in proportion.

        :raises RequestRefused: the request is not acceptable.
        """
        body = comparable(command)
        await self.follow(command)
        if known := self.operations.known(command.request_id, "reclaim", body):
            return known
        self._host.modes.check(HostEvent.RECLAIM)
        await self.harvest.revoke(f"{command.need.vector()} are to be reclaimed")
        if known := self.operations.known(command.request_id, "reclaim", body):
            return known
        return self.operations.begin(
            command.request_id, "reclaim", body, lambda operation: self._reclaim(operation, command, body)
        )

    async def reinflate(self, command: ReinflateCommand) -> Operation:
        """Share free room among the VMs that lack something.

        :raises RequestRefused: the request is not acceptable.
        """
        body = comparable(command)
        await self.follow(command)
        if known := self.operations.known(command.request_id, "reinflate", body):
            return known
        self._host.modes.check(HostEvent.REINFLATE)
        return self.operations.begin(
            command.request_id, "reinflate", body, lambda operation: self._reinflate(operation, command, body)
        )

    async def give(
        self,
        request_id: str,
        body: dict[str, Any],
        decide: Callable[[list[ManagedVM]], Mapping[str, ResourceVector]],
        deadline_s: float,
    ) -> list[VMOutcome]:
        """Grow VMs because the host's mode says so.

        :param decide: who is to grow to what, of those VMs that nobody else works on.
        :raises HypervisorError: an intent could not be stored; all are as they were.
        """
        until = _now() + deadline_s
        async with self._host.claimed(deadline_s * WAIT_SHARE) as claim:
            await self._host.sample()
            members = self._plan(decide(claim.vms), Command(request_id=request_id), "mode", body)
            claim.keep(members)
            await self.persist(members)
            return await self._host.resize(members, _left(until))

    # --- how they run --------------------------------------------------------------------------------------------

    async def bring_up(
        self, operation: Operation, vm: ManagedVM, fresh: bool, xml: str | None = None, suspend: bool = False
    ) -> Operation:
        # A deletion waits: what is cleared away here must not be the domain of a later VM of that name.
        async with vm.lock:
            if fresh:
                try:
                    await self._host.hypervisor.create(vm.domain, vm.intent, xml)
                except BaseException:
                    # It has undone what it did; a domain of that name may be somebody else's.
                    await self._host.drop(vm)
                    raise
            try:
                if suspend:
                    await self._host.hypervisor.suspend(vm.domain)
                # Admitted at its committed size before its vCPUs run.
                await vm.enforce_at_start()
                await self._host.hypervisor.resume(vm.domain)
                return await self.started(operation, vm)
            except Exception:
                await self._host.clear_away(vm)
                raise

    async def started(self, operation: Operation, vm: ManagedVM) -> Operation:
        size = vm.allocation().current
        await self._host.record_change(vm.name, ZERO, size, operation.request_id)
        await vm.store(phase=Phase.SETTLED)
        vm.running = True
        vm.start()
        sentence = f"{vm.name} runs with {size}"
        self._host.note(vm.name, "admit", sentence, {"size": sizes(size), "free": sizes(self._host.free())})
        return operation.model_copy(update={"state": OperationState.DONE, "sentence": sentence})

    async def remove(self, operation: Operation, vm: ManagedVM, cause: Cause) -> Operation:
        vm.condemn("it is being removed")
        try:
            async with vm.lock:
                size = vm.allocation().current
                if self._host.holds(vm):
                    with contextlib.suppress(DomainGone):
                        await vm.store(phase=Phase.DELETING, cause=cause, committed=Vector.of(size))
                    await self._host.record_change(vm.name, size, ZERO, operation.request_id)
                    await asyncio.to_thread(self._host.journal.add_deleted, operation.request_id)
                    await self._host.forget(vm)
        finally:
            vm.condemned = ""
        reason = cause.body["reason"]
        what = f"preempted {vm.name}, reason {reason}" if reason != "delete" else f"stopped and removed {vm.name}"
        sentence = f"{what}: {size} came free"
        self._host.note(vm.name, "remove", sentence, {"request_id": operation.request_id, "size": sizes(size)})
        return operation.model_copy(update={"state": OperationState.DONE, "sentence": sentence})

    async def _target(
        self, operation: Operation, vm: ManagedVM, command: TargetCommand, body: dict[str, Any]
    ) -> Operation:
        until = _now() + command.deadline_s
        await self.harvest.make_room(command.target.vector().less(vm.allocation().current), f"{vm.name} grows", vm.name)
        async with vm.lock:
            await self._host.sample()
            # Again: other operations may have ended since this one was taken on.
            if not self._host.holds(vm) or vm not in self._host.resizable():
                raise RequestRefused(409, f"{vm.name} cannot be resized now: it is stopped or being removed", "name")
            self.check_target(vm, command)
            cause = self.cause(command, "target", body, vm.allocation().current)
            vm.plan(command.target.vector(), cause, command.generation)
            await self.persist([vm])
            return concluded(operation, await self._host.resize([vm], _left(until), command.mode))

    async def _reclaim(self, operation: Operation, command: ReclaimCommand, body: dict[str, Any]) -> Operation:
        until, need = _now() + command.deadline_s, command.need.vector()
        async with self._host.claimed(command.deadline_s * WAIT_SHARE) as claim:
            split = split_need([vm.row() for vm in claim.vms if vm.name not in command.exclude], need)
            self._host.note(None, "deflate", split_told(command.request_id, need, split), {"need": sizes(need)})
            members = self._plan(split.targets, command, "reclaim", body)
            claim.keep(members)
            await self.persist(members)
            outcomes = await self._host.resize(members, _left(until), command.mode)
        return concluded(operation, outcomes, need)

    async def _reinflate(self, operation: Operation, command: ReinflateCommand, body: dict[str, Any]) -> Operation:
        until = _now() + command.deadline_s
        async with self._host.claimed(command.deadline_s * WAIT_SHARE) as claim:
            await self._host.sample()
            room = self._host.free()
            if command.room is not None:
                room = room.smaller(command.room.vector())
            # A resize that failed is given up: otherwise it would be tried again after this.
            targets = {vm.name: vm.allocation().current for vm in claim.vms if vm.intent.phase in RESIZING}
            targets |= share_room(growing(claim.vms, command), room, pressed(self._host))
            members = self._plan(targets, command, "reinflate", body)
            claim.keep(members)
            await self.persist(members)
            return concluded(operation, await self._host.resize(members, _left(until)))

    def _repeated(self, vm: ManagedVM) -> Run:
        async def answer(operation: Operation) -> Operation:
            async with vm.lock:
                return concluded(operation, [vm.summary()])

        return answer

    def _plan(
        self, targets: Mapping[str, ResourceVector], command: Command, kind: Kind, body: dict[str, Any]
    ) -> list[ManagedVM]:
        """Plan for each VM, all in one turn of the loop: from here on nobody else counts on the room that is given."""
        members = [self._host.vms[name] for name in targets]
        for vm in members:
            vm.plan(targets[vm.name], self.cause(command, kind, body, vm.allocation().current))
        return members

    async def persist(self, members: list[ManagedVM]) -> None:
        """Write all intents before the first action: a kill in between leaves each VM at its old size or its target.

        :raises HypervisorError: an intent could not be stored; all are as they were.
        """
        results = await asyncio.gather(*(vm.persist() for vm in members), return_exceptions=True)
        failed = [result for result in results if isinstance(result, BaseException)]
        if failed:
            await asyncio.gather(*(vm.unplan() for vm in members))
            raise failed[0]

    async def follow(self, command: Command) -> None:
        """Refuse a command that comes too late, unless it only repeats one. Raises :class:`RequestRefused`."""
        request_id = command.request_id
        known = self.operations.has(request_id) or request_id in self._host.journal.deleted
        await self.leadership.follow(command, known)

    def cause(self, command: Command, kind: Kind, body: dict[str, Any], before: ResourceVector) -> Cause:
        return Cause(
            request_id=command.request_id, kind=kind, body=body, started_at=time.time(), before=Vector.of(before)
        )


async def _removed_before(operation: Operation) -> Operation:
    sentence = f"{operation.vm} was removed by this request before the agent was started anew"
    return operation.model_copy(update={"state": OperationState.DONE, "sentence": sentence})


def _now() -> float:
    return asyncio.get_running_loop().time()


def _left(until: float) -> float:
    return max(until - _now(), 0.0)


def target_event(vm: ManagedVM, command: TargetCommand) -> HostEvent:
    """What a target is to the host's mode: whether it takes something."""
    return HostEvent.GROW if vm.allocation().current.fits_in(command.target.vector()) else HostEvent.SHRINK


def comparable(command: Command) -> dict[str, Any]:
    """The command as it is compared and stored; a new leader repeats it under its own epoch."""
    return command.model_dump(mode="json", exclude={"epoch", "order", "dry_run"})
