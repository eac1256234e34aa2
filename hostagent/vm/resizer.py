"""Resizer of one VM: measures it, runs the cascade or the reinflation, and commits the size that was measured."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Callable, Collection, Coroutine, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import structlog

from ebbtide.deflation.allocations import Priority
from ebbtide.deflation.bounds import Bound
from ebbtide.deflation.cascade.asking import Refusal, mode_of_asking
from ebbtide.deflation.cascade.cascade import Cascade
from ebbtide.deflation.cascade.instructions import GuestKind, Mode, Outcome
from ebbtide.deflation.cascade.mechanisms import LAYER_OF, Finding, Mechanism, Mechanisms
from ebbtide.deflation.cascade.ordinary import OrdinaryGuest
from ebbtide.deflation.cascade.readiness import BootTimes
from ebbtide.deflation.cascade.reconcile import SLACK, RepairPace, cap_of, lacks_memory, quota_of, spread_of
from ebbtide.deflation.cascade.reinflation import Reinflation, TellApplication
from ebbtide.deflation.ledger import Layer, LedgerEntry
from ebbtide.deflation.resources import ZERO, ResourceVector
from ebbtide.messages.common import Vector
from ebbtide.messages.explanations import DecisionKind
from ebbtide.tracing.spans import span
from hostagent.libvirt.hypervisor import Hypervisor
from hostagent.state.intents import Phase
from hostagent.vm.executor import Executor
from hostagent.vm.guest_link import GuestLink
from hostagent.vm.guest_pressure import GuestPressure
from hostagent.vm.intent_record import IntentRecord
from hostagent.vm.late_memory import LateMemory
from hostagent.vm.running import Interrupt, run

#: What cannot be used on a guest that does not answer, and what besides it to take memory: that is done by fresh
#: readings only (rule 5), while what is given needs the guest's kernel alone.
NEED_THE_GUEST = (Mechanism.APPLICATION, Mechanism.CPU_OFFLINE, Mechanism.CPU_UNPLUG)
NEED_THE_GUEST_TO_TAKE = (
    *(mechanism for mechanism, layer in LAYER_OF.items() if layer is not Layer.HYPERVISOR),
    Mechanism.BALLOON,
    Mechanism.MEMORY_LIMIT,
)
#: What a guest that runs nothing of ours has instead: its balloon's statistics, and qemu-guest-agent.
OWN_MEANS = (Mechanism.BALLOON, Mechanism.CPU_OFFLINE)
#: Why a step of steady mode ends early.
WANTED = "an operation waits for the VM"
#: Time for plugging what a VM was started without, in seconds.
PLUG_DEADLINE_S = 30.0
#: For a guest that is told its VM's size later, in seconds.
TELL_LIMIT_S = 10.0

log = structlog.get_logger()


@dataclass(frozen=True, slots=True)
class HostSide:
    """What a VM needs of the host that it runs on."""

    host_id: str
    hypervisor: Hypervisor
    #: Memory that a VM costs besides its size.
    overhead_mib: float
    #: Called with each change before it is committed: (name, size before, size after, cause).
    record_change: Callable[[str, ResourceVector, ResourceVector, str], Awaitable[None]]
    #: Called when a VM should be looked at soon.
    request_check: Callable[[], None]
    #: Told of each decision: (VM, kind, sentence, inputs).
    note: Callable[[str, DecisionKind, str, Mapping[str, object]], None]
    #: Makes the ids under which applications are asked differ between attempts at one operation.
    attempt: Callable[[], str]
    #: Whether the host's VMs hold more than there is.
    is_overcommitted: Callable[[], bool]
    #: Whether the hypervisor answers: of guests on one that does not, nothing is assumed.
    is_available: Callable[[], bool]
    #: How long this host's guests take to boot.
    boots: Callable[[], BootTimes]
    #: Told of each hello of a guest agent: (name, how long the guest took to boot; None: not seen).
    take_hello: Callable[[str, float | None], Coroutine[Any, Any, None]]


class Resizer:
    """Changes one VM's size, under the VM's lock.

    :param is_wanted: whether another operation waits for that lock.
    """

    def __init__(
        self,
        domain: str,
        record: IntentRecord,
        link: GuestLink,
        pressure: GuestPressure,
        host: HostSide,
        is_wanted: Callable[[], bool],
    ) -> None:
        self.domain = domain
        self.record = record
        self.link = link
        self.pressure = pressure
        self.host = host
        self._is_wanted = is_wanted
        self._interrupt = Interrupt()
        self._refusal: Refusal | None = None
        #: Whether the guest may still be asked for something: by an earlier agent, or because a resize broke off.
        self._unsure = record.intent.phase in (Phase.DEFLATING, Phase.REINFLATING)
        #: What is known of the guest where it runs nothing of ours.
        self.ordinary = OrdinaryGuest()
        #: As it was read last, its CPUs on line by the guest's word; None: not yet.
        self.bound: Bound | None = None
        #: CPUs of which the guest said in the last resize that it cannot have them on line.
        self._refused_cpus: frozenset[int] = frozenset()
        #: What the VM was started without.
        self.late = LateMemory()
        #: Whether an application may be smaller than it was, as an earlier agent may have left it, and whether the
        #: guest is still to be told its VM's size: it could not be, may have forgotten it, or was asked for less.
        #: What an earlier agent could not tell went with it. What a VM that is made anew has on a disk that hosts
        #: share may come from a smaller one: of another host, or of an earlier time.
        self._gave, self.untold = self._unsure, record.intent.phase is not Phase.CREATING or self._has_shared_disk()
        #: How often that is tried, and the limit of the attempt that is under way.
        self.tell_pace = RepairPace()
        self._telling: asyncio.Timeout | None = None
        #: Until when an application may be giving what it has promised (monotonic seconds).
        self._gives_until = -math.inf
        #: Why the VM will have no more resizes; empty as long as it may.
        self.terminating = ""
        #: Whether something is being taken from it now.
        self._taking = False
        #: Whether that is to leave less to be saved.
        self._at_end = False
        self._log = log.bind(vm=record.intent.spec.name, host=host.host_id)

    def _has_shared_disk(self) -> bool:
        name = self.record.intent.spec.template
        return any(template.shared_disk for template in self.host.hypervisor.templates() if template.name == name)

    async def reach(self, target: ResourceVector, deadline_s: float, mode: Mode) -> Outcome:
        """Bring the VM to a size, without committing it.

        :raises HypervisorError: its size cannot be read.
        """
        held_mib = self.late.held_mib
        if held_mib is None:
            outcome = await self._reach(target, deadline_s, mode)
        else:
            # What is not plugged yet needs no guest: it is plugged later, or never.
            now = target.with_component("memory_mib", min(target.memory_mib, held_mib))
            outcome = await self._reach(now, deadline_s, mode)
            outcome = with_late_memory(outcome, target, self.record.intent.committed.memory_mib)
            self.late.held_mib = min(held_mib, outcome.after.memory_mib)
        self._unsure = not outcome.measured
        if outcome.measured:
            self.bound = outcome.after
        return outcome

    async def reach_at_end(self, target: ResourceVector, deadline_s: float, mode: Mode) -> Outcome:
        """As `reach`, for a VM that is being saved and is to be smaller before. A removal stops it all the same."""
        why, self.terminating = self.terminating, ""
        self._at_end = True
        try:
            return await self.reach(target, deadline_s, mode)
        finally:
            self._at_end = False
            self.terminating = self.terminating or why

    def cpus_refused(self, count: int) -> int:
        """How many of its first CPUs a VM lacks, after a resize, though they are plugged and were asked for; 0 where
        the guest did not refuse each of these by itself."""
        missing = set(range(count)).difference(self.link.online or ())
        plugged = self.bound is not None and self.bound.vcpus >= count
        return len(missing) if plugged and missing <= self._refused_cpus else 0

    async def plug(self, repairs: bool) -> None:
        """Give the VM the memory that it was started without, as its size allows. Under its lock.

        What its guest does not take is given again, ever more rarely.

        :param repairs: whether to give it also where it is not known who has taken it.
        :raises HypervisorError: it could not be given yet.
        """
        committed, late_mib = self.record.intent.committed.vector(), self.late.held_mib
        has = (await self.host.hypervisor.sizes.read(self.domain)).bound(None)
        if not (lacks_memory(has, committed.memory_mib) and (repairs or late_mib is not None)):
            self.late.plugged()
            return
        outcome = await self._reach(committed, PLUG_DEADLINE_S, Mode.ASK)
        await self.commit(outcome, committed, outcome.after.size.larger(committed), "start")
        lacks = lacks_memory(outcome.after, committed.memory_mib)
        if lacks and not (repairs and self.link.connected):
            # Of one whose start this agent has not seen, it is still not known who has taken it.
            held_mib = outcome.after.memory_mib if outcome.measured and late_mib is not None else None
            self.late.fell_short(asyncio.get_running_loop().time(), held_mib)
        else:
            self.late.plugged()  # what one whose guest answers lacks is drift from now on
        what = "it lacks memory" if lacks else "it has the memory"
        what += " that it was started without" + (", and is given that again" if lacks else "")
        inputs = {"held_mib": late_mib or has.memory_mib}
        self.host.note(self.record.intent.spec.name, DecisionKind.REINFLATE, f"{what}: {outcome.sentence}", inputs)

    async def tell(self) -> None:
        """Tell the guest of the VM's size, where it has not heard of it. Under the VM's lock, which nobody waits for:
        one that is late is told ever more rarely, and no more once an operation wants the VM."""
        now = asyncio.get_running_loop().time()
        waits = now < self._gives_until or self._is_wanted() or not self.tell_pace.due(now)
        if self.untold and not waits and self.link.connected and self.bound is not None:
            self.tell_pace.tried(now)
            executor = self._executor(self._attempt(), asks_cpus=False)
            size = self.record.intent.committed.vector()
            try:
                async with asyncio.timeout(TELL_LIMIT_S) as self._telling:
                    await executor.carry_out(TellApplication(0, TELL_LIMIT_S, size, self.bound.memory_mib))
            except TimeoutError:
                pass  # it has not heard
            finally:
                self._telling = None
            self._heard(size, executor)

    async def undone(self) -> ResourceVector:
        """The size of a VM whose operation is given up: what was taken is given back, what was given stays as it is.

        :raises HypervisorError: its size cannot be read.
        """
        intent, has = self.record.intent, await self.host.hypervisor.sizes.read(self.domain)
        bound = has.bound(None, intent.spec.nominal.vector()).size
        before = intent.cause.before.vector() if intent.cause is not None else bound
        row = self.record.allocation()
        return before.larger(bound).smaller(row.current).larger(row.minimum)

    async def _reach(self, target: ResourceVector, deadline_s: float, mode: Mode) -> Outcome:
        self._clear_interrupt()
        executor = self._executor(self._attempt(), self._moves_cpus(target))
        if self._unsure:
            await self.host.hypervisor.sizes.call_off(self.domain)
        self._unsure = True
        before, _ = await executor.measure()
        found = await self.host.hypervisor.sizes.findings(self.domain)
        to_give = Mechanisms.to_give(self._without_silent_guest(found, NEED_THE_GUEST))
        if before.size.fits_in(target) and (self._gave or not target.fits_in(before.size)):
            return await self._run(await self._reinflation(before, target, deadline_s, to_give), executor)
        to_take = Mechanisms.of(self._without_silent_guest(found, NEED_THE_GUEST_TO_TAKE))
        if self._has_owners_quota:
            # Fewer on line would have a larger share each, and fewer would be given back than its owner had.
            cpus = (Mechanism.CPU_OFFLINE, Mechanism.CPU_UNPLUG)
            to_take = to_take.without(cpus, "its owner's quota is one of all its vCPUs, so all stay on line")
        down = await self._take(before, target, deadline_s, mode, to_take, executor)
        if target.fits_in(down.after.size) or before.size.fits_in(target):
            return down
        # Down in one component and up in another: the second half, once what was taken has been taken.
        self._clear_interrupt()
        # By a name of its own: applications take a name they know for the same request.
        upwards = self._executor(self._attempt(), self._moves_cpus(target))
        return joined(down, await self._run(await self._reinflation(down.after, target, deadline_s, to_give), upwards))

    @property
    def _has_owners_quota(self) -> bool:
        was = self.record.intent.adopted
        return was is not None and was.quota_per_cpu is not None

    @property
    def _may_have_parked(self) -> bool:
        """Whether its guest may have CPUs off line by our doing."""
        has_agent = self.link.has_channel or self.ordinary.kind is GuestKind.QEMU_GUEST_AGENT
        return has_agent and not self._has_owners_quota

    async def _take(
        self,
        before: Bound,
        target: ResourceVector,
        deadline_s: float,
        mode: Mode,
        mechanisms: Mechanisms,
        executor: Executor,
    ) -> Outcome:
        """Run the cascade; an application is asked only where it may be."""
        asking = mode_of_asking(asyncio.get_running_loop().time(), mode, self._refusal)
        if asking is None:
            mechanisms = mechanisms.without([Mechanism.APPLICATION], "refused a while ago and is left alone until then")
        if self.pressure.sentence:
            self._interrupt.ask(self.pressure.sentence)
        if self.record.intent.spec.priority is Priority.FIXED:
            mechanisms = mechanisms.without([Mechanism.APPLICATION], "an application of a fixed VM is never asked")
        if self.record.intent.gently:
            unforced = [Mechanism.APPLICATION, Mechanism.MEMORY_LIMIT]
            mechanisms = mechanisms.without(unforced, "only memory that lies idle is trimmed")
            if self._is_wanted():
                self._interrupt.ask(WANTED)
        if self._at_end:
            # It would be read back to be saved.
            mechanisms = mechanisms.without([Mechanism.MEMORY_LIMIT], "what lies in swap is saved all the same")
        self._taking, began = True, asyncio.get_running_loop().time()
        executor.taking = True
        try:
            down = await self._run(Cascade(before, target, deadline_s, mechanisms, asking or mode), executor)
        finally:
            self._taking = executor.taking = False
        self._refusal = executor.refusal or self._refusal
        self._gave = self._gave or executor.may_give
        if executor.may_give and not down.reached:
            # It is as small as was asked, and the VM is not: it hears what was reached.
            self.untold, self._gives_until = True, -math.inf
        elif executor.may_give:
            # It may be at that for as long: a word of another size would call it off.
            self._gives_until = began + deadline_s
        if not before.size.fits_in(down.after.size):
            self.pressure.deflated()
        return down

    async def _reinflation(
        self, before: Bound, target: ResourceVector, deadline_s: float, mechanisms: Mechanisms
    ) -> Reinflation:
        plugged = (await self.host.hypervisor.sizes.read(self.domain)).vcpus
        intent = self.record.intent
        self._gives_until = -math.inf
        # What ACPI unplug took can be plugged again: a VM starts with all that its nominal size asks for.
        present = max(plugged, math.ceil(intent.spec.nominal.cpu_cores))
        return Reinflation(before, target, intent.boot_mib, present, deadline_s, mechanisms, plugged, self._gave)

    async def commit(self, outcome: Outcome, previous: ResourceVector, reached: ResourceVector, cause: str) -> None:
        """Write down the size that was measured and hold the VM to it from outside."""
        row = self.record.allocation()
        size = reached.smaller(self.record.upper)
        asked = outcome.target.cpu_cores
        # CPUs went off line under the old quota and the new one is not set yet, or are off line without having been
        # asked for: no reason to take more than asked.
        kept = asked if outcome.before.cpu_cores > asked else min(asked, previous.cpu_cores)
        size = size.larger(ResourceVector(cpu_cores=kept))
        if size.cpu_cores > row.current.cpu_cores:
            # It is not known which of these CPUs are on line: a quota holds it to what it is charged with.
            size = size.with_component("cpu_cores", row.current.cpu_cores)
        # Whatever a resize that broke off has left: it is charged with its minimum at least, and its quota set to that.
        size = size.larger(row.minimum)
        bound = outcome.after
        # Reckoned over all vCPUs, those that a silent guest has on line would have less than the size.
        spread = bound.cpus_online
        if not self.link.connected:
            spread = spread_of(len(self.link.online or ()), size.cpu_cores, bound, self._may_have_parked)
        quota, cap = quota_of(size.cpu_cores, spread), cap_of(size.cpu_cores, bound.vcpus)
        if (quota, cap) != (bound.quota_per_cpu, bound.cap_cores) or bound.size.cpu_cores > size.cpu_cores:
            await self.host.hypervisor.sizes.set_quota(self.domain, quota, cap)
        await self.host.hypervisor.prepare_start(self.domain, size)
        # Before the commit: a kill in between repeats the change, which is recognised, instead of losing it.
        await self.host.record_change(self.record.intent.spec.name, previous, size, cause)
        fields = {"target": Vector.of(size)} if self.record.intent.given_up else {}
        await self.record.store(phase=Phase.SETTLED, committed=Vector.of(size), **fields)
        # CPU time is held by the quota; memory that was not given back is there, also beyond what the VM is sold.
        left = reached.memory_mib > size.memory_mib + SLACK.memory_mib
        self.record.beyond = ResourceVector(memory_mib=reached.memory_mib) if left else ZERO
        self._log.info("resized", request_id=cause, reached=str(size), why=outcome.sentence)

    async def _run(self, machine: Cascade | Reinflation, executor: Executor) -> Outcome:
        name, kind = self.record.intent.spec.name, type(machine).__name__.lower()
        with structlog.contextvars.bound_contextvars(vm=name), span(f"vm {kind}", vm=name) as one:
            outcome = await run(machine, executor, self._interrupt)
            self._refused_cpus = executor.refused_cpus
            if isinstance(machine, Reinflation):
                self._heard(machine.target, executor)
            if not one.is_recorded:
                return outcome
            one.set(before=str(outcome.before.size), target=str(outcome.target), after=str(outcome.after.size))
            one.set(shortfall="" if outcome.reached else str(outcome.shortfall), sentence=outcome.sentence)
            return outcome

    def _heard(self, size: ResourceVector, executor: Executor) -> None:
        """Take note of whether the guest was told of a size."""
        self.untold = not executor.told
        if executor.told:
            self.tell_pace.held()
        if executor.told and self.record.upper.fits_in(size):
            self._gave = False

    def _moves_cpus(self, target: ResourceVector) -> bool:
        """Whether its CPUs are of interest: memory is not to wait for a qemu-guest-agent that does not answer."""
        online, wanted = self.link.online, math.ceil(target.cpu_cores - SLACK.cpu_cores)
        moves = abs(target.cpu_cores - self.record.intent.committed.cpu_cores) > SLACK.cpu_cores
        return moves or (online is not None and len(online) < wanted)

    def _attempt(self) -> str:
        """The id under which applications are asked now."""
        cause = self.record.intent.cause
        return f"{cause.request_id if cause is not None else 'repair'}{self.host.attempt()}"

    def _executor(self, request_id: str, asks_cpus: bool) -> Executor:
        upper, sold = self.record.upper, self.record.intent.spec.nominal.vector()
        sold = replace(sold, cpu_cores=upper.cpu_cores, memory_mib=upper.memory_mib)
        ordinary = None if self.link.has_channel else self.ordinary
        sizes = self.host.hypervisor.sizes
        observe = self.pressure.observe
        return Executor(self.domain, sizes, self.link, request_id, sold, observe, ordinary, asks_cpus)

    # --- what stops a resize -------------------------------------------------------------------------------------

    def interrupt(self, why: str) -> None:
        """Stop the resize that is under way."""
        self._interrupt.ask(why)

    def interrupt_taking(self, why: str) -> None:
        """Stop the resize that is under way if it takes something."""
        if self._taking:
            self._interrupt.ask(why)

    def give_way(self) -> None:
        """An operation waits for the VM: stop what is in nobody's way otherwise, a step of steady mode or a word."""
        if self.record.intent.gently:
            self.interrupt_taking(WANTED)
        telling, self._telling = self._telling, None
        if telling is not None and not telling.expired():
            telling.reschedule(asyncio.get_running_loop().time())

    def mark_terminating(self, why: str) -> None:
        """Stop the resize that is under way, and each one that follows."""
        self.terminating = why
        self._interrupt.ask(why)

    def _clear_interrupt(self) -> None:
        """What was asked of an earlier resize is over, but for a removal."""
        self._interrupt.clear()
        if self.terminating:
            self._interrupt.ask(self.terminating)

    # --- mechanisms ----------------------------------------------------------------------------------------------

    async def findings(self) -> tuple[Finding, ...]:
        """What can be used on this VM now, and why not where it cannot.

        :raises HypervisorError: the domain cannot be examined.
        """
        found = await self.host.hypervisor.sizes.findings(self.domain)
        return self._without_silent_guest(found, NEED_THE_GUEST_TO_TAKE)

    async def mechanisms(self) -> Mechanisms:
        """The findings as the cascade takes them."""
        return Mechanisms.of(await self.findings())

    def _without_silent_guest(self, found: Sequence[Finding], need: Collection[Mechanism]) -> tuple[Finding, ...]:
        """The findings, without what needs a guest that answers if this one does not."""
        return tuple(
            replace(finding, available=False, reason=self.link.silence)
            if finding.available and self._needs_the_agent(finding.mechanism, need)
            else finding
            for finding in found
        )

    def _needs_the_agent(self, mechanism: Mechanism, need: Collection[Mechanism]) -> bool:
        """Whether a mechanism waits for our agent: a guest that has none has means of its own."""
        there = self.link.has_channel or mechanism not in OWN_MEANS
        return mechanism in need and there and not self.link.connected


