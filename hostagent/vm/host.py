"""Host: its slice, its VMs, what is free, and resizes of several VMs at once."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import math
import time
import uuid
from collections.abc import AsyncIterator, Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import structlog

from ebbtide.deflation.allocations import Allocation, deflatable_capacity, free_capacity, undeclared, untouched_mib
from ebbtide.deflation.cascade.instructions import Mode
from ebbtide.deflation.resources import ZERO, ResourceVector
from ebbtide.deflation.sharing.overcommitment import MemoryWatch, overcommitment
from ebbtide.messages.common import Vector
from ebbtide.messages.explanations import DecisionKind
from ebbtide.messages.hosts import HostReport, HostTemplate
from ebbtide.messages.operations import Operation, VMOutcome
from ebbtide.rest.metrics.totals import Reports
from hostagent.clock import now
from hostagent.errors import DomainGone, HostAgentError, HypervisorError, JournalError, RequestRefused, wrong_state
from hostagent.libvirt.hypervisor import Hypervisor
from hostagent.mechanisms.host_memory import host_memory_available_mib
from hostagent.state.history import History
from hostagent.state.host_boot import HostBoot
from hostagent.state.intents import Cause, Intent, Phase, Request
from hostagent.state.journal import Journal
from hostagent.state.modes import Modes
from hostagent.state.tallies import Tallies
from hostagent.threads import LIMITS
from hostagent.vm.managed_vm import ManagedVM
from hostagent.vm.resizer import HostSide

#: VMs that are worked on at the same time.
CONCURRENT: Final = 64
#: Core changes in one report; what is left waits for the next.
MOST_CHANGES: Final = 500
#: How long a busy VM is waited for at the least, in seconds, where the deadline leaves less: a look takes that long.
LEAST_WAIT_S: Final = 2.0
#: The longest text of an error in a report.
MOST_TEXT: Final = 300
#: Phases in which a resize is unfinished.
RESIZING: Final = (Phase.DEFLATING, Phase.REINFLATING)
#: Kinds of operations that end for good when they are answered. What gives back goes on until it has.
ANSWERED: Final = ("target", "reclaim")

log = structlog.get_logger()


@dataclass(frozen=True, slots=True)
class Slice:
    """What of this machine the agent may hand out."""

    host_id: str
    url: str
    capacity: ResourceVector
    accelerator: str
    #: What a VM costs besides its size (docs/internals/contracts.md, accounting), MiB.
    vm_overhead_mib: float
    #: Host memory that is never handed out, whatever the slice says, MiB.
    reserve_mib: float = 512.0
    #: What one costs that is emulated, where others are not, MiB.
    emulated_overhead_mib: float = 0.0

    def overhead_of(self, emulated: bool) -> float:
        """What a domain costs besides its size, MiB; one that was made while there was no KVM stays emulated."""
        return max(self.vm_overhead_mib, self.emulated_overhead_mib) if emulated else self.vm_overhead_mib


@dataclass(slots=True)
class Claim:
    """VMs whose locks are held."""

    vms: list[ManagedVM]

    def release(self, vm: ManagedVM) -> None:
        """Let go of one, if it is still held. From here on it is another operation's."""
        if vm in self.vms:
            self.vms.remove(vm)
            vm.lock.release()

    def keep(self, vms: Collection[ManagedVM]) -> None:
        """Let go of all others."""
        for vm in [vm for vm in self.vms if vm not in vms]:
            self.release(vm)


