"""What an acquirer needs of whoever gives machines: our own cluster manager, and the simulator's replayed pools."""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Iterable, Mapping, Set
from dataclasses import dataclass, field
from typing import Any, Protocol

from task_matcher.acquirer import (
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
    """

    machines: Set[str] = frozenset()
    offers: Mapping[int, str] = field(default_factory=dict)
    refusals: Mapping[int, str] = field(default_factory=dict)
    silent: Set[str] = frozenset()


class Provider(Protocol):
    """Gives machines and takes them back. Every method may be called again with the same arguments.

    A request whose cancellation comes too late is taken back by the provider itself.
    """

    async def look(self) -> Provision:
        """What there is now."""

    async def request(self, number: int) -> None:
        """Ask for a machine; `look` has the answer."""

    async def cancel(self, number: int) -> None:
        """A request need not be answered any more."""

    async def deallocate(self, machine: str) -> None:
        """Take a machine back on which nothing runs."""


def news(state: Acquirer, provision: Provision, now: float) -> list[Event]:
    """What an acquirer does not know yet of what a provider has."""
    events: list[Event] = []
    offered = set()
    for number, machine in sorted(provision.offers.items()):
        if number in state.requests and machine in provision.machines:
            events.append(Offered(now, number, machine))
            offered.add(machine)
    events += [Refused(number, why) for number, why in sorted(provision.refusals.items()) if number in state.requests]
    known = state.machines.keys() | offered
    events += [Found(now, machine) for machine in sorted(provision.machines - known)]
    there = provision.machines | provision.silent
    events += [Gone(now, machine) for machine in sorted(state.machines.keys() - there)]
    return events


async def carry_out(
    provider: Provider, instructions: Iterable[Instruction], decommission: Callable[[Decommission], None]
) -> None:
    """Have the provider do its part; the scheduler's is told by ``decommission``."""
    for instruction in instructions:
        match instruction:
            case RequestMachine(number):
                await provider.request(number)
            case CancelRequest(number):
                await provider.cancel(number)
            case Deallocate(machine):
                await provider.deallocate(machine)
            case Decommission():
                decommission(instruction)


def unfinished(state: Acquirer) -> list[Instruction]:
    """What was asked for and may not have happened: to be given again after a failure."""
    again: list[Instruction] = [RequestMachine(one.number, one.why) for one in state.requests.values()]
    again += [Deallocate(one.name, one.why) for one in state.machines.values() if one.standing is Standing.EMPTY]
    return again


def at_once(coroutine: Coroutine[Any, Any, None]) -> None:
    """Run what never waits, as a simulated provider's methods: no loop is needed.

    :raises RuntimeError: it waits.
    """
    try:
        coroutine.send(None)
    except StopIteration:
        return
    coroutine.close()
    raise RuntimeError("a provider that is called at once must not wait")
