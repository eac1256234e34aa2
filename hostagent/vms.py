"""One managed VM: its intent, its guest, and the operations on it, one at a time.

The order of writes makes a kill at any instruction harmless (rule 7): the intent is stored before the first action,
``committed`` is raised before anything is given and lowered only after the fall of the bound was measured.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from dataclasses import replace

import structlog

from deflation.allocations import Allocation, Priority
from deflation.asking import Refusal, mode_of_asking
from deflation.bounds import Bound
from deflation.cascade import Cascade
from deflation.guest_messages import Hello, Notice
from deflation.instructions import Mode, Outcome
from deflation.ledger import Layer
from deflation.mechanisms import LAYER_OF, Finding, Mechanism, Mechanisms
from deflation.messages import Vector, VMOutcome, VMState, VMStatus
from deflation.reconcile import quota_of
from deflation.reinflation import Reinflation
from deflation.resources import ZERO, ResourceVector
from hostagent.errors import HypervisorError
from hostagent.eternal import guarded
from hostagent.executor import Executor
from hostagent.guestlink import GuestLink
from hostagent.hypervisor import Hypervisor
from hostagent.intents import Cause, Intent, Phase
from hostagent.outcomes import joined, shortfall
from hostagent.pressure import GuestPressure
from hostagent.running import Interrupt, run
from hostagent.upkeep import Upkeep

#: What cannot be used on a guest that does not answer, and what besides it to take memory: that is done by fresh
#: readings only (rule 5), while what is given needs the guest's kernel alone.
NEED_THE_GUEST = (Mechanism.APPLICATION, Mechanism.CPU_OFFLINE, Mechanism.CPU_UNPLUG)
NEED_THE_GUEST_TO_TAKE = (
    *(mechanism for mechanism, layer in LAYER_OF.items() if layer is not Layer.HYPERVISOR),
    Mechanism.BALLOON,
    Mechanism.MEMORY_LIMIT,
)
#: What the API calls a running VM in each phase.
STATES = {
    Phase.CREATING: VMState.STARTING,
    Phase.SETTLED: VMState.RUNNING,
    Phase.DEFLATING: VMState.DEFLATING,
    Phase.REINFLATING: VMState.REINFLATING,
    Phase.DELETING: VMState.STOPPED,
    Phase.ADMITTING: VMState.STARTING,
    Phase.STOPPING: VMState.STOPPING,
    Phase.STOPPED: VMState.STOPPED,
    Phase.STARTING: VMState.STARTING,
}

log = structlog.get_logger()


#: Tells of a decision: (VM, kind, sentence, inputs).
Note = Callable[[str, str, str, Mapping[str, object]], None]


class ManagedVM:
    """A VM of ours. All that changes its size or its intent runs under its :attr:`lock`.

    :param on_change: called with each change before it is committed: (name, size before, size after, cause).
    :param on_stir: called when the VM should be looked at soon.
    :param note: told of each decision.
    :param crowded: whether the host's VMs hold more than there is.
    :param attempt: makes the ids under which applications are asked differ between attempts at one operation.
    """

    def __init__(
        self,
        domain: str,
        intent: Intent,
        host: str,
        hypervisor: Hypervisor,
        overhead_mib: float,
        on_change: Callable[[str, ResourceVector, ResourceVector, str], Awaitable[None]],
        on_stir: Callable[[], None] = lambda: None,
        note: Note = lambda vm, kind, sentence, inputs: None,
        attempt: Callable[[], str] = lambda: "",
        crowded: Callable[[], bool] = lambda: False,
    ) -> None:
        self.domain = domain
        self.intent = intent
        self.running = True
        self._host = host
        self.hypervisor = hypervisor
        self._overhead_mib = overhead_mib
        self._on_change = on_change
        self._greeted = asyncio.Event()
        self.link = GuestLink(self.name, lambda: hypervisor.guest_channel(domain), self._hello, on_notice=self._noticed)
        self._tasks: set[asyncio.Task[None]] = set()
        self._unplanned = intent
        self._on_stir = on_stir
        self.note = note
        self._attempt = attempt
        self.crowded = crowded
        #: Held by whoever changes the VM's size or its intent.
        self.lock = asyncio.Lock()
        #: Stops the deflation that is under way.
        self.interrupt = Interrupt()
        self.pressure = GuestPressure(
            self.allocation,
            self._pressed,
            lambda kind, sentence, inputs: note(self.name, kind, sentence, inputs),
        )
        #: What the VM wants under pressure and its host cannot spare.
        self.asks = ZERO
        self._refusal: Refusal | None = None
        #: Whether the guest may still be asked for something: by an earlier agent, or because a resize broke off.
        self._unsure = intent.phase in (Phase.DEFLATING, Phase.REINFLATING)
        #: Whether the domain may hold another intent than ours: a write that took too long can still be carried out.
        self.uncertain = False
        #: The largest size that such a write would commit: the VM is charged with it until the domain holds ours.
        self._attempted = ZERO
        #: Why the VM will have no more resizes; empty as long as it may.
        self.condemned = ""
        #: Whether something is being taken from it now.
        self._taking = False
        self.upkeep = Upkeep(self)
        self._log = log.bind(vm=self.name, host=host)

    @property
    def name(self) -> str:
        return self.intent.spec.name

    def start(self) -> None:
        """Begin to talk to the guest, if that has not begun."""
        if self._tasks:
            return
        self._tasks.add(asyncio.create_task(guarded(self.link.run), name=f"guest:{self.name}"))

    async def stop(self) -> None:
        """Stop talking to the guest; the domain stays as it is."""
        tasks, self._tasks = self._tasks, set()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def allocation(self) -> Allocation:
        """The row that policies read; its current size is what is committed, or may yet be."""
        if self.intent.phase is Phase.STOPPED:
            return self.intent.spec.allocation(ZERO)
        committed = self.intent.committed.vector()
        if self.uncertain:
            committed = committed.larger(self._attempted)
        return self.intent.spec.allocation(committed, self._overhead_mib)

    @property
    def deflated(self) -> bool:
        """Whether the VM has less than it was sold."""
        return not self.intent.spec.nominal.vector().fits_in(self.intent.committed.vector())

    def row(self) -> Allocation:
        """The row by which a need is split: a VM under pressure gives nothing (rule 6)."""
        allocation = self.allocation()
        return replace(allocation, minimum=allocation.current) if self.pressure.sentence else allocation

    def status(self) -> VMStatus:
        """What the API says of this VM."""
        spec, allocation = self.intent.spec, self.allocation()
        stopped = self.intent.phase is Phase.STOPPED
        return VMStatus(
            name=self.name,
            host=self._host,
            domain=self.domain,
            state=self._state(),
            priority=spec.priority,
            nominal=spec.nominal,
            minimum=Vector.of(allocation.minimum),
            ceiling=spec.ceiling,
            current=Vector() if stopped else self.intent.committed,
            overhead_mib=allocation.overhead_mib,
            generation=self.intent.generation,
            guest_connected=self.link.connected,
            template=spec.template,
            boot_memory_mib=self.intent.boot_mib,
            pressure=self.pressure.sentence or None,
            asks=Vector.of(self.asks if self.pressure.sentence else ZERO),
            drift_total=self.upkeep.drift_total,
            throttled_share=self.upkeep.throttled_share,
            held=self.deflated and self.intent.cause is not None and self.intent.cause.kind == "target",
            start_size=self.intent.committed if stopped else None,
            at_next_start=self.intent.at_next_start,
            adopted=self.intent.adopted is not None,
        )

    def _state(self) -> VMState:
        if self.condemned and self.running and self.intent.phase is not Phase.DELETING:
            return VMState.STOPPING
        if self.running or self.intent.phase in (Phase.CREATING, Phase.STARTING):
            return STATES[self.intent.phase]
        return VMState.STOPPED

    async def store(self, **fields: object) -> None:
        """Change the intent: in the domain's metadata first, then here."""
        intent = self.intent.changed(**fields)
        await self._write(intent)
        self.intent = intent

    async def _write(self, intent: Intent) -> None:
        attempted = intent.committed.vector()
        self._attempted = self._attempted.larger(attempted) if self.uncertain else attempted
        self.uncertain = True
        await self.hypervisor.write_intent(self.domain, intent)
        self.uncertain = False

    async def enforce_at_start(self) -> None:
        """Hold a VM whose guest does not run yet to its committed size: all vCPUs count.

        :raises HypervisorError: a limit could not be set.
        """
        committed, nominal = self.intent.committed.vector(), self.intent.spec.nominal.vector()
        reading = await self.hypervisor.read(self.domain)
        await self.hypervisor.set_quota(self.domain, quota_of(committed.cpu_cores, reading.vcpus))
        for component, limit in (
            ("disk_mib_s", self.hypervisor.set_disk),
            ("network_mib_s", self.hypervisor.set_network),
        ):
            if nominal[component] > 0 and (why := await limit(self.domain, committed[component])):
                raise HypervisorError(f"{component} cannot be held to {committed[component]:g}: {why}")

    async def greeted(self, limit_s: float) -> None:
        """Wait until the guest has said hello, or ``limit_s`` at most: without it only its CPU can be taken."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(limit_s):
                await self._greeted.wait()

    def summary(self) -> VMOutcome:
        """What became of the VM's latest operation, from its intent alone: the ledger went with an earlier agent."""
        before = self.intent.cause.before if self.intent.cause else self.intent.committed
        # What is still to be given is committed already, but nobody has verified it.
        reached = before if self.intent.phase in (Phase.DEFLATING, Phase.REINFLATING) else self.intent.committed
        missing = shortfall(before.vector(), reached.vector(), self.intent.target.vector())
        return VMOutcome(
            name=self.name,
            generation=self.intent.generation,
            before=before,
            after=self.intent.committed,
            target=self.intent.target,
            shortfall=Vector.of(missing),
            ledger=(),
            seconds=0.0,
            sentence=f"has {self.intent.committed.vector()}, found after a restart of the agent",
        )

    def failed(self, why: str) -> VMOutcome:
        """The outcome of an operation that could not be carried out; the VM counts as before."""
        return self.summary().model_copy(update={"sentence": f"could not be resized: {why}"})

    def plan(self, target: ResourceVector, cause: Cause, generation: int | None = None) -> None:
        """Decide what is going to happen; :meth:`persist` it before anything does.

        What will be given is committed at once, so that nobody else counts on it.
        """
        committed = self.intent.committed.vector()
        grows = any(wanted > has for wanted, has in zip(target, committed, strict=True))
        shrinks = any(wanted < has for wanted, has in zip(target, committed, strict=True))
        self._unplanned = self.intent
        self.intent = self.intent.changed(
            generation=self.intent.generation + 1 if generation is None else generation,
            phase=Phase.DEFLATING if shrinks or not grows else Phase.REINFLATING,
            target=Vector.of(target),
            committed=Vector.of(committed.larger(target)),
            cause=cause,
        )

    async def persist(self) -> None:
        """Store the plan durably.

        :raises HypervisorError: it could not be stored.
        """
        await self._write(self.intent)

    async def unplan(self) -> None:
        """Take back a plan of which nothing was carried out."""
        self.intent = self._unplanned
        with contextlib.suppress(HypervisorError):
            await self.persist()

    async def resize(self, deadline_s: float, mode: Mode = Mode.ASK) -> VMOutcome:
        """Bring the VM to its intent's target: deflate what is too much, then reinflate what is missing.

        :raises HypervisorError: the size cannot be read; the intent stays, so that it is tried again.
        """
        cause = self.intent.cause
        outcome = await self.reach(self.intent.target.vector(), deadline_s, mode)
        if not outcome.measured:
            # It stays charged with all that it may have been given.
            raise HypervisorError(f"its size could not be read at the end: {outcome.sentence}")
        previous = cause.before.vector() if cause is not None else outcome.before.size
        await self.commit(outcome, previous, outcome.after.size, cause.request_id if cause is not None else "resize")
        return VMOutcome.of(self.name, self.intent.generation, outcome)

    async def reach(self, target: ResourceVector, deadline_s: float, mode: Mode) -> Outcome:
        """Bring the VM to a size, without committing it.

        :raises HypervisorError: its size cannot be read.
        """
        outcome = await self._reach(target, deadline_s, mode)
        self._unsure = not outcome.measured
        return outcome

    async def _reach(self, target: ResourceVector, deadline_s: float, mode: Mode) -> Outcome:
        self._clear_interrupt()
        cause = self.intent.cause
        executor = self._executor(f"{cause.request_id if cause is not None else 'repair'}{self._attempt()}")
        if self._unsure:
            await self.hypervisor.call_off(self.domain)
        self._unsure = True
        before, _ = await executor.measure()
        found = await self.hypervisor.findings(self.domain)
        mechanisms = Mechanisms.of(self._heard(found, NEED_THE_GUEST_TO_TAKE))
        to_give = Mechanisms.of(self._heard(found, NEED_THE_GUEST))
        if before.size.fits_in(target) and not target.fits_in(before.size):
            return await self._run(await self._reinflation(before, target, deadline_s, to_give), executor)
        asking = mode_of_asking(_now(), mode, self._refusal)
        if asking is None:
            mechanisms = mechanisms.without([Mechanism.APPLICATION], "refused a while ago and is left alone until then")
        if self.pressure.sentence:
            self.interrupt.ask(self.pressure.sentence)
        if self.intent.spec.priority is Priority.FIXED:
            mechanisms = mechanisms.without([Mechanism.APPLICATION], "an application of a fixed VM is never asked")
        self._taking = True
        try:
            down = await self._run(Cascade(before, target, deadline_s, mechanisms, asking or mode), executor)
        finally:
            self._taking = False
        self._refusal = executor.refusal or self._refusal
        if not down.after.size.fits_in(before.size) or down.after.size != before.size:
            self.pressure.deflated()
        if target.fits_in(down.after.size) or before.size.fits_in(target):
            return down
        # Down in one component and up in another: the second half, once what was taken has been taken.
        self._clear_interrupt()
        return joined(down, await self._run(await self._reinflation(down.after, target, deadline_s, to_give), executor))

    def _clear_interrupt(self) -> None:
        """What was asked of an earlier resize is over, but for a removal."""
        self.interrupt.clear()
        if self.condemned:
            self.interrupt.ask(self.condemned)

    def condemn(self, why: str) -> None:
        """Stop the resize that is under way, and each one that follows."""
        self.condemned = why
        self.interrupt.ask(why)

    async def _reinflation(
        self, before: Bound, target: ResourceVector, deadline_s: float, mechanisms: Mechanisms
    ) -> Reinflation:
        plugged = (await self.hypervisor.read(self.domain)).vcpus
        # What ACPI unplug took can be plugged again: a VM starts with all that its nominal size asks for.
        present = max(plugged, math.ceil(self.intent.spec.nominal.cpu_cores))
        return Reinflation(before, target, self.intent.boot_mib, present, deadline_s, mechanisms, plugged)

    async def commit(self, outcome: Outcome, previous: ResourceVector, reached: ResourceVector, cause: str) -> None:
        """Write down the size that was measured and hold the VM to it from outside."""
        row = self.allocation()
        size = reached.smaller(row.upper)
        if outcome.before.cpu_cores > outcome.target.cpu_cores > size.cpu_cores:
            # CPUs went off line under the old quota and the new one is not set yet: no reason to take more than asked.
            size = size.with_component("cpu_cores", outcome.target.cpu_cores)
        if size.cpu_cores > row.current.cpu_cores:
            # CPUs of which nobody can tell whether they are on line: a quota holds it to what it is charged with.
            size = size.with_component("cpu_cores", row.current.cpu_cores)
        # Whatever a resize that broke off has left: it is charged with its minimum at least, and its quota set to that.
        size = size.larger(row.minimum)
        bound = outcome.after
        quota = quota_of(size.cpu_cores, bound.cpus_online)
        if quota != bound.quota_per_cpu or bound.size.cpu_cores > size.cpu_cores:
            await self.hypervisor.set_quota(self.domain, quota)
        await self.hypervisor.prepare_start(self.domain, size)
        # Before the commit: a kill in between repeats the change, which is recognised, instead of losing it.
        await self._on_change(self.name, previous, size, cause)
        await self.store(phase=Phase.SETTLED, committed=Vector.of(size))
        self._log.info("resized", request_id=cause, reached=str(size), why=outcome.sentence)

    async def _run(self, machine: Cascade | Reinflation, executor: Executor) -> Outcome:
        with structlog.contextvars.bound_contextvars(vm=self.name):
            return await run(machine, executor, self.interrupt)

    async def findings(self) -> tuple[Finding, ...]:
        """What can be used on this VM now, and why not where it cannot.

        :raises HypervisorError: the domain cannot be examined.
        """
        return self._heard(await self.hypervisor.findings(self.domain), NEED_THE_GUEST_TO_TAKE)

    async def mechanisms(self) -> Mechanisms:
        """The findings as the cascade takes them."""
        return Mechanisms.of(await self.findings())

    def _heard(self, found: Sequence[Finding], need: Collection[Mechanism]) -> tuple[Finding, ...]:
        """The findings, without what needs a guest that answers if this one does not."""
        silent = "the guest agent is not connected"
        return tuple(
            replace(finding, available=False, reason=silent)
            if finding.available and finding.mechanism in need and not self.link.connected
            else finding
            for finding in found
        )

    def _executor(self, request_id: str) -> Executor:
        nominal = self.intent.spec.nominal.vector()
        return Executor(self.domain, self.hypervisor, self.link, request_id, nominal, self.pressure.observe)

    # --- looking after ---------------------------------------------------------------------------------------------

    def _hello(self, hello: Hello) -> None:
        """The guest agent has come (back): after a reset all CPUs are on line again, so the state is applied anew."""
        self._greeted.set()
        self.stir()

    def _noticed(self, notice: Notice) -> None:
        """The guest says something of its own accord."""
        self.pressure.heard(notice)
        if self.pressure.sentence:
            self.stir()

    def _pressed(self, sentence: str) -> None:
        """Pressure has begun: what takes is stopped; what can be spared is given once the watch has heard of it."""
        if self._taking:
            self.interrupt.ask(sentence)
        self.stir()

    def stir(self) -> None:
        """Have the VM looked at closely, soon."""
        self.upkeep.unsettled = True
        self.upkeep.pace.held()
        self._on_stir()


def _now() -> float:
    return asyncio.get_running_loop().time()
