"""Managed VM: its intent, its guest, and the operations on it, one at a time."""

from __future__ import annotations

import asyncio
import contextlib
import math
from dataclasses import replace
from typing import Any

from ebbtide.deflation.allocations import Allocation, Priority
from ebbtide.deflation.cascade.instructions import GuestKind, Mode
from ebbtide.deflation.cascade.readiness import NotYet, Readiness, Silence
from ebbtide.deflation.cascade.reconcile import SLACK, cap_of, quota_of
from ebbtide.deflation.resources import ZERO, ResourceVector
from ebbtide.messages.common import Vector
from ebbtide.messages.explanations import DecisionKind
from ebbtide.messages.guest import Hello, Notice, PreemptionWithdrawn
from ebbtide.messages.operations import VMOutcome
from ebbtide.messages.vms import NotYetDeflatable, VMState, VMStatus
from hostagent.clock import now as _now
from hostagent.errors import GuestRefused, GuestUnreachable, HypervisorError
from hostagent.state.intents import Intent, Phase
from hostagent.supervised_task import guarded
from hostagent.vm.drift_repair import DriftRepair
from hostagent.vm.guest_link import UNKNOWN_METHOD, GuestLink
from hostagent.vm.guest_pressure import GuestPressure
from hostagent.vm.intent_record import IntentRecord
from hostagent.vm.notice import RunningNotice
from hostagent.vm.resizer import HostSide, Resizer
from hostagent.vm.yielding_lock import YieldingLock

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
    Phase.LEAVING: VMState.MIGRATING,
    Phase.ARRIVING: VMState.MIGRATING,
}
#: For telling a guest that it is not preempted any more, seconds.
TOLD_LIMIT_S = 5.0
#: So often at the most a guest is told so that says it has a notice which nobody knows of, seconds.
OVER_PAUSE_S = 60.0
#: So often at the most one is looked at because its guest says what it wants, in seconds: it is not given more any
#: sooner (reconciler, PRESSURE_PAUSE_S).
NOTICE_PAUSE_S = 1.0
#: Phases in which a VM is on its way between two hosts.
MOVING = (Phase.LEAVING, Phase.ARRIVING)
#: Kinds of commands after which a VM may be off.
TURN_OFF = ("stop", "start", "adopt", "release", "resize", "depart")


