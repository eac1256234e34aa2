"""Executor of the deflation state machines' instructions on one VM; answers each with one event.

Instructions that move different resources may be carried out at once. No decision is made here. An instruction that
fails or runs out of its time limit is answered with what could be measured and the reason.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections.abc import Awaitable, Callable
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

import structlog

from ebbtide.deflation.bounds import Bound
from ebbtide.deflation.cascade.asking import Refusal
from ebbtide.deflation.cascade.instructions import (
    ApplicationAnswered,
    ApplicationReported,
    AskApplication,
    ColdReclaimed,
    Event,
    GuestKind,
    GuestReading,
    Instruction,
    Measured,
    PollApplication,
    ReadGuest,
    ReclaimCold,
    Throttle,
    Unplug,
)
from ebbtide.deflation.cascade.memory_lane import SLACK_MIB
from ebbtide.deflation.cascade.ordinary import STATS_PERIOD_S, OrdinaryGuest
from ebbtide.deflation.cascade.reconcile import SLACK, cap_of, quota_of
from ebbtide.deflation.cascade.reinflation import TellApplication, Told
from ebbtide.deflation.resources import ZERO, ResourceVector
from ebbtide.messages.guest import ApplicationPromise, ApplicationRelease, ColdFreed, CpusSet, GuestAmounts, GuestStatus
from hostagent.clock import now as _now
from hostagent.errors import DomainGone, GuestRefused, GuestUnreachable, HypervisorError, HypervisorTimeout
from hostagent.libvirt.hypervisor import DomainSizes, GuestCpus, HostSideReading
from hostagent.libvirt.settling import load_factor
from hostagent.vm.guest_link import GuestLink

#: A guest that does not say its state within this has none that we could use.
STATUS_LIMIT_S = 5.0
#: How often a guest is asked whether it has found a vCPU.
PRESENT_LOOK_S = 0.2
#: A kernel that calls so much less available than the agent does, and too little for a step, is heard once more; MiB
#: and seconds.
DISAGREEMENT_MIB = 32.0
WORTH_A_STEP_MIB = 128.0
KERNEL_SPEAKS_S = 1.6
KERNEL_LOOK_S = 0.1
#: For so long a balloon driver is waited for that is to say what came of a step, in seconds.
DRIVER_SPEAKS_S = 4.0
#: So long a guest waits with its answer for what it is asked about to come about, in seconds. One whose agent knows of
#: no waiting is asked again no sooner than after `SAID_LOOK_S`.
GUEST_WAITS_S = 1.0
SAID_LOOK_S = 0.5
#: After how long without progress, on an idle machine, in seconds, the host is waited for instead of the guest's word.
SAID_STALLED_S = 2.0
#: After this, in seconds, a call of the hypervisor that failed is tried once more.
RETRY_S = 1.0

#: Of a guest agent that was made before there was such a thing.
NO_COLD = "the guest agent knows of no cold pages"

T = TypeVar("T")

log = structlog.get_logger()


class Executor:
    """Acts on one VM: through the hypervisor from outside, through the guest agent inside.

    :param request_id: goes to the application, so that a repeated question is recognised.
    :param declared: of what the VM was sold its disk and network, which count only where they are declared; its cores
        and memory are those at full size, for the application; 0: not known.
    :param on_status: told of everything that the guest says of itself.
    :param ordinary: what is known of a guest that runs nothing of ours; None: it has our agent.
    :param asks_cpus: whether the qemu-guest-agent of such a guest is asked, which may take it seconds.
    """

    def __init__(
        self,
        domain: str,
        sizes: DomainSizes,
        link: GuestLink,
        request_id: str,
        declared: ResourceVector = ZERO,
        on_status: Callable[[GuestStatus], None] = lambda status: None,
        ordinary: OrdinaryGuest | None = None,
        asks_cpus: bool = False,
    ) -> None:
        self._domain = domain
        self._sizes = sizes
        self._link = link
        self._request_id = request_id
        self._declared = declared
        self._on_status = on_status
        self._ordinary = ordinary
        self._asks_cpus = asks_cpus
        #: What it has said since CPUs were last moved, None: nothing, and whether it was asked: memory moves meanwhile.
        self._cpus_said: GuestCpus | None = None
        self._cpus_asked = False
        #: Whether memory was moved since the guest was read, and whether it is being moved now.
        self._memory_moved = self._memory_moves = False
        #: vCPUs that were plugged at the latest reading; 0: some may have been plugged since.
        self._vcpus = 0
        #: Until when the guest's agent may be busy with its CPUs, by the loop's clock.
        self._cpus_until = 0.0
        #: Said by the guest at the end of what it has just given, for the reading that follows.
        self._status: GuestStatus | None = None
        #: Whether the guest has been asked for memory that the host has not heard of yet.
        self.asked_for_more = False
        #: Whether something is being taken, for which a guest without our agent is waited for.
        self.taking = False
        #: The application's refusal, where there was one.
        self.refusal: Refusal | None = None
        #: CPUs of which the guest said, one by one, when it was asked for them last, that it cannot have them on line.
        self.refused_cpus: frozenset[int] = frozenset()
        #: Whether an application may be giving something, and whether the guest has heard of what its VM was given.
        self.may_give = self.told = False

    async def carry_out(self, instruction: Instruction) -> Event:
        """Do what is instructed and say what came of it; never raises for a failing guest or hypervisor."""
        match instruction:
            case AskApplication():
                return await self._ask(instruction)
            case PollApplication():
                return await self._poll(instruction)
            case ReclaimCold():
                return await self._reclaim_cold(instruction)
            case ReadGuest():
                return await self._measured(instruction, "", memory=True, cpus=instruction.cpus)
            case Unplug():
                memory = instruction.plugged_mib is not None
                return await self._moved(instruction, partial(self._unplug, instruction), memory)
            case Throttle():
                memory = instruction.balloon_mib is not None
                return await self._moved(instruction, partial(self._throttle, instruction), memory)
            case TellApplication():
                return await self._tell(instruction)
        raise TypeError(f"{type(instruction).__name__} is no instruction for an executor")

    async def measure(self, cpus: bool = False, waits: bool = False) -> tuple[Bound, GuestReading | None]:
        """Read bound and guest now. All plugged CPUs count as on line as long as the guest does not say otherwise.

        :param cpus: whether to ask the guest which CPUs could be taken.
        :param waits: whether memory is to be taken by this: what has been freed or taken lately is waited for until the
            guest's kernel tells of it.
        :raises HypervisorError: the host's side cannot be read.
        """
        # While memory is on its way, nothing that is said tells what there will be.
        moved = self._memory_moved and not self._memory_moves
        status, self._status = self._status, None
        if status is None or cpus:
            status, reading = await asyncio.gather(
                guest_status(self._link, not cpus, self._status_limit_s), self._sizes.read(self._domain)
            )
        else:
            reading = await self._sizes.read(self._domain)
        guest, self._vcpus = None, reading.vcpus
        if status is not None:
            self._on_status(status)
            spare_mib = min(status.memory.unpluggable_mib, await self._spare_by_kernel(status, reading, waits))
            guest = GuestReading(
                tuple(status.cpus.online),
                tuple(status.cpus.unpluggable),
                spare_mib,
                free_mib=_free_mib(status),
                cold_blocked=why_no_cold(status),
                total_mib=status.memory.total_mib if reading.plugged_lags else None,
            )
        elif self._ordinary is not None:
            if moved:
                self._ordinary.moved(reading.read_at)
                self._memory_moved = False
            reading, guest = await self._by_the_balloon(self._ordinary, reading, waits)
            if self._asks_cpus and reading.qemu_agent:
                guest = await self._with_cpus(guest, cpus)
            online = len(guest.online) if guest is not None else None
            return reading.bound(online, self._declared), guest
        return reading.bound(len(guest.online) if guest is not None else None, self._declared), guest

    @property
    def _status_limit_s(self) -> float:
        """Off-lining takes its time on a busy host, and what the guest is asked meanwhile may wait for it."""
        return max(STATUS_LIMIT_S, self._cpus_until - _now())

    async def _spare_by_kernel(self, status: GuestStatus, reading: HostSideReading, waits: bool) -> float:
        """What the guest can spare by its kernel's own figure, MiB: no more is taken by the word of a frozen agent.

        The kernel speaks every second: what an application has freed since is waited for rather than left out.
        """
        said_at, until = reading.usable_at, _now() + KERNEL_SPEAKS_S
        while reading.usable_mib is not None:
            spare_mib = max(reading.usable_mib - status.memory.reserve_mib, 0.0)
            enough = spare_mib > min(status.memory.unpluggable_mib - DISAGREEMENT_MIB, WORTH_A_STEP_MIB)
            if enough or not waits or reading.usable_at != said_at or _now() >= until:
                return spare_mib
            await asyncio.sleep(KERNEL_LOOK_S)
            reading = await self._sizes.read(self._domain)
        return math.inf

    async def _by_the_balloon(
        self, ordinary: OrdinaryGuest, reading: HostSideReading, waits: bool
    ) -> tuple[HostSideReading, GuestReading | None]:
        """A guest that runs nothing of ours, by a statement of its balloon driver that is later than any step."""
        if waits:
            await ask_statistics(self._sizes, self._domain, reading)
        until = _now() + (DRIVER_SPEAKS_S if waits else 0.0)
        while True:
            ordinary.observe(reading.read_at, reading.statement, reading.qemu_agent)
            guest = ordinary.reading(reading.vcpus)
            if guest is not None or reading.stats_period_s is None or _now() >= until:
                return reading, guest
            await asyncio.sleep(KERNEL_LOOK_S)
            reading = await self._sizes.read(self._domain)

    async def _with_cpus(self, guest: GuestReading | None, again: bool) -> GuestReading | None:
        """The reading with what qemu-guest-agent says of the CPUs. One that does not answer is asked once.

        :param again: whether to ask one that has answered before.
        """
        if not self._cpus_asked or (again and self._cpus_said is not None):
            self._cpus_asked, self._cpus_said = True, await self._sizes.guest_cpus(self._domain)
        said = self._cpus_said
        if said is None:
            return guest
        self._link.online = frozenset(said.online)
        silent = guest or GuestReading((), (), 0.0, silent=True)
        return replace(silent, online=said.online, unpluggable=said.offlinable, kind=GuestKind.QEMU_GUEST_AGENT)

    # --- application: its silence is not the guest agent's, which answers meanwhile; `status` judges that ---------

    async def _ask(self, instruction: AskApplication) -> Event:
        target = {name: instruction.target[name] for name in instruction.components}
        params = self._application_params(target, instruction.bound_mib, instruction.deadline_s)
        params["mode"] = instruction.mode.value
        # Also one whose promise comes too late for the answer, or is not heard of at all.
        self.may_give = True
        try:
            answer = await self._link.call(
                "application.deflate", params, ApplicationPromise, min(instruction.limit_s, 15.0), breaks=False
            )
        except (GuestUnreachable, GuestRefused) as error:
            return ApplicationAnswered(_now(), instruction.step, reason=str(error))
        if answer.state == "none":
            self.may_give = False
            return ApplicationAnswered(_now(), instruction.step, reason="no application is registered in the guest")
        if answer.state == "refused":
            self.refusal = Refusal(_now(), answer.retry_after_s, instruction.mode)
        promised = _vector(answer.promised) if answer.state == "promised" else ResourceVector()
        refused = "" if answer.state == "promised" else f"refused: {answer.reason}"
        return ApplicationAnswered(_now(), instruction.step, promised, answer.expected_s, refused or answer.reason)

    async def _poll(self, instruction: PollApplication) -> Event:
        wait_s = min(GUEST_WAITS_S, instruction.limit_s)
        params = {"request_id": self._request_id, "wait_s": wait_s, "until_released_mib": instruction.until_mib}
        asked_at = _now()
        try:
            limit_s = STATUS_LIMIT_S + wait_s
            report = await self._link.call("application.status", params, ApplicationRelease, limit_s, breaks=False)
        except (GuestUnreachable, GuestRefused) as error:
            return ApplicationReported(_now(), instruction.step, done=True, reason=str(error))
        if report.state == "running":
            await asyncio.sleep(asked_at + instruction.delay_s - _now())
        reason = report.reason or (f"measured by {report.measured_by}" if report.measured_by else "")
        return ApplicationReported(
            _now(), instruction.step, _vector(report.released), done=report.state != "running", reason=reason
        )

    async def _reclaim_cold(self, instruction: ReclaimCold) -> Event:
        params = {"memory_mib": instruction.memory_mib, "deadline_s": instruction.limit_s}
        try:
            freed = await self._link.call("cold.reclaim", params, ColdFreed, instruction.limit_s + STATUS_LIMIT_S)
        except (GuestUnreachable, GuestRefused) as error:
            return ColdReclaimed(_now(), instruction.step, done=True, reason=str(error))
        except asyncio.CancelledError:
            # A guest that does not hear of it ends by itself, at its deadline.
            with contextlib.suppress(GuestUnreachable, GuestRefused):
                await self._link.call("cold.stop", {}, ColdFreed, STATUS_LIMIT_S)
            raise
        # The guest's own word: it cannot have freed more than it was asked for, in whole pages.
        freed_mib = min(freed.freed_mib, instruction.memory_mib)
        return ColdReclaimed(_now(), instruction.step, freed_mib, freed.done, freed.reason)

    async def _tell(self, instruction: TellApplication) -> Event:
        params = self._application_params(instruction.target.as_dict(), instruction.bound_mib, instruction.limit_s)
        params["full"] = 0.0 < self._declared.memory_mib <= instruction.target.memory_mib + SLACK.memory_mib
        try:
            answer = await self._link.call(
                "application.reinflate", params, ApplicationPromise, min(instruction.limit_s, 15.0), breaks=False
            )
        except (GuestUnreachable, GuestRefused) as error:
            return Told(_now(), instruction.step, reason=str(error))
        self.told = True
        return Told(_now(), instruction.step, reason=answer.reason)

    def _application_params(self, target: dict[str, float], bound_mib: float, deadline_s: float) -> dict[str, Any]:
        return {
            "request_id": self._request_id,
            "deadline_s": deadline_s,
            "target": target,
            "bound_mib": bound_mib,
            "full_cores": self._declared.cpu_cores,
        }

    # --- guest and hypervisor ------------------------------------------------------------------------------------

    async def _unplug(self, instruction: Unplug) -> str:
        until = _now() + instruction.limit_s
        parts: list[Awaitable[str]] = []
        if instruction.online is not None:
            parts.append(self._set_cpus(instruction, instruction.online, until))
        if instruction.plugged_mib is not None:
            parts.append(self._set_plugged(instruction, instruction.plugged_mib, until))
        # Neither waits for the other: a guest that is slow to find its CPUs can have its memory, and the reverse.
        reasons = await asyncio.gather(*parts, return_exceptions=True)
        for reason in reasons:
            if isinstance(reason, BaseException) and not isinstance(reason, GuestUnreachable | GuestRefused):
                raise reason
        return "; ".join(str(reason) for reason in reasons if str(reason))

    async def _set_plugged(self, instruction: Unplug, plugged_mib: float, until: float) -> str:
        if await self._given(instruction, plugged_mib, until):
            return ""
        reason = await self._sizes.set_plugged(self._domain, plugged_mib, max(until - _now(), 0.0))
        self.asked_for_more = False
        return reason

    async def _set_cpus(self, instruction: Unplug, online: tuple[int, ...], until: float) -> str:
        """Why not all are as they should be, in words.

        :raises GuestUnreachable: it does not answer.
        :raises GuestRefused: it does not do it.
        """
        reasons, unknown = [], set[int]()
        self.refused_cpus = frozenset()
        if instruction.plug_vcpus is not None:
            reasons.append(await self._plug_vcpus(instruction.plug_vcpus, until))
        if self._ordinary is not None:
            reasons.append(await self._sizes.set_guest_cpus(self._domain, online))
            self._cpus_asked = False
            return "; ".join(filter(None, reasons))
        if set(online).difference(self._link.online or ()):
            wanted, online = online, await self._present(online)
            if unknown := set(wanted).difference(online):
                reasons.append(f"the guest has no CPU {', '.join(map(str, sorted(unknown)))}")
        limit_s = min(instruction.limit_s, 20.0)
        self._cpus_until = _now() + limit_s
        try:
            answer = await self._link.call("cpus.set", {"online": list(online)}, CpusSet, limit_s)
        finally:
            self._cpus_until = 0.0
        reasons += [f"CPU {failure.cpu}: {failure.reason}" for failure in answer.failed]
        # One that has just been plugged may yet be found.
        found = unknown if instruction.plug_vcpus is None else set()
        self.refused_cpus = frozenset(found.union(failure.cpu for failure in answer.failed).difference(answer.online))
        # By what the kernel read back: a vCPU that stayed on line stays plugged. None is plugged by its word.
        if instruction.unplug_vcpus and (count := max(answer.online) + 1) < self._vcpus:
            left = max(until - _now(), 0.0)
            reasons.append(await self._sizes.set_vcpus(self._domain, count, left))
        return "; ".join(filter(None, reasons))

    async def _given(self, instruction: Unplug, plugged_mib: float, until: float) -> bool:
        """Whether the guest says within a while that it has given what it is asked for, where that is enough."""
        total_mib = instruction.until_total_mib
        if total_mib is None:
            return False
        self.asked_for_more = True
        stalled_s = SAID_STALLED_S * await asyncio.to_thread(load_factor)
        enough_mib, least_mib, moved_at = total_mib + SLACK_MIB, math.inf, _now()
        try:
            await self._sizes.ask_plugged(self._domain, plugged_mib)
            while _now() < until and _now() - moved_at <= stalled_s:
                asked_at = _now()
                status = await guest_status(
                    self._link, brief=True, limit_s=self._status_limit_s + GUEST_WAITS_S, until_total_mib=enough_mib
                )
                if status is None:
                    return False
                if status.memory.total_mib <= enough_mib:
                    self._status = status
                    return True
                if status.memory.total_mib < least_mib:
                    least_mib, moved_at = status.memory.total_mib, _now()
                await asyncio.sleep(asked_at + SAID_LOOK_S - _now())
        except asyncio.CancelledError:
            await self.call_off()
            raise
        return False

    async def call_off(self) -> None:
        """Ask the guest for no more memory than the host knows it has given.

        :raises HypervisorError: that could not be asked.
        """
        await self._sizes.call_off(self._domain)
        self.asked_for_more = False

    async def _plug_vcpus(self, count: int, until: float) -> str:
        """Plug, and wait until the guest's kernel has found them: what it does not know it cannot put on line."""
        self._vcpus = 0
        reason = await self._sizes.set_vcpus(self._domain, count, max(until - _now(), 0.0))
        while not reason:
            status = await guest_status(self._link, brief=True)
            if status is not None and len(status.cpus.present) >= count:
                return ""
            if _now() >= until:
                return "the guest does not see the vCPUs that were plugged"
            await asyncio.sleep(PRESENT_LOOK_S)
        return reason

    async def _present(self, cpus: tuple[int, ...]) -> tuple[int, ...]:
        """Those that the guest knows: it refuses the whole map for one that it does not."""
        status = await guest_status(self._link, brief=True)
        return cpus if status is None else tuple(cpu for cpu in cpus if cpu in status.cpus.present)

    async def _throttle(self, instruction: Throttle) -> str:
        if instruction.cpu_cores is not None:
            await self.enforce_cpu(instruction.cpu_cores, instruction.cpus_online)
        reasons = []
        if instruction.disk_mib_s is not None:
            reasons.append(await self._sizes.set_disk(self._domain, instruction.disk_mib_s))
        if instruction.network_mib_s is not None:
            reasons.append(await self._sizes.set_network(self._domain, instruction.network_mib_s))
        until = _now() + instruction.limit_s
        if instruction.limit_mib is not None:
            limit = instruction.limit_mib if math.isfinite(instruction.limit_mib) else None
            reasons.append(await self._sizes.set_limit(self._domain, limit, instruction.limit_s))
        if instruction.balloon_mib is not None:
            left = max(until - _now(), 0.0)
            reasons.append(await self._sizes.set_balloon(self._domain, instruction.balloon_mib, left))
        return "; ".join(reason for reason in reasons if reason)

    async def enforce_cpu(self, cpu_cores: float, cpus_online: int | None = None) -> None:
        """Hold the domain to a size, spread over the CPUs that the guest has on line, by its word of now or its last.

        :raises HypervisorError: the limits could not be set.
        """
        if cpus_online is None:
            await guest_status(self._link, brief=True)
        vcpus = self._vcpus or (await self._sizes.read(self._domain)).vcpus
        spread = cpus_online or min(len(self._link.online or ()), vcpus) or vcpus
        quota, cap = quota_of(cpu_cores, spread), cap_of(cpu_cores, vcpus)
        await self._sizes.set_quota(self._domain, quota, cap)

    async def _measured(
        self, instruction: Instruction, reason: str, memory: bool, cpus: bool = False, error: str = ""
    ) -> Measured:
        try:
            bound, guest = await twice(partial(self.measure, cpus, self.taking and memory))
        except HypervisorError as failure:
            why = "; ".join(dict.fromkeys(filter(None, (reason, str(failure)))))
            return Measured(_now(), instruction.step, None, None, why, error=error or str(failure))
        return Measured(_now(), instruction.step, bound, guest, reason, error=error)

    async def _moved(self, instruction: Instruction, attempt: Callable[[], Awaitable[str]], memory: bool) -> Measured:
        """Attempt something and measure. Memory that may still be on its way after an error is called off first: until
        that has been done, no reading tells what there will be."""
        reason = error = ""
        self._memory_moves = self._memory_moves or memory
        try:
            reason = await twice(attempt)
        except (GuestUnreachable, GuestRefused) as failure:
            reason = str(failure)
        except HypervisorError as failure:
            reason = error = str(failure)
            if memory:
                try:
                    await self.call_off()
                except HypervisorError as worse:
                    also = "" if str(worse) == error else f": {worse}"
                    why = f"{reason}; what had been asked of the guest could not be called off{also}"
                    return Measured(_now(), instruction.step, None, None, why, error=error)
        finally:
            if memory:
                self._memory_moved, self._memory_moves = True, False
        return await self._measured(instruction, reason, memory, error=error)


