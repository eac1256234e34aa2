"""Steady mode of this host: idle memory of its VMs is trimmed slowly, so that arrivals find room.

See docs/reference/steady.md. How much is to be free is learned in `deflation.sharing.reserve`, who gives and gets how
much is decided in `deflation.trimming`. A step is a resize like any other, with a ledger; whatever else wants
the VM goes first.
"""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Final

import structlog

from ebbtide.deflation.modes import HostEvent
from ebbtide.deflation.sharing.harvest import harvested
from ebbtide.deflation.sharing.reserve import REFILL_S, ReserveLearner, reserve_of
from ebbtide.deflation.trimming import Step, Trimmer, TrimRow
from ebbtide.messages.commands import SteadyCommand, SteadyStatus
from ebbtide.messages.explanations import DecisionKind
from hostagent.clock import now as _now
from hostagent.control.start_admission import past_pressure
from hostagent.errors import HostAgentError
from hostagent.state.history import STEADY
from hostagent.state.intents import Phase, Request
from hostagent.vm.executor import guest_status
from hostagent.vm.host import Host, persist_all, plan_all
from hostagent.vm.managed_vm import ManagedVM

#: How often guests are asked for their memory, in seconds; only where memory may be taken or given back.
LOOK_S: Final = 10.0
#: Time for one step, in seconds: what it does not give by then stays where it is.
STEP_LIMIT_S: Final = 20.0
#: How long after a reclaim nothing is given: whoever it was for is charged by then, in seconds.
SPOKEN_FOR_S: Final = 15.0
#: Phases of a VM beside which others are trimmed. One that is paused until there is room may be so for days, and what
#: is trimmed is what it waits for.
AT_REST: Final = (Phase.SETTLED, Phase.STOPPED, Phase.ADMITTING)
#: A VM to which memory is given back again and again is written down once in so many seconds.
NOTE_S: Final = 300.0

log = structlog.get_logger()


