"""End of a VM that is preempted: its guest is told, and it is suspended or powered off within its notice."""

from __future__ import annotations

import asyncio
import contextlib
import time
from typing import Final

from ebbtide.deflation.cascade.instructions import Mode
from ebbtide.deflation.sharing.suspension import (
    POWER_OFF_SHARE,
    SavingRate,
    power_off_s,
    saving_s,
    why_not_saved,
)
from ebbtide.messages.common import Vector
from ebbtide.messages.explanations import DecisionKind
from ebbtide.messages.operations import Operation
from hostagent.clock import now
from hostagent.errors import HostAgentError, HypervisorError, HypervisorTimeout, NoticeWithdrawn
from hostagent.operations.operations import partly_done
from hostagent.operations.requests import left
from hostagent.state.intents import Cause, Phase
from hostagent.vm.host import Host
from hostagent.vm.managed_vm import ManagedVM
from hostagent.vm.notice import give_notice

#: A notice that a restart of the agent or another operation has cut off is at least so long, where so much was
#: promised, seconds.
LEAST_S: Final = 5.0
#: Of the notice, what a VM that is to be suspended has to give memory back: what it gives need not be saved.
DEFLATION_SHARE: Final = 1 / 4


class Ending:
    """Ends the VMs of one host that are preempted."""

    def __init__(self, host: Host) -> None:
        self._host = host
        #: What the disk for saved memory took lately.
        self._rate = SavingRate()

    async def end(self, vm: ManagedVM, cause: Cause, began: float | None) -> str:
        """Have a VM off. Under its lock.

        :param began: when its operation did, by the loop's clock; None: an earlier agent had begun, and the guest's
            programs may run for it.
        :returns: how it ended, in words.
        :raises HypervisorError: it could not be turned off.
        :raises NoticeWithdrawn: it stays; its guest is still to be told.
        """
        until = end_of_notice(cause, float(cause.body["limit_s"]), began)
        if began is None and vm.running:
            await vm.wait_for_hello(left(until) / 3)
        said = ""
        if cause.body.get("suspend"):
            how, why_not = await self._suspend(vm, cause, until)
            if not why_not:
                return how
            said = f"{how}it was not suspended: {why_not}; "
            if how:
                # Its programs were told that they go on, and have not ended: none of them loses what it has in memory
                # only because the save took all of the notice.
                return said + await self._host.hypervisor.shut_down(vm.domain, max(left(until), LEAST_S))
        notice_s = left(until)
        kept_s = notice_s * POWER_OFF_SHARE
        told = await give_notice(vm.link, vm.notice, self._told(cause, "stop"), notice_s, kept_s)
        return f"{said}{told}; {await self._host.hypervisor.shut_down(vm.domain, left(until))}"

    @staticmethod
    def _told(cause: Cause, kind: str) -> dict[str, str]:
        return {"request_id": cause.request_id, "kind": kind, "reason": str(cause.body.get("reason", ""))}

    async def _suspend(self, vm: ManagedVM, cause: Cause, until: float) -> tuple[str, str]:
        """Save a VM's memory to disk.

        :returns: what was done, in words, empty where its guest was not told yet; and why it is not saved, empty if it
            is.
        """
        hypervisor = self._host.hypervisor
        try:
            if await hypervisor.saved_mib(vm.domain) is not None:
                return "its memory was saved before the agent was started again", ""
            wants = await hypervisor.to_save(vm.domain)
        except HypervisorError as error:
            return "", str(error)
        notice_s, rate_mib_s = left(until), self._rate.mib_s(now())
        why_not = why_not_saved(wants.state_mib, wants.free_mib, notice_s, rate_mib_s)
        if why_not:
            return "", why_not
        needed_s = saving_s(wants.state_mib, rate_mib_s)
        off_s = power_off_s(notice_s, needed_s)
        kept_s = needed_s + off_s
        deflating = asyncio.create_task(
            self._deflate(vm, min(notice_s * DEFLATION_SHARE, notice_s - kept_s)), name=f"deflate:{vm.name}"
        )
        try:
            told = await give_notice(vm.link, vm.notice, self._told(cause, "suspend"), notice_s, kept_s) + "; "
            await deflating
        except NoticeWithdrawn:
            # Its lock is given up next: nothing may go on taking.
            vm.resizer.interrupt("its preemption was called off")
            await deflating
            raise
        finally:
            deflating.cancel()
            await asyncio.gather(deflating, return_exceptions=True)
        try:
            wants = await hypervisor.to_save(vm.domain)
            if wants.free_mib is None or (why_not := why_not_saved(wants.state_mib, wants.free_mib, notice_s, 1e9)):
                return told, why_not or "the disk for saved memory is gone"
            # What is saved comes up with all that the guest can touch, and is charged with that from its start on, not
            # while it is still limited to less.
            size = vm.intent.committed.vector().with_component("memory_mib", wants.memory_mib)
            await vm.record.store(target=Vector.of(size.smaller(vm.allocation().upper)))
            limit_s = max(left(until) - off_s, LEAST_S)
            try:
                saved = await hypervisor.save(vm.domain, limit_s)
            except HypervisorTimeout:
                self._rate = self._rate.not_ready(now(), wants.state_mib, limit_s)
                raise
        except HostAgentError as error:
            return told, str(error)
        self._rate = self._rate.saved(saved.mib, saved.seconds)
        return f"{told}its memory, {saved.mib:.0f} MiB, was saved in {saved.seconds:.1f} s", ""

    async def _deflate(self, vm: ManagedVM, limit_s: float) -> None:
        """Have a VM give the memory that it can do without, as far as that goes."""
        allocation = vm.allocation()
        target = allocation.current.with_component("memory_mib", allocation.minimum.memory_mib)
        if limit_s > 0 and not allocation.current.fits_in(target):
            with contextlib.suppress(HostAgentError):
                await vm.resizer.reach_at_end(target, limit_s, Mode.ASK)


def end_of_notice(cause: Cause, notice_s: float, began: float | None = None) -> float:
    """When a notice ends that began when its operation did, by the loop's clock.

    :param began: when that was; None: it is known by the wall clock only, which may have been set since.
    """
    passed_s = max(time.time() - cause.started_at, 0.0) if began is None else now() - began
    return now() + max(notice_s - passed_s, min(notice_s, LEAST_S))


async def stays(operation: Operation, host: Host, vm: ManagedVM, error: NoticeWithdrawn, **fields: object) -> Operation:
    """The end of an operation whose VM stays after all; its guest is told when it is looked at. Under its lock.

    :param fields: what else of its intent is as before.
    """
    await vm.record.store(phase=Phase.SETTLED, told=operation.request_id, **fields)
    vm.request_check()
    host.note(vm.name, DecisionKind.REMOVE, f"{vm.name} runs on: {error}", {"request_id": operation.request_id})
    return partly_done(operation, f"{vm.name} runs on ({error})")