class ManagedVM:
    """A VM of ours. All that changes its size or its intent runs under its :attr:`lock`."""

    def __init__(self, domain: str, intent: Intent, host: HostSide, running: bool = True) -> None:
        self.domain = domain
        self.running = running
        #: Whether its vCPUs stand still although it is on: it keeps what it has.
        self.paused = False
        self.host = host
        #: Held by the task that changes the VM's size or its intent.
        self.lock = YieldingLock(lambda: self.resizer.give_way())
        self.record = IntentRecord(domain, intent, host.hypervisor, host.overhead_mib)
        self.link = GuestLink(
            self.name, lambda: host.hypervisor.guest_channel(domain), self._on_hello, on_notice=self._on_notice
        )
        self.pressure = GuestPressure(
            self.allocation,
            self._on_pressure,
            lambda kind, sentence, inputs: host.note(self.name, kind, sentence, inputs),
        )
        #: The notice of a preemption that its guest has now.
        self.notice = RunningNotice()
        #: Of its domain; None until it was first surveyed.
        self.uuid: str | None = None
        #: What its process has in the host's memory, MiB, by the last `Host.sample`; None: it is not known.
        self.resident_mib: float | None = None
        #: What the VM wants under pressure and its host cannot spare.
        self.asks = ZERO
        self.resizer = Resizer(domain, self.record, self.link, self.pressure, host, lambda: self.lock.is_wanted)
        self.drift_repair = DriftRepair(self.resizer)
        #: What was said of it last, and what that was made of.
        self._told: tuple[dict[str, Any], VMStatus | None] = {}, None
        #: Whether it has less than it was sold, by which intent.
        self._less: tuple[Intent | None, bool] = None, False
        #: The last row, and what it was made of.
        self._row: tuple[tuple[Allocation, float | None], Allocation] | None = None
        self._hello = asyncio.Event()
        #: How many wait for it.
        self._awaiting = 0
        self._readiness = Readiness()
        #: Until when what its guest says has it looked at no more (monotonic seconds).
        self._noticed_until = -math.inf
        #: Until when it is not told that a notice is over which only its guest knows (monotonic seconds).
        self._over_until = -math.inf
        self._telling: asyncio.Task[None] | None = None
        self._link_task: asyncio.Task[None] | None = None

    @property
    def intent(self) -> Intent:
        return self.record.intent

    @property
    def name(self) -> str:
        return self.intent.spec.name

    def start(self) -> None:
        """Begin to talk to the guest, if that has not begun."""
        if self._link_task is None:
            self._link_task = asyncio.create_task(guarded(self.link.run), name=f"guest:{self.name}")

    async def stop(self) -> None:
        """Stop talking to the guest; the domain stays as it is."""
        task, self._link_task = self._link_task, None
        if task is not None:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    # --- what it has ---------------------------------------------------------------------------------------------

    def allocation(self) -> Allocation:
        """The row that policies read; its current size is what is committed, or may yet be."""
        return self.record.allocation()

    @property
    def deflated(self) -> bool:
        """Whether the VM has less than it was sold."""
        intent = self.intent
        if self._less[0] is not intent:
            self._less = intent, not intent.spec.nominal.vector().fits_in(intent.committed.vector())
        return self._less[1]

    @property
    def resizable(self) -> bool:
        """Whether its size may be changed now, also where its last resize is still to be tried again."""
        return self.running and self.intent.phase in (Phase.SETTLED, Phase.DEFLATING, Phase.REINFLATING)

    @property
    def is_fixed(self) -> bool:
        """Whether it never gives anything: then nobody who takes from others waits for it."""
        return self.intent.spec.priority is Priority.FIXED

    @property
    def _gives_nothing(self) -> bool:
        """A VM under pressure gives nothing (rule 6), nor does one that is paused, moves, comes up or goes."""
        return not self.resizable or bool(self.pressure.sentence or self.resizer.terminating)

    def row_for_room(self) -> Allocation:
        """The row by which room is shared that nobody has named a VM for: up to the size that a target holds it to."""
        row, held = self.allocation(), self.intent.held_size
        if held is None or row.ceiling is not None:
            return row
        return replace(row, nominal=row.current.larger(held.vector()).larger(row.minimum))

    def row(self) -> Allocation:
        """The row by which a need is split: as its minimum counts what cannot be taken now."""
        allocation = self.allocation()
        not_yet_mib = None if self._gives_nothing else self._not_yet_mib() if self._not_yet() else 0.0
        # Asked for all VMs with each report: made anew only where it is another one.
        made_of = allocation, not_yet_mib
        if self._row is None or self._row[0] != made_of:
            kept = allocation.current
            if not_yet_mib is not None:
                minimum = allocation.minimum
                kept = minimum.with_component("memory_mib", minimum.memory_mib + not_yet_mib)
            self._row = made_of, allocation.keeping(kept)
        return self._row[1]

    def guest_boots(self, why: Silence = Silence.BOOTING) -> None:
        """Its guest begins to boot: until its agent says hello, no memory can be taken from it."""
        self.link.hang_up()
        self.pressure.boots()
        if not self.link.has_channel:
            self.link.online = None  # nobody will say when they are off line again
        self.link.has_channel = True
        self._readiness.booting(_now(), why)
        self.host.request_check()

    def _not_yet(self) -> NotYet | None:
        """When its guest will answer, if it does not now but probably will."""
        if not self.running:
            if not self.paused:
                self._readiness.off()
            return None
        if not self.link.has_channel:
            return None
        return self._readiness.not_yet(_now(), self.link.connected, self.host.boots(), self.name)

    def _not_yet_mib(self) -> float:
        """The memory above its minimum that only a guest that answers can give: not what is not plugged yet."""
        return max(self.allocation().deflatable.memory_mib - self._late_mib(), 0.0)

    def _late_mib(self) -> float:
        return self.resizer.late.missing_mib(self.allocation().current.memory_mib)

    @property
    def boots_small(self) -> bool:
        """Whether it was started without all its memory, and does not have the rest yet."""
        return self.resizer.late.held_mib is not None

    def plug_is_due(self) -> bool:
        """Whether it is to have the memory that it was started without."""
        return self.running and self.resizer.late.due(_now(), bool(self.pressure.sentence))

    def _not_yet_deflatable(self) -> NotYetDeflatable | None:
        soon = self._not_yet()
        if soon is None or self._gives_nothing or (memory_mib := self._not_yet_mib()) <= 0:
            return None
        return NotYetDeflatable(memory_mib=memory_mib, in_s=math.ceil(soon.in_s), why=soon.why)

    def status(self) -> VMStatus:
        """What the API says of this VM: the same object as before where nothing has changed."""
        spec, allocation = self.intent.spec, self.allocation()
        stopped = self.intent.phase is Phase.STOPPED
        fields: dict[str, Any] = {
            "name": self.name,
            "host": self.host.host_id,
            "domain": self.domain,
            "state": self._state(),
            "priority": spec.priority,
            "nominal": spec.nominal,
            "minimum": allocation.minimum,
            "ceiling": spec.ceiling,
            "current": None if stopped else self.intent.committed,
            "overhead_mib": allocation.overhead_mib,
            "generation": self.intent.generation,
            "guest_connected": self.link.connected and self.host.is_available(),
            "guest_kind": GuestKind.AGENT if self.link.has_channel else self.resizer.ordinary.kind,
            "template": spec.template,
            "boot_memory_mib": self.intent.boot_mib,
            "not_yet": self._not_yet_deflatable(),
            "pressure": self.pressure.sentence or None,
            # Where the mode leaves pressure alone, it may be of long ago.
            "asks": self.asks.smaller(self.pressure.wants) if self.pressure.sentence else ZERO,
            "pressure_budget_s": 30.0 * round(self.pressure.budget_s / 30),
            "drift_total": self.drift_repair.drift_total,
            "contention": (self.drift_repair.contention.sentence or None) if self.running else None,
            "broken_offline_total": self.drift_repair.broken_offline_total,
            "throttled_share": self.drift_repair.throttled_share if self.running else None,
            "held": self.deflated and self.intent.held_size is not None,
            "start_size": self.intent.committed if stopped else None,
            "start_overhead_mib": self.host.overhead_mib if stopped else None,
            "saved_mib": self.intent.saved_mib if stopped else None,
            "started_at": None if stopped else self.intent.started_at,
            "off_reason": self._off_reason(),
            "at_next_start": self.intent.at_next_start,
            "adopted": self.intent.adopted is not None,
            "uuid": self.uuid,
        }
        before, status = self._told
        if status is None or fields != before:
            vectors = {name: Vector.of(fields[name]) for name in ("minimum", "asks")}
            status = VMStatus(**{**fields, **vectors, "current": fields["current"] or Vector()})
            self._told = fields, status
        return status

    def _state(self) -> VMState:
        if self.intent.phase in MOVING:
            return VMState.MIGRATING
        if self.resizer.terminating and self.running and self.intent.phase is not Phase.DELETING:
            return VMState.STOPPING
        if self.running or self.intent.phase in (Phase.CREATING, Phase.STARTING):
            return STATES[self.intent.phase]
        held = (Phase.SETTLED, Phase.DEFLATING, Phase.REINFLATING, Phase.ADMITTING)
        return VMState.PAUSED if self.paused and self.intent.phase in held else VMState.STOPPED

    def _off_reason(self) -> str | None:
        """Why it is off or paused, where no command has made it so."""
        cause, state = self.intent.cause, self._state()
        if state is VMState.PAUSED and self.intent.phase is not Phase.ADMITTING:
            return "another program has paused it; it is charged in full, and nothing is taken from it"
        asked = cause is not None and cause.kind in TURN_OFF
        if self.intent.phase is not Phase.STOPPED or asked:
            return None
        return "its domain has ended, and not by a command; it holds no room and keeps its disk"

    # --- changes -------------------------------------------------------------------------------------------------

    async def enforce_at_start(self) -> None:
        """Hold a VM whose guest does not run yet to its committed size: all vCPUs count.

        :raises HypervisorError: a limit could not be set.
        """
        committed, nominal = self.intent.committed.vector(), self.intent.spec.nominal.vector()
        sizes = self.host.hypervisor.sizes
        low = not self.is_fixed and self.intent.adopted is None
        if boots_small := low and committed.memory_mib > self.intent.boot_mib + SLACK.memory_mib:
            # What it needs to boot; the rest is plugged when its agent has said hello.
            await sizes.hold_back(self.domain)
        reading = await sizes.read(self.domain)
        cores, vcpus = committed.cpu_cores, reading.vcpus
        await sizes.set_quota(self.domain, quota_of(cores, vcpus), cap_of(cores, vcpus))
        held_mib = reading.bound(None).memory_mib
        if boots_small and (rest_mib := committed.memory_mib - held_mib) > SLACK.memory_mib:
            self.resizer.late.started(_now(), held_mib)
            if self.link.connected:
                self.resizer.late.heard(_now())  # it was only paused
            sentence = f"it boots with {held_mib:g} MiB; {rest_mib:g} more are plugged once its agent has said hello"
            self.host.note(self.name, DecisionKind.ADMIT, sentence, {"held_mib": held_mib})
        for component, limit in (
            ("disk_mib_s", sizes.set_disk),
            ("network_mib_s", sizes.set_network),
        ):
            if nominal[component] > 0 and (why := await limit(self.domain, committed[component])):
                raise HypervisorError(f"{component} cannot be held to {committed[component]:g}: {why}")

    async def wait_for_hello(self, limit_s: float) -> None:
        """Wait until the guest has said hello, or ``limit_s`` at most: without it only its CPU can be taken."""
        self._awaiting += 1
        try:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(limit_s):
                    await self._hello.wait()
        finally:
            self._awaiting -= 1

    @property
    def awaits_hello(self) -> bool:
        """Whether its operation waits for its guest, and goes on by itself."""
        return self._awaiting > 0

    async def resize(self, deadline_s: float, mode: Mode = Mode.ASK) -> VMOutcome:
        """Bring the VM to its intent's target: deflate what is too much, then reinflate what is missing.

        :raises HypervisorError: the size cannot be read; the intent stays, so that it is tried again.
        """
        cause, target = self.intent.cause, self.intent.target.vector()
        if self.intent.given_up:
            target = await self.resizer.undone()
        outcome = await self.resizer.reach(target, deadline_s, mode)
        if not outcome.measured:
            # It stays charged with all that it may have been given.
            raise HypervisorError(f"its size could not be read at the end: {outcome.sentence}")
        previous = cause.before.vector() if cause is not None else outcome.before.size
        request_id = cause.request_id if cause is not None else "resize"
        await self.resizer.commit(outcome, previous, outcome.after.size, request_id)
        return VMOutcome.of(self.name, self.intent.generation, outcome)

    def summary(self) -> VMOutcome:
        """What became of the VM's latest operation, from its intent alone: the ledger went with an earlier agent."""
        before = self.intent.cause.before if self.intent.cause else self.intent.committed
        # What is still to be given is committed already, but has not been verified.
        reached = before if self.intent.phase in (Phase.DEFLATING, Phase.REINFLATING) else self.intent.committed
        missing = _shortfall(before.vector(), reached.vector(), self.intent.target.vector())
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
        return self.summary().model_copy(update={"sentence": f"could not be resized: {why}", "errors": (why,)})

    async def give_up(self) -> None:
        """Have nothing more of an operation carried out that is answered as failed; its owner decides what comes next.

        :raises HypervisorError: it could not be written yet; the reconciler does.
        """
        self.record.intent = self.intent.changed(given_up=True)
        self.request_check()
        await self.record.persist()

    async def found_off(self, why: str) -> bool:
        """Take note that the domain is off although no command has stopped it: it holds nothing and keeps its disk.

        Under the VM's lock. One that is being sold something else stays charged until that has ended.

        :returns: whether it counts as off now.
        :raises HostAgentError: it could not be read or written; the VM stays charged, and is found off again.
        """
        if self.intent.was is not None:
            self.running = False
            return False
        # Another program may have saved it: then it goes on where it was, as what it was sold.
        saved_mib = await self.host.hypervisor.saved_mib(self.domain)
        size = self.allocation().current
        await self.host.record_change(self.name, size, ZERO, "stopped from outside")
        # A resize that was under way is answered as failed, or is not gone on with.
        given_up = self.intent.given_up or self.intent.phase in (Phase.DEFLATING, Phase.REINFLATING)
        fields = {"target": self.intent.committed, "given_up": given_up, "saved_mib": saved_mib}
        await self.record.store(phase=Phase.STOPPED, **fields)
        self.running = self.paused = False
        self.host.note(
            self.name, DecisionKind.STOPPED, f"{self.name} is off ({why}): {size} came free; it keeps its disk", {}
        )
        return True

    def off_meanwhile(self, before: ResourceVector, why: str) -> VMOutcome:
        """The outcome of an operation during which the domain ended: what it held is free."""
        sentence = f"is off ({why}): it holds nothing and keeps its disk"
        return self.summary().model_copy(
            update={"before": Vector.of(before), "after": Vector(), "shortfall": Vector(), "sentence": sentence}
        )

    def found_paused(self) -> None:
        """Take note that another program has paused the domain: it keeps what it has and gives nothing."""
        self.running, self.paused = False, True
        sentence = "paused, and not by us: it is charged in full, and nothing is taken from it"
        self.host.note(self.name, DecisionKind.STOPPED, sentence, {"state": "paused"})

    @staticmethod
    def paused_meanwhile(outcome: VMOutcome) -> VMOutcome:
        """The outcome of an operation during which the domain was paused: what it still lacks is no lack of room."""
        why = "it is paused: another program did that while it was being resized"
        return outcome.model_copy(update={"errors": (why, *outcome.errors), "sentence": f"{outcome.sentence}; {why}"})

    async def tell_that_it_stays(self) -> None:
        """Tell a guest that had notice of its preemption, and runs on, that this is over; once. Under the VM's lock.

        One that goes on from a snapshot may have a notice that was over long ago: only the guest says so.

        :raises HypervisorError: it could not be written down; the guest is told again.
        """
        told = self.intent.told or (self.link.notice if _now() >= self._over_until else "")
        # No notice runs while this holds its lock.
        if not told or not self.link.connected:
            return
        self.link.notice, self._over_until = "", _now() + OVER_PAUSE_S
        params = {"request_id": told, "reason": "it runs on"}
        try:
            await self.link.call("preemption.withdrawn", params, PreemptionWithdrawn, TOLD_LIMIT_S)
        except GuestUnreachable:
            return
        except GuestRefused as error:
            if error.code != UNKNOWN_METHOD:  # only an older guest agent, which knows of no end, never takes it
                return
        if self.intent.told:
            await self.record.store(told="")

    # --- what asks for a check -----------------------------------------------------------------------------------

    def _on_hello(self, hello: Hello) -> None:
        """The guest agent has connected (again): after a reset all CPUs are on line, so its size is checked."""
        # One that was started again has forgotten what it still had to tell its applications.
        self.resizer.untold = self.resizer.untold or self._hello.is_set()
        self.resizer.tell_pace.held()
        self._hello.set()
        boot_s = self._readiness.heard(_now(), hello.boot_id)
        self.resizer.late.heard(_now())
        self._telling = asyncio.create_task(self.host.take_hello(self.name, boot_s), name=f"hello:{self.name}")
        self.request_check()

    def _on_notice(self, notice: Notice) -> None:
        """The guest reports something without having been asked."""
        self.pressure.heard(notice)
        if not self.pressure.wants.is_zero() and _now() >= self._noticed_until:
            self._noticed_until = _now() + NOTICE_PAUSE_S
            self.host.request_check()

    def _on_pressure(self, sentence: str) -> None:
        """Pressure has begun: a deflation is stopped; what can be spared is given when the reconciler has seen it."""
        self.resizer.interrupt_taking(sentence)
        self.request_check()

    def request_check(self) -> None:
        """Have the VM looked at closely, soon."""
        self.drift_repair.unsettled = True
        self.drift_repair.pace.held()
        self.host.request_check()


def _shortfall(before: ResourceVector, after: ResourceVector, target: ResourceVector) -> ResourceVector:
    """What the target still asks for, in the direction in which each component was to go."""
    return ResourceVector(
        *(
            max((now - goal) if was >= goal else (goal - now), 0.0)
            for was, now, goal in zip(before, after, target, strict=True)
        )
    )
