"""Requests: each command is taken once, from the manager that leads, and answered with its operation."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping
from functools import partial
from typing import Any, Final
from weakref import WeakValueDictionary

from pydantic import ValidationError

from ebbtide.deflation.errors import InvalidField
from ebbtide.deflation.fencing import Fence
from ebbtide.messages.commands import Command
from ebbtide.messages.operations import Operation
from hostagent.clock import now
from hostagent.errors import RequestRefused, wrong_state
from hostagent.operations.operations import Kind, Operations, Run, done, failed
from hostagent.state.intents import Cause, Phase, Request
from hostagent.state.journal import Journal
from hostagent.vm.host import Host
from hostagent.vm.managed_vm import ManagedVM

#: Checks a new request and returns what carries it out. Nothing is waited for between its last look and its end, so
#: that no other operation comes between the two; before it changes something itself it asks whether its manager still
#: leads.
Accept = Callable[[Request], Awaitable[Run]]
#: The end of a request that is repeated after a restart.
FAILED_EARLIER: Final = "it failed before the agent was started again: another request has to ask for it anew"


class Leadership:
    """The latest command that was seen. Its epoch outlives the agent, in the journal.

    The order of commands ends with this process, as the connections do on which they could come late.
    """

    def __init__(self, journal: Journal) -> None:
        self._journal = journal
        self._fence = Fence()

    async def follow(self, command: Command, known: bool = False) -> None:
        """Refuse a manager whose leadership is over and a command that comes too late; remember the latest.

        :param known: it has been taken already, so that it can be overtaken by nothing: its repetition does nothing.
        :raises RequestRefused: the epoch, or within it the order, is lower than one that was seen.
        :raises JournalError: the epoch could not be stored.
        """
        self.check(command, known)
        self._fence = self._fence.after(command.epoch, command.order)
        if command.epoch > self._journal.epoch:
            await asyncio.to_thread(self._journal.raise_epoch, command.epoch)

    def check(self, command: Command, known: bool = False) -> None:
        """Whether a command may still be carried out: another may have come while it was looked at.

        :raises RequestRefused: as `follow`.
        """
        self._fence = self._fence.after(self._journal.epoch)
        why, field = self._fence.refusal(command.epoch, 0 if known else command.order)
        if why:
            raise RequestRefused(409, why, field)

    def leads(self, epoch: int, order: int) -> bool:
        """Whether a command of this epoch and order would have others refused from now on."""
        return order > 0 or epoch > self._journal.epoch


class Requests:
    """Takes the requests of one agent."""

    def __init__(self, host: Host) -> None:
        self._journal = host.journal
        self.leadership = Leadership(host.journal)
        self.operations = Operations(host.slice.host_id, host.failure_is_written)
        #: Held while a request is checked: its repetition waits, and then gets the same operation.
        self._being_checked: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()

    async def take(
        self,
        kind: Kind,
        command: Command,
        accept: Accept,
        vm: str | None = None,
        at_once: bool = False,
        **path: str,
    ) -> Operation:
        """Answer a command: with the operation that it has begun already, or with the one that begins now.

        :param vm: the VM that the operation is about; default: the name in the path.
        :param at_once: ``accept`` carries it out, and has asked before: what overtakes it after that comes later.
        :param path: what the request says beside its body.
        :raises RequestRefused: the command comes too late, its id stands for another one, or it is not accepted.
        """
        request_id, body = command.request_id, command.comparable() | path
        journal = self._journal
        known = self.operations.has(request_id) or any(
            request_id in ended for ended in (journal.deleted, journal.failed, journal.withdrawn)
        )
        await self.leadership.follow(command, known)
        lock = self._being_checked.setdefault(request_id, asyncio.Lock())
        async with lock:
            if operation := self.operations.known(request_id, kind, body, partial(_read_again, type(command), path)):
                return operation
            request = Request(request_id, kind, body, time.time())
            if journal.has_failed(kind, request_id):
                run = answer(FAILED_EARLIER, failed)
            else:
                # Its epoch may have been stored meanwhile: what is refused now must not have begun.
                self.leadership.check(command)
                run = await accept(request)
                if not at_once:
                    self.leadership.check(command)
            return self.operations.begin(
                request_id, kind, body, run, vm=vm or path.get("name"), started_at=request.started_at
            )


def _read_again(kind: type[Command], path: Mapping[str, str], stored: dict[str, Any]) -> dict[str, Any]:
    """The body of a request, which an earlier version may have stored with fewer fields, as this one stores it."""
    try:
        command = kind.model_validate({key: value for key, value in stored.items() if key not in path})
    except ValidationError:
        return stored
    return command.comparable() | {key: stored[key] for key in path if key in stored}


def answer(sentence: str, end: Callable[[Operation, str], Operation] = done) -> Run:
    """Carries out a request that asks for what is there already, or that has ended before this agent started.

    :param end: how it ends, or has ended.
    """

    async def run(operation: Operation) -> Operation:
        return end(operation, sentence)

    return run


def check_present(host: Host, vm: ManagedVM) -> None:
    """:raises RequestRefused: the VM was removed while its lock was waited for."""
    if not host.holds(vm):
        raise RequestRefused(404, f"there is no VM {vm.name} any more", "name")


async def check_not_arrived(host: Host, vm: ManagedVM) -> None:
    """That a VM which was to come runs on its old host, as who removes it here thinks.

    :raises RequestRefused: it runs here by now, so that it runs nowhere else (409).
    :raises HypervisorError: that is not known.
    """
    if vm.intent.phase is Phase.ARRIVING and (await host.domain_states()).get(vm.domain) == "running":
        vm.request_check()
        raise wrong_state(f"{vm.name} has arrived: it runs on {host.slice.host_id}", "name")


def cause_of(vm: ManagedVM) -> Cause:
    if vm.intent.cause is None:
        raise InvalidField("cause", f"of {vm.name} is missing")
    return vm.intent.cause


def left(until: float) -> float:
    return max(until - now(), 0.0)
