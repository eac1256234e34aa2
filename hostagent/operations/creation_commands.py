"""Commands that bring VMs into being and remove them, as operations."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable
from functools import partial
from typing import Any

from ebbtide.deflation.modes import HostEvent
from ebbtide.deflation.resources import ZERO, ResourceVector
from ebbtide.messages.commands import Command, CreateCommand
from ebbtide.messages.common import Vector
from ebbtide.messages.explanations import DecisionKind
from ebbtide.messages.operations import Operation
from hostagent.control.harvest import Harvest
from hostagent.control.start_admission import adopt_new, check_new
from hostagent.errors import DomainGone, HypervisorError, JournalError, NoticeWithdrawn, already_exists, superseded
from hostagent.operations.ending import end_of_notice, stays
from hostagent.operations.operations import WRITE_AGAIN_S, Run, done, failed, partly_done
from hostagent.operations.requests import Requests, answer, cause_of, check_not_arrived, left
from hostagent.state.history import sizes
from hostagent.state.intents import Cause, Intent, Phase, Request
from hostagent.vm.host import Host
from hostagent.vm.managed_vm import ManagedVM
from hostagent.vm.notice import give_notice


class CreationCommands:
    """Takes creations and deletions.

    :param boot_mib: how much of a VM's memory is boot memory, given nominal and wished-for boot memory.
    """

    def __init__(
        self, host: Host, requests: Requests, harvest: Harvest, boot_mib: Callable[[float, float | None], float]
    ) -> None:
        self._host = host
        self._requests = requests
        self._harvest = harvest
        self._boot_mib = boot_mib
        #: VMs that room is still being made for, or that failed and may come about late, and the requests that create
        #: them: nothing of them is charged yet.
        self._coming: dict[str, str] = {}

    async def create(self, command: CreateCommand) -> Operation:
        """Start a VM, at its nominal size or deflated; harvest VMs make room for it where they have to.

        :raises RequestRefused: it does not fit, the name is taken, or the request is not acceptable.
        """
        host, spec = self._host, command.vm

        async def accept(request: Request) -> Run:
            await host.hypervisor.check(spec)
            await self._harvest.revoke(f"{spec.name} is to be created")
            await host.sample()
            self._requests.leadership.check(command)
            host.modes.check(HostEvent.CREATE)
            if spec.name in self._coming:
                raise already_exists(f"{spec.name} is being made already", "vm.name")
            charge = check_new(host, command, self._harvest.spare())
            adopt = partial(adopt_new, host, command, request.cause(ZERO), self._boot_mib)
            if charge.is_zero():
                return partial(self.bring_up, vm=adopt(), fresh=True, xml=spec.xml)
            self._coming[spec.name] = request.request_id
            return partial(self._make_room, charge=charge, name=spec.name, xml=spec.xml, adopt=adopt)

        return await self._requests.take("create", command, accept, vm=spec.name)

    async def _make_room(
        self, operation: Operation, charge: ResourceVector, name: str, xml: str | None, adopt: Callable[[], ManagedVM]
    ) -> Operation:
        try:
            await self._harvest.make_room(charge, f"{name} is to be started")
        finally:
            # After a deletion the name may be another creation's.
            deleted = self._coming.get(name) != operation.request_id
            if not deleted:
                del self._coming[name]
        if deleted:
            raise superseded(f"{name} was deleted meanwhile")
        return await self.bring_up(operation, adopt(), fresh=True, xml=xml)

    async def bring_up(
        self,
        operation: Operation,
        vm: ManagedVM,
        fresh: bool,
        xml: str | None = None,
        suspend: bool = False,
        keep: bool = False,
    ) -> Operation:
        """Have a new VM run at its size, of which nothing is left if that fails.

        :param suspend: its vCPUs run already: they stand still until it is held to its size.
        :param keep: leave it as it is if that fails, since it may have worked.
        :raises HostAgentError: it could not be done.
        """
        late = False
        try:
            # A deletion waits: what is cleared away here must not be the domain of a later VM of that name.
            async with vm.lock:
                if fresh:
                    try:
                        await self._host.hypervisor.create(vm.domain, vm.intent, xml)
                    except BaseException as error:
                        # It has undone what it did; a domain of that name may have another owner.
                        if late := isinstance(error, HypervisorError):
                            # What is made late all the same is removed, by a later agent, too.
                            await self._host.mark_failed(operation.request_id)
                        await self._host.drop(vm)
                        raise
                try:
                    if suspend:
                        # An earlier agent's word that it is settled may come late: paused then, it would count as
                        # paused by another program.
                        await vm.record.persist()
                        await self._host.hypervisor.suspend(vm.domain)
                    # Admitted at its committed size before its vCPUs run, and by any later start past us.
                    await vm.enforce_at_start()
                    await self._host.hypervisor.prepare_start(vm.domain, vm.intent.committed.vector())
                    await self._host.hypervisor.keep(vm.domain)
                    await self._host.hypervisor.resume(vm.domain)
                    return await self._started(operation, vm)
                except Exception:
                    if not keep:
                        await self._host.clear_away(vm)
                    raise
        except Exception as error:
            if not keep:
                await self.undone(operation, vm, error, late)
            raise

    async def undone(self, operation: Operation, vm: ManagedVM, why: Exception, late: bool = False) -> None:
        """Wait until a creation may be answered as failed: that is written down, or there is nothing left of it.

        Else a later agent would bring up what was answered as failed.

        :param late: whether its domain may still come about.
        """
        request_id, is_told = operation.request_id, False
        while (late or self._host.holds(vm)) and not await self._host.mark_failed(request_id):
            if late:
                self._coming.setdefault(vm.name, request_id)
            if not is_told:
                said = f"{vm.name} is still being undone, and that it failed cannot be written down yet: {why}"
                self._requests.operations.progress(request_id, said)
                is_told = True
            await asyncio.sleep(WRITE_AGAIN_S)
        # Where nothing is left of it, nothing need be written.
        self._host.unwritten.discard(request_id)
        if late and self._coming.get(vm.name) == request_id:
            del self._coming[vm.name]

    async def _started(self, operation: Operation, vm: ManagedVM) -> Operation:
        size = vm.allocation().current
        await self._host.record_change(vm.name, ZERO, size, operation.request_id)
        await vm.record.store(phase=Phase.SETTLED, started_at=time.time())
        vm.running = True
        vm.guest_boots()
        vm.start()
        sentence = f"{vm.name} runs with {size}"
        self._host.note(vm.name, DecisionKind.ADMIT, sentence, {"size": sizes(size), "free": sizes(self._host.free())})
        return done(operation, sentence)

    async def delete(self, name: str, command: Command, reason: str, notice_s: float = 0.0) -> Operation:
        """Stop a VM and remove it.

        :param notice_s: how long its guest is told before, in seconds.
        :raises RequestRefused: no such VM, or the request is not acceptable.
        """

        async def accept(request: Request) -> Run:
            if request.request_id in self._host.journal.deleted:
                # Done before a restart: the VM that has the name now is another one.
                return answer(f"{name} was removed by this request before the agent was started again")
            if name not in self._host.vms and (creation := self._coming.pop(name, None)) is not None:
                return partial(self._call_off, name=name, creation=creation)
            vm = self._host.vm(name)
            return partial(self.remove, vm=vm, cause=request.cause(vm.allocation().current))

        told: dict[str, Any] = {"notice_s": f"{notice_s:g}"} if notice_s else {}
        return await self._requests.take("delete", command, accept, name=name, reason=reason, **told)

    async def _call_off(self, operation: Operation, name: str, creation: str) -> Operation:
        await asyncio.to_thread(self._host.journal.add_failed, creation)
        await asyncio.to_thread(self._host.journal.add_deleted, operation.request_id)
        return done(operation, f"{name} was still to be started, and will not be")

    async def remove(self, operation: Operation, vm: ManagedVM, cause: Cause) -> Operation:
        vm.resizer.mark_terminating("it is being removed")
        try:
            async with vm.lock:
                size, how = vm.allocation().current, ""
                await check_not_arrived(self._host, vm)
                if self._host.holds(vm):
                    before = vm.intent
                    # One that an earlier agent had begun has taken its place.
                    kept = before.cause if before.told != cause.request_id else None
                    try:
                        try:
                            how = await self._tell(vm, cause)
                        except NoticeWithdrawn as error:
                            return await stays(operation, self._host, vm, error, cause=kept)
                        told = vm.intent
                        with contextlib.suppress(DomainGone):
                            deleting = {"cause": cause, "committed": Vector.of(size), "told": ""}
                            await vm.record.store(phase=Phase.DELETING, **deleting)
                    except HypervisorError:
                        if before.phase is not Phase.DELETING:
                            await self._not_removed(vm, cause.request_id, kept)
                        raise
                    # What fails now is tried again at once, however long a repair of it was to wait.
                    vm.request_check()
                    try:
                        await self._write_down(vm, size, operation.request_id)
                    except JournalError:
                        # Nothing has been done to it, nor is it once there is room to write again.
                        if before.phase is not Phase.DELETING:
                            vm.record.intent = told
                            await self._not_removed(vm, cause.request_id, kept)
                            # What cannot be written now, the reconciler writes later.
                            with contextlib.suppress(HypervisorError):
                                await vm.record.persist()
                        raise
                    await self._host.forget(vm)
        finally:
            vm.resizer.terminating = ""
        reason = cause.body["reason"]
        what = f"preempted {vm.name}, reason {reason}" if reason != "delete" else f"stopped and removed {vm.name}"
        sentence = f"{what}{how}: {size} came free"
        self._host.note(
            vm.name, DecisionKind.REMOVE, sentence, {"request_id": operation.request_id, "size": sizes(size)}
        )
        return done(operation, sentence)

    async def _write_down(self, vm: ManagedVM, size: ResourceVector, request_id: str) -> None:
        """Have a VM's end in the journal before it comes.

        :raises JournalError: it could not be written; it is as before.
        """
        await self._host.record_change(vm.name, size, ZERO, request_id)
        try:
            await asyncio.to_thread(self._host.journal.add_deleted, request_id)
        except JournalError:
            await self._host.tell_growth(vm, size, request_id)
            raise

    async def _not_removed(self, vm: ManagedVM, request_id: str, cause: Cause | None) -> None:
        """Have a VM looked after whose deletion is answered as failed before it has begun.

        :param cause: of what it has.
        """
        # A write that comes late must not have a later agent remove it.
        await self._host.mark_failed(request_id)
        vm.record.intent = vm.intent.changed(cause=cause)
        vm.request_check()

    async def resume_removal(self, operation: Operation, vm: ManagedVM) -> Operation:
        """Go on with a deletion that an earlier agent had begun, unless that has answered it as failed."""
        begun = vm.intent.phase is Phase.DELETING or vm.intent.told == operation.request_id
        if begun and not self._host.has_failed(operation):
            return await self.remove(operation, vm, cause_of(vm))
        async with vm.lock:
            if vm.intent.phase is Phase.DELETING:
                vm.record.intent = not_deleted(vm.intent)
                # What cannot be written now, the reconciler writes later.
                with contextlib.suppress(HypervisorError):
                    await vm.record.persist()
                vm.request_check()
        if operation.request_id in self._host.journal.withdrawn:
            return partly_done(operation, f"{vm.name} runs on: its preemption had ended before this agent started")
        return failed(operation, f"{vm.name} could not be removed, as was answered before this agent started")

    @staticmethod
    async def _tell(vm: ManagedVM, cause: Cause) -> str:
        """Tell a guest that it goes, where it has a notice and an earlier agent had not begun to remove it.

        :returns: what became of that, in words.
        :raises HypervisorError: it could not be stored, and the guest was not told.
        :raises NoticeWithdrawn: it stays; its guest is still to be told.
        """
        notice_s = float(cause.body.get("notice_s", 0.0))
        if not notice_s or not vm.running or vm.intent.phase is Phase.DELETING:
            return ""
        if vm.intent.told == cause.request_id:
            # By an earlier agent; the guest's programs may run for it.
            until = end_of_notice(cause, notice_s)
            await vm.wait_for_hello(left(until) / 3)
            notice_s = left(until)
        else:
            with contextlib.suppress(DomainGone):
                await vm.record.store(cause=cause, told=cause.request_id)
        told = {"request_id": cause.request_id, "kind": "delete", "reason": str(cause.body["reason"])}
        return f" ({await give_notice(vm.link, vm.notice, told, notice_s, kept_s=0.0)})"


def not_deleted(intent: Intent) -> Intent:
    """The intent of a VM whose deletion was answered as failed before it had begun, and was written too late."""
    # One that was off had nothing; it comes up with what it was to come up with.
    size = intent.target if intent.committed.vector().is_zero() else intent.committed
    told = intent.cause.request_id if intent.cause is not None and intent.cause.body.get("notice_s") else ""
    return intent.changed(phase=Phase.SETTLED, committed=size, told=told)
