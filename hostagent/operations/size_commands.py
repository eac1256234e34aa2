"""Commands that change the sizes of VMs, as operations: target, reclaim, reinflate.

The VMs of an operation are worked on side by side, and so are operations on different VMs; what is done to one VM is
done one after another. Who gives how much is decided in `ebbtide.deflation.sharing.proportional`, in one turn of the
event loop with the plans that come of it, so that no room is counted twice.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping
from functools import partial
from typing import Any, Final

from ebbtide.deflation.allocations import check_target, undeclared
from ebbtide.deflation.modes import HostEvent, HostMode
from ebbtide.deflation.resources import ZERO, ResourceVector
from ebbtide.deflation.sharing.proportional import split_need
from ebbtide.messages.commands import ReclaimCommand, ReinflateCommand, TargetCommand
from ebbtide.messages.explanations import DecisionKind
from ebbtide.messages.operations import Operation, VMOutcome
from hostagent.clock import now
from hostagent.control.harvest import Harvest
from hostagent.control.start_admission import reinflation_targets
from hostagent.errors import HypervisorError, no_room, superseded
from hostagent.operations.operations import Run, concluded, failed, split_told
from hostagent.operations.requests import Requests, left
from hostagent.state.history import sizes
from hostagent.state.intents import Phase, Request
from hostagent.vm.host import Host, persist_all, plan_all
from hostagent.vm.managed_vm import ManagedVM

#: How much of its deadline an operation on many VMs waits for one that is busy.
WAIT_SHARE: Final = 0.5


class SizeCommands:
    """Takes commands about the sizes of VMs."""

    def __init__(self, host: Host, requests: Requests, harvest: Harvest) -> None:
        self._host = host
        self._requests = requests
        self._harvest = harvest

    async def target(self, name: str, command: TargetCommand) -> Operation:
        """Bring one VM to a size.

        :raises RequestRefused: no such VM, an old generation, a target outside its range, or no room to grow.
        """

        async def accept(request: Request) -> Run:
            await self._host.sample()
            vm = self._host.vm(name)
            if _repeats(vm, command, request.body):
                return partial(_as_found, vm=vm)
            self.check_target(vm, command, self._harvest.spare(name))
            self._host.modes.check(target_event(vm, command))
            return partial(self._target, vm=vm, command=command, request=request)

        return await self._requests.take("target", command, accept, name=name)

    def check_target(self, vm: ManagedVM, command: TargetCommand, spare: ResourceVector = ZERO) -> None:
        """Whether a VM may be brought to a size now.

        :param spare: what harvest VMs could give for it.
        :raises RequestRefused: an old generation, or no room to grow.
        :raises InvalidField: a target outside its range.
        """
        wanted, free = command.target.size_of(vm.allocation()), self._host.free() + spare
        check_target(vm.allocation(), wanted)
        if command.generation <= vm.intent.generation:
            raise superseded(
                f"generation {command.generation} is not above {vm.intent.generation}, which {vm.name} has",
                "generation",
            )
        room = free.larger(undeclared(self._host.slice.capacity, vm.allocation().upper))
        if not wanted.less(vm.allocation().current).fits_in(room):
            raise no_room(f"target ({wanted}) needs more than what is free ({free})", "target")

    async def reclaim(self, command: ReclaimCommand) -> Operation:
        """Free an amount by deflating this host's VMs in proportion.

        :raises RequestRefused: the request is not acceptable.
        """

        async def accept(request: Request) -> Run:
            self._host.modes.check(HostEvent.RECLAIM)
            await self._harvest.revoke(f"{command.need.vector()} are to be reclaimed")
            return partial(self._reclaim, command=command, request=request)

        return await self._requests.take("reclaim", command, accept)

    async def reinflate(self, command: ReinflateCommand) -> Operation:
        """Share free room among the VMs that lack something.

        :raises RequestRefused: the request is not acceptable.
        """

        async def accept(request: Request) -> Run:
            self._host.modes.check(HostEvent.REINFLATE)
            return partial(self._reinflate, command=command, request=request)

        return await self._requests.take("reinflate", command, accept)

    async def give(
        self,
        request_id: str,
        body: dict[str, Any],
        decide: Callable[[list[ManagedVM]], Mapping[str, ResourceVector]],
        deadline_s: float,
    ) -> list[VMOutcome]:
        """Grow VMs because the host's mode says so.

        :param decide: who is to grow to what, of those VMs that no other operation works on.
        :raises HypervisorError: an intent could not be stored; all are as they were.
        """
        until = now() + deadline_s
        async with self._host.claimed(deadline_s * WAIT_SHARE) as claim:
            await self._host.sample()
            targets = decide(claim.vms)
            freed = targets if self._host.modes.mode is HostMode.OFF else ()
            members = plan_all(self._host, targets, Request(request_id, "mode", body, time.time()), freed)
            claim.keep(members)
            await persist_all(members)
            return await self._host.resize(members, left(until), ended=claim.release)

    # --- how they run --------------------------------------------------------------------------------------------

    async def _target(self, operation: Operation, vm: ManagedVM, command: TargetCommand, request: Request) -> Operation:
        until, wanted = now() + command.deadline_s, command.target.size_of(vm.allocation())
        await self._harvest.make_room(wanted.less(vm.allocation().current), f"{vm.name} grows", vm.name)
        async with self._host.locked_until(vm, until):
            await self._host.sample()
            # Again: other operations may have ended since this one was taken on.
            self._host.check_resizable(vm)
            self.check_target(vm, command)
            wanted = command.target.size_of(vm.allocation())
            vm.record.plan(wanted, request.cause(vm.allocation().current), command.generation)
            await self._persist([vm], request)
            outcomes = await self._host.resize([vm], left(until), command.mode)
            if vm.intent.phase is Phase.STOPPED:
                return failed(operation, f"{vm.name} {outcomes[0].sentence}", *outcomes)
            return concluded(operation, outcomes)

    async def _persist(self, members: Collection[ManagedVM], request: Request) -> None:
        """Write all intents, or none: a write that comes late must not have a successor of this agent go on with it.

        :raises HypervisorError: an intent could not be stored; all are as they were.
        """
        try:
            await persist_all(members)
        except HypervisorError:
            await self._host.mark_failed(request.request_id)
            raise

    async def _reclaim(self, operation: Operation, command: ReclaimCommand, request: Request) -> Operation:
        until, need = now() + command.deadline_s, command.need.vector()

        def gives_nothing(vm: ManagedVM) -> bool:
            return vm.is_fixed or vm.name in command.exclude

        wait_s = command.deadline_s * WAIT_SHARE
        async with self._host.reclaiming(), self._host.claimed(wait_s, gives_nothing) as claim:
            split = split_need([vm.row() for vm in claim.vms], need)
            self._host.note(
                None, DecisionKind.DEFLATE, split_told(command.request_id, need, split), {"need": sizes(need)}
            )
            members = plan_all(self._host, split.targets, request)
            # One that is busy for so long was not asked: that is no lack of room either.
            busy = [vm for vm in self._host.resizable() if vm not in claim.vms and not gives_nothing(vm)]
            claim.keep(members)
            await self._persist(members, request)
            outcomes = await self._host.resize(members, left(until), command.mode, claim.release)
        if any(outcome.shortfall.vector() != ZERO for outcome in outcomes) or not split.shortfall.is_zero():
            outcomes += [vm.failed("another operation is at work on it") for vm in busy]
        return concluded(operation, outcomes, need)

    async def _reinflate(self, operation: Operation, command: ReinflateCommand, request: Request) -> Operation:
        until = now() + command.deadline_s
        async with self._host.claimed(command.deadline_s * WAIT_SHARE) as claim:
            await self._host.sample()
            targets = reinflation_targets(self._host, claim.vms, command)
            members = plan_all(self._host, targets, request, freed=command.vms)
            claim.keep(members)
            await persist_all(members)
            outcomes = await self._host.resize(members, left(until), ended=claim.release)
            return concluded(operation, outcomes)


def _repeats(vm: ManagedVM, command: TargetCommand, body: Mapping[str, Any]) -> bool:
    """Whether a target of this generation was set by an earlier request that asked for the same."""
    cause = vm.intent.cause
    if command.generation != vm.intent.generation or cause is None or cause.kind != "target":
        return False
    return {**cause.body, "request_id": ""} == {**body, "request_id": ""}


async def _as_found(operation: Operation, vm: ManagedVM) -> Operation:
    async with vm.lock:
        return concluded(operation, [vm.summary()])


def target_event(vm: ManagedVM, command: TargetCommand) -> HostEvent:
    """What a target is to the host's mode: whether it takes something."""
    allocation = vm.allocation()
    grows = allocation.current.fits_in(command.target.size_of(allocation))
    return HostEvent.GROW if grows else HostEvent.SHRINK
