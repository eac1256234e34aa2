"""One managed VM: its intent, its guest, and the operations on it, one at a time.

The order of writes makes a kill at any instruction harmless (rule 7): the intent is stored before the first action,
``committed`` is raised before anything is given and lowered only after the fall of the bound was measured.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import replace

import structlog

from deflation.allocations import Allocation
from deflation.bounds import Bound
from deflation.cascade import Cascade
from deflation.guest_messages import Hello
from deflation.instructions import Mode, Outcome
from deflation.ledger import Layer
from deflation.mechanisms import LAYER_OF, Mechanism, Mechanisms
from deflation.messages import Vector, VMOutcome, VMState, VMStatus
from deflation.reconcile import Repair, RepairPace, Resize, SetDisk, SetNetwork, SetQuota, Sight, quota_of, repairs
from deflation.reinflation import Reinflation
from deflation.resources import ResourceVector
from hostagent.errors import HypervisorError
from hostagent.eternal import guarded
from hostagent.executor import Executor, guest_status
from hostagent.guestlink import GuestLink
from hostagent.hypervisor import Hypervisor
from hostagent.intents import Cause, Intent, Phase
from hostagent.running import Interrupt, run

#: Host-side CPU time that a parked vCPU may use between two looks, in seconds; more means that it runs.
PARKED_S = 0.05
#: A guest that has booted just now is still taking its memory.
YOUNG_S = 30.0
#: Time to bring a VM back to its committed size, in seconds.
REPAIR_DEADLINE_S = 30.0
#: What cannot be used on a guest that does not answer: without a fresh reading no memory is taken (rule 5).
NEED_THE_GUEST = (
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
}

log = structlog.get_logger()


#: Tells of a decision: (VM, kind, sentence, inputs).
Note = Callable[[str, str, str, Mapping[str, object]], None]


class ManagedVM:
    """A VM of ours. All that changes its size or its intent runs under its :attr:`lock`.

    :param on_change: called with each change before it is committed: (name, size before, size after, cause).
    :param on_stir: called when the VM should be looked at soon.
    :param note: told of each decision.
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
    ) -> None:
        self.domain = domain
        self.intent = intent
        self.running = True
        self._host = host
        self._hypervisor = hypervisor
        self._overhead_mib = overhead_mib
        self._on_change = on_change
        self._greeted = asyncio.Event()
        self.link = GuestLink(self.name, lambda: hypervisor.guest_channel(domain), self._hello)
        self._tasks: set[asyncio.Task[None]] = set()
        self._unplanned = intent
        self._on_stir = on_stir
        self._note = note
        self._attempt = attempt
        #: Held by whoever changes the VM's size or its intent.
        self.lock = asyncio.Lock()
        #: Stops the deflation that is under way.
        self.interrupt = Interrupt()
        #: Whether the VM is to be looked at closely as soon as possible.
        self.unsettled = True
        #: CPUs on line at the guest's last word; None: not known.
        self.online: frozenset[int] | None = None
        #: Host-side seconds of each parked vCPU at the last look, to see whether it runs.
        self._parked: dict[int, float] = {}
        self._parked_running: tuple[int, ...] = ()
        #: Why the VM is under pressure; empty if it is not.
        self.pressure = ""
        #: How often something had to be put right that somebody else had changed, and when it may be tried again.
        self.drift_total = 0
        self.pace = RepairPace()
        self._log = log.bind(vm=self.name, host=host)

    @property
    def name(self) -> str:
        return self.intent.spec.name

    def start(self) -> None:
        """Begin to talk to the guest."""
        self._tasks.add(asyncio.create_task(guarded(self.link.run()), name=f"guest:{self.name}"))

    async def stop(self) -> None:
        """Stop talking to the guest; the domain stays as it is."""
        tasks, self._tasks = self._tasks, set()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def allocation(self) -> Allocation:
        """The row that policies read; its current size is what is committed."""
        return self.intent.spec.allocation(self.intent.committed.vector(), self._overhead_mib)

    def row(self) -> Allocation:
        """The row by which a need is split: a VM under pressure gives nothing (rule 6)."""
        allocation = self.allocation()
        return replace(allocation, minimum=allocation.current) if self.pressure else allocation

    def status(self) -> VMStatus:
        """What the API says of this VM."""
        spec, allocation = self.intent.spec, self.allocation()
        return VMStatus(
            name=self.name,
            host=self._host,
            domain=self.domain,
            state=self._state(),
            priority=spec.priority,
            nominal=spec.nominal,
            minimum=Vector.of(allocation.minimum),
            ceiling=spec.ceiling,
            current=self.intent.committed,
            overhead_mib=self._overhead_mib,
            generation=self.intent.generation,
            guest_connected=self.link.connected,
            template=spec.template,
            boot_memory_mib=self.intent.boot_mib,
        )

    def _state(self) -> VMState:
        if self.running or self.intent.phase is Phase.CREATING:
            return STATES[self.intent.phase]
        return VMState.STOPPED

    async def store(self, **fields: object) -> None:
        """Change the intent: in the domain's metadata first, then here."""
        intent = self.intent.changed(**fields)
        await self._hypervisor.write_intent(self.domain, intent)
        self.intent = intent

    async def enforce(self) -> None:
        """Hold the VM to its committed CPU size from outside.

        :raises HypervisorError: the quota could not be set.
        """
        await self._executor("").enforce_cpu(self.intent.committed.cpu_cores)

    async def enforce_at_start(self) -> None:
        """Hold a VM whose guest does not run yet to its committed size: all vCPUs count.

        :raises HypervisorError: a limit could not be set.
        """
        committed, nominal = self.intent.committed.vector(), self.intent.spec.nominal.vector()
        reading = await self._hypervisor.read(self.domain)
        await self._hypervisor.set_quota(self.domain, quota_of(committed.cpu_cores, reading.vcpus))
        if nominal.disk_mib_s > 0:
            await self._hypervisor.set_disk(self.domain, committed.disk_mib_s)
        if nominal.network_mib_s > 0:
            await self._hypervisor.set_network(self.domain, committed.network_mib_s)

    async def greeted(self, limit_s: float) -> None:
        """Wait until the guest has said hello, or ``limit_s`` at most: without it only its CPU can be taken."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(limit_s):
                await self._greeted.wait()

    def summary(self) -> VMOutcome:
        """What became of the VM's latest operation, from its intent alone: the ledger went with an earlier agent."""
        before = self.intent.cause.before if self.intent.cause else self.intent.committed
        missing = _shortfall(before.vector(), self.intent.committed.vector(), self.intent.target.vector())
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
        await self._hypervisor.write_intent(self.domain, self.intent)

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
        outcome = await self._reach(self.intent.target.vector(), deadline_s, mode)
        previous = cause.before.vector() if cause is not None else outcome.before.size
        await self._commit(outcome, previous, outcome.after.size, cause.request_id if cause is not None else "resize")
        return VMOutcome.of(self.name, self.intent.generation, outcome)

    async def _reach(self, target: ResourceVector, deadline_s: float, mode: Mode) -> Outcome:
        self.interrupt.clear()
        cause = self.intent.cause
        executor = self._executor(f"{cause.request_id}{self._attempt()}" if cause else "")
        before, _ = await executor.measure()
        if before.size.fits_in(target) and not target.fits_in(before.size):
            return await self._run(await self._reinflation(before, target, deadline_s), executor)
        down = await self._run(Cascade(before, target, deadline_s, self._mechanisms(), mode), executor)
        if target.fits_in(down.after.size) or before.size.fits_in(target):
            return down
        # Down in one component and up in another: the second half, once what was taken has been taken.
        return _joined(down, await self._run(await self._reinflation(down.after, target, deadline_s), executor))

    async def _reinflation(self, before: Bound, target: ResourceVector, deadline_s: float) -> Reinflation:
        reading = await self._hypervisor.read(self.domain)
        return Reinflation(before, target, self.intent.boot_mib, reading.vcpus, deadline_s, self._mechanisms())

    async def _commit(self, outcome: Outcome, previous: ResourceVector, reached: ResourceVector, cause: str) -> None:
        """Write down the size that was measured and hold the VM to it from outside."""
        size = reached.smaller(self.allocation().upper)
        if outcome.before.cpu_cores > outcome.target.cpu_cores > size.cpu_cores:
            # CPUs went off line under the old quota and the new one is not set yet: no reason to take more than asked.
            size = size.with_component("cpu_cores", outcome.target.cpu_cores)
        await self._executor(cause).enforce_cpu(size.cpu_cores)
        await self._hypervisor.prepare_start(self.domain, size)
        # Before the commit: a kill in between repeats the change, which is recognised, instead of losing it.
        await self._on_change(self.name, previous, size, cause)
        await self.store(phase=Phase.SETTLED, committed=Vector.of(size))
        self._log.info("resized", request_id=cause, reached=str(size), why=outcome.sentence)

    async def _run(self, machine: Cascade | Reinflation, executor: Executor) -> Outcome:
        with structlog.contextvars.bound_contextvars(vm=self.name):
            return await run(machine, executor, self.interrupt)

    def _mechanisms(self) -> Mechanisms:
        connected = self.link.connected
        silent = "the guest agent is not connected"
        return Mechanisms({} if connected else dict.fromkeys(NEED_THE_GUEST, silent))

    def _executor(self, request_id: str) -> Executor:
        return Executor(self.domain, self._hypervisor, self.link, request_id, self.intent.spec.nominal.vector())

    # --- looking after ---------------------------------------------------------------------------------------------

    def _hello(self, hello: Hello) -> None:
        """The guest agent has come (back): after a reset all CPUs are on line again, so the state is applied anew."""
        self._greeted.set()
        self.stir()

    def stir(self) -> None:
        """Have the VM looked at closely, soon."""
        self.unsettled = True
        self.pace.held()
        self._on_stir()

    def glance(self, vcpus: int, vcpu_seconds: Sequence[float]) -> None:
        """Take note of what can be seen of all VMs at once: whether a parked vCPU runs nevertheless."""
        online = self.online if self.online is not None else frozenset(range(vcpus))
        earlier, self._parked = self._parked, parked_seconds(vcpu_seconds, online)
        running = tuple(cpu for cpu, seconds in self._parked.items() if seconds - earlier.get(cpu, seconds) > PARKED_S)
        if running != self._parked_running and running:
            self.unsettled = True
        self._parked_running = running or tuple(cpu for cpu in self._parked_running if cpu in self._parked)

    async def look(self) -> tuple[Repair, ...]:
        """Compare what the VM has with what it should have, and put right what differs. Under the VM's lock.

        :returns: what was put right.
        :raises HypervisorError: the host's side cannot be read or set.
        """
        self.unsettled = False
        status = await guest_status(self.link)
        reading = await self._hypervisor.read(self.domain)
        nominal, committed = self.intent.spec.nominal.vector(), self.intent.committed.vector()
        self.online = frozenset(status.cpus.online) if status is not None else None
        sight = Sight(
            reading.bound(len(status.cpus.online) if status is not None else None, nominal),
            reading.vcpus,
            status is not None,
            self._parked_running,
            reading.disk_mib_s,
            reading.network_mib_s,
            young=status is not None and status.uptime_s < YOUNG_S,
        )
        needed = repairs(committed, nominal, sight)
        now = _now()
        if not needed:
            self.pace.held()
        elif self.pace.due(now):
            self.pace.tried(now)
            self.drift_total += 1
            for repair in needed:
                self._note(self.name, "repair", repair.why, {"committed": committed.as_dict()})
                await self._put_right(repair, committed, sight)
            return needed
        return ()

    async def _put_right(self, repair: Repair, committed: ResourceVector, sight: Sight) -> None:
        match repair:
            case SetQuota():
                await self._hypervisor.set_quota(self.domain, repair.cores_per_cpu)
            case SetDisk():
                await self._hypervisor.set_disk(self.domain, repair.disk_mib_s)
            case SetNetwork():
                await self._hypervisor.set_network(self.domain, repair.network_mib_s)
            case Resize():
                if not sight.online_known:
                    return
                outcome = await self._reach(repair.target, REPAIR_DEADLINE_S, Mode.ASK)
                # What the guest does not give back is charged, whatever was agreed: only what is verified counts.
                await self._commit(outcome, committed, outcome.after.size.larger(committed), "repair")


def parked_seconds(vcpu_seconds: Sequence[float], online: frozenset[int]) -> dict[int, float]:
    """The host-side CPU time of each vCPU that the guest calls off line: what one used before does not count."""
    return {cpu: seconds for cpu, seconds in enumerate(vcpu_seconds) if cpu not in online}


def _shortfall(before: ResourceVector, after: ResourceVector, target: ResourceVector) -> ResourceVector:
    """What the target still asks for, in the direction in which each component was to go."""
    return ResourceVector(
        *(
            max((now - goal) if was >= goal else (goal - now), 0.0)
            for was, now, goal in zip(before, after, target, strict=True)
        )
    )


def _joined(down: Outcome, up: Outcome | None) -> Outcome:
    """One outcome for a resize that went down in one component and up in another."""
    if up is None:
        return down
    return Outcome(
        before=down.before,
        after=up.after,
        target=down.target,
        ledger=down.ledger + up.ledger,
        shortfall=down.shortfall + up.shortfall,
        seconds=down.seconds + up.seconds,
        sentence=f"{down.sentence}; {up.sentence}",
    )


def _now() -> float:
    return asyncio.get_running_loop().time()