async def twice(attempt: Callable[[], Awaitable[T]]) -> T:
    """The result of an attempt that may be repeated, which is tried once more where a call of the hypervisor failed.

    :raises HypervisorError: it failed again, did not come back in time, or the domain is gone.
    """
    try:
        return await attempt()
    except (DomainGone, HypervisorTimeout):
        raise
    except HypervisorError as error:
        log.debug("a call of the hypervisor failed and is tried once more", why=str(error))
    await asyncio.sleep(RETRY_S)
    return await attempt()


async def guest_status(
    link: GuestLink,
    brief: bool = False,
    limit_s: float = STATUS_LIMIT_S,
    until_total_mib: float | None = None,
    breaks: bool = True,
) -> GuestStatus | None:
    """The guest's own figures, fresh; None if it does not say.

    :param brief: without what costs the guest a look at all its tasks: which CPUs could be taken.
    :param until_total_mib: the guest answers once it has no more than this, MiB, or after `GUEST_WAITS_S`.
    :param breaks: whether silence ends the conversation; not without the VM's lock.
    """
    params: dict[str, Any] = {"brief": True} if brief else {}
    if until_total_mib is not None:
        params |= {"until_total_mib": until_total_mib, "wait_s": GUEST_WAITS_S}
    with contextlib.suppress(GuestUnreachable, GuestRefused):
        return await link.call("status", params, GuestStatus, limit_s, breaks)
    return None


async def ask_statistics(sizes: DomainSizes, domain: str, reading: HostSideReading) -> None:
    """Have libvirt ask a balloon driver as often as we need it; where that fails, nothing is known and nothing taken.

    :raises DomainGone: there is nobody to ask.
    """
    if reading.stats_period_s in (None, STATS_PERIOD_S):
        return
    try:
        await sizes.ask_statistics(domain, STATS_PERIOD_S)
    except DomainGone:
        raise
    except HypervisorError as error:
        log.info("balloon statistics could not be asked for", domain=domain, why=str(error))


def why_no_cold(status: GuestStatus) -> str:
    """Why a guest makes no cold pages free; empty: it does."""
    return NO_COLD if status.cold_blocked is None else status.cold_blocked


def _free_mib(status: GuestStatus) -> float | None:
    """What is free beyond the guest's reserve, MiB; None: it does not say."""
    free_mib = status.memory.free_mib
    return None if free_mib is None else max(free_mib - status.memory.reserve_mib, 0.0)


def _vector(amounts: GuestAmounts) -> ResourceVector:
    return ResourceVector(**amounts.model_dump())
