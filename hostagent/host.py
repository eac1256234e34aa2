"""The host: its slice, its VMs, what is free, and resizes of several VMs at once."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import time
import uuid
from collections.abc import AsyncIterator, Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Final

import psutil
import structlog

from deflation.allocations import Allocation, Priority, deflatable_capacity, free_capacity, undeclared
from deflation.instructions import Mode
from deflation.messages import HostReport, HostTemplate, Vector, VMOutcome
from deflation.resources import COMPONENTS, TOLERANCE, ZERO, ResourceVector
from hostagent.errors import DomainGone, HostAgentError, HypervisorError, RequestRefused
from hostagent.history import History
from hostagent.hypervisor import Hypervisor
from hostagent.intents import Intent, Phase
from hostagent.journal import Journal
from hostagent.modes import Modes
from hostagent.vms import ManagedVM

#: VMs that are worked on at the same time.
CONCURRENT: Final = 64
#: Core changes in one report; what is left waits for the next.
MOST_CHANGES: Final = 500
#: Phases in which a resize is to be gone on with.
RESIZING: Final = (Phase.DEFLATING, Phase.REINFLATING)

log = structlog.get_logger()


@dataclass(frozen=True, slots=True)
class Slice:
    """What of this machine the agent may hand out."""

    host_id: str
    url: str
    capacity: ResourceVector
    accelerator: str
    #: What a VM costs besides its size (docs/contracts.md, accounting), MiB.
    vm_overhead_mib: float
    #: Host memory that is never handed out, whatever the slice says, MiB.
    reserve_mib: float = 512.0


def host_memory_available_mib() -> float:
    """MemAvailable: libvirt's node information misses memory that was plugged into the host later."""
    return float(psutil.virtual_memory().available) / 2**20


