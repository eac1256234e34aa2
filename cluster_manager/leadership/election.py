"""State machine that decides who leads, without clock and I/O: events in, instructions out.

A manager leads while it holds the store's lock and has proved so within ``limit_s``. The proof counts from the moment
when its question was sent, so this manager stops before the server, which waits longer, lets another one have the lock.
Times are seconds of one clock that never goes back.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import StrEnum


class Phase(StrEnum):
    """Where a manager is."""

    #: Another one leads, or none.
    STANDBY = "standby"
    #: It holds the lock and begins its term: epoch, hosts, plans.
    BEGINNING = "beginning"
    LEADING = "leading"
    #: Its term is over, and its parts are being stopped.
    ENDING = "ending"
    #: For good.
    STOPPED = "stopped"


@dataclass(frozen=True, slots=True)
class ElectionState:
    """What is known.

    :param limit_s: how long a proof counts.
    :param pause_s: how long one that stepped down leaves the lock to others.
    :param proved_at: when the question that proved the lock was sent.
    :param not_before: when the lock may be tried again.
    :param resigned: it is being stopped.
    :param why: the reason of the latest change, or of the latest failure to get the lock.
    :param leader: where the leader is reached, as far as this one knows; None while it leads itself.
    """

    limit_s: float
    pause_s: float
    phase: Phase = Phase.STANDBY
    proved_at: float = 0.0
    not_before: float = 0.0
    resigned: bool = False
    why: str = "it has just started"
    leader: str | None = None
    epoch: int | None = None

    def acts(self, now: float) -> bool:
        """Whether it may command agents and change the store."""
        return self.phase in (Phase.BEGINNING, Phase.LEADING) and not self.has_lapsed(now)

    def leads(self, now: float) -> bool:
        """Whether it may answer clients."""
        return self.phase is Phase.LEADING and not self.has_lapsed(now)

    def has_lapsed(self, now: float) -> bool:
        return now - self.proved_at >= self.limit_s


# --- events ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Tick:
    """Time has passed."""

    now: float


@dataclass(frozen=True, slots=True)
class Held:
    """The lock is ours, by a question sent at ``asked_at``."""

    asked_at: float


@dataclass(frozen=True, slots=True)
class Refused:
    """Another manager holds the lock."""

    leader: str | None


@dataclass(frozen=True, slots=True)
class Unproved:
    """The store did not answer: whether the lock is ours is unknown, or it is lost."""

    why: str


@dataclass(frozen=True, slots=True)
class TermBegun:
    """All parts run."""

    epoch: int


@dataclass(frozen=True, slots=True)
class TermFailed:
    """The term could not be begun, or the store failed in it, or another manager has a higher epoch."""

    why: str


@dataclass(frozen=True, slots=True)
class TermEnded:
    """All parts are stopped."""

    now: float


@dataclass(frozen=True, slots=True)
class Resign:
    """The manager is to stop."""


ElectionEvent = Tick | Held | Refused | Unproved | TermBegun | TermFailed | TermEnded | Resign

# --- instructions ----------------------------------------------------------------------------------------------------


class Instruction(StrEnum):
    """What is to be done next."""

    #: Take the lock, or prove that it is held.
    ASK = "ask"
    BEGIN_TERM = "begin-term"
    END_TERM = "end-term"
    #: Give the lock and its connection up.
    RELEASE = "release"


Next = tuple[ElectionState, tuple[Instruction, ...]]


def advance(state: ElectionState, event: ElectionEvent) -> Next:
    """What follows from an event. One that comes too late changes nothing."""
    match state.phase:
        case Phase.STANDBY:
            return _standby(state, event)
        case Phase.BEGINNING | Phase.LEADING:
            return _term(state, event)
        case Phase.ENDING:
            return _ending(state, event)
        case Phase.STOPPED:
            # An answer to the last question may still bring a lock.
            return state, (Instruction.RELEASE,) if isinstance(event, Held) else ()


def _standby(state: ElectionState, event: ElectionEvent) -> Next:
    match event:
        case Tick(now):
            return state, (Instruction.ASK,) if now >= state.not_before else ()
        case Held(asked_at) if asked_at < state.not_before:
            # By a question of the term that has ended: this lock is being given up.
            return state, (Instruction.RELEASE,)
        case Held(asked_at):
            why = "it got the lock of the store"
            return replace(state, phase=Phase.BEGINNING, proved_at=asked_at, why=why), (Instruction.BEGIN_TERM,)
        case Refused(leader):
            return replace(state, leader=leader, why="another manager holds the lock of the store"), ()
        case Unproved(why):
            return replace(state, leader=None, why=why), (Instruction.RELEASE,)
        case Resign():
            return replace(state, phase=Phase.STOPPED, resigned=True, why="it is stopped"), (Instruction.RELEASE,)
        case _:
            return state, ()


def _term(state: ElectionState, event: ElectionEvent) -> Next:
    match event:
        case Tick(now):
            if state.has_lapsed(now):
                return _end(state, f"it could not prove within {state.limit_s:g} s that it still holds the lock")
            return state, (Instruction.ASK,)
        case Held(asked_at):
            return replace(state, proved_at=max(asked_at, state.proved_at)), ()
        case Refused():
            return _end(state, "it has lost the lock of the store to another manager")
        case Unproved(why) | TermFailed(why):
            return _end(state, why)
        case TermBegun(epoch) if state.phase is Phase.BEGINNING:
            return replace(state, phase=Phase.LEADING, epoch=epoch, leader=None), ()
        case Resign():
            return _end(replace(state, resigned=True), "it is stopped")
        case _:
            return state, ()


def _end(state: ElectionState, why: str) -> Next:
    return replace(state, phase=Phase.ENDING, why=why, epoch=None), (Instruction.END_TERM,)


def _ending(state: ElectionState, event: ElectionEvent) -> Next:
    match event:
        case TermEnded(now):
            phase = Phase.STOPPED if state.resigned else Phase.STANDBY
            return replace(state, phase=phase, not_before=now + state.pause_s), (Instruction.RELEASE,)
        case Resign():
            return replace(state, resigned=True), ()
        case _:
            return state, ()
