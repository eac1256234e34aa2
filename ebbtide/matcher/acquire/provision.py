"""Interface of what gives an acquirer machines: our own cluster manager, and the simulator's replayed servers."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Set
from dataclasses import dataclass, field
from typing import Protocol

from ebbtide.matcher.acquire.acquirer import (
    Acquirer,
    CancelRequest,
    Deallocate,
    Decommission,
    Event,
    Found,
    Gone,
    Instruction,
    Offered,
    Refused,
    RequestMachine,
    Standing,
)


@dataclass(frozen=True, slots=True)
class Provision:
    """All that a provider has for us at one moment.

    :param machines: ours, and there.
    :param offers: the machine that a request has got; stays there while the machine does, or goes at some time.
    :param refusals: requests that get none, and why.
    :param silent: machines that may be there or not: nothing follows.
    :param under_way: machines that are coming, for requests that are not remembered here.
    :param cores: of machines of which it is known.
    :param asked: requests that it works at, or has answered with a machine that is there; without cancelled ones.
    :param opened: names that machines of ours hold, there or not.
    :param others: names like theirs that something of somebody else's holds at the same provider.
    """

    machines: Set[str] = frozenset()
    offers: Mapping[int, str] = field(default_factory=dict)
    refusals: Mapping[int, str] = field(default_factory=dict)
    silent: Set[str] = frozenset()
    under_way: int = 0
    asked: Set[int] = frozenset()
    cores: Mapping[str, float] = field(default_factory=dict)
    opened: Set[str] = frozenset()
    others: Set[str] = frozenset()


class Provider(Protocol):
    """Gives machines and takes them back. Every method may be called again with the same arguments.

    A request whose cancellation comes too late is taken back by the provider itself.
    """

    def look(self) -> Awaitable[Provision]:
        """What there is now."""

    def request(self, number: int) -> Awaitable[None]:
        """Ask for a machine; `look` has the answer."""

    def cancel(self, number: int) -> Awaitable[None]:
        """A request need not be answered any more."""

    def deallocate(self, machine: str) -> Awaitable[None]:
        """Take a machine back on which nothing runs."""


def news(state: Acquirer, provision: Provision, now: float) -> list[Event]:
    """What an acquirer does not know yet of what a provider has."""
    events: list[Event] = []
    for number, machine in sorted(provision.offers.items()):
        if number in state.requests and machine in provision.machines:
            events.append(Offered(now, number, machine, provision.cores.get(machine)))
    events += [Refused(number, why) for number, why in sorted(provision.refusals.items()) if number in state.requests]
    # An offer that is no longer waited for is no find: its request is to be cancelled once more.
    known = state.machines.keys() | set(provision.offers.values())
    events += [Found(now, machine) for machine in sorted(provision.machines - known)]
    there = provision.machines | provision.silent
    events += [Gone(now, machine) for machine in sorted(state.machines.keys() - there)]
    return events


def calls(
    provider: Provider, instructions: Iterable[Instruction], decommission: Callable[[Decommission], None]
) -> Iterator[Awaitable[None]]:
    """The provider's part of instructions, one after another; the scheduler's is told by ``decommission``."""
    for instruction in instructions:
        match instruction:
            case RequestMachine(number):
                yield provider.request(number)
            case CancelRequest(number):
                yield provider.cancel(number)
            case Deallocate(machine):
                yield provider.deallocate(machine)
            case Decommission():
                decommission(instruction)


def unfinished(state: Acquirer, provision: Provision) -> list[Instruction]:
    """What was asked for and may not have happened: to be given again after a failure.

    :param provision: what the provider had to say before the state came to be.
    """
    again: list[Instruction] = [RequestMachine(one.number, one.why) for one in state.requests.values()]
    for number in sorted(provision.asked - state.requests.keys()):
        if provision.offers.get(number) not in state.machines:
            again.append(CancelRequest(number, "it is not wanted any more"))
    again += [Deallocate(one.name, one.why) for one in state.machines.values() if one.standing is Standing.EMPTY]
    return again