@dataclass(slots=True)
class Claim:
    """VMs whose locks are held."""

    vms: list[ManagedVM]

    def keep(self, vms: Collection[ManagedVM]) -> None:
        """Let go of all others."""
        for vm in self.vms:
            if vm not in vms:
                vm.lock.release()
        self.vms = [vm for vm in self.vms if vm in vms]


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
    #: VMs that are worked on now: no more than :data:`CONCURRENT`.
    slots: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(CONCURRENT))
    _attempts: Iterator[int] = field(default_factory=lambda: itertools.count(1))
    #: The last report that was made.
    _told: HostReport | None = None
    #: Set whenever the manager should hear of something at once.
    changed: asyncio.Event = field(default_factory=asyncio.Event)
    #: Set whenever the VMs should be looked at at once.
    stirred: asyncio.Event = field(default_factory=asyncio.Event)
    #: What was decided lately, and why.
    history: History = field(default_factory=History)
    #: What an operator has the host do.
    modes: Modes = field(init=False)

    def __post_init__(self) -> None:
        self.modes = Modes(self.slice.host_id, self.journal, self.history)

    async def sample(self) -> None:
        """Ask the machine what memory it has available: before each decision about free room."""
        self.available_mib = await asyncio.to_thread(self.memory_available_mib)

    def free(self) -> ResourceVector:
        """What could be given away at the last :meth:`sample`, less what has been charged since."""
        available = self.available_mib - self.slice.reserve_mib
        return free_capacity(self.slice.capacity, [vm.allocation() for vm in self.vms.values()], max(available, 0.0))

    def fits(self, allocation: Allocation, besides: ResourceVector = ZERO) -> bool:
        """Whether there is room for a VM; what the host does not declare is had by anybody.

        :param besides: what the VM is charged with already.
        """
        room = self.free() + besides
        return allocation.charge.fits_in(room.larger(undeclared(self.slice.capacity, allocation.upper)))

    def report(self) -> HostReport:
        """What the manager hears of this host."""
        report = HostReport(
            id=self.slice.host_id,
            url=self.slice.url,
            incarnation=self.incarnation,
            sequence=self._told.sequence if self._told is not None else 1,
            capacity=Vector.of(self.slice.capacity),
            free=Vector.of(self.free()),
            deflatable=Vector.of(deflatable_capacity(vm.row() for vm in self.vms.values())),
            vm_overhead_mib=self.slice.vm_overhead_mib,
            accelerator=self.slice.accelerator,
            mode=self.modes.mode,
            mode_reason=self.modes.reason,
            vms=tuple(vm.status() for vm in self.vms.values()),
            core_changes=tuple(self.journal.changes[:MOST_CHANGES]),
            budget=Vector.of(self.journal.budget.room),
            budget_number=self.journal.budget.number,
            templates=tuple(
                HostTemplate(name=template.name, shared_disk=template.shared_disk)
                for template in self.hypervisor.templates()
            ),
        )
        if self._told is not None and report != self._told:
            # Counted where something changed only: the same body again tells the manager that there is no news.
            report = report.model_copy(update={"sequence": report.sequence + 1})
        self._told = report
        return report

    def vm(self, name: str) -> ManagedVM:
        """:raises RequestRefused: there is no such VM here (404)."""
        try:
            return self.vms[name]
        except KeyError:
            raise RequestRefused(404, f"there is no VM {name} on {self.slice.host_id}", "name") from None

    def resizable(self) -> list[ManagedVM]:
        """VMs whose size may be changed now, those included whose last resize is still to be tried again."""
        return [vm for vm in self.vms.values() if vm.running and vm.intent.phase in (Phase.SETTLED, *RESIZING)]

    @contextlib.asynccontextmanager
    async def claimed(self, wait_s: float, priority: Priority | None = None) -> AsyncIterator[Claim]:
        """Hold the locks of all VMs that may be resized; one that is busy for longer than ``wait_s`` is left out.

        :param priority: only those of this one.

        Nothing is waited for while something is held, so that two who claim never wait for each other.
        """
        claim = Claim([])

        def wanted() -> list[ManagedVM]:
            return [vm for vm in self.resizable() if priority in (None, vm.intent.spec.priority)]

        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(wait_s):
                # Nothing is held while one is waited for: others, a relief above all, may work on the rest.
                while busy := next((vm for vm in wanted() if vm.lock.locked()), None):
                    async with busy.lock:
                        pass
        try:
            for vm in wanted():
                try:
                    async with asyncio.timeout(0):  # what is free is had at once
                        await vm.lock.acquire()
                except TimeoutError:
                    log.info("busy for too long, so left out of the operation", vm=vm.name)
                    continue
                claim.vms.append(vm)
            present = wanted()
            claim.keep([vm for vm in claim.vms if vm in present])
            yield claim
        finally:
            claim.keep([])

    @contextlib.asynccontextmanager
    async def locked(self, vms: Iterable[ManagedVM]) -> AsyncIterator[None]:
        """Hold the locks of these VMs, in the order of names."""
        async with contextlib.AsyncExitStack() as stack:
            for vm in sorted(vms, key=lambda vm: vm.name):
                await stack.enter_async_context(vm.lock)
            yield

    def holds(self, vm: ManagedVM) -> bool:
        """Whether this very VM is still here: another one may have its name by now."""
        return self.vms.get(vm.name) is vm

    def adopt(self, domain: str, intent: Intent, running: bool) -> ManagedVM:
        overhead_mib = self.slice.vm_overhead_mib
        vm = ManagedVM(
            domain,
            intent,
            self.slice.host_id,
            self.hypervisor,
            overhead_mib,
            self.record_change,
            self.stirred.set,
            self.note,
            self._attempt,
            self.crowded,
        )
        vm.running = running
        self.vms[vm.name] = vm
        return vm

    def _attempt(self) -> str:
        """A suffix for request ids that no attempt, of this agent or an earlier one, has had."""
        return f"#{self.incarnation[:6]}.{next(self._attempts)}"

    async def forget(self, vm: ManagedVM) -> None:
        """Remove a VM and its domain; an adopted one is stopped and given back.

        :raises HypervisorError: the domain could not be removed; the VM stays.
        """
        if vm.intent.adopted is not None:
            with contextlib.suppress(DomainGone):
                await self.hypervisor.shut_down(vm.domain, 0.0)
                await self.hypervisor.give_back(vm.domain, vm.intent.adopted)
        else:
            await self.hypervisor.destroy(vm.domain)
        await self.drop(vm)

    async def drop(self, vm: ManagedVM) -> None:
        """Have nothing more to do with a VM, whatever becomes of its domain."""
        await vm.stop()
        if self.holds(vm):
            del self.vms[vm.name]
        self.changed.set()

    async def clear_away(self, vm: ManagedVM) -> None:
        """Remove a VM that could not be started; where even that fails, it stays charged and is tried again.

        Its creation was answered as failed, so a later agent must not carry it out either.
        """
        vm.intent = vm.intent.changed(phase=Phase.DELETING)
        with contextlib.suppress(HostAgentError):
            if vm.intent.cause is not None:
                await asyncio.to_thread(self.journal.add_deleted, vm.intent.cause.request_id)
        try:
            await self.forget(vm)
        except HypervisorError as error:
            log.warning("what was left of the VM could not be removed yet", vm=vm.name, why=str(error))

    async def record_change(self, name: str, before: ResourceVector, after: ResourceVector, cause: str) -> None:
        """Write down a change of cores, durably, and let the manager hear of it."""
        if before.cpu_cores != after.cpu_cores:
            await asyncio.to_thread(
                self.journal.add, name, self.slice.host_id, time.time(), before.cpu_cores, after.cpu_cores, cause
            )
        self.changed.set()

    def crowded(self) -> bool:
        """Whether the VMs hold more than the host may hand out: a guest did not give back what it was not to have."""
        charges = sum((vm.allocation().charge for vm in self.vms.values()), ZERO)
        declared = self.slice.capacity
        return any(charges[name] > declared[name] + TOLERANCE for name in COMPONENTS if declared[name] > 0)

    def note(self, vm: str | None, kind: str, sentence: str, inputs: Mapping[str, object]) -> None:
        """Tell of a decision: one sentence, with what it rests on."""
        self.history.note(vm, kind, sentence, inputs)

    async def resize(self, vms: Iterable[ManagedVM], deadline_s: float, mode: Mode = Mode.ASK) -> list[VMOutcome]:
        """Bring VMs to their intents' targets, concurrently.

        One that fails is reported by its shortfall and stays with its intent.
        """

        async def one(vm: ManagedVM) -> VMOutcome:
            async with self.slots:
                return await self.resize_one(vm, deadline_s, mode)

        return list(await asyncio.gather(*(one(vm) for vm in vms)))

    async def resize_one(self, vm: ManagedVM, deadline_s: float, mode: Mode = Mode.ASK) -> VMOutcome:
        """Bring one VM to its intent's target, under its lock, and remember what came of it."""
        cause = vm.intent.cause
        try:
            outcome = await vm.resize(deadline_s, mode)
        except HostAgentError as error:
            outcome = vm.failed(str(error))
        self.history.resized(cause, outcome, deadline_s, mode)
        return outcome