@dataclass(slots=True)
class Host:
    """The VMs of one agent, and what they leave."""

    slice: Slice
    hypervisor: Hypervisor
    journal: Journal
    memory_available_mib: Callable[[], float] = host_memory_available_mib
    vms: dict[str, ManagedVM] = field(default_factory=dict)
    #: Differs after each start of the agent.
    incarnation: str = field(default_factory=lambda: uuid.uuid4().hex)
    #: What the host had available when it was last asked, MiB. Files are never read on the event loop's thread.
    available_mib: float = 0.0
    #: Whether others on the machine have taken memory that the VMs were promised.
    memory: MemoryWatch = field(default_factory=MemoryWatch)
    #: Why the hypervisor does not answer; empty while it does.
    unavailable: str = ""
    #: VMs that are worked on now: no more than `CONCURRENT`.
    slots: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(CONCURRENT))
    _attempts: Iterator[int] = field(default_factory=lambda: itertools.count(1))
    #: The last report that was made.
    _last_report: HostReport | None = None
    #: What all VMs are charged with, and the rows that it is the sum of.
    _charged: tuple[list[Allocation], ResourceVector] = ([], ZERO)
    #: What all VMs can still give, and the rows that it is the sum of.
    _deflatable: tuple[list[Allocation], ResourceVector] = ([], ZERO)
    #: What the charges leave of the slice, and what it was made of.
    _left: tuple[tuple[ResourceVector, list[Allocation]], ResourceVector] = ((ZERO, []), ZERO)
    #: Set whenever the manager should hear of something at once.
    changed: asyncio.Event = field(default_factory=asyncio.Event)
    #: Fields of a report that the manager, of an earlier version, does not know (`hostagent.vm.earlier_manager`).
    unknown_fields: set[tuple[str, ...]] = field(default_factory=set)
    #: Set whenever the VMs should be looked at at once.
    check_requested: asyncio.Event = field(default_factory=asyncio.Event)
    #: Request ids of operations that failed and that a later agent would go on with: that could not be written yet.
    unwritten: set[str] = field(default_factory=set)
    #: What was decided lately, and why.
    history: History = field(default_factory=History)
    #: What the resizes of each VM came to.
    tallies: Tallies = field(default_factory=Tallies)
    reports: Reports = field(default_factory=Reports)
    #: Directories whose free room is told, by what they are for.
    directories: Mapping[str, Path] = field(default_factory=dict)
    #: Memory that steady mode keeps free, MiB, and what it has trimmed and given back since the agent started.
    reserve_mib: float = 0.0
    steady_taken_mib: float = 0.0
    steady_given_mib: float = 0.0
    #: Reclaims that are under way, and when the last one ended (monotonic seconds): what they free is spoken for.
    reclaims: int = 0
    reclaimed_at: float = -math.inf
    #: The boot that the host runs in.
    boot: HostBoot = field(default_factory=HostBoot)
    #: What an operator has the host do.
    modes: Modes = field(init=False)

    def __post_init__(self) -> None:
        self.modes = Modes(self.slice.host_id, self.journal, self.history)

    async def sample(self) -> None:
        """Ask the machine what memory it has available, and its VMs have: before each decision about free room."""
        # The VMs first: what they touch meanwhile is missed twice, rather than sold twice.
        found = await self.hypervisor.resident_mib([vm.domain for vm in self.vms.values()])
        self.available_mib = await LIMITS.run(self.memory_available_mib)
        for vm in self.vms.values():
            vm.resident_mib = found.get(vm.domain)

    def untouched_mib(self) -> float:
        """What the VMs are charged and had not touched at the last `sample`, MiB."""
        return untouched_mib((vm.allocation(), vm.resident_mib) for vm in self.vms.values())

    def free(self, loaded_mib: float = 0.0) -> ResourceVector:
        """What could be given away at the last `sample`, less what has been charged since.

        :param loaded_mib: of what the machine has no more available, what is the VM's that it is asked for.
        """
        capacity, rows = made_of = self.slice.capacity, [vm.allocation() for vm in self.vms.values()]
        if made_of != self._left[0]:
            self._left = made_of, free_capacity(capacity, rows)
        available_mib = self.available_mib + loaded_mib - self.untouched_mib()
        return free_capacity(self._left[1], (), max(available_mib - self.slice.reserve_mib, 0.0))

    def fits(self, allocation: Allocation, besides: ResourceVector = ZERO, loaded_mib: float = 0.0) -> bool:
        """Whether there is room for a VM; what the host does not declare is never short.

        :param besides: what the VM is charged with already.
        :param loaded_mib: see `free`.
        """
        room = self.free(loaded_mib) + besides
        return allocation.charge.fits_in(room.larger(undeclared(self.slice.capacity, allocation.upper)))

    def report(self) -> HostReport:
        """What the manager hears of this host: the same object as before where nothing has changed."""
        rows = [vm.row() for vm in self.vms.values()]
        if rows != self._deflatable[0]:
            self._deflatable = rows, deflatable_capacity(rows)
        report = HostReport(
            id=self.slice.host_id,
            url=self.slice.url,
            incarnation=self.incarnation,
            sequence=self._last_report.sequence if self._last_report is not None else 1,
            capacity=Vector.of(self.slice.capacity),
            free=Vector.of(self.free()),
            deflatable=Vector.of(self._deflatable[1]),
            vm_overhead_mib=self.slice.vm_overhead_mib,
            accelerator=self.slice.accelerator,
            mode=self.modes.mode,
            mode_reason=self.modes.reason,
            unavailable=self.unavailable,
            overcommitted=Vector.of(self.overcommitted()),
            vms=tuple(vm.status() for vm in self.vms.values()),
            core_changes=tuple(self.journal.changes[:MOST_CHANGES]),
            budget=Vector.of(self.journal.budget.room),
            budget_number=self.journal.budget.number,
            reserve_mib=self.reserve_mib,
            templates=tuple(
                HostTemplate(name=template.name, shared_disk=template.shared_disk)
                for template in self.hypervisor.templates()
            ),
            can_create=self.hypervisor.can_create,
            migration=self.hypervisor.moves.address,
            moves_by_command_only=self.hypervisor.moves.by_command_only,
            epoch=self.journal.epoch,
        )
        if self._last_report is None or report != self._last_report:
            # Counted where something changed only: the same body again tells the manager that there is no news.
            number = report.sequence + (self._last_report is not None)
            self._last_report = report.model_copy(update={"sequence": number})
        return self._last_report

    def vm(self, name: str) -> ManagedVM:
        """:raises RequestRefused: there is no such VM here (404)."""
        try:
            return self.vms[name]
        except KeyError:
            raise RequestRefused(404, f"there is no VM {name} on {self.slice.host_id}", "name") from None

    def resizable(self) -> list[ManagedVM]:
        """VMs whose size may be changed now, those included whose last resize is still to be tried again."""
        return [vm for vm in self.vms.values() if vm.resizable]

    def under_pressure(self) -> list[ManagedVM]:
        """VMs whose guests are: one that is off wants nothing, also where it goes on later where it was saved."""
        return [vm for vm in self.vms.values() if vm.pressure.sentence and vm.intent.phase is not Phase.STOPPED]

    def check_resizable(self, vm: ManagedVM) -> None:
        """:raises RequestRefused: the VM's size cannot be changed now (409)."""
        if not self.holds(vm) or vm not in self.resizable():
            state = vm.status().state if self.holds(vm) else "removed"
            raise wrong_state(f"{vm.name} cannot be resized now: it is {state}", "name")

    @contextlib.asynccontextmanager
    async def claimed(
        self, wait_s: float, besides: Callable[[ManagedVM], bool] = lambda vm: False
    ) -> AsyncIterator[Claim]:
        """Hold the locks of all VMs that may be resized; one that is busy for longer than ``wait_s`` is left out.

        :param besides: those that are neither waited for nor held.

        Nothing is waited for while something is held, so that two who claim never wait for each other. What is done
        to a VM once it is released from the claim is another operation's: only outcomes tell of it then.
        """
        claim = Claim([])

        def wanted() -> list[ManagedVM]:
            return [vm for vm in self.resizable() if not besides(vm)]

        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(wait_s):
                # Nothing is held while one is waited for: others, above all a response to pressure, work on the rest.
                while wait_s > 0 and (busy := next((vm for vm in wanted() if not vm.lock.is_free), None)):
                    with contextlib.ExitStack() as told:
                        # All hear of it, those too that are free and may be taken for something that can give way:
                        # told one after the other, the last might hear of it only when the time is over.
                        for vm in wanted():
                            if vm is not busy:
                                told.enter_context(vm.lock.wanted())
                        await busy.lock.wait_until_free()
        try:
            for vm in wanted():
                if vm.lock.is_free:
                    await vm.lock.acquire()  # at once, so that nothing changes meanwhile
                    claim.vms.append(vm)
                else:
                    log.info("busy for too long, so left out of the operation", vm=vm.name)
            yield claim
        finally:
            claim.keep([])

    @contextlib.asynccontextmanager
    async def reclaiming(self) -> AsyncIterator[None]:
        """Free room for somebody who will be charged with it only after this."""
        self.reclaims += 1
        try:
            yield
        finally:
            self.reclaims -= 1
            self.reclaimed_at = now()

    @contextlib.asynccontextmanager
    async def locked_until(self, vm: ManagedVM, until: float) -> AsyncIterator[None]:
        """Hold the lock of a VM for an operation that has to begin in time: what comes too late is not begun at all.

        :param until: the operation's deadline, by the loop's clock.
        :raises RequestRefused: another operation had not ended by then (409).
        """
        wait_s = max(until - now(), LEAST_WAIT_S)
        try:
            async with asyncio.timeout(wait_s):
                await vm.lock.acquire()
        except TimeoutError:
            sentence = f"{vm.name} was busy until the deadline, and nothing was changed"
            raise RequestRefused(409, sentence, "name") from None
        try:
            yield
        finally:
            vm.lock.release()

    async def domain_states(self) -> dict[str, str]:
        """What our domains do, by name: "running", "paused" or "stopped".

        :raises HypervisorError: the hypervisor does not say.
        """
        return {domain.name: domain.state for domain in await self.hypervisor.domains()}

    def holds(self, vm: ManagedVM) -> bool:
        """Whether this very VM is still here: another one may have its name by now."""
        return self.vms.get(vm.name) is vm

    def adopt(self, domain: str, intent: Intent, running: bool, emulated: bool = False) -> ManagedVM:
        side = HostSide(
            self.slice.host_id,
            self.hypervisor,
            self.slice.overhead_of(emulated),
            self.record_change,
            self.check_requested.set,
            self.note,
            self._attempt,
            self.is_overcommitted,
            lambda: not self.unavailable,
            lambda: self.journal.boots,
            self.take_hello,
        )
        vm = ManagedVM(domain, intent, side, running)
        self.vms[vm.name] = vm
        return vm

    def _attempt(self) -> str:
        """A suffix for request ids that no attempt, of this agent or an earlier one, has had."""
        return f"#{self.incarnation[:6]}.{next(self._attempts)}"

    async def forget(self, vm: ManagedVM) -> None:
        """Remove a VM and its domain; an adopted one is stopped and given back.

        :raises HypervisorError: the domain could not be removed; the VM stays.
        """
        found = (await self.hypervisor.survey()).get(vm.domain)
        if found is not None and vm.uuid not in (None, found.uuid):
            log.warning("the VM's domain was removed from outside, and another has its name", vm=vm.name)
        elif (before := vm.intent.adopted) is not None:
            with contextlib.suppress(DomainGone):
                await self.hypervisor.shut_down(vm.domain, 0.0)
                # Its owner starts it as it was, not at the size that it was stopped at.
                size = before.size or vm.intent.spec.nominal
                await self.hypervisor.prepare_start(vm.domain, size.vector())
                await self.hypervisor.adoption.give_back(vm.domain, before)
        else:
            await self.hypervisor.destroy(vm.domain)
        await self.drop(vm)
        if (cause := vm.intent.cause) is not None and cause.kind == "delete":
            await self.note_carried_out(cause.request_id)

    async def drop(self, vm: ManagedVM) -> None:
        """Have nothing more to do with a VM, whatever becomes of its domain."""
        await vm.stop()
        if self.holds(vm):
            del self.vms[vm.name]
            self.tallies.forget(vm.name)
        self.changed.set()

    async def clear_away(self, vm: ManagedVM) -> None:
        """Remove a VM that could not be started; where even that fails, it stays charged and is tried again.

        Its creation was answered as failed, so a later agent must not carry it out either.
        """
        vm.record.intent = vm.intent.changed(phase=Phase.DELETING)
        if vm.intent.cause is not None:
            await self.mark_failed(vm.intent.cause.request_id)
        try:
            await self.forget(vm)
        except HypervisorError as error:
            log.warning("what was left of the VM could not be removed yet", vm=vm.name, why=str(error))

    def has_failed(self, operation: Operation) -> bool:
        """Whether an operation was answered as failed by an earlier agent."""
        return self.journal.has_failed(operation.kind, operation.request_id)

    async def mark_failed(self, request_id: str) -> bool:
        """Remember, if that can be written, that an operation is answered as failed.

        :returns: whether it could be.
        """
        try:
            # With it those that could not be written before, also where nobody waits for that.
            for one in (*self.unwritten, request_id):
                await asyncio.to_thread(self.journal.add_failed, one)
                self.unwritten.discard(one)
        except JournalError as error:
            if request_id not in self.unwritten:
                log.warning("a failure could not be written down", request_id=request_id, why=str(error))
            self.unwritten.add(request_id)
            return False
        return True

    async def note_carried_out(self, request_id: str) -> None:
        """Remember, if that can be written, that a stop or deletion has come to its end."""
        try:
            await asyncio.to_thread(self.journal.add_carried_out, request_id)
        except JournalError as error:
            what = "an end could not be written down: what is put back of this time may be ended by it again"
            log.warning(what, request_id=request_id, why=str(error))

    async def failure_is_written(self, request_id: str) -> bool:
        """Whether an operation may be answered as failed: a later agent does not go on with it."""
        return request_id not in self.unwritten or await self.mark_failed(request_id)

    async def record_change(self, name: str, before: ResourceVector, after: ResourceVector, cause: str) -> None:
        """Write down a change of cores, durably, and let the manager hear of it."""
        if before.cpu_cores != after.cpu_cores:
            await asyncio.to_thread(
                self.journal.add, name, self.slice.host_id, time.time(), before.cpu_cores, after.cpu_cores, cause
            )
        self.changed.set()

    async def tell_growth(self, vm: ManagedVM, after: ResourceVector, cause: str) -> None:
        """As `record_change`, of one that runs already: that it cannot be told is no reason to take it for off."""
        try:
            await self.record_change(vm.name, ZERO, after, cause)
        except JournalError as error:
            log.warning("a growth was not told", vm=vm.name, why=str(error))

    async def take_hello(self, name: str, boot_s: float | None) -> None:
        """Let the manager hear that a guest answers, and remember how long it took to boot, if it did."""
        self.changed.set()
        if boot_s is None:
            return
        try:
            await asyncio.to_thread(self.journal.add_boot, name, boot_s)
        except JournalError as error:
            log.warning("nothing was learned of a boot", vm=name, why=str(error))

    def is_overcommitted(self) -> bool:
        """Whether the VMs hold more than the host may hand out: a guest did not give back what it was not to have."""
        return not self.overcommitted().is_zero()

    def overcommitted(self) -> ResourceVector:
        """What the VMs are charged beyond what the host may hand out, or has (`MemoryWatch`)."""
        # Asked with each look at a VM: added up anew only where a row is another one.
        rows = [vm.allocation() for vm in self.vms.values()]
        if rows != self._charged[0]:
            self._charged = rows, sum((row.charge for row in rows), ZERO)
        beyond = overcommitment(self.slice.capacity, self._charged[1])
        return beyond.larger(ResourceVector(memory_mib=self.memory.short_mib))

    def hypervisor_answers(self, why_not: str = "") -> None:
        """Take note of whether the hypervisor answers.

        :param why_not: its error; empty if it answers.
        """
        why_not = why_not[:MOST_TEXT]
        if bool(why_not) != bool(self.unavailable):
            said = f"the hypervisor does not answer: {why_not}" if why_not else "the hypervisor answers again"
            self.note(None, DecisionKind.HYPERVISOR, said, {})
            self.changed.set()
        self.unavailable = why_not

    def note(self, vm: str | None, kind: DecisionKind, sentence: str, inputs: Mapping[str, object]) -> None:
        """Tell of a decision: one sentence, with what it rests on."""
        self.history.note(vm, kind, sentence, inputs)

    async def resize(
        self,
        vms: Iterable[ManagedVM],
        deadline_s: float,
        mode: Mode = Mode.ASK,
        ended: Callable[[ManagedVM], None] = lambda vm: None,
    ) -> list[VMOutcome]:
        """Bring VMs to their intents' targets, concurrently.

        One that fails is reported by its shortfall and stays with its intent.

        :param ended: called for each VM as soon as its own resize has ended, to release it: one that is short of memory
            must not wait until the slowest has given.
        """
        until = now() + deadline_s

        async def one(vm: ManagedVM) -> VMOutcome:
            waits = self.slots.locked()
            try:
                async with self.slots:
                    # What it has waited for a slot is gone: the deadline is one for all. Whom nobody has asked has
                    # not shown that it could not give.
                    left_s = max(until - now(), 0.0)
                    late = (
                        vm.failed("its turn came after the deadline") if waits and left_s == 0.0 < deadline_s else None
                    )
                    if late is not None:
                        self._remember(vm.intent.cause, late, left_s, mode)
                    outcome = late or await self.resize_one(vm, left_s, mode)
                    await self._give_up(vm)
                    return outcome
            finally:
                ended(vm)

        outcomes = await asyncio.gather(*(one(vm) for vm in vms), return_exceptions=True)
        for outcome in outcomes:
            if isinstance(outcome, BaseException):
                raise outcome  # a defect; all have ended, so their locks may go
        return [outcome for outcome in outcomes if isinstance(outcome, VMOutcome)]

    async def resize_one(self, vm: ManagedVM, deadline_s: float, mode: Mode = Mode.ASK) -> VMOutcome:
        """Bring one VM to its intent's target, under its lock, and remember what came of it."""
        cause = vm.intent.cause
        if not vm.deflated:
            self.tallies.of(vm.name).application_holds(ZERO)  # from here on it is seen what its application gives
        try:
            outcome = await vm.resize(deadline_s, mode)
        except HostAgentError as error:
            outcome = vm.failed(str(error))
        if outcome.errors or outcome.shortfall.vector() != ZERO:
            outcome = await self._unless_halted(vm, outcome)
        else:
            vm.drift_repair.pace.held()  # it was right: what is changed from now on is put right at once
        self._remember(cause, outcome, deadline_s, mode)
        return outcome

    def _remember(self, cause: Cause | None, outcome: VMOutcome, deadline_s: float, mode: Mode) -> None:
        self.history.resized(cause, outcome, deadline_s, mode)
        self.tallies.add(outcome, gently=cause is not None and cause.gently)

    async def _give_up(self, vm: ManagedVM) -> None:
        """What is answered as failed is not carried out later, neither by this agent nor by its successor."""
        cause = vm.intent.cause
        if vm.intent.phase in RESIZING and cause is not None and cause.kind in ANSWERED:
            await self.mark_failed(cause.request_id)
            with contextlib.suppress(HostAgentError):
                await vm.give_up()

    async def _unless_halted(self, vm: ManagedVM, outcome: VMOutcome) -> VMOutcome:
        """The outcome of a resize that came to less; where the domain has ended or was paused meanwhile, that is why.

        Neither is a shortfall: a guest that stands still cannot show what it could give.
        """
        before = vm.allocation().current
        with contextlib.suppress(HostAgentError):
            found = (await self.hypervisor.survey()).get(vm.domain)
            state = found.state if found is not None else "gone"
            if state == "stopped":
                why = "its domain ended while it was being resized"
                if await vm.found_off(why):
                    self.changed.set()
                    return vm.off_meanwhile(before, why)
            if state == "paused":
                vm.found_paused()
                self.changed.set()
                return vm.paused_meanwhile(outcome)
        return outcome


def plan_all(
    host: Host, targets: Mapping[str, ResourceVector], request: Request, freed: Collection[str] = ()
) -> list[ManagedVM]:
    """Plan for each VM, all in one turn of the loop: from here on no other operation counts on the room.

    :param freed: names of those that no target holds any more.
    """
    members = [host.vms[name] for name in targets]
    for vm in members:
        fields = {"held": None} if vm.name in freed else {}
        vm.record.plan(targets[vm.name], request.cause(vm.allocation().current), **fields)
    return members


async def persist_all(members: Collection[ManagedVM]) -> None:
    """Write all intents before the first action: a kill in between leaves each VM at its old size or its target.

    :raises HypervisorError: an intent could not be stored; all are as they were.
    """
    results = await asyncio.gather(*(vm.record.persist() for vm in members), return_exceptions=True)
    failed = [result for result in results if isinstance(result, BaseException)]
    if failed:
        await asyncio.gather(*(vm.record.unplan() for vm in members))
        raise failed[0]
