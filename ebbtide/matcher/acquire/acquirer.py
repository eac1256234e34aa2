"""The acquirer as a state machine: machines to keep, to give back, to ask for (Agarwal et al. 2023, §3.2, Algorithm 2).

Events come in, instructions go out; who carries them out is a provider (`provision.Provider`) and the scheduler, which
sends no new task to a machine that is decommissioned. A machine is given back only after its last task has ended, and
one that is replaced is decommissioned only after the other one has come: asked first, given back afterwards.

Every instruction may be given again. What a restart forgets is harmless: machines that are found are kept.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Set
from dataclasses import dataclass, field, replace
from enum import StrEnum

from ebbtide.matcher.acquire.net_changes import AcquirerOptions, View, net_change


class Standing(StrEnum):
    """What the acquirer means to do with a machine."""

    HELD = "held"
    #: It takes no new task; what runs there goes on to its end.
    LEAVING = "leaving"
    #: Its last task has ended: the provider takes it back.
    EMPTY = "empty"


@dataclass(frozen=True, slots=True)
class Machine:
    """One machine. Times are seconds since the epoch, or of a simulation."""

    name: str
    came_at: float
    standing: Standing = Standing.HELD
    #: When it began to leave.
    leaves_at: float | None = None
    why: str = "it was asked for"
    #: Since when it has been seen off; None: it is on. One that is off counts as none.
    off_at: float | None = None


@dataclass(frozen=True, slots=True)
class Request:
    """A machine that was asked for, and has not come."""

    number: int
    at: float
    #: The machine that goes when this one has come; None: none.
    replaces: str | None
    why: str
    #: Cores of the machine that goes; with fewer the one that comes is no gain.
    least_cores: float = 0.0


@dataclass(frozen=True, slots=True)
class Acquirer:
    """All that it knows."""

    machines: Mapping[str, Machine] = field(default_factory=dict)
    requests: Mapping[int, Request] = field(default_factory=dict)
    #: Of the last request.
    number: int = 0
    #: When the period ends.
    next_at: float = 0.0
    utilisation: float | None = None
    sentence: str = "it has not looked yet"

    @property
    def kept(self) -> tuple[Machine, ...]:
        """Machines that are not leaving."""
        return tuple(one for one in self.machines.values() if one.standing is Standing.HELD)

    @property
    def coming(self) -> tuple[Request, ...]:
        """Requests beside replacements, oldest first."""
        return tuple(one for one in self.requests.values() if one.replaces is None)


# --- events ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class PeriodOver:
    """Time for a look. One that comes early only tells which machines are off.

    :param pool: the machines of which something is known.
    :param wanted_cores: of all tasks that run and wait.
    """

    now: float
    pool: Mapping[str, View]
    wanted_cores: float


@dataclass(frozen=True, slots=True)
class Offered:
    """A request has got its machine."""

    now: float
    number: int
    machine: str
    #: None: it is not known yet.
    cores: float | None = None


@dataclass(frozen=True, slots=True)
class Refused:
    """A request gets none: the next look decides again."""

    number: int
    why: str


@dataclass(frozen=True, slots=True)
class Found:
    """The provider has a machine of ours that is not known here: it came before a restart."""

    now: float
    machine: str


@dataclass(frozen=True, slots=True)
class Emptied:
    """No task runs on a leaving machine, and none will; may come again and again."""

    machine: str


@dataclass(frozen=True, slots=True)
class Gone:
    """The provider has a machine no more: it was given back, or taken away."""

    now: float
    machine: str


Event = PeriodOver | Offered | Refused | Found | Emptied | Gone


# --- instructions ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class RequestMachine:
    """Ask the provider for a machine."""

    number: int
    why: str


@dataclass(frozen=True, slots=True)
class CancelRequest:
    """The provider need not answer any more; what has come meanwhile it takes back."""

    number: int
    why: str


@dataclass(frozen=True, slots=True)
class Decommission:
    """Send no new task to a machine; what runs goes on."""

    machine: str
    why: str


@dataclass(frozen=True, slots=True)
class Deallocate:
    """Give a machine back to the provider: nothing runs there."""

    machine: str
    why: str


Instruction = RequestMachine | CancelRequest | Decommission | Deallocate
Step = tuple[Acquirer, tuple[Instruction, ...]]


def advance(state: Acquirer, event: Event, options: AcquirerOptions) -> Step:
    """The state after an event, and what is to be done. An event of something unknown changes nothing."""
    match event:
        case PeriodOver():
            state, made_up = _on_switched(state, event, options)
            if event.now < state.next_at:
                return state, made_up
            state, instructions = _look(state, event, options)
            return state, (*made_up, *instructions)
        case Offered():
            return _on_offer(state, event)
        case Refused(number, why):
            if number not in state.requests:
                return state, ()
            left = {key: one for key, one in state.requests.items() if key != number}
            return replace(state, requests=left, sentence=f"a request was refused: {why}"), ()
        case Found(now, machine):
            if machine in state.machines:
                return state, ()
            found = Machine(machine, now, why="it was there when this manager began to look")
            return replace(state, machines={**state.machines, machine: found}), ()
        case Emptied(name):
            machine_ = state.machines.get(name)
            if machine_ is None or machine_.standing is Standing.HELD:
                return state, ()
            empty = replace(machine_, standing=Standing.EMPTY)
            return replace(state, machines={**state.machines, name: empty}), (Deallocate(name, machine_.why),)
        case Gone():
            return _on_loss(state, event, options)


def _look(state: Acquirer, event: PeriodOver, options: AcquirerOptions) -> Step:
    """The end of a period."""
    kept = {one.name: one for one in state.kept if one.off_at is None}
    pool = {name: view for name, view in event.pool.items() if name in kept}
    marked = frozenset(one.replaces for one in state.requests.values() if one.replaces in kept)
    change = net_change(
        pool,
        len(kept) - len(pool),
        frozenset(name for name in marked if name is not None),
        len(state.coming),
        event.wanted_cores,
        options,
    )
    machines, requests = dict(state.machines), dict(state.requests)
    instructions: list[Instruction] = []
    # Requests that are not wanted any more serve replacements before new ones are made.
    spare = [one.number for one in state.coming[::-1][: change.fewer]]
    spare += [one.number for one in requests.values() if one.replaces in change.removed]
    number = state.number
    for name in change.replaced:
        why, least = _why_replaced(name, pool[name]), pool[name].cores if pool[name].stability is not None else 0.0
        if spare:
            used = spare.pop()
            requests[used] = replace(requests[used], replaces=name, why=why, least_cores=least)
            continue
        number += 1
        requests[number] = Request(number, event.now, name, why, least)
        instructions.append(RequestMachine(number, why))
    for _ in range(change.more):
        number += 1
        requests[number] = Request(number, event.now, None, change.sentence)
        instructions.append(RequestMachine(number, change.sentence))
    for used in spare:
        del requests[used]
        instructions.append(CancelRequest(used, change.sentence))
    for name in change.removed:
        why = f"{change.sentence}; {_unchanged(pool[name])}"
        machines[name] = replace(kept[name], standing=Standing.LEAVING, leaves_at=event.now, why=why)
        instructions.append(Decommission(name, why))
    sentence, enough = change.sentence, not change.more and change.fewer == len(state.coming)
    # Those that are on do, and whoever meant to start it again has had a period for that.
    spent = [one for one in state.kept if enough and _off_s(one, event.now) >= options.period_s]
    if spent:
        sentence += f"; {len(spent)} that {'is' if len(spent) == 1 else 'are'} off given back"
    for one in spent:
        why = f"it has been off for {_off_s(one, event.now) / 60.0:.0f} min"
        machines[one.name] = replace(one, standing=Standing.LEAVING, leaves_at=event.now, why=why)
        instructions.append(Decommission(one.name, why))
    looked = Acquirer(machines, requests, number, event.now + options.period_s, change.utilisation, sentence)
    return looked, tuple(instructions)


def _on_offer(state: Acquirer, event: Offered) -> Step:
    request = state.requests.get(event.number)
    if request is None or event.machine in state.machines:
        return state, ()
    machines = {**state.machines, event.machine: Machine(event.machine, event.now, why=request.why)}
    requests = {key: one for key, one in state.requests.items() if key != event.number}
    leaving = state.machines.get(request.replaces) if request.replaces is not None else None
    if leaving is None or leaving.standing is not Standing.HELD:
        return replace(state, machines=machines, requests=requests), ()
    if event.cores is not None and event.cores < request.least_cores:
        why = f"it has {event.cores:g} cores, and {leaving.name}, which it was to replace, {request.least_cores:g}"
        machines[event.machine] = replace(
            machines[event.machine], standing=Standing.LEAVING, leaves_at=event.now, why=why
        )
        return replace(state, machines=machines, requests=requests), (Decommission(event.machine, why),)
    why = f"{request.why}; {event.machine} came in its place"
    machines[leaving.name] = replace(leaving, standing=Standing.LEAVING, leaves_at=event.now, why=why)
    return replace(state, machines=machines, requests=requests), (Decommission(leaving.name, why),)


def _on_loss(state: Acquirer, event: Gone, options: AcquirerOptions) -> Step:
    """One that went by itself is asked for again at once if there are too few; else the next look decides."""
    if event.machine not in state.machines:
        return state, ()
    machines = {name: one for name, one in state.machines.items() if name != event.machine}
    return _made_up(replace(state, machines=machines), {event.machine}, f"{event.machine} is gone", event.now, options)


def _on_switched(state: Acquirer, event: PeriodOver, options: AcquirerOptions) -> Step:
    """Note which machines are off. One that has just gone off is made up for as one that has gone."""
    machines, gone = dict(state.machines), set[str]()
    for name, one in state.machines.items():
        view = event.pool.get(name)
        if view is None or not (view.off or one.off_at is not None):
            continue
        if view.off and one.off_at is None and one.standing is Standing.HELD:
            gone.add(name)
        # Not in the future: the clock was set back since.
        off_at = event.now if one.off_at is None else min(one.off_at, event.now)
        machines[name] = replace(one, off_at=off_at if view.off else None)
    after = replace(state, machines=machines)
    if not gone:
        return after, ()
    return _made_up(
        after, gone, f"{', '.join(sorted(gone))} {'is' if len(gone) == 1 else 'are'} off", event.now, options
    )


def _made_up(state: Acquirer, lost: Set[str], what: str, now: float, options: AcquirerOptions) -> Step:
    """Ask for machines in place of lost ones where fewer than the least number are left."""
    # What was to replace one comes in its place.
    requests = {
        number: replace(one, replaces=None) if one.replaces in lost else one for number, one in state.requests.items()
    }
    after = replace(state, requests=requests)
    on = sum(one.off_at is None for one in after.kept)
    missing = options.least_machines - on - len(after.coming)
    why = f"{what}, and {options.least_machines} machines are to be kept at least"
    made = [Request(state.number + one, now, None, why) for one in range(1, missing + 1)]
    after = replace(
        after,
        requests={**requests, **{one.number: one for one in made}},
        number=state.number + len(made),
    )
    return after, tuple(RequestMachine(one.number, why) for one in made)


def advance_all(state: Acquirer, events: Iterable[Event], options: AcquirerOptions) -> Step:
    """The state after several events, and what is to be done, in order."""
    instructions: list[Instruction] = []
    for event in events:
        state, more = advance(state, event, options)
        instructions += more
    return state, tuple(instructions)


def _off_s(machine: Machine, now: float) -> float:
    """For how long a machine has been off; negative: it is on."""
    return -1.0 if machine.off_at is None else now - machine.off_at


def _why_replaced(name: str, view: View) -> str:
    if view.stability is None:
        return f"{_unchanged(view)}: {name} is among the most recently changed"
    return f"it keeps its cores for a task with {view.stability:.0%}: {name} is among the least stable"


def _unchanged(view: View) -> str:
    if view.unchanged_s == float("inf"):
        return "its cores have not changed for longer than is remembered"
    return f"its cores changed {view.unchanged_s / 60.0:.0f} min ago"
