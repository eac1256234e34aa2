"""Resumption of operations that a killed agent had begun, under the request ids that they had (rule 7)."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Iterable
from typing import Any, Final

import structlog

from ebbtide.deflation.modes import HostEvent
from ebbtide.messages.commands import ReclaimCommand
from ebbtide.messages.explanations import DecisionKind
from ebbtide.messages.operations import Operation, VMOutcome
from hostagent.control.unowned import put_back
from hostagent.errors import HostAgentError, HypervisorError
from hostagent.operations.creation_commands import CreationCommands, not_deleted
from hostagent.operations.operations import Operations, Run, concluded, done, failed
from hostagent.operations.respec import fallen_short
from hostagent.state.intents import Intent, Phase
from hostagent.vm.host import ANSWERED, RESIZING, Host
from hostagent.vm.managed_vm import ManagedVM

#: How long a resumed operation waits for its guests to say hello.
HELLO_S: Final = 60.0
#: How long to wait before a hypervisor that did not say is asked again, in seconds.
ASK_AGAIN_S: Final = 1.0
#: The longest wait between two tries to hold a VM to its size, in seconds.
TRY_AGAIN_S: Final = 30.0
#: Time for a resumed resize, in seconds: the deadline of the command has passed with the old agent.
RESUMED_DEADLINE_S: Final = 60.0

#: Resumes one VM's operation.
Resume = Callable[[Operation, ManagedVM], Awaitable[Operation]]
log = structlog.get_logger()


class Resuming:
    """Finds in the intents what is unfinished.

    :param kinds: how operations are resumed that are neither creations nor changes of sizes, by kind.
    """

    def __init__(
        self, host: Host, operations: Operations, creations: CreationCommands, kinds: dict[str, Resume]
    ) -> None:
        self._host = host
        self._operations = operations
        self._creations = creations
        self._kinds = kinds

    async def take_back(self, vm: ManagedVM) -> None:
        """Go on with a VM whose domain libvirt did not name for a while."""
        if (cause := vm.intent.cause) is None or not self._operations.has(cause.request_id):
            self.resume([vm])
            return
        undone = self._host.journal.has_failed(cause.kind, cause.request_id) or self._is_put_back(vm)
        async with vm.lock:
            vm.start()
            if (intent := _as_answered(vm.intent, undone, vm.running)) == vm.intent:
                return
            vm.record.intent = intent
            # What cannot be written now, the reconciler writes later.
            with contextlib.suppress(HostAgentError):
                await vm.record.persist()

    def resume(self, vms: Iterable[ManagedVM]) -> None:
        """Begin every operation of an intent again; one that has ended is answered as it ended.

        Whatever comes of it, and however a VM that is off is started again, its guest is heard.
        """
        unfinished: dict[str, list[ManagedVM]] = {}
        for vm in vms:
            if vm.intent.phase is not Phase.ARRIVING:  # it runs on another host
                vm.start()
            if vm.intent.cause is not None:
                unfinished.setdefault(vm.intent.cause.request_id, []).append(vm)
        for request_id, members in unfinished.items():
            cause = members[0].intent.cause
            assert cause is not None
            kind: Any = cause.kind
            if any(vm.intent.phase not in (Phase.SETTLED, Phase.STOPPED) for vm in members):
                log.info("resuming", request_id=request_id, vms=[vm.name for vm in members])
            self._operations.begin(
                request_id,
                kind,
                cause.body,
                self._resuming(members),
                vm=members[0].name if kind not in ("reclaim", "reinflate", "mode") else None,
                started_at=cause.started_at,
            )

    def _resuming(self, members: list[ManagedVM]) -> Run:
        async def run(operation: Operation) -> Operation:
            if self._is_put_back(members[0]):
                return await self._leave(operation, members[0])
            if (resume := self._kinds.get(operation.kind)) is not None:
                return await resume(operation, members[0])
            return await self._resume(operation, members)

        return run

    def _is_put_back(self, vm: ManagedVM) -> bool:
        journal, off = self._host.journal, not (vm.running or vm.paused)
        # The stop of one that is off takes nothing from it, and finds what was saved.
        if off and vm.intent.phase is Phase.STOPPING:
            return False
        return put_back(vm.intent, journal.deleted, journal.carried_out)

    async def _leave(self, operation: Operation, vm: ManagedVM) -> Operation:
        """Look after a VM that was put back as it was before it was stopped or removed, and do neither once more."""
        host, what = self._host, "stopped" if operation.kind == "stop" else "removed"
        async with vm.lock:
            vm.record.intent = _kept(vm.intent)
            # What cannot be written now, the reconciler writes later.
            with contextlib.suppress(HypervisorError):
                await vm.record.persist()
        vm.request_check()
        if vm.running and not host.journal.last_cores(vm.name):
            await host.tell_growth(vm, vm.allocation().current, "it was put back")
        sentence = f"{vm.name} was {what} by this request before, and was put back since as it was then: it is kept"
        host.note(vm.name, DecisionKind.ALARM, sentence, {"request_id": operation.request_id})
        return done(operation, sentence)

    async def _resume(self, operation: Operation, members: list[ManagedVM]) -> Operation:
        phases = {vm.intent.phase for vm in members}
        if Phase.CREATING in phases or operation.kind == "create":
            (vm,) = members
            return await self._resume_creation(operation, vm)
        if operation.kind == "delete":
            (vm,) = members
            return await self._creations.resume_removal(operation, vm)
        if not self._host.modes.does(HostEvent.ROOM if operation.kind == "mode" else HostEvent.UNFINISHED):
            return concluded(operation, [vm.summary() for vm in members])
        if self._host.has_failed(operation):
            # Answered as failed by an earlier agent: the reconciler gives back what it took.
            for vm in members:
                vm.record.intent = vm.intent.changed(given_up=vm.intent.given_up or vm.intent.phase in RESIZING)
            sentence = "it had failed before this agent started; what it took is given back"
            return failed(operation, sentence, *(vm.summary() for vm in members))
        need = None
        if operation.kind == "reclaim" and (cause := members[0].intent.cause) is not None:
            need = ReclaimCommand.model_validate(cause.body).need.vector()
        going = (self._go_on(operation.request_id, vm) for vm in members)
        outcomes = await asyncio.gather(*going, return_exceptions=True)
        for outcome in outcomes:
            if isinstance(outcome, BaseException):
                raise outcome  # a defect; all have ended
        return concluded(operation, [outcome for outcome in outcomes if isinstance(outcome, VMOutcome)], need)

    async def _go_on(self, request_id: str, vm: ManagedVM) -> VMOutcome:
        """Bring one VM of a resumed operation to its target, however long the guests of the others boot."""
        found = vm.summary()
        if vm.intent.phase not in RESIZING:
            return found
        # Not under its lock: meanwhile it may need memory, be stopped or be given another size.
        await vm.wait_for_hello(HELLO_S)
        async with vm.lock:
            cause = vm.intent.cause
            if not self._host.holds(vm) or cause is None or cause.request_id != request_id:
                why = "another operation has taken it over" if self._host.holds(vm) else "it was removed"
                return found.model_copy(update={"sentence": f"was not gone on with: {why} meanwhile", "errors": (why,)})
            if vm.intent.phase in RESIZING:
                await self._host.resize([vm], RESUMED_DEADLINE_S)
            return vm.summary()

    async def _resume_creation(self, operation: Operation, vm: ManagedVM) -> Operation:
        if vm.intent.phase in (Phase.SETTLED, Phase.STOPPED, Phase.ADMITTING):
            # Created long ago: one that is off keeps its disk.
            return done(operation, f"{vm.name} was started")
        if self._host.has_failed(operation):
            await self._host.clear_away(vm)
            raise HypervisorError(f"{vm.name} could not be started, as was answered before this agent started")
        # Where it is not known to be new it has worked, or was put back as it was while it was made: no empty disk.
        ran, wait_s = not await self._host.hypervisor.is_new(vm.domain), ASK_AGAIN_S
        while (state := await state_of(self._host, vm)) in ("running", "paused") and self._host.holds(vm):
            ran = ran or state == "running"
            try:
                # It is not known who let it run, nor whether it was held to its size first.
                suspend = state == "running"
                return await self._creations.bring_up(operation, vm, fresh=False, suspend=suspend, keep=ran)
            except HostAgentError as error:
                if not ran:
                    raise
                # It has worked: no error is a reason to end it.
                log.warning("a VM that runs is not held to its size yet", vm=vm.name, again_in_s=wait_s, why=str(error))
                await asyncio.sleep(wait_s)
                wait_s = min(2 * wait_s, TRY_AGAIN_S)
        if not self._host.holds(vm):
            raise HypervisorError(f"{vm.name} was removed meanwhile")
        if ran:
            async with vm.lock:
                vm.record.intent = vm.intent.changed(phase=Phase.STOPPED)
                # What cannot be written now, the reconciler writes later.
                with contextlib.suppress(HypervisorError):
                    await vm.record.persist()
            vm.request_check()
            return done(operation, f"{vm.name} was started, and is off by now")
        await self._host.clear_away(vm)
        refusal = HypervisorError(f"{vm.name} had not been started when the agent ended; nothing is left of it")
        await self._creations.undone(operation, vm, refusal)
        raise refusal


def _kept(intent: Intent) -> Intent:
    """The intent of a VM that was put back as it was before its stop or deletion came to its end."""
    assert intent.cause is not None
    if intent.cause.kind == "delete":
        # A repetition of the request is known by the journal.
        return (not_deleted(intent) if intent.phase is Phase.DELETING else intent).changed(cause=None)
    # Its guest's memory may be of when that was told that it goes.
    told = intent.cause.request_id if intent.cause.body.get("reason", "stop") != "stop" else intent.told
    return intent.changed(phase=Phase.SETTLED, target=intent.committed, told=told)


def _as_answered(intent: Intent, failed: bool, runs: bool) -> Intent:
    """The intent of a VM whose operation has ended: what that left unfinished is not carried out any more.

    :param failed: whether it was answered as failed before it had begun, or the VM was put back after its end.
    :param runs: whether the VM does, so that its start may have been done and not be written down yet.
    """
    kind, committed = intent.cause.kind if intent.cause is not None else "", intent.committed
    if intent.was is not None:
        phase = Phase.SETTLED if intent.phase in RESIZING else intent.phase
        spec = fallen_short(intent.was, committed.vector())
        return intent.changed(spec=spec, was=None, phase=phase, target=committed)
    if intent.phase is Phase.DELETING and failed:
        return not_deleted(intent)
    if intent.phase is Phase.CREATING:
        return intent.changed(phase=Phase.ADMITTING if runs else Phase.STOPPED)
    if intent.phase is Phase.STARTING:
        # The reconciler holds it to its size, or turns it off.
        return intent.changed(phase=Phase.ADMITTING if runs else Phase.STOPPING)
    if intent.phase is Phase.LEAVING or (intent.phase is Phase.STOPPING and kind != "start"):
        # What it was to come up with, had it been saved, is no target any more.
        return intent.changed(phase=Phase.SETTLED, target=committed)
    return intent.changed(given_up=intent.given_up or (intent.phase in RESIZING and kind in ANSWERED))


async def state_of(host: Host, vm: ManagedVM) -> str:
    """The domain's state; "stopped" also where there is none. Asks until the hypervisor says."""
    while True:
        try:
            return (await host.domain_states()).get(vm.domain, "stopped")
        except HypervisorError as error:
            log.warning("it is not known yet whether the VM was started", vm=vm.name, why=str(error))
            await asyncio.sleep(ASK_AGAIN_S)
