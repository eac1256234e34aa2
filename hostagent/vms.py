"""One managed VM: its intent, its guest, and the operations on it, one at a time.

The order of writes makes a kill at any instruction harmless (rule 7): the intent is stored before the first action,
``committed`` is raised before anything is given and lowered only after the fall of the bound was measured.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Sequence

import structlog

from deflation.allocations import Allocation
from deflation.cascade import Cascade
from deflation.guest_messages import Hello
from deflation.instructions import Finish, Instruction, Mechanisms, Mode, Outcome
from deflation.ledger import Layer
from deflation.messages import Vector, VMOutcome, VMState, VMStatus
from deflation.reinflation import Reinflation
from deflation.resources import ResourceVector
from hostagent.errors import HypervisorError
from hostagent.eternal import guarded
from hostagent.executor import Executor, guest_status
from hostagent.guestlink import GuestLink
from hostagent.hypervisor import Hypervisor
from hostagent.intents import Cause, Intent, Phase

#: Host-side CPU time that a parked vCPU may use between two looks, in seconds; more means that it runs.
PARKED_S = 0.05

#: What the API calls a running VM in each phase.
STATES = {
    Phase.CREATING: VMState.STARTING,
    Phase.SETTLED: VMState.RUNNING,
    Phase.DEFLATING: VMState.DEFLATING,
    Phase.REINFLATING: VMState.REINFLATING,
    Phase.DELETING: VMState.STOPPED,
}

log = structlog.get_logger()


class ManagedVM:
    """A VM of ours. Operations must not overlap: the host serialises them.

    :param on_change: called with each change before it is committed: (name, size before, size after, cause).
    """

    def __init__(
        self,
        domain: str,
        intent: Intent,
        host: str,
        hypervisor: Hypervisor,
        overhead_mib: float,
        on_change: Callable[[str, ResourceVector, ResourceVector, str], Awaitable[None]],
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
        self._busy = asyncio.Lock()
        #: Host-side seconds of each parked vCPU at the last look, to see whether it runs.
        self._parked: dict[int, float] = {}
        #: How often something had to be put right that somebody else had changed.
        self.drift_total = 0
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

    async def measured(self) -> ResourceVector:
        """The bound now.

        :raises HypervisorError: it cannot be read.
        """
        bound, _ = await self._executor("").measure()
        return bound.size

    async def enforce(self) -> None:
        """Hold the VM to its committed CPU size from outside.

        :raises HypervisorError: the quota could not be set.
        """
        await self._executor("").enforce_cpu(self.intent.committed.cpu_cores)

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

    async def prepare(self, target: ResourceVector, cause: Cause, generation: int | None = None) -> None:
        """Write down what is going to happen, before it does.

        What will be given is committed at once, so that nobody else counts on it.
        """
        committed = self.intent.committed.vector()
        grows = any(wanted > has for wanted, has in zip(target, committed, strict=True))
        shrinks = any(wanted < has for wanted, has in zip(target, committed, strict=True))
        await self.store(
            generation=self.intent.generation + 1 if generation is None else generation,
            phase=Phase.DEFLATING if shrinks or not grows else Phase.REINFLATING,
            target=Vector.of(target),
            committed=Vector.of(committed.larger(target)),
            cause=cause,
        )

    async def resize(self, deadline_s: float, mode: Mode = Mode.ASK) -> VMOutcome:
        """Bring the VM to its intent's target: deflate what is too much, then reinflate what is missing.

        :raises HypervisorError: the size cannot be read; the intent stays, so that it is tried again.
        """
        async with self._busy:
            return await self._resize(deadline_s, mode)

    async def _resize(self, deadline_s: float, mode: Mode) -> VMOutcome:
        cause = self.intent.cause
        target = self.intent.target.vector()
        executor = self._executor(cause.request_id if cause else "")
        before, _ = await executor.measure()
        outcome: Outcome | None = None
        if not before.size.fits_in(target):
            outcome = await self._run(executor, Cascade(before, target, deadline_s, self._mechanisms(), mode))
        elif not target.fits_in(before.size):
            reading = await self._hypervisor.read(self.domain)
            outcome = await self._run(
                executor,
                Reinflation(before, target, self.intent.boot_mib, reading.vcpus, deadline_s, self._mechanisms()),
            )
        else:
            cascade = Cascade(before, target, deadline_s, self._mechanisms(), mode)
            outcome = await self._run(executor, cascade)
        if not target.fits_in(outcome.after.size) and not outcome.before.size.fits_in(target):
            # Down in one component and up in another: the second half, once what was taken has been taken.
            reading = await self._hypervisor.read(self.domain)
            back = Reinflation(
                outcome.after, target, self.intent.boot_mib, reading.vcpus, deadline_s, self._mechanisms()
            )
            await self._run(executor, back)
            outcome = _joined(outcome, back.outcome)
        return await self._commit(executor, outcome)

    async def _commit(self, executor: Executor, outcome: Outcome) -> VMOutcome:
        """Write down the size that was measured and hold the VM to it from outside."""
        size = outcome.after.size.smaller(self.allocation().upper)
        if outcome.before.cpu_cores > outcome.target.cpu_cores > size.cpu_cores:
            # CPUs went off line under the old quota and the new one is not set yet: no reason to take more than asked.
            size = size.with_component("cpu_cores", outcome.target.cpu_cores)
        await executor.enforce_cpu(size.cpu_cores)
        previous = self.intent.cause.before.vector() if self.intent.cause else outcome.before.size
        cause = self.intent.cause.request_id if self.intent.cause else "settle"
        # Before the commit: a kill in between repeats the change, which is recognised, instead of losing it.
        await self._on_change(self.name, previous, size, cause)
        await self.store(phase=Phase.SETTLED, committed=Vector.of(size))
        self._log.info("resized", request_id=cause, reached=str(size), why=outcome.sentence)
        return VMOutcome.of(self.name, self.intent.generation, outcome)

    async def _run(self, executor: Executor, machine: Cascade | Reinflation) -> Outcome:
        pending: list[Instruction] = machine.start(_now())
        while True:
            (instruction,) = pending
            if isinstance(instruction, Finish):
                return instruction.outcome
            self._log.debug("step", machine=type(machine).__name__, instruction=str(instruction))
            pending = machine.handle(await executor.carry_out(instruction))

    def _mechanisms(self) -> Mechanisms:
        connected = self.link.connected
        silent = "the guest agent is not connected"
        return Mechanisms(
            application=connected,
            guest=connected,
            reasons={} if connected else {Layer.APPLICATION: silent, Layer.GUEST: silent},
        )

    def _executor(self, request_id: str) -> Executor:
        return Executor(self.domain, self._hypervisor, self.link, request_id)

    # --- drift ---------------------------------------------------------------------------------------------------

    def _hello(self, hello: Hello) -> None:
        """The guest agent has come (back): after a reset all CPUs are on line again, so apply the state anew."""
        self._greeted.set()
        task = asyncio.create_task(self._settle(), name=f"settle:{self.name}")
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _settle(self) -> None:
        async with self._busy:
            if self.intent.phase is not Phase.SETTLED:
                return
            try:
                size = await self.measured()
                if not size.fits_in(self.intent.committed.vector() + ResourceVector(cpu_cores=0.005, memory_mib=1.0)):
                    self.drift_total += 1
                    self._log.warning("the VM holds more than it should; put right", has=str(size))
                    await self._resize(30.0, Mode.ASK)
                else:
                    await self.enforce()
            except HypervisorError as error:
                self._log.warning("the VM's state could not be applied", why=str(error))

    async def watch(self) -> None:
        """Look whether a vCPU that the guest has parked runs nevertheless; then the quota counts all that are plugged.

        docs/contracts.md, accounting: an off-lined CPU is a promise of the guest.
        """
        if self._busy.locked() or self.intent.phase is not Phase.SETTLED or not self.running:
            self._parked = {}
            return
        status = await guest_status(self.link)
        try:
            reading = await self._hypervisor.read(self.domain)
            online = set(status.cpus.online) if status is not None else set(range(reading.vcpus))
            earlier, self._parked = self._parked, parked_seconds(reading.vcpu_seconds, online)
            moving = [cpu for cpu, seconds in self._parked.items() if seconds - earlier.get(cpu, seconds) > PARKED_S]
            allowed = self.intent.committed.cpu_cores
            if moving and (reading.quota_per_cpu or 1.0) * reading.vcpus > allowed + 0.005:
                self.drift_total += 1
                self._log.warning("vCPUs that the guest reports as off line run; quota over all", vcpus=moving)
                await self._hypervisor.set_quota(self.domain, allowed / reading.vcpus)
        except HypervisorError as error:
            self._log.warning("the VM could not be watched", why=str(error))


def parked_seconds(vcpu_seconds: Sequence[float], online: set[int]) -> dict[int, float]:
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
