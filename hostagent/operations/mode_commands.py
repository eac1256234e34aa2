"""Changes of the host's mode as operations, and what a mode does by itself: off undoes, draining shares.

A change takes effect when it is asked for; its operation ends when what ran under the old mode has ended and, for off,
when everything was tried once. What could not be undone is tried again for as long as the host is off.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any, Final

import structlog

from ebbtide.deflation.allocations import Allocation, lack, shareable
from ebbtide.deflation.modes import HostEvent, HostMode
from ebbtide.deflation.resources import ResourceVector
from ebbtide.deflation.sharing.harvest import without_harvest
from ebbtide.deflation.sharing.proportional import share_room
from ebbtide.deflation.sharing.undo import is_worth_while, lacking, undone
from ebbtide.messages.commands import ModeCommand
from ebbtide.messages.common import Vector
from ebbtide.messages.explanations import DecisionKind
from ebbtide.messages.operations import Operation, VMOutcome
from hostagent.control.start_admission import PAUSED_BY_US, let_run, past_pressure
from hostagent.errors import HostAgentError
from hostagent.operations.operations import Run, done, partly_done
from hostagent.operations.requests import Requests
from hostagent.operations.size_commands import SizeCommands
from hostagent.state.intents import Phase, Request
from hostagent.vm.host import RESIZING, Host
from hostagent.vm.managed_vm import ManagedVM

#: How often it is checked whether a mode can give something back by itself, in seconds.
KEEP_S: Final = 10.0
#: What moved nothing is tried again after so many checks, twice as many each time, at most these.
MOST_SKIPPED: Final = 32
#: Time for giving back, in seconds.
DEADLINE_S: Final = 60.0

log = structlog.get_logger()


class ModeCommands:
    """Takes changes of the mode, and keeps to the mode: `run` until cancelled."""

    def __init__(self, host: Host, requests: Requests, size_commands: SizeCommands) -> None:
        self._host = host
        self._requests = requests
        self._size_commands = size_commands
        #: One at a time is stored, so that the later one holds.
        self._setting = asyncio.Lock()
        #: One at a time gives back.
        self._giving = asyncio.Lock()
        #: Whether that ended in an error, so that not even all was tried.
        self._failed = False
        self._changed = asyncio.Event()
        #: Commands that are not operations yet.
        self._taking = 0
        self._numbers = itertools.count(1)
        #: What was tried last by itself without moving anything, and after how many checks it is tried again.
        self._futile: dict[str, ResourceVector] = {}
        self._skipped = self._skip = 0

    async def set(self, command: ModeCommand) -> Operation:
        """Change the mode.

        :raises RequestRefused: the request is not acceptable.
        :raises JournalError: the mode could not be stored.
        """

        async def accept(request: Request) -> Run:
            async with self._setting:
                # Who was overtaken until now has changed nothing.
                self._requests.leadership.check(command)
                await self._host.modes.set(command.mode, command.reason)
            self._host.changed.set()
            for vm in self._host.vms.values():
                # What was left is caught up with, and what is left from now on is written down.
                vm.request_check()
            return partial(self._run, mode=command.mode, body=request.body)

        self._taking += 1
        try:
            return await self._requests.take("mode", command, accept, at_once=True)
        finally:
            self._taking -= 1
            self._changed.set()

    async def run(self) -> None:
        """Do what the mode does by itself, again and again."""
        while True:
            try:
                async with asyncio.timeout(KEEP_S):
                    await self._changed.wait()
                self._changed.clear()
                self._futile = {}
            except TimeoutError:
                pass
            try:
                await self._keep()
            except HostAgentError as error:
                log.warning("what was taken could not be given back yet", why=str(error))
            except Exception:
                log.exception("giving back failed")

    async def _keep(self) -> None:
        """Give back by ourselves, unless it is what moved nothing a little while ago."""
        if not self._host.modes.does(HostEvent.ROOM) or self._giving.locked():
            return
        if self._taking or self._requests.operations.under_way()["mode"]:
            return  # what off gives back its command gives back, and says so
        await self._host.sample()
        targets = self._targets(self._host.resizable()) | self._starts()
        if not targets and not self._failed:
            await self._look_back([])
            return
        if targets == self._futile:
            self._skipped += 1
            if self._skipped < self._skip:
                return
        self._skip = min(self._skip * 2, MOST_SKIPPED) if targets == self._futile else 1
        self._skipped = 0
        before = self._sizes()
        await self._give_back(f"{self._host.modes.mode}-{self._host.incarnation[:8]}-{next(self._numbers)}", {})
        self._futile = targets if self._sizes() == before else {}

    async def _run(self, operation: Operation, mode: HostMode, body: dict[str, Any]) -> Operation:
        modes, operations = self._host.modes, self._requests.operations
        if mode is not HostMode.ACTIVE:
            # On a draining host, too: what was begun may still bring a VM, which whoever empties it is to see.
            for other in operations.resizing():
                operations.progress(operation.request_id, f"{other.kind} {other.request_id} was begun before and ends")
                await operations.ended(other.request_id)
        if mode in (HostMode.PAUSED, HostMode.OFF):
            # And what the reconciler was doing: from here on it checks the mode first. While one is waited for, none is
            # held.
            for vm in list(self._host.vms.values()):
                async with vm.lock:
                    pass
        if modes.mode is not mode:
            return partly_done(operation, f"given up: {modes.sentence}")
        if mode is not HostMode.OFF:
            return done(operation, modes.sentence)
        with contextlib.suppress(HostAgentError):  # the host is off all the same, and that is still to be undone
            outcomes = await self._give_back(operation.request_id, body)
            operation = operation.model_copy(update={"vms": tuple(outcomes)})
        if modes.mode is not HostMode.OFF:
            return partly_done(operation, f"given up half way: {modes.sentence}")
        if not modes.unfinished:
            count = len(self._host.vms)
            return done(operation, f"{modes.sentence}; all {count} VMs have their nominal sizes")
        left = "; ".join(modes.unfinished)
        return partly_done(operation, f"{modes.sentence}; still to be undone, and tried again while it is off: {left}")

    async def _give_back(self, request_id: str, body: dict[str, Any]) -> list[VMOutcome]:
        """Give back once what the mode gives back."""
        async with self._giving:
            try:
                vms = list(self._host.vms.values())
                # First: what they can touch is given to no other, and they are undone with the others.
                errors = await _each(vms, self._let_run)
                errors += await _each(vms, self._leave_what_it_holds)
                outcomes = await self._size_commands.give(request_id, body, self._targets, DEADLINE_S)
                errors += await _each(vms, self._redefine)
                if errors:
                    raise errors[0]
            except HostAgentError as error:
                self._failed = True
                await self._look_back([], str(error))
                raise
            self._failed = False
            await self._look_back(outcomes)
            return outcomes

    async def _let_run(self, vm: ManagedVM) -> None:
        """Have a VM run that we have paused: without an agent nobody would."""
        host = self._host
        if vm.running or vm.intent.phase not in PAUSED_BY_US:
            return
        async with vm.lock:
            # One that is being started is its operation's.
            held = not vm.running and vm.intent.phase in (Phase.ADMITTING, Phase.STOPPED)
            if host.modes.mode is not HostMode.OFF or not held or not host.holds(vm):
                return
            vm.paused = (await host.domain_states()).get(vm.domain) == "paused"
            if vm.paused:
                await let_run(host, vm)

    async def _leave_what_it_holds(self, vm: ManagedVM) -> None:
        """Let a VM keep what it holds beyond its committed size, as one may that was started past us."""
        host = self._host
        if not self._holds_more(vm):
            return
        async with vm.lock:
            if host.modes.mode is HostMode.OFF and host.holds(vm) and self._holds_more(vm):
                size = vm.allocation().current.smaller(vm.record.upper)
                await host.hypervisor.prepare_start(vm.domain, size)
                await vm.record.charge(committed=Vector.of(size))

    @staticmethod
    def _holds_more(vm: ManagedVM) -> bool:
        beyond = vm.record.beyond.smaller(vm.record.upper)
        return vm.intent.phase is Phase.SETTLED and not beyond.fits_in(vm.intent.committed.vector())

    async def _redefine(self, vm: ManagedVM) -> None:
        """Undo what a stopped VM would come up with."""
        host = self._host
        if host.modes.mode is not HostMode.OFF or vm.running:
            return
        async with vm.lock:
            if vm.running or not host.holds(vm) or vm.intent.phase not in (Phase.SETTLED, Phase.STOPPED):
                return
            await host.sample()
            size = self._undone([vm.allocation()]).get(vm.name)
            if vm.intent.phase is Phase.STOPPED:
                # It holds no room, so none has to be found.
                row = vm.intent.spec.allocation(vm.intent.committed.vector())
                size = row.current.larger(row.nominal) if lacking([row]) else None
            # One that is paused is not off, and comes up with what it has.
            if size is not None and (await host.domain_states()).get(vm.domain) == "stopped":
                await host.hypervisor.prepare_start(vm.domain, size)
                if await host.hypervisor.saved_mib(vm.domain) is not None:
                    return  # it goes on with what it had when it was saved, whatever its definition says
                fields = {"committed": Vector.of(size), "target": Vector.of(size), "held": None, "saved_mib": None}
                await vm.record.store(**fields)
                host.note(vm.name, DecisionKind.REINFLATE, f"stopped, and starts with {size} from now on", {})

    async def _look_back(self, outcomes: list[VMOutcome], why_not: str = "") -> None:
        """What mode off has still to undo.

        :param why_not: what kept everything from being tried.
        """
        modes = self._host.modes
        if modes.mode is HostMode.OFF:
            await self._host.sample()
            modes.unfinished = self._unfinished(outcomes, why_not) or ((why_not,) if why_not else ())

    def _targets(self, vms: list[ManagedVM]) -> dict[str, ResourceVector]:
        """Which of these VMs are to grow to what."""
        rows = [vm.allocation() for vm in vms]
        match self._host.modes.mode:
            case HostMode.OFF:
                # What an earlier command had begun is given up, or its resize would go on.
                targets = {vm.name: vm.allocation().current for vm in vms if vm.intent.phase in RESIZING}
                shared = self._undone(rows)
            case HostMode.DRAINING:
                rows = without_harvest([vm.row_for_room() for vm in vms])
                room = shareable(self._host.free(), self._host.slice.capacity, lack(rows))
                targets, shared = {}, share_room(rows, *past_pressure(self._host, rows, room))
            case _:
                return {}
        by_name = {row.name: row for row in rows}
        return targets | {name: size for name, size in shared.items() if is_worth_while(by_name[name], size)}

    def _starts(self) -> dict[str, ResourceVector]:
        """The sizes that stopped VMs would come up with if they were undone."""
        if self._host.modes.mode is not HostMode.OFF:
            return {}
        rows = [vm.allocation() for vm in self._charged() if not vm.running and not vm.paused]
        more = [vm for vm in self._host.vms.values() if self._holds_more(vm)]
        held = {vm.name: vm.allocation().current for vm in (*self._held(), *more)}
        return self._undone([row for row in rows if row.name in lacking(rows)]) | self._saved() | held

    def _held(self) -> list[ManagedVM]:
        """VMs that we have paused."""
        return [vm for vm in self._host.vms.values() if vm.paused and vm.intent.phase in PAUSED_BY_US]

    def _saved(self) -> dict[str, ResourceVector]:
        """What those VMs lack whose memory is saved: a definition changes nothing of that."""
        saved = [vm.intent for vm in self._host.vms.values() if vm.intent.saved_mib is not None]
        off = [intent for intent in saved if intent.phase is Phase.STOPPED]
        return lacking(intent.spec.allocation(intent.committed.vector()) for intent in off)

    def _undone(self, rows: list[Allocation]) -> dict[str, ResourceVector]:
        return undone(rows, *past_pressure(self._host, rows, self._host.free()))

    def _charged(self) -> list[ManagedVM]:
        """All VMs but those that were stopped on command: they hold nothing, so they lack nothing."""
        return [vm for vm in self._host.vms.values() if vm.intent.phase is not Phase.STOPPED]

    def _sizes(self) -> dict[str, tuple[Vector, Phase]]:
        return {vm.name: (vm.intent.committed, vm.intent.phase) for vm in self._host.vms.values()}

    def _missing(self) -> dict[str, ResourceVector]:
        """What each VM lacks of its nominal size; one whose size is not known may lack all of it."""
        vms = self._charged()
        open_ones = {vm.name: vm.allocation().nominal for vm in vms if vm.running and _is_open(vm)}
        return lacking(vm.allocation() for vm in vms) | open_ones

    def _unfinished(self, outcomes: list[VMOutcome], why_not: str) -> tuple[str, ...]:
        """What is still to be undone, a sentence a VM."""
        tried = {outcome.name: outcome for outcome in outcomes}
        otherwise = why_not or f"the host has {self._host.free().memory_mib:g} MiB of memory free"
        held = self._held()
        sentences = [f"{vm.name} is paused by us: there was no room when another program started it" for vm in held]
        for name, missing in self._missing().items():
            vm = self._host.vms[name]
            if vm in held:
                continue
            if vm.running and _is_open(vm):
                why = tried[name].sentence if name in tried else why_not or _why_open(vm)
                sentences.append(f"{name} is not known to have its nominal size: {why}")
            else:
                short = name in tried and not tried[name].shortfall.vector().is_zero()
                why = "another program has paused it" if vm.paused else tried[name].sentence if short else otherwise
                sentences.append(f"{name} lacks {missing}, since {why}")
        for name, missing in self._saved().items():
            why = "its memory is saved as it is: start it first, or remove what is saved"
            sentences.append(f"{name} lacks {missing}, since {why}")
        return tuple(sentences)


async def _each(vms: list[ManagedVM], work: Callable[[ManagedVM], Awaitable[None]]) -> list[HostAgentError]:
    """Do something with each VM; one with which that fails holds up no other.

    :returns: the errors.
    """
    errors = []
    for vm in vms:
        try:
            await work(vm)
        except HostAgentError as error:
            errors.append(error)
    return errors


def _is_open(vm: ManagedVM) -> bool:
    """Whether its resize has not ended, or what its domain holds of it could not be written: it is charged in full."""
    return vm.intent.phase in RESIZING or vm.record.uncertain


def _why_open(vm: ManagedVM) -> str:
    return "that could not be written down" if vm.record.uncertain else "another operation works on it"
