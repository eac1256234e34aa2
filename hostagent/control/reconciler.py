"""Reconciler of VMs with their intents: survey, retries of failed resizes, admission of starts, repair of drift.

Every few seconds one cheap call surveys all domains; a VM is checked closely when that call, its guest or an event
gives reason to, and now and then in any case.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Awaitable, Callable, Coroutine, Iterable
from functools import partial
from typing import Final

import structlog

from ebbtide.deflation.cascade.ordinary import STATS_PERIOD_S
from ebbtide.deflation.cascade.readiness import Silence
from ebbtide.deflation.cascade.reconcile import RepairPace
from ebbtide.deflation.modes import HostEvent, HostMode
from ebbtide.deflation.resources import ZERO
from ebbtide.deflation.sharing.pressure_response import Neighbours
from ebbtide.messages.explanations import DecisionKind
from hostagent.control.clock_steps import ClockSteps, date_start
from hostagent.control.pressure_response import respond_to_pressure_of
from hostagent.control.start_admission import admit, admit_arrival, let_run, turn_off_again
from hostagent.control.unowned import Fate, fate, is_copy, put_back, rank
from hostagent.errors import HostAgentError, HypervisorError
from hostagent.libvirt.hypervisor import DomainState, DomainSummary
from hostagent.state.intents import Intent, Phase
from hostagent.vm.executor import twice
from hostagent.vm.host import CONCURRENT, RESIZING, Host
from hostagent.vm.managed_vm import MOVING, ManagedVM

#: How often all domains are surveyed, in seconds.
SURVEY_S: Final = 2.0
#: From one survey to the next it takes at least this, whoever asks for it, in seconds.
LEAST_PAUSE_S: Final = 0.25
#: How often a VM is checked closely although nothing seems to have changed, in seconds; half as often one from which
#: nothing is taken, since there is little that could be lifted.
CHECK_S: Final = 15.0
#: How often a VM that stays under pressure is given what has come free meanwhile, in seconds.
PRESSURE_PAUSE_S: Final = 5.0
#: How often it is asked whether the domains still bear our intents, in seconds.
OWNERS_S: Final = 60.0
#: Time for a resize that is tried again, in seconds.
RETRY_DEADLINE_S: Final = 60.0
#: The task that checks the memory limits. No VM's name.
_LIMITS: Final = "check-limits:"

log = structlog.get_logger()


def check_is_due(
    earlier: DomainSummary | None, now: DomainSummary | None, age_s: float, rests: bool, deflated: bool
) -> bool:
    """Whether a VM is to be looked at closely.

    :param earlier: what the survey said when that was done last, and what it says now; None: it had, or has, no domain.
    :param age_s: for how long it was not, in seconds.
    :param rests: whether nothing is to be done with it as far as its agent knows.
    :param deflated: whether it has less than it was sold.
    """
    if earlier is None or now is None or not rests or age_s >= CHECK_S * (1 if deflated else 2):
        return True
    before, after = ((one.uuid, one.state, one.vcpus, one.balloon_mib) for one in (earlier, now))
    return before != after


class Reconciler:
    """Runs the checks, each VM's in a task of its own, so that one that hangs holds up no other.

    :param take_back: looks after a domain of ours that no VM belongs to.
    :param has_failed: whether an intent's operation was answered as failed.
    """

    def __init__(
        self,
        host: Host,
        take_back: Callable[[DomainState], Awaitable[None]],
        has_failed: Callable[[Intent], bool],
    ) -> None:
        self._host = host
        self._take_back = take_back
        self._has_failed = has_failed
        self._checks: dict[str, asyncio.Task[None]] = {}
        #: When each VM was checked closely, and what the survey said then.
        self._seen: dict[str, tuple[float, DomainSummary]] = {}
        self._owners_at = 0.0
        self._clock_steps = ClockSteps()
        #: Checks have slots of their own: those of silent guests must not hold up operations.
        self._slots = asyncio.Semaphore(CONCURRENT)
        #: Until when the response to a VM's pressure is not tried again.
        self._responded: dict[str, float] = {}
        self._neighbours = Neighbours()
        #: When each domain of ours that no VM belongs to may be seen to again.
        self._unowned: dict[str, RepairPace] = {}
        #: Domains that bear a name of this host and are not ours, or are left alone, as of the last asking.
        self._foreign: set[str] = set()
        #: Those that are left alone and were told of.
        self._told: set[str] = set()
        host.hypervisor.on_lifecycle(self._on_lifecycle)

    def _on_lifecycle(self, domain: str, rebooted: bool) -> None:
        for vm in self._host.vms.values():
            if vm.domain == domain:
                if rebooted:
                    vm.guest_boots(Silence.REBOOTING)
                vm.request_check()
        self._host.check_requested.set()

    async def run(self) -> None:
        """Reconcile until cancelled. A round that fails is logged, and the next one is tried."""
        self._checks[_LIMITS] = asyncio.create_task(self._watch_limits(), name=_LIMITS)
        loop, next_at, told = asyncio.get_running_loop(), 0.0, set[str]()
        try:
            while True:
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(self._pause_s()):
                        await self._host.check_requested.wait()
                await asyncio.sleep(next_at - loop.time())
                next_at = loop.time() + min(LEAST_PAUSE_S, SURVEY_S)
                self._host.check_requested.clear()
                try:
                    await self._round()
                    told.clear()
                except HypervisorError as error:
                    # Once for each reason: a hypervisor may be away for days.
                    tell = log.debug if str(error) in told else log.warning
                    tell("the VMs could not be surveyed", why=str(error))
                    told.add(str(error))
                except Exception:
                    log.exception("a round of the reconciler failed")
        finally:
            for task in self._checks.values():
                task.cancel()
            await asyncio.gather(*self._checks.values(), return_exceptions=True)

    def _pause_s(self) -> float:
        """Guests that are deflated and cannot ask for help themselves are looked at as often as they say something."""
        alone = any(not vm.link.has_channel and vm.running and vm.deflated for vm in self._host.vms.values())
        return STATS_PERIOD_S if alone else SURVEY_S

    async def _round(self) -> None:
        # Listed before the domains: a VM that comes into being meanwhile is not missed for it.
        vms = [vm for vm in self._host.vms.values() if vm.intent.phase is not Phase.CREATING]
        self._follow_clock(vms)
        await self._host.sample()
        try:
            found = await twice(self._host.hypervisor.survey)
        except HypervisorError as error:
            self._host.hypervisor_answers(str(error))
            for vm in self._host.vms.values():
                vm.pressure.judge()
            raise
        self._host.hypervisor_answers()
        now = asyncio.get_running_loop().time()
        # One that has moved away was the other host's at the end, and may be on its way back.
        back = any(vm.intent.phase is Phase.ARRIVING and vm.domain in self._foreign for vm in vms)
        if back or now - self._owners_at >= OWNERS_S:
            self._foreign = found.keys() - {domain.name for domain in await self._host.hypervisor.domains()}
            found = await twice(self._host.hypervisor.survey)  # the first one is old by now
            self._owners_at = now
            self._seen = {vm.domain: self._seen[vm.domain] for vm in vms if vm.domain in self._seen}
            self._responded = {vm.name: self._responded[vm.name] for vm in vms if vm.name in self._responded}
        found = {name: summary for name, summary in found.items() if name not in self._foreign}
        short = [vm.name for vm in self._host.under_pressure() if vm.pressure.short_of_memory]
        self._neighbours.observe(now, self._host.vms, short)
        for vm in vms:
            self._start_check_if_due(vm, found.get(vm.domain))
        known = {vm.domain for vm in self._host.vms.values()} | {vm.domain for vm in vms}
        if found.keys() - known:
            await self._see_to_unowned(known)

    def _follow_clock(self, vms: Iterable[ManagedVM]) -> None:
        for vm, was, right in self._clock_steps.look(vms):
            # Beside the round: one that is busy may be so for long.
            self._begin(f"clock:{vm.name}:{right}", date_start(self._host, vm, was, right))

    def _begin(self, name: str, work: Coroutine[None, None, None]) -> None:
        self._checks[name] = task = asyncio.create_task(work, name=name)
        task.add_done_callback(lambda done: self._checks.pop(name, None))

    async def _watch_limits(self) -> None:
        """Beside all else: swap may fill while the hypervisor does not answer."""
        while True:
            await self._check_limits()
            await asyncio.sleep(self._pause_s())

    async def _check_limits(self) -> None:
        """Lift the memory limits that must go."""
        try:
            for domain, why in (await self._host.hypervisor.sizes.check_limits()).items():
                for vm in self._host.vms.values():
                    if vm.domain == domain:
                        self._host.note(vm.name, DecisionKind.LIMIT, f"the memory limit is lifted: {why}", {})
                        vm.request_check()
        except HostAgentError as error:
            log.warning("the memory limits could not be checked", why=str(error))
        except Exception:
            log.exception("the check of the memory limits failed")

    def _start_check_if_due(self, vm: ManagedVM, summary: DomainSummary | None) -> None:
        """Begin a close check where there is reason for one."""
        if not self._host.holds(vm):
            return
        if vm.uuid is None and summary is not None:
            vm.uuid = summary.uuid
        if summary is not None and summary.state == "running":
            vm.drift_repair.sample(summary.vcpus, summary.vcpu_seconds)
            if vm.link.has_channel:
                vm.pressure.sample(summary.usable_mib, summary.major_faults, summary.said_at)
            else:
                vm.pressure.sample_ordinary(summary.statement)
        if summary is not None and summary.state == "stopped" and vm.running:
            # An operation on it would only run out of its time.
            vm.resizer.interrupt("its domain has ended")
        if vm.intent.phase is Phase.STOPPED and vm.intent.saved_mib is None:
            vm.pressure.boots()
        else:
            vm.pressure.judge()
        if vm.pressure.sentence:
            vm.drift_repair.unsettled = True
            if self._host.modes.does(HostEvent.PRESSURE):
                self._start_response(vm)
        if vm.name in self._checks:
            return
        at, earlier = self._seen.get(vm.domain, (0.0, None))
        now = asyncio.get_running_loop().time()
        rests = not (vm.drift_repair.unsettled or vm.record.uncertain or vm.plug_is_due())
        rests = rests and vm.intent.phase is Phase.SETTLED
        if vm.lock.locked() or not check_is_due(earlier, summary, now - at, rests, vm.deflated):
            return
        if summary is not None:
            self._seen[vm.domain] = (now, summary)
        task = asyncio.create_task(self._check_logged(vm, summary), name=f"check:{vm.name}")
        self._checks[vm.name] = task
        task.add_done_callback(lambda done: self._checks.pop(vm.name, None))

    def _start_response(self, vm: ManagedVM) -> None:
        """Give a VM under pressure what can be spared, in a task of its own that waits for no other work."""
        name = f"pressure-response:{vm.name}"
        now = asyncio.get_running_loop().time()
        if name in self._checks or now < self._responded.get(vm.name, 0.0) or not vm.running:
            return
        self._responded[vm.name] = now + PRESSURE_PAUSE_S
        task = asyncio.create_task(self._respond(vm), name=name)
        self._checks[name] = task
        task.add_done_callback(lambda done: self._checks.pop(name, None))

    async def _respond(self, vm: ManagedVM) -> None:
        try:
            await respond_to_pressure_of(self._host, vm, self._neighbours)
        except HostAgentError as error:
            log.warning("a VM under pressure could not be given more", vm=vm.name, why=str(error))
        except Exception:
            log.exception("the response to a VM's pressure failed", vm=vm.name)

    async def _check_logged(self, vm: ManagedVM, summary: DomainSummary | None) -> None:
        try:
            # In this order: one that waits for its turn is in nobody's way.
            async with self._slots:
                if not vm.lock.is_free:
                    vm.drift_repair.unsettled = True  # busy by now: looked at when that has ended, and no slot waits
                    return
                async with vm.lock:
                    if self._host.holds(vm):
                        await self._check(vm, summary)
        except HostAgentError as error:
            vm.drift_repair.unsettled = True
            log.warning("the VM could not be checked", vm=vm.name, why=str(error))
        except Exception:
            vm.drift_repair.unsettled = True
            log.exception("the check of a VM failed", vm=vm.name)

    async def _check(self, vm: ManagedVM, summary: DomainSummary | None) -> None:
        if vm.intent.phase is Phase.CREATING:
            return
        if vm.intent.phase is Phase.DELETING:
            await self._paced(vm, DecisionKind.REMOVE, "removed", self._finish_removal)
            return
        if (summary is None or summary.uuid != vm.uuid) and await self._drop_if_not_owned(vm):
            return
        if summary is None:
            return
        vm.uuid = summary.uuid
        if vm.record.uncertain and summary.state != "running":
            await vm.record.persist()
        if vm.intent.phase is Phase.STOPPING and vm.intent.cause is not None and vm.intent.cause.kind == "start":
            if summary.state != "paused":
                vm.drift_repair.pace.held()  # there is nothing left to refuse, or it runs and is kept
            await self._paced(vm, DecisionKind.STOPPED, "turned off", partial(turn_off_again, self._host))
            return
        if vm.intent.phase is Phase.ARRIVING and summary.state == "running":
            # libvirt lets it run here once it does not run there any more.
            await admit_arrival(self._host, vm)
        if vm.intent.phase in (Phase.STOPPING, Phase.STARTING, *MOVING):
            return  # an operation is about it
        state = summary.state
        if (state == "running") != vm.running:
            # An operation may have ended between the survey and this check.
            state = (await self._host.domain_states()).get(vm.domain, state)
        if await self._follow_state(vm, state):
            await self._repair(vm)
        else:
            vm.drift_repair.unsettled = False

    async def _paced(
        self, vm: ManagedVM, kind: DecisionKind, what: str, work: Callable[[ManagedVM], Awaitable[None]]
    ) -> None:
        """Do what libvirt may refuse again and again, ever more rarely; a command does it at once."""
        pace, now = vm.drift_repair.pace, asyncio.get_running_loop().time()
        if not pace.due(now):
            return
        pace.tried(now)
        try:
            await work(vm)
        except HostAgentError as error:
            again_s = pace.not_before - now
            sentence = f"it could not be {what} yet, and that is tried again in {again_s:.0f} s: {error}"
            self._host.note(vm.name, kind, sentence, {})

    async def _finish_removal(self, vm: ManagedVM) -> None:
        """Remove a VM whose deletion, or whose start, failed half way."""
        cause = vm.intent.cause
        if cause is not None and cause.kind == "delete":
            await self._host.record_change(vm.name, vm.allocation().current, ZERO, cause.request_id)
        await self._host.forget(vm)

    async def _drop_if_not_owned(self, vm: ManagedVM) -> bool:
        """Have nothing more to do with a VM whose domain is gone or has another owner."""
        if vm.domain in {domain.name for domain in await self._host.hypervisor.domains()}:
            return False
        log.warning("the VM's domain was removed or taken over by another owner", vm=vm.name)
        self._seen.pop(vm.domain, None)
        await self._host.record_change(vm.name, vm.allocation().current, ZERO, "removed from outside")
        await self._host.drop(vm)
        return True

    async def _follow_state(self, vm: ManagedVM, state: str) -> bool:
        """Take note of a start or stop from outside; a VM that was started is admitted first.

        :returns: whether the VM runs.
        """
        vm.paused = state == "paused"
        if state == "stopped" and vm.intent.phase in (Phase.SETTLED, Phase.ADMITTING, *RESIZING):
            await vm.found_off("it was not stopped by a command")
            self._host.changed.set()
            return False
        running = state == "running"
        if vm.intent.phase is Phase.STOPPED and state == "paused":
            running = self._host.modes.does(HostEvent.FOREIGN_START)  # paused by us until there is room
        # One that was suspended goes on, and does not boot.
        boots = vm.intent.phase in (Phase.STOPPED, Phase.ADMITTING) and vm.intent.saved_mib is None
        if running != vm.running:
            vm.running = await self._take_state(vm, running)
            self._host.changed.set()
        elif vm.intent.phase is Phase.ADMITTING and self._host.modes.mode is not HostMode.PAUSED:
            vm.running = await admit(self._host, vm)
        if boots and vm.running and not vm.link.connected:
            vm.guest_boots()
        return vm.running

    async def _take_state(self, vm: ManagedVM, running: bool) -> bool:
        modes = self._host.modes
        if vm.intent.phase is Phase.ADMITTING and running and modes.mode is HostMode.PAUSED:
            # Paused by us until there is room, and let run by an operator, who has the last word now.
            await let_run(self._host, vm)
            return True
        if vm.intent.phase is Phase.ADMITTING or (running and modes.does(HostEvent.FOREIGN_START)):
            # Not started by us: it is held to its committed size first.
            return await admit(self._host, vm)
        if not running:
            vm.found_paused()
            return False
        if vm.intent.phase is Phase.STOPPED:
            # First: it is charged whatever can be told.
            await vm.record.store(phase=Phase.SETTLED, started_at=time.time())
            await self._host.tell_growth(vm, vm.intent.committed.vector(), "started from outside")
        self._host.note(vm.name, DecisionKind.ADMIT, f"started from outside and left as it is: {modes.sentence}", {})
        return True

    async def _repair(self, vm: ManagedVM) -> None:
        """Try a resize again that failed, or put drift right."""
        await vm.tell_that_it_stays()
        modes, pace, now = self._host.modes, vm.drift_repair.pace, asyncio.get_running_loop().time()
        if vm.intent.phase not in RESIZING:
            if vm.plug_is_due() and modes.mode is not HostMode.PAUSED:
                await vm.resizer.plug(repairs=modes.does(HostEvent.DRIFT))
            await vm.drift_repair.check("" if modes.does(HostEvent.DRIFT) else modes.sentence)
        elif modes.does(HostEvent.UNFINISHED) and pace.due(now) and not vm.awaits_hello:
            pace.tried(now)
            if vm.record.uncertain:
                await vm.record.persist()
            await self._host.resize_one(vm, RETRY_DEADLINE_S)

    async def _see_to_unowned(self, known: set[str]) -> None:
        """Look after domains of ours that no VM belongs to, or remove them."""
        listed, here = await self._host.hypervisor.domains(), self._host.vms
        found, there = [domain for domain in listed if domain.name not in known], {domain.name for domain in listed}
        self._unowned = {domain.name: self._unowned.get(domain.name, RepairPace()) for domain in found}
        self._told &= self._unowned.keys()
        # What is a VM before what is a copy of it: libvirt may name both again at once.
        for domain in sorted(found, key=rank):
            pace, now = self._unowned[domain.name], asyncio.get_running_loop().time()
            if domain.name in {vm.domain for vm in here.values()} or not pace.due(now):
                continue
            if (vm := here.get(domain.intent.spec.name)) is not None and vm.domain not in there:
                continue  # renamed, perhaps: its check drops that VM first
            try:
                await self._see_to(domain)
            except HostAgentError as error:
                pace.tried(now)
                again_s = round(pace.not_before - now)
                what = "a domain of ours that no VM belongs to could not be seen to"
                log.warning(what, domain=domain.name, again_in_s=again_s, why=str(error))

    async def _see_to(self, domain: DomainState) -> None:
        intent, name, here = domain.intent, domain.intent.spec.name, self._host.vms
        journal = self._host.journal
        ended = put_back(intent, journal.deleted, journal.carried_out)
        taken = name in here or is_copy(domain)
        match fate(intent, domain.state, self._has_failed(intent), taken, ended):
            case Fate.TAKEN_BACK:
                await self._take_back(domain)
            case Fate.AWAITED if domain.state == "stopped":
                # No more is known of it: it may have been put back as it was while it came, and its disk with it.
                sentence = f"domain {domain.name} was to come from another host, and is off: it is left as it is"
                self._tell_once(name, domain.name, f"{sentence}, and looked after once it is started")
            case Fate.LEFT:
                said = f"domain {domain.name} is a copy of {name}, which is not here: it is left alone"
                if name in here:
                    said = f"domain {domain.name} is called {name}, too: it is left alone beside {here[name].domain}"
                self._tell_once(name, domain.name, said)
                self._foreign.add(domain.name)
            case Fate.GIVEN_BACK if intent.adopted is not None:
                await self._host.hypervisor.adoption.give_back(domain.name, intent.adopted)
            case Fate.REMOVED:
                log.warning("removing a domain of ours that no VM belongs to", domain=domain.name)
                await self._host.hypervisor.destroy(domain.name)

    def _tell_once(self, name: str, domain: str, sentence: str) -> None:
        if domain not in self._told:
            self._told.add(domain)
            self._host.note(name, DecisionKind.ALARM, sentence, {})