def with_late_memory(outcome: Outcome, target: ResourceVector, committed_mib: float) -> Outcome:
    """The outcome of a resize of a VM that was started with less memory than its size: what was not plugged counts.

    :param target: of the resize, with that memory.
    :param committed_mib: what the VM was charged with.
    """
    before, after = outcome.before, outcome.after
    late_before_mib = max(committed_mib - before.memory_mib, 0.0)
    late_after_mib = max(target.memory_mib - after.memory_mib, 0.0)
    taken_mib = late_before_mib - late_after_mib
    entry = LedgerEntry(Layer.GUEST, "memory_mib", taken_mib, taken_mib, taken_mib, 0.0, "not plugged yet")
    more = f"; {taken_mib:g} MiB of its memory had not been plugged yet" if taken_mib > 0 else ""
    return replace(
        outcome,
        before=replace(before, plugged_mib=before.plugged_mib + late_before_mib),
        after=replace(after, plugged_mib=after.plugged_mib + late_after_mib),
        target=target,
        ledger=(*outcome.ledger, entry) if taken_mib > 0 else outcome.ledger,
        sentence=outcome.sentence + more,
    )


def joined(down: Outcome, up: Outcome) -> Outcome:
    """One outcome for a resize that went down in one component and up in another."""
    return Outcome(
        before=down.before,
        after=up.after,
        target=down.target,
        ledger=down.ledger + up.ledger,
        shortfall=down.shortfall + up.shortfall,
        seconds=down.seconds + up.seconds,
        sentence=f"{down.sentence}; {up.sentence}",
        measured=up.measured,
        errors=down.errors + up.errors,
    )