class Steady:
    """Keeps a host's reserve. `run` until cancelled."""

    def __init__(self, host: Host) -> None:
        self._host = host
        self._trimmer = Trimmer()
        stored = host.journal.steady
        self._learner = ReserveLearner(stored.refill_s or REFILL_S, list(stored.arrivals))
        self._changed = asyncio.Event()
        self._storing = asyncio.Lock()
        #: What each VM takes, by name, as it was seen last; None: nothing was seen yet.
        self._charged: dict[str, float] | None = None
        self._taken_mib = 0.0
        self._noted_at: dict[str, float] = {}
        self._told_setting = (stored.enabled, stored.reserve_mib)

    # --- the setting -------------------------------------------------------------------------------------------------

    def status(self) -> SteadyStatus:
        """What is set, what was learned, and what is so now."""
        host, stored = self._host, self._host.journal.steady
        learned = self._learner.learned_mib(time.time())
        kept, free = host.reserve_mib, host.free().memory_mib
        how = f"learned from {len(stored.arrivals)} arrivals" if stored.reserve_mib is None else "as it was asked for"
        sentence = "steady mode is off: no memory is taken before it is asked for"
        if stored.enabled:
            sentence = f"{free:.0f} MiB are free of the {kept:.0f} that are kept for arrivals ({how})"
            if not host.modes.does(HostEvent.TRIM):
                sentence = f"steady mode waits: {host.modes.sentence}"
            elif free < kept and (busy := self._busy()):
                sentence += f"; trimming waits until the operation on {', '.join(busy)} has ended"
        return SteadyStatus(
            enabled=stored.enabled,
            reserve_mib=stored.reserve_mib,
            learned_mib=round(learned, 1),
            kept_mib=round(kept, 1),
            free_mib=round(free, 1),
            refill_s=round(self._learner.refill_s, 1),
            sentence=sentence,
        )

    async def set(self, command: SteadyCommand) -> SteadyStatus:
        """Change the setting; what is left out stays.

        :raises JournalError: it could not be stored; all is as before.
        """
        changes: dict[str, Any] = {}
        if command.enabled is not None:
            changes["enabled"] = command.enabled
        if command.reserve_mib is not None:
            changes["reserve_mib"] = None if command.reserve_mib == "auto" else command.reserve_mib
        if replace(self._host.journal.steady, **changes) != self._host.journal.steady:
            # Only what it names: another command may be storing the rest.
            await self._store(**changes)
            self._keep()
            self._tell_setting()
            self._host.changed.set()
            self._changed.set()
        return self.status()

    async def _store(self, **fields: Any) -> None:
        async with self._storing:
            stored = replace(self._host.journal.steady, **fields)
            stored = replace(stored, refill_s=self._learner.refill_s, arrivals=tuple(self._learner.arrivals))
            await asyncio.to_thread(self._host.journal.set_steady, stored)

    # --- what goes on by itself ----------------------------------------------------------------------------------

    async def run(self) -> None:
        """Watch arrivals, take and give back, again and again."""
        while True:
            try:
                async with asyncio.timeout(LOOK_S):
                    await self._changed.wait()
            except TimeoutError:
                pass
            self._changed.clear()
            try:
                await self._round()
            except HostAgentError as error:
                log.warning("steady mode could do nothing", why=str(error))
            except Exception:
                log.exception("a round of steady mode failed")

    def _busy(self) -> list[str]:
        """Names of the VMs with an operation beside which nothing is trimmed: a step of ours is none."""
        away = (vm for vm in self._host.vms.values() if vm.intent.phase not in AT_REST)
        return [vm.name for vm in away if not (cause := vm.intent.cause) or not cause.request_id.startswith(STEADY)]

    def _keep(self) -> float:
        """How much is to be free now; the manager hears of it by the next report."""
        host, stored = self._host, self._host.journal.steady
        kept = 0.0
        if stored.enabled and host.modes.does(HostEvent.TRIM):
            learned = self._learner.learned_mib(time.time())
            kept = float(round(reserve_of(stored.reserve_mib, learned, host.slice.capacity.memory_mib)))
        if kept != host.reserve_mib:
            host.reserve_mib = kept
            host.changed.set()
        return kept

    async def _round(self) -> None:
        host = self._host
        await self._watch_arrivals()
        # It is in force as soon as it is stored, which may be before the command goes on.
        self._tell_setting()
        kept = self._keep()
        if not host.journal.steady.enabled or not host.modes.does(HostEvent.TRIM):
            self._trimmer.filling = False
            self._learner.rests()
            return
        await host.sample()
        before = self._trimmer.filling
        filling = self._trimmer.is_filling(host.free().memory_mib, kept)
        if self._busy():
            self._learner.waits(_now())
        else:
            self._learner.observe(_now(), filling)
        self._tell(before, filling, kept)
        watched = [vm for vm in host.resizable() if _may_give(vm) and (filling or vm.deflated)]
        if watched:
            await asyncio.gather(*(self._ask(vm) for vm in watched))
            await self._step()

    async def _watch_arrivals(self) -> None:
        """Take in what has come since the last look: VMs that are charged and were not."""
        charged = {
            vm.name: vm.allocation().nominal.memory_mib + vm.allocation().overhead_mib
            for vm in self._host.vms.values()
            if vm.intent.phase is not Phase.STOPPED
        }
        before, self._charged = self._charged, charged
        if before is None:
            return  # an agent that starts finds its VMs: they came long ago
        arrived = [size for name, size in charged.items() if name not in before]
        for size in arrived:
            self._learner.arrived(time.time(), size)
        if arrived:
            await self._store()

    async def _ask(self, vm: ManagedVM) -> None:
        """Hear how the guest is; one that does not answer is left alone."""
        status = await guest_status(vm.link, brief=True, breaks=False)
        if status is not None:
            vm.pressure.observe(status)
        if vm.pressure.said is not None:
            said, at = vm.pressure.said
            self._trimmer.observe(at, vm.name, said.pressure_reading())

    async def _step(self) -> None:
        host = self._host
        async with host.claimed(0.0) as claim:
            await host.sample()
            if not host.modes.does(HostEvent.TRIM):
                return
            # In one turn of the loop with the plan: no other operation counts on this room.
            quiet = not self._busy()
            rows = [_row(vm, vm in claim.vms, quiet) for vm in host.resizable()]
            spoken_for = host.reclaims > 0 or _now() - host.reclaimed_at < SPOKEN_FOR_S
            # What a VM under pressure waits for is its own: the reserve lacks it all the same.
            room_mib = 0.0 if spoken_for else past_pressure(host, (), host.free())[0].memory_mib
            # Harvest VMs get back no more than their budget leaves: a reclaim has revoked it, and counts on that room.
            budget = host.journal.budget.room.less(harvested([vm.allocation() for vm in host.vms.values()]))
            free_mib = host.free().memory_mib
            steps = self._trimmer.steps(_now(), rows, free_mib, host.reserve_mib, room_mib, budget.memory_mib)
            request_id = f"{STEADY}{uuid.uuid4().hex[:12]}"
            body = {"request_id": request_id, "deadline_s": STEP_LIMIT_S, "gently": True}
            targets = {
                name: host.vms[name].allocation().current.with_component("memory_mib", step.memory_mib)
                for name, step in steps.items()
            }
            self._note(steps)
            members = plan_all(host, targets, Request(request_id, "reinflate", body, time.time()))
            claim.keep(members)
            if not members:
                return
            gave_way: set[str] = set()

            def ended(vm: ManagedVM) -> None:
                # Seen before it is released: whoever waits for it has it then.
                if vm.lock.is_wanted:
                    gave_way.add(vm.name)
                claim.release(vm)

            await persist_all(members)
            for outcome in await host.resize(members, STEP_LIMIT_S, ended=ended):
                before, after = outcome.before.memory_mib, outcome.after.memory_mib
                wanted = before - steps[outcome.name].memory_mib
                self._taken_mib += max(before - after, 0.0)
                host.steady_taken_mib += max(before - after, 0.0)
                host.steady_given_mib += max(after - before, 0.0)
                fell_short = wanted > 0 and before - after < wanted / 2 and not outcome.errors
                if fell_short and outcome.name not in gave_way:
                    self._trimmer.fell_short(_now(), outcome.name)

    # --- what is told of it ------------------------------------------------------------------------------------------

    def _tell_setting(self) -> None:
        """Write down a setting that is new, before anything that follows from it."""
        stored = self._host.journal.steady
        if self._told_setting == (stored.enabled, stored.reserve_mib):
            return
        self._told_setting = (stored.enabled, stored.reserve_mib)
        told = _told(stored.reserve_mib)
        sentence = f"steady mode is on, reserve: {told}" if stored.enabled else "steady mode is off"
        self._host.note(None, DecisionKind.STEADY, sentence, {"enabled": stored.enabled, "reserve": told})

    def _tell(self, before: bool, filling: bool, kept: float) -> None:
        """Write down when trimming begins and ends: a step is in the VM's ledger."""
        free = self._host.free().memory_mib
        if filling and not before:
            self._taken_mib = 0.0
            sentence = f"idle memory is trimmed: {free:.0f} MiB are free of the {kept:.0f} that are kept for arrivals"
            self._host.note(None, DecisionKind.STEADY, sentence, {"free_mib": free, "reserve_mib": kept})
        elif before and not filling:
            sentence = f"the reserve of {kept:.0f} MiB is full: {self._taken_mib:.0f} MiB were trimmed"
            self._host.note(None, DecisionKind.STEADY, sentence, {"free_mib": free, "reserve_mib": kept})

    def _note(self, steps: Mapping[str, Step]) -> None:
        now = _now()
        self._noted_at = {name: at for name, at in self._noted_at.items() if now - at < NOTE_S}
        for name, step in steps.items():
            gives_back = step.memory_mib > self._host.vms[name].allocation().current.memory_mib
            if gives_back and name not in self._noted_at:
                self._noted_at[name] = now
                self._host.note(name, DecisionKind.STEADY, step.why, {"memory_mib": step.memory_mib})


def _may_give(vm: ManagedVM) -> bool:
    """Whether a VM is watched at all: its guest answers, and nobody wants it left alone."""
    return not vm.is_fixed and vm.link.connected and not vm.status().held


def _row(vm: ManagedVM, ours: bool, quiet: bool) -> TrimRow:
    """The row of a VM.

    :param ours: whether no other operation has it.
    :param quiet: whether none is under way on its host.
    """
    ready = ours and vm.intent.phase is Phase.SETTLED and not vm.record.uncertain and not vm.boots_small
    # One under pressure gets what there is by its own rules.
    ready = ready and not vm.pressure.sentence and not vm.status().held
    return TrimRow(vm.allocation(), may_trim=ready and quiet and vm.intent.spec.steady, may_grow=ready)


def _told(reserve_mib: float | None) -> str:
    return "learned" if reserve_mib is None else f"{reserve_mib:g} MiB"
