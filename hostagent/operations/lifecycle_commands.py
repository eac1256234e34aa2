"""Commands of a VM's lifecycle, as operations: stop, start, resize (docs/reference/lifecycle.md).

Each writes its intent before its first action, and is resumed after a kill by what the intent says.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from functools import partial
from typing import Final

from ebbtide.deflation.allocations import Priority
from ebbtide.deflation.cascade.instructions import Mode
from ebbtide.deflation.modes import HostEvent
from ebbtide.deflation.resources import ZERO, ResourceVector
from ebbtide.messages.commands import SpecCommand, StartCommand, StopCommand, WithdrawCommand
from ebbtide.messages.common import Vector
from ebbtide.messages.explanations import DecisionKind
from ebbtide.messages.operations import Operation
from ebbtide.messages.vms import RESERVED_TEMPLATES, VMSpec
from hostagent.clock import now
from hostagent.control.start_admission import PAUSED_BY_US, admit_later, charge_memory, turn_off_again
from hostagent.errors import (
    DomainGone,
    HostAgentError,
    HypervisorError,
    NoticeWithdrawn,
    RequestRefused,
    busy,
    no_room,
    wrong_state,
)
from hostagent.operations.ending import Ending, stays
from hostagent.operations.operations import Run, done, failed, partly_done
from hostagent.operations.requests import Requests, answer, cause_of, check_present, left
from hostagent.operations.respec import (
    BootMib,
    Respec,
    fallen_short,
    off,
    resized_while_off,
    respec,
    starting_at,
)
from hostagent.operations.resuming import HELLO_S, Resume, state_of
from hostagent.state.history import sizes
from hostagent.state.intents import Cause, Intent, Phase, Request
from hostagent.vm.host import RESIZING, Host, persist_all
from hostagent.vm.managed_vm import MOVING, ManagedVM

#: A size that is this near to the wanted one counts as reached.
NEAR: Final = ResourceVector(cpu_cores=0.02, memory_mib=4.0, disk_mib_s=1.0, network_mib_s=1.0)
#: So long a start waits for who looks at its VM, seconds.
FOUND_OFF_S: Final = 2.0
_OFF: Final = (Phase.STOPPED, Phase.SETTLED)
_GOING: Final = (Phase.CREATING, Phase.STOPPING, Phase.DELETING)


class LifecycleCommands:
    """Takes commands about VMs that exist.

    :param boot_mib: how much of a VM's memory is boot memory, given nominal and wished-for boot memory.
    """

    def __init__(self, host: Host, requests: Requests, boot_mib: BootMib) -> None:
        self._host = host
        self._requests = requests
        self._boot_mib = boot_mib
        self._ending = Ending(host)

    def resumed(self) -> dict[str, Resume]:
        """How each kind is resumed after a kill."""
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

        async def accept(request: Request) -> Run:
            vm = self._host.vm(name)
            if vm.intent.phase in (Phase.CREATING, Phase.DELETING):
                doing = "made" if vm.intent.phase is Phase.CREATING else "removed"
                raise busy(f"{name} is being {doing}")
            if vm.intent.phase in MOVING:
                raise busy(f"{name} is moving to another host; try again when it has", "name")
            vm.resizer.mark_terminating("it is being stopped")
            return partial(self._stop, vm=vm, request=request, began=now())

        return await self._requests.take("stop", command, accept, name=name)

    async def _stop(
        self, operation: Operation, vm: ManagedVM, request: Request | None = None, began: float | None = None
    ) -> Operation:
        """:param request: None: an earlier agent had begun, and it stands in the intent.
        :param began: when it was taken, by the loop's clock; None: by an earlier agent.
        """
        host = self._host
        vm.resizer.mark_terminating("it is being stopped")
        try:
            async with vm.lock:
                check_present(host, vm)
                if vm.intent.phase is Phase.STOPPED:
                    await self._define(vm)
                    return done(operation, f"{vm.name} is stopped")
                size = vm.allocation().current
                if request is not None:
                    await self._begin_stop(vm, request.cause(size))
                cause, how = cause_of(vm), ""
                try:
                    try:
                        how = await self._power_off(vm, cause, began)
                    except NoticeWithdrawn as error:
                        return await stays(operation, host, vm, error)
                    except DomainGone:
                        how = "it had ended by then"  # without a definition: what follows says so
                    vm.running = False
                    await host.record_change(vm.name, size, ZERO, operation.request_id)
                    intent = off(vm.intent, self._boot_mib)
                    if cause.body.get("suspend") and (saved := await host.hypervisor.saved_mib(vm.domain)) is not None:
                        told = operation.request_id
                        intent = vm.intent.changed(saved_mib=saved, committed=vm.intent.target, told=told)
                    if not intent.redefine:
                        await host.hypervisor.prepare_start(vm.domain, intent.committed.vector())
                    fields = {
                        "spec",
                        "committed",
                        "target",
                        "boot_mib",
                        "at_next_start",
                        "redefine",
                        "saved_mib",
                        "told",
                    }
                    await vm.record.store(phase=Phase.STOPPED, **{field: getattr(intent, field) for field in fields})
                except HostAgentError as error:
                    if not (how and isinstance(error, DomainGone)):
                        # No check looks after one that is being stopped; it stays charged.
                        await self._not_stopped(vm, operation.request_id)
                        raise
                    # Undefined while it ran, it has gone with its end.
                    await host.drop(vm)
                    kept = "" if vm.intent.adopted else ", and its disk is kept until it is removed by hand"
                    how += f"; its domain is gone from here{kept}: {error}"
                else:
                    await self._define(vm)
                await host.note_carried_out(operation.request_id)
        finally:
            vm.resizer.terminating = ""
        reason = cause.body.get("reason", "stop")
        what = f"preempted {vm.name}, reason {reason}" if reason != "stop" else f"{vm.name} is stopped"
        sentence = f"{what} ({how}): {size} came free"
        host.note(vm.name, DecisionKind.REMOVE, sentence, {"size": sizes(size)})
        host.changed.set()
        return done(operation, sentence)

    async def _begin_stop(self, vm: ManagedVM, cause: Cause) -> None:
        """Store what is going to happen.

        :raises HypervisorError: it could not be stored; all is as it was.
        """
        try:
            await vm.record.store(phase=Phase.STOPPING, cause=cause)
        except HypervisorError:
            await self._host.mark_failed(cause.request_id)
            raise

    async def _not_stopped(self, vm: ManagedVM, request_id: str) -> None:
        """Have a VM looked after again whose stop is answered as failed. Under its lock."""
        await self._host.mark_failed(request_id)
        # Its guest may have been told that it goes.
        told = request_id if cause_of(vm).body.get("reason", "stop") != "stop" else vm.intent.told
        await self._decide(vm, vm.intent.changed(phase=Phase.SETTLED, target=vm.intent.committed, told=told))
        vm.request_check()

    @staticmethod
    async def _decide(vm: ManagedVM, intent: Intent) -> None:
        """Decide what a VM is; what cannot be written now, the reconciler writes later."""
        vm.record.intent = intent
        with contextlib.suppress(HostAgentError):
            await vm.record.persist()

    async def _power_off(self, vm: ManagedVM, cause: Cause, began: float | None) -> str:
        """Have a guest power off; where it is preempted, it is told first.

        :param began: see `Ending.end`.
        :returns: how it ended, in words.
        """
        if cause.body.get("reason", "stop") == "stop":
            return await self._host.hypervisor.shut_down(vm.domain, float(cause.body["limit_s"]))
        return await self._ending.end(vm, cause, began)

    async def withdraw(self, name: str, command: WithdrawCommand) -> Operation:
        """Call off the preemption of a VM whose notice runs: it stays, and its guest is told.

        :raises RequestRefused: no such VM, or no such notice of it runs any more.
        :raises JournalError: it could not be stored; the notice runs on.
        """

        async def accept(request: Request) -> Run:
            vm = self._host.vm(name)
            async with vm.notice.calling_off:
                self._requests.leadership.check(command)
                if vm.notice.request_id != command.preemption:
                    raise wrong_state(f"no notice of {command.preemption} runs for {name}", "preemption")
                await asyncio.to_thread(self._host.journal.add_withdrawn, command.preemption)
                vm.notice.withdrawn = command.reason or "it is not needed any more"
            return answer(f"the preemption of {name} is called off")

        return await self._requests.take("withdraw", command, accept, at_once=True, name=name)

    async def _define(self, vm: ManagedVM) -> None:
        """Write the definition of a VM that is off, so that any start brings it up as what it is sold as."""
        if not vm.intent.redefine or vm.intent.saved_mib is not None:
            return
        try:
            await self._host.hypervisor.redefine(vm.domain, vm.intent)
            await vm.record.store(redefine=False)
        except HypervisorError as error:
            self._host.note(vm.name, DecisionKind.RESIZE, f"it will be defined again at its next start: {error}", {})

    async def _resume_stop(self, operation: Operation, vm: ManagedVM) -> Operation:
        if self._host.has_failed(operation):
            async with vm.lock:
                if vm.intent.phase is Phase.STOPPING:
                    await self._not_stopped(vm, operation.request_id)
            if operation.request_id in self._host.journal.withdrawn:
                return partly_done(operation, f"{vm.name} runs on: its preemption had ended before this agent started")
            return failed(operation, f"{vm.name} could not be stopped, as was answered before this agent started")
        cause = cause_of(vm)
        if vm.intent.phase is Phase.SETTLED and (vm.intent.started_at or 0.0) < cause.started_at:
            # It has not been off since.
            if cause.body.get("reason", "stop") == "stop":
                return failed(operation, f"{vm.name} was not stopped, and runs on")
            return partly_done(operation, f"{vm.name} runs on: its preemption had ended before this agent started")
        if vm.intent.phase not in (Phase.STOPPING, Phase.STOPPED):
            return self._as_found(operation, vm)
        return await self._stop(operation, vm)

    # --- start ---------------------------------------------------------------------------------------------------

    async def start(self, name: str, command: StartCommand) -> Operation:
        """Start a VM that is off, at its committed size or another one; one that runs already stays as it is.

        :raises RequestRefused: no such VM, no room for it, it is on its way down, or the request is not acceptable.
        """

        async def accept(request: Request) -> Run:
            await self._host.sample()
            vm = self._host.vm(name)
            if vm.lock.locked() and not vm.running and vm.intent.phase in _OFF:
                # It has just gone off, and whoever found that is about to be done.
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(FOUND_OFF_S), vm.lock:
                        pass
                vm = self._host.vm(name)
            self._requests.leadership.check(command)
            self._host.modes.check(HostEvent.CREATE)
            if vm.resizer.terminating or vm.intent.phase in _GOING:
                # One that is to go down runs for a while yet: "it runs" would be no longer true a moment later.
                why = vm.resizer.terminating or f"it is {vm.status().state}"
                raise busy(f"{name} cannot be started now: {why}; try again when that has ended", "name")
            if vm.running:
                return answer(f"{name} runs already")
            if vm.lock.locked() and not vm.paused:
                raise busy(
                    f"{name} cannot be started now: another operation on it is under way; try again when it has ended",
                    "name",
                )
            if vm.paused and vm.intent.phase in PAUSED_BY_US:
                why = "another program has started it, and it is paused until it can be held to its size"
                raise busy(f"{name} cannot be started now: {why}", "name")
            if vm.intent.phase not in _OFF or vm.paused:
                raise wrong_state(f"{name} cannot be started now: it is {vm.status().state}", "name")
            before = vm.intent
            intent = off(before, self._boot_mib) if before.saved_mib is None else before
            if command.start_size is not None:
                intent = starting_at(intent, command.start_size.vector())
            row = intent.spec.allocation(intent.committed.vector(), vm.host.overhead_mib)
            if not self._host.fits(row, vm.allocation().charge):
                free = self._host.free()
                raise no_room(f"{name} ({row.charge}) needs more than what is free ({free})", "name")
            # Charged from this moment on, so that no other operation counts on the room.
            vm.record.intent = intent.changed(phase=Phase.STARTING, cause=request.cause(ZERO), held=None)
            return partial(self._store_and_start, vm=vm, before=before)

        return await self._requests.take("start", command, accept, name=name)

    async def _store_and_start(self, operation: Operation, vm: ManagedVM, before: Intent) -> Operation:
        async with vm.lock:
            try:
                # Another program may have started it a moment ago: to start it again fails, and that cuts its power.
                state = (await self._host.domain_states()).get(vm.domain, "stopped")
                await vm.record.persist()
            except HypervisorError:
                vm.record.intent = before
                # A write that comes late must not have a later agent start it.
                await self._host.mark_failed(operation.request_id)
                raise
            return await self._start(operation, vm, state)

    async def _start(self, operation: Operation, vm: ManagedVM, state: str) -> Operation:
        """Under the VM's lock; its intent says that it is being started.

        :param state: its domain's. One that is on may have worked: no error is a reason to end it.
        """
        host, keep = self._host, state != "stopped"
        try:
            if state == "stopped":
                await host.hypervisor.start(vm.domain, vm.intent)
                if vm.intent.saved_mib is None:
                    vm.record.intent = vm.intent.changed(redefine=False)
            if state == "running":
                # By an earlier agent, or past it: it is not known how. Written, as that one's word may come late.
                await vm.record.persist()
                await host.hypervisor.suspend(vm.domain)
            # Held to its committed size before its vCPUs run.
            await vm.enforce_at_start()
            # Its definition may be another's by now.
            fits, found = await charge_memory(host, vm)
            if not fits:
                more, free, keep = found["more_mib"], found["free_mib"], False
                raise HypervisorError(f"{vm.name} came up with {more:g} MiB more than its size; {free:g} are free")
            await host.hypervisor.resume(vm.domain)
        except Exception:
            # Nor does a later agent carry it out, or say that it came about.
            await host.mark_failed(operation.request_id)
            await (admit_later(host, vm) if keep else self._off_again(vm))
            raise
        # It runs, and what cannot be written now is no reason to end it.
        size = vm.allocation().current
        await host.tell_growth(vm, size, operation.request_id)
        # One that goes on where it was has worked since it was started.
        at = vm.intent.started_at if vm.intent.saved_mib is not None else time.time()
        await self._decide(vm, vm.intent.changed(phase=Phase.SETTLED, saved_mib=None, started_at=at))
        vm.running = True
        vm.guest_boots()
        vm.start()
        vm.request_check()
        sentence = f"{vm.name} runs with {size}"
        host.note(vm.name, DecisionKind.ADMIT, sentence, {"size": sizes(size), "free": sizes(host.free())})
        host.changed.set()
        return done(operation, sentence)

    async def _off_again(self, vm: ManagedVM) -> None:
        """A VM that could not be started is off, unless it runs; where that fails it stays charged until it is."""
        try:
            await turn_off_again(self._host, vm)
        except DomainGone:
            await self._host.drop(vm)
        except HostAgentError as error:
            # The reconciler turns it off, unless it runs.
            await self._decide(vm, vm.intent.changed(phase=Phase.STOPPING))
            self._host.note(vm.name, DecisionKind.STOPPED, f"it could not be stopped again yet: {error}", {})
            vm.request_check()

    async def _resume_start(self, operation: Operation, vm: ManagedVM) -> Operation:
        async with vm.lock:
            if self._host.has_failed(operation):
                if vm.intent.phase is Phase.STARTING:
                    if await state_of(self._host, vm) == "running":
                        # Let run by another program, it goes on. Written: it is paused next.
                        await admit_later(self._host, vm)
                    else:
                        await self._decide(vm, vm.intent.changed(phase=Phase.STOPPING))
                        vm.request_check()
                return failed(operation, f"{vm.name} could not be started, as was answered before this agent started")
            if vm.intent.phase is not Phase.STARTING:
                return self._as_found(operation, vm)
            return await self._start(operation, vm, await state_of(self._host, vm))

    # --- resize --------------------------------------------------------------------------------------------------

    async def resize(self, name: str, command: SpecCommand) -> Operation:
        """Sell a VM something else: its size follows, what the running domain cannot take waits for its next start.

        :raises RequestRefused: no such VM, no room to grow, or the request is not acceptable.
        """

        async def accept(request: Request) -> Run:
            vm = self._host.vm(name)
            if command.spec.name != name:
                raise RequestRefused(400, f"spec.name: is {command.spec.name}, but the path is of {name}", "spec.name")
            if vm.intent.spec.template not in RESERVED_TEMPLATES:
                await self._host.hypervisor.check(command.spec)
            await self._host.sample()
            self._host.modes.check(HostEvent.SHRINK if vm.running else HostEvent.READING)
            return partial(self._resize, vm=vm, command=command, request=request)

        return await self._requests.take("resize", command, accept, name=name)

    async def _resize(self, operation: Operation, vm: ManagedVM, command: SpecCommand, request: Request) -> Operation:
        until = now() + command.deadline_s
        async with self._host.locked_until(vm, until):
            return await self._resize_locked(operation, vm, command, request, until)

    async def _resize_locked(
        self, operation: Operation, vm: ManagedVM, command: SpecCommand, request: Request | None, until: float
    ) -> Operation:
        """:param request: None: an earlier agent had begun, and the intent is half way."""
        check_present(self._host, vm)
        # A template or XML cannot be changed by a resize.
        new = command.spec.model_copy(update={"template": vm.intent.spec.template, "xml": None})
        if vm.intent.phase in _OFF and not vm.running and not vm.paused:
            return await self._resize_off(operation, vm, new, request)
        old, current = vm.intent.spec, vm.allocation().current
        if request is None:
            old, current = vm.intent.was or old, cause_of(vm).before.vector()
            if not self._host.modes.does(HostEvent.UNFINISHED):
                return await left_as_it_is(self._host, operation, vm, old)
        self._host.check_resizable(vm)
        most = (await self._host.hypervisor.sizes.most(vm.domain)).larger(current)
        way = respec(old, new, current, most)
        if way.at_next_start is not None and vm.intent.adopted is not None:
            raise no_room(f"the running domain has no room for {way.why}, and is not ours to define")
        if request is not None:
            await self._begin_resize(vm, way, request.cause(current))
        return await self._settle_spec(operation, vm, way, old, left(until))

    async def _begin_resize(self, vm: ManagedVM, way: Respec, cause: Cause) -> None:
        """Store what is going to happen.

        :raises RequestRefused: there is no room.
        :raises HypervisorError: it could not be stored; all is as it was.
        """
        await self._host.sample()
        charge = vm.allocation().charge
        row = way.meanwhile.allocation(vm.allocation().current.larger(way.target), vm.host.overhead_mib)
        if not way.target.fits_in(vm.allocation().current) and not self._host.fits(row, charge):
            raise no_room(f"{way.target} needs more than what is free ({self._host.free()})", "spec.nominal")
        freed = {} if way.target.fits_in(vm.allocation().current) else {"held": None}
        vm.record.plan(way.target, cause, spec=way.meanwhile, was=vm.intent.spec, **freed)
        try:
            await persist_all([vm])
        except HypervisorError:
            await self._host.mark_failed(cause.request_id)
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
            await stay_as_it_was(host, vm, old, operation.request_id)
            sentence = f"{vm.name} stays what it was and has {reached}: {outcome.sentence}"
            return partly_done(operation, sentence, outcome)
        size = reached.smaller(now.upper)
        redefine = vm.intent.redefine or (vm.intent.adopted is None and _defined(old) != _defined(way.now))
        try:
            await vm.record.store(
                spec=way.now,
                was=None,
                at_next_start=way.at_next_start,
                committed=Vector.of(size),
                target=Vector.of(size),
                redefine=redefine,
            )
        except HypervisorError:
            await host.mark_failed(operation.request_id)
            with contextlib.suppress(HypervisorError):
                await stay_as_it_was(host, vm, old, operation.request_id)
            raise
        vm.request_check()
        host.changed.set()
        sentence = f"{vm.name} is sold {way.now.nominal.vector()} and has {size}"
        if way.at_next_start is not None:
            sentence += f"; the running domain has no room for {way.why}: that takes effect at its next start"
        host.note(vm.name, DecisionKind.RESIZE, sentence, {"size": sizes(size)})
        return done(operation, sentence, outcome)

    async def _resize_off(self, operation: Operation, vm: ManagedVM, new: VMSpec, request: Request | None) -> Operation:
        if vm.intent.adopted is not None:
            raise wrong_state(f"{vm.name} is adopted and off: its definition is not ours", "name")
        if vm.intent.saved_mib is not None and _sizes_of(vm.intent.spec) != _sizes_of(new):
            raise wrong_state(f"{vm.name} is suspended, its memory saved as it is: resize it when it runs")
        before = vm.allocation()
        intent = self._sold_while_off(vm.intent, new)
        if vm.intent.phase is not Phase.STOPPED:
            row = intent.spec.allocation(intent.committed.vector(), before.overhead_mib)
            if not self._host.fits(row, before.charge):
                raise no_room(f"{row.charge} needs more than what is free ({self._host.free()})")
        fields = ("spec", "committed", "target", "boot_mib", "redefine")
        changes = {"at_next_start": None} | {field: getattr(intent, field) for field in fields}
        if request is not None:
            was = vm.intent.was or vm.intent.at_next_start or vm.intent.spec
            try:
                await vm.record.store(cause=request.cause(before.current), was=was, **changes)
            except HypervisorError:
                # Written late all the same, a later agent takes it back.
                await self._host.mark_failed(request.request_id)
                raise
        # Written once, it may have been answered as done: what fails now takes nothing back.
        await self._decide(vm, vm.intent.changed(was=None, **changes))
        await self._define(vm)
        self._host.changed.set()
        size = intent.committed.vector()
        return done(operation, f"{vm.name} is sold {new.nominal.vector()} and comes up with {size}")

    def _sold_while_off(self, intent: Intent, spec: VMSpec) -> Intent:
        if intent.saved_mib is not None:
            return intent.changed(spec=spec)
        return resized_while_off(intent, spec, self._boot_mib)

    async def _resume_resize(self, operation: Operation, vm: ManagedVM) -> Operation:
        if self._host.has_failed(operation):
            async with vm.lock:
                is_off = vm.intent.phase in _OFF and not vm.running and not vm.paused
                if vm.intent.was is not None and is_off and vm.intent.adopted is None:
                    await self._decide(vm, self._sold_while_off(vm.intent, vm.intent.was).changed(was=None))
                    await self._define(vm)
            await give_up_change(self._host, vm, operation.request_id)
            return failed(operation, f"{vm.name} could not be resized, as was answered before this agent started")
        if vm.intent.was is None:
            async with vm.lock:
                if vm.intent.phase is Phase.STOPPED:
                    await self._define(vm)
            return self._as_found(operation, vm)
        cause = cause_of(vm)
        command = SpecCommand.model_validate({key: cause.body[key] for key in ("request_id", "spec", "deadline_s")})
        try:
            # From the start on: half way a fixed VM counts as one that gives.
            async with vm.lock:
                if vm.intent.phase in RESIZING:
                    await vm.wait_for_hello(HELLO_S)
                return await self._resize_locked(operation, vm, command, None, now() + command.deadline_s)
        except HostAgentError:
            await give_up_change(self._host, vm, operation.request_id)
            raise

    def _as_found(self, operation: Operation, vm: ManagedVM) -> Operation:
        return done(operation, f"{vm.name} {vm.summary().sentence}")


async def stay_as_it_was(host: Host, vm: ManagedVM, old: VMSpec, request_id: str) -> None:
    """End a change of what a VM is sold that did not come to its end, under the VM's lock.

    It is decided here first: what cannot be written now, the reconciler writes later.

    :raises HypervisorError: it could not be written yet.
    """
    # Also where it grew, or may have: what it may hold is charged.
    reached = vm.intent.committed
    spec = fallen_short(old, reached.vector())
    phase = Phase.SETTLED if vm.intent.phase in RESIZING else vm.intent.phase
    vm.record.intent = vm.intent.changed(spec=spec, was=None, phase=phase, target=reached)
    vm.request_check()
    try:
        await vm.record.persist()
    except HypervisorError:
        await host.mark_failed(request_id)
        raise


async def left_as_it_is(host: Host, operation: Operation, vm: ManagedVM, old: VMSpec) -> Operation:
    """The end of a change that an earlier agent had begun, on a host that is not to go on with it; under its lock."""
    await stay_as_it_was(host, vm, old, operation.request_id)
    reached = vm.intent.committed.vector()
    return partly_done(operation, f"{vm.name} stays what it was and has {reached}: {host.modes.sentence}")


async def give_up_change(host: Host, vm: ManagedVM, request_id: str) -> None:
    """Give up a change of what a VM is sold that an earlier agent had begun and that is answered as failed."""
    async with vm.lock:
        if vm.intent.was is not None:
            with contextlib.suppress(HypervisorError):
                await stay_as_it_was(host, vm, vm.intent.was, request_id)
    await host.mark_failed(request_id)


def _defined(spec: VMSpec) -> tuple[float, float, Vector | None]:
    """What of a spec stands in a domain's definition."""
    return spec.nominal.cpu_cores, spec.nominal.memory_mib, spec.ceiling


def _sizes_of(spec: VMSpec) -> VMSpec:
    """A spec without what may change while a VM's memory is saved."""
    kept = ("on_preemption", "preemption_notice_s", "steady")
    return spec.model_copy(update={field: VMSpec.model_fields[field].default for field in kept})
