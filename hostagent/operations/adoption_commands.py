"""Commands that adopt domains of other owners and give them back as they were (docs/reference/lifecycle.md)."""

from __future__ import annotations

import asyncio
import contextlib
import math
import time
import uuid
from dataclasses import replace
from functools import partial
from typing import Final

import structlog

from ebbtide.deflation.allocations import Priority, check_sizes
from ebbtide.deflation.bounds import Bound
from ebbtide.deflation.cascade.ordinary import STATS_PERIOD_S, is_fresh
from ebbtide.deflation.floors import HARD_FLOOR
from ebbtide.deflation.modes import HostEvent, HostMode
from ebbtide.deflation.resources import ZERO, ResourceVector
from ebbtide.deflation.use import Use, minimum_cpu_cores, minimum_memory_mib, use_of
from ebbtide.messages.adoptions import MEASURED_S, Adoptable
from ebbtide.messages.commands import AdoptCommand, ReleaseCommand
from ebbtide.messages.common import PartialVector, Vector
from ebbtide.messages.explanations import DecisionKind
from ebbtide.messages.operations import Operation, OperationState, VMOutcome
from ebbtide.messages.vms import ADOPTED_TEMPLATE, VMSpec
from hostagent.clock import now
from hostagent.control.start_admission import PAUSED_BY_US
from hostagent.errors import (
    DomainGone,
    HostAgentError,
    HypervisorError,
    JournalError,
    RequestRefused,
    already_exists,
    no_room,
    wrong_state,
)
from hostagent.libvirt.hypervisor import Candidate
from hostagent.operations.lifecycle_commands import NEAR, give_up_change, left_as_it_is, stay_as_it_was
from hostagent.operations.operations import Run, done, failed, partly_done
from hostagent.operations.requests import Requests, answer, cause_of, check_present
from hostagent.operations.respec import returning
from hostagent.operations.resuming import HELLO_S, Resume
from hostagent.state.history import sizes
from hostagent.state.intents import Cause, Intent, Phase, Request
from hostagent.vm.host import RESIZING, Host, persist_all
from hostagent.vm.managed_vm import ManagedVM

NO_BALLOON: Final = "it has no balloon"
#: For giving a domain back that was released and has come back, and how often that is tried, seconds.
AGAIN_DEADLINE_S: Final = 60.0
AGAIN_S: Final = 60.0

log = structlog.get_logger()


class AdoptionCommands:
    """Takes commands about domains that were not made here."""

    def __init__(self, host: Host, requests: Requests, window_s: float = MEASURED_S) -> None:
        self._host = host
        #: For how long a domain is measured that may be adopted.
        self.window_s = window_s
        self._requests = requests
        #: How often the owner of a domain asks for its statistics, once for each measurement of it under way.
        self._periods_s: dict[str, list[int]] = {}

    def resumed(self) -> dict[str, Resume]:
        """How each kind is resumed after a kill."""
        return {"adopt": self._resume_adopt, "release": self._resume_release}

    async def adoptable(self, domain: str) -> Adoptable:
        """What a domain could be adopted as, by what it uses while it is looked at. Its guest notices nothing.

        :raises RequestRefused: there is no such domain.
        """
        found = await self._found(domain)
        why_not = found.why_not
        if any(vm.domain == domain for vm in self._host.vms.values()):
            why_not = f"{domain} is adopted already"
        if why_not:
            return Adoptable(domain=domain, why_not=why_not, sentence=f"{domain} cannot be adopted: {why_not}")
        nominal = _size_of(found)
        use = await self._measured(domain, found)
        memory_mib, cpu_cores = minimum_memory_mib(use, nominal), minimum_cpu_cores(use, nominal)
        sentence = f"measured for {self.window_s:g} s"
        if memory_mib is None:
            why = "its balloon driver has said nothing" if found.before.stats_period_s is not None else NO_BALLOON
            sentence = f"it is not known what memory {domain} uses: {why}"
        return Adoptable(
            domain=domain,
            size=Vector.of(nominal),
            used=PartialVector(cpu_cores=_rounded(use.cpu_cores), memory_mib=_rounded(use.memory_mib)),
            minimum=PartialVector(cpu_cores=cpu_cores, memory_mib=memory_mib),
            window_s=self.window_s,
            sentence=sentence,
        )

    async def _found(self, domain: str) -> Candidate:
        """What a domain is; while it is measured, with the period of its statistics that it had before."""
        periods_s = list(self._periods_s.get(domain, ()))
        try:
            found = await self._host.hypervisor.adoption.examine(domain)
        except DomainGone as error:
            raise RequestRefused(404, f"there is no domain {domain} on this host", "domain") from error
        # A measurement may have begun or ended meanwhile.
        periods_s += self._periods_s.get(domain, ())
        if not periods_s:
            return found
        return replace(found, before=found.before.model_copy(update={"stats_period_s": periods_s[0]}))

    async def _measured(self, domain: str, found: Candidate) -> Use:
        """What a domain uses over a few seconds; its statistics are asked for as often before and after."""
        sizes, period_s = self._host.hypervisor.sizes, found.before.stats_period_s
        period_s = None if period_s == STATS_PERIOD_S else period_s
        first = last = await sizes.read(domain)
        said_before = None if first.statement is None else first.statement.said_at
        began_s, began = await sizes.cpu_seconds(domain), now()
        usable_mib: list[float] = []
        if period_s is not None:
            self._periods_s.setdefault(domain, []).append(period_s)
        try:
            if period_s is not None:
                await sizes.ask_statistics(domain, STATS_PERIOD_S)
            until = now() + self.window_s
            while now() < until:
                await asyncio.sleep(min(STATS_PERIOD_S, self.window_s))
                last = await sizes.read(domain)
                said = last.statement
                if said is None or not is_fresh(said, last.read_at):
                    continue
                # Its time is in whole seconds, and the clock may be set meanwhile.
                if said.said_at != said_before or said.said_at >= int(first.read_at):
                    usable_mib.append(said.usable_mib)
        finally:
            if period_s is not None:
                await self._put_back(domain, period_s)
        cpu_s, window_s = await sizes.cpu_seconds(domain) - began_s, now() - began
        size_mib = last.balloon_mib + last.plugged_mib
        return use_of(size_mib, min(usable_mib, default=None), cpu_s, window_s)

    async def _put_back(self, domain: str, period_s: int) -> None:
        """End one measurement's asking for statistics; who adopts it meanwhile, or still measures it, needs them."""
        periods_s = self._periods_s[domain]
        try:
            if len(periods_s) == 1 and all(vm.domain != domain for vm in self._host.vms.values()):
                with contextlib.suppress(HypervisorError):
                    await self._host.hypervisor.sizes.ask_statistics(domain, period_s)
        finally:
            periods_s.pop()
            if not periods_s:
                del self._periods_s[domain]

    async def adopt(self, command: AdoptCommand) -> Operation:
        """Look after a running domain of another owner at the size that it has.

        :raises RequestRefused: it cannot be looked after, the name is taken, or the slice has no room for it.
        """

        async def accept(request: Request) -> Run:
            found = await self._found(command.domain)
            self._requests.leadership.check(command)
            self._host.modes.check(HostEvent.CREATE)
            there = self._host.vms.get(command.name)
            if there is not None and there.domain == command.domain:
                return answer(f"{command.domain} is adopted already")
            self._check_adoptable(command, found)
            intent = self._intent_of(command, found, request)
            vm = self._host.adopt(command.domain, intent, running=True, emulated=found.emulated)
            return partial(self._adopt, vm=vm, intent=intent)

        return await self._requests.take("adopt", command, accept, vm=command.name)

    def _check_adoptable(self, command: AdoptCommand, found: Candidate) -> None:
        """:raises RequestRefused: the domain cannot be looked after under this name."""
        if command.name in self._host.vms:
            raise already_exists(f"there is a VM {command.name} on this host already", "name")
        if any(vm.domain == command.domain for vm in self._host.vms.values()):
            # Its metadata may not be written yet, so that the examination finds nothing.
            raise already_exists(f"{command.domain} is adopted already", "domain")
        if found.why_not:
            raise wrong_state(f"{command.domain} cannot be adopted: {found.why_not}", "domain")
        if command.priority is Priority.HARVEST:
            raise RequestRefused(400, "priority: a domain is adopted as fixed or deflatable", "priority")

    def _intent_of(self, command: AdoptCommand, found: Candidate, request: Request) -> Intent:
        """The intent of a domain that is to be adopted.

        :raises InvalidField: the minimum does not fit its size.
        :raises RequestRefused: the slice has no room for it.
        """
        nominal = _size_of(found)
        check_sizes(command.priority, nominal, command.minimum.vector(), None)
        spec = VMSpec(
            name=command.name,
            priority=command.priority,
            nominal=Vector.of(nominal),
            minimum=command.minimum,
            template=ADOPTED_TEMPLATE,
        )
        charge = spec.allocation(nominal, self._host.slice.overhead_of(found.emulated)).charge
        charges = sum((vm.allocation().charge for vm in self._host.vms.values()), ZERO)
        # Its memory is in use already, so only the slice has to have room.
        left = self._host.slice.capacity.less(charges)
        if not charge.fits_in(left):
            raise no_room(f"{charge} does not fit into what the slice has left ({left})", "domain")
        return Intent(
            owner=self._host.slice.host_id,
            spec=spec,
            boot_mib=found.boot_mib,
            generation=1,
            phase=Phase.SETTLED,
            target=spec.nominal,
            committed=spec.nominal,
            cause=request.cause(nominal),
            adopted=found.before.model_copy(update={"size": spec.nominal}),
        )

    async def _adopt(self, operation: Operation, vm: ManagedVM, intent: Intent) -> Operation:
        nominal = intent.spec.nominal.vector()
        async with vm.lock:
            try:
                await self._host.hypervisor.adoption.take_over(vm.domain, intent)
            except BaseException as error:
                if isinstance(error, HypervisorError):
                    # It may still be written: then the reconciler gives the domain back.
                    await self._host.mark_failed(operation.request_id)
                await self._host.drop(vm)
                raise
            await self._host.tell_growth(vm, nominal, operation.request_id)
            with contextlib.suppress(HypervisorError):
                # Known from the first command on: a guest without one is not waited for.
                vm.link.has_channel = await self._host.hypervisor.guest_channel(vm.domain) is not None
        vm.start()
        sentence = f"{vm.domain} is looked after as {vm.name} with {nominal}"
        self._host.note(vm.name, DecisionKind.ADMIT, sentence, {"size": sizes(nominal)})
        self._host.changed.set()
        return done(operation, sentence)

    async def _resume_adopt(self, operation: Operation, vm: ManagedVM) -> Operation:
        if self._host.has_failed(operation):
            # The reconciler gives it back.
            await self._host.drop(vm)
            return failed(operation, f"{vm.domain} could not be adopted, as was answered before this agent started")
        if vm.intent.phase is not Phase.STOPPED and not self._host.journal.last_cores(vm.name):
            # Its own change was lost to a kill; those that followed one that was not stand.
            await self._host.tell_growth(vm, vm.allocation().current, operation.request_id)
        return done(operation, f"{vm.domain} is looked after as {vm.name}")

    async def release(self, name: str, command: ReleaseCommand) -> Operation:
        """Give an adopted domain back: everything that was taken, its shares and its quota, and our metadata out of it.

        :raises RequestRefused: no such VM, or it was not adopted.
        """

        async def accept(request: Request) -> Run:
            vm = self._host.vm(name)
            if vm.intent.adopted is None:
                raise wrong_state(f"{name} was made here: it can be deleted, not released", "name")
            self._host.modes.check(HostEvent.RELEASE)
            await self._check_not_saved(vm)
            await self._host.sample()
            return partial(self._release, vm=vm, deadline_s=command.deadline_s, request=request)

        return await self._requests.take("release", command, accept, name=name)

    async def _check_not_saved(self, vm: ManagedVM) -> None:
        """That no memory of it is saved: what goes on from there has what it had then, our limits and metadata too.

        :raises RequestRefused: some is.
        :raises HypervisorError: that is not known.
        """
        if not vm.running and await self._host.hypervisor.saved_mib(vm.domain) is not None:
            raise wrong_state(
                f"the memory of {vm.name} is saved as it is: start it first, or remove what is saved", "name"
            )

    async def _release(self, operation: Operation, vm: ManagedVM, deadline_s: float, request: Request) -> Operation:
        async with vm.lock:
            return await self._release_locked(operation, vm, deadline_s, request)

    async def _release_locked(
        self, operation: Operation, vm: ManagedVM, deadline_s: float, request: Request | None
    ) -> Operation:
        """:param request: None: an earlier agent had begun, and the intent is half way."""
        host = self._host
        check_present(host, vm)
        before = vm.intent.adopted
        if before is None:
            raise wrong_state(f"{vm.name} was made here: it can be deleted, not released", "name")
        await self._check_not_saved(vm)
        old, current = vm.intent.was or vm.intent.spec, vm.allocation().current
        size = (before.size or old.nominal).vector()
        # A resize may have changed what it is sold; what it gets back is what it had when it was adopted.
        differs = vm.intent.phase in RESIZING or not (size.fits_in(current + NEAR) and current.fits_in(size + NEAR))
        resizes = vm.running and differs
        states = await host.domain_states()
        paused = states.get(vm.domain) == "paused"
        if paused and differs and not resizes and vm.intent.phase not in PAUSED_BY_US:
            raise wrong_state(
                f"another program has paused {vm.name}: what was taken from it can be given back once it runs",
                "name",
            )
        if request is not None:
            target = size if resizes else None
            await self._begin_release(vm, returning(old, size), target, request.cause(current))
        outcomes, off_line = [], ""
        if resizes:
            outcomes.append(await host.resize_one(vm, deadline_s))
            reached = vm.intent.committed.vector()
            missing = size.less(reached).cpu_cores
            # What its guest cannot have on line is its own doing: quota and cap alone are given back of that.
            refused = min(missing, float(vm.resizer.cpus_refused(math.ceil(size.less(NEAR).cpu_cores))))
            if refused:
                reached += ResourceVector(cpu_cores=refused)
                off_line = f", but for CPUs that its guest cannot have on line ({outcomes[0].sentence})"
            if vm.intent.phase in RESIZING or not (size.fits_in(reached + NEAR) and reached.fits_in(size + NEAR)):
                return await self._kept(operation, vm, old, outcomes[0])
        try:
            # However it is started later, it comes up as it was.
            await host.hypervisor.prepare_start(vm.domain, size)
            if vm.intent.phase in PAUSED_BY_US and paused:
                # While it still bears our intent: after that no agent would let it run if this one were killed.
                await host.hypervisor.resume(vm.domain)
            await host.hypervisor.adoption.give_back(vm.domain, before)
        except HypervisorError:
            await host.mark_failed(operation.request_id)
            with contextlib.suppress(HypervisorError):
                await stay_as_it_was(host, vm, old, operation.request_id)
            raise
        try:
            if vm.intent.phase is not Phase.STOPPED:
                await host.record_change(vm.name, vm.allocation().current, ZERO, operation.request_id)
        except JournalError as error:
            # It is its owner's again, and nothing may be taken from it any more.
            log.warning("a release was not told", vm=vm.name, why=str(error))
        await host.drop(vm)
        sentence = f"{vm.domain} is as it was when it was adopted{off_line}, and is not looked after any more"
        host.note(vm.name, DecisionKind.REMOVE, sentence, {})
        return done(operation, sentence, *outcomes)

    def release_again(self, vm: ManagedVM) -> None:
        """Give a domain back that was released and has come back as it was before, by a snapshot or a backup.

        Where there is no room for what was taken it is tried again, and looked after meanwhile.
        """
        request_id = f"back-{uuid.uuid4().hex[:12]}"
        body = {"request_id": request_id, "deadline_s": AGAIN_DEADLINE_S, "name": vm.name}
        request = Request(request_id, "release", body, time.time())

        async def run(operation: Operation) -> Operation:
            if vm.running:
                await vm.wait_for_hello(HELLO_S)
            while True:
                why = self._host.modes.sentence
                try:
                    if self._host.modes.mode is not HostMode.PAUSED:
                        ended = await self._release(operation, vm, AGAIN_DEADLINE_S, request)
                        if ended.state is OperationState.DONE:
                            return ended
                        why = ended.sentence
                except HostAgentError as error:
                    if not self._host.holds(vm):
                        raise
                    why = str(error)
                self._requests.operations.progress(request_id, why)
                await asyncio.sleep(AGAIN_S)

        self._requests.operations.begin(request_id, "release", body, run, vm=vm.name, started_at=request.started_at)
        sentence = f"{vm.domain} was released, and has come back with what was taken from it: it is given back again"
        self._host.note(vm.name, DecisionKind.ALARM, sentence, {"request_id": request_id})

    async def _begin_release(self, vm: ManagedVM, spec: VMSpec, target: ResourceVector | None, cause: Cause) -> None:
        """Store what is going to happen.

        :param target: the size to give back; None: it has it, or is off.
        :raises RequestRefused: there is no room.
        :raises HypervisorError: it could not be stored; all is as it was.
        """
        host, row = self._host, vm.allocation()
        was = vm.intent.was or vm.intent.spec
        if target is not None:
            grown = spec.allocation(row.current.larger(target), vm.host.overhead_mib)
            if not target.fits_in(row.current) and not host.fits(grown, row.charge):
                raise no_room(f"{target} needs more than what is free ({host.free()})", "name")
            vm.record.plan(target, cause, spec=spec, was=was)
        try:
            await (vm.record.store(was=was, cause=cause) if target is None else persist_all([vm]))
        except HypervisorError:
            await host.mark_failed(cause.request_id)
            raise

    async def _kept(self, operation: Operation, vm: ManagedVM, old: VMSpec, outcome: VMOutcome) -> Operation:
        """It is looked after as before, with the size that was reached."""
        await stay_as_it_was(self._host, vm, old, operation.request_id)
        sentence = f"{vm.name} was not given back: {outcome.sentence}"
        return partly_done(operation, sentence, outcome)

    async def _resume_release(self, operation: Operation, vm: ManagedVM) -> Operation:
        if self._host.has_failed(operation):
            await give_up_change(self._host, vm, operation.request_id)
            return failed(operation, f"{vm.name} could not be given back, as was answered before this agent started")
        if vm.intent.was is None:
            # It had ended, or it would be gone.
            return partly_done(operation, f"{vm.name} was not given back: {vm.summary().sentence}")
        try:
            # From the start on: half way a fixed VM counts as one that gives.
            async with vm.lock:
                if vm.intent.phase in RESIZING:
                    if self._host.modes.mode is HostMode.PAUSED:
                        return await left_as_it_is(self._host, operation, vm, vm.intent.was)
                    await vm.wait_for_hello(HELLO_S)
                return await self._release_locked(operation, vm, float(cause_of(vm).body["deadline_s"]), None)
        except HostAgentError:
            await give_up_change(self._host, vm, operation.request_id)
            raise


def _size_of(found: Candidate) -> ResourceVector:
    """What a domain has, which becomes its nominal size: its owner's quota and cap count, and so stay as they are."""
    before = found.before
    held = Bound(found.vcpus, before.quota_per_cpu, found.memory_mib, 0.0, cap_cores=before.cap_cores)
    cores = min(max(held.cpu_cores, HARD_FLOOR.cpu_cores), float(found.vcpus))
    return ResourceVector(cpu_cores=cores, memory_mib=float(int(found.memory_mib)))


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 2)
