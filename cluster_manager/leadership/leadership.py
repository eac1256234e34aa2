"""Runner of the election: asks for the lock, begins and ends the manager's terms, guards what only a leader does."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import Protocol

import structlog

from cluster_manager.defaults import LeadershipTimes
from cluster_manager.errors import LostLeadership, StoreError
from cluster_manager.leadership.election import (
    ElectionEvent,
    ElectionState,
    Held,
    Instruction,
    Phase,
    Refused,
    Resign,
    TermBegun,
    TermEnded,
    TermFailed,
    Tick,
    Unproved,
    advance,
)
from cluster_manager.leadership.locks import LeaderLock, Taken

log = structlog.get_logger()


class Term(Protocol):
    """What is there while this manager leads."""

    async def begin_term(self) -> int:
        """Start everything that only a leader does. Returns the epoch. Raises StoreError."""

    async def end_term(self) -> None:
        """Stop it, as far as it was started."""


def since_boot() -> float:
    """Seconds, those too in which this machine was suspended, which the monotonic clock leaves out."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


class Leadership:
    """Whether this manager leads.

    :param clock: seconds that never go back, and go on while this process is stopped.
    """

    def __init__(
        self, lock: LeaderLock, term: Term, times: LeadershipTimes, clock: Callable[[], float] = since_boot
    ) -> None:
        self._lock = lock
        self._term = term
        self._times = times
        self._clock = clock
        self._state = ElectionState(lock.limit_s, times.pause_s)
        self._news = asyncio.Event()
        #: Instructions that wait for the loop in `_keep`.
        self._asking = self._releasing = False
        self._work: asyncio.Task[None] | None = None
        self._run: asyncio.Task[None] | None = None
        self._failure: StoreError | None = None
        self._said = ("standby", self._state.why, self._state.leader)

    @property
    def leader(self) -> str | None:
        """Where another manager that leads is reached, if that is known."""
        return self._state.leader

    @property
    def why(self) -> str:
        """The reason of the present role."""
        return self._state.why

    def leads(self) -> bool:
        """Whether clients may be answered."""
        return self._state.leads(self._clock())

    def check(self) -> None:
        """Before each command to an agent.

        :raises LostLeadership: this manager must not act (any more).
        """
        now = self._clock()
        if not self._state.acts(now):
            # After a halt of the whole process this may be the first to notice.
            self._feed(Tick(now))
            raise LostLeadership(f"this manager does not lead: {self._state.why}")

    def fail(self, why: str) -> None:
        """The store failed, or another manager has a higher epoch: the term ends."""
        self._feed(TermFailed(why))

    async def start(self) -> None:
        """Lead, if no other manager does; else wait for it in the background.

        :raises StoreError: the store cannot be used, or is used by another manager and cannot be waited for; or the
            first term could not be begun.
        """
        asked_at = self._clock()
        try:
            await self._lock.hold()
            self._feed(Held(asked_at))
        except Taken as error:
            if not self._lock.waits:
                raise StoreError(str(error)) from error
            self._feed(Refused(error.leader))
        except StoreError:
            await self._lock.release()
            raise
        self._run = asyncio.create_task(self._keep(), name="leadership")
        while self._state.phase is Phase.BEGINNING:
            await self._wait(self._times.check_s)
        if self._failure is not None:
            failure = self._failure
            await self.stop()
            raise failure

    async def stop(self) -> None:
        """End the term, give the lock up at once. Harmless where nothing was started."""
        self._feed(Resign())
        if self._run is not None:
            await asyncio.gather(self._run, return_exceptions=True)
        else:
            await self._lock.release()

    async def _keep(self) -> None:
        while True:
            self._feed(Tick(self._clock()))
            # What is to be given up goes first: else that would be the lock of the next term.
            asking, self._asking = self._asking and not self._releasing, False
            if asking:
                await self._ask()
            if self._releasing:
                self._releasing = False
                await self._lock.release()
            if self._state.phase is Phase.STOPPED and not self._releasing:
                return
            await self._wait(self._times.check_s)

    async def _wait(self, limit_s: float) -> None:
        """For the next change of the state, at most so long."""
        try:
            async with asyncio.timeout(limit_s):
                await self._news.wait()
        except TimeoutError:
            pass
        self._news.clear()

    async def _ask(self) -> None:
        asked_at = self._clock()
        limit_s = self._lock.limit_s
        if self._state.acts(asked_at):
            limit_s -= asked_at - self._state.proved_at
        try:
            async with asyncio.timeout(limit_s if limit_s < float("inf") else None):
                await self._lock.hold()
        except Taken as error:
            self._feed(Refused(error.leader))
        except StoreError as error:
            self._feed(Unproved(str(error)))
        except TimeoutError:
            self._feed(Unproved(f"the store did not answer within {self._lock.limit_s:g} s"))
        else:
            self._feed(Held(asked_at))

    def _feed(self, event: ElectionEvent) -> None:
        before = self._state
        self._state, instructions = advance(before, event)
        for instruction in instructions:
            match instruction:
                case Instruction.ASK:
                    self._asking = True
                case Instruction.RELEASE:
                    self._releasing = True
                case Instruction.BEGIN_TERM:
                    self._work = asyncio.create_task(self._begin(), name="begin the term")
                case Instruction.END_TERM:
                    self._work = asyncio.create_task(self._end(self._work), name="end the term")
        self._say()
        if self._state.phase is not before.phase:
            self._news.set()

    def _say(self) -> None:
        """One line for each change of role, and for a standby's reason when it becomes another one."""
        state = self._state
        role = "leader" if state.phase is Phase.LEADING else "standby"
        if state.phase is Phase.BEGINNING or (role, state.why, state.leader) == self._said:
            return
        self._said = (role, state.why, state.leader)
        known = {"epoch": state.epoch, "leader": state.leader}
        log.info(f"this manager is {role}", why=state.why, **{key: value for key, value in known.items() if value})

    async def _begin(self) -> None:
        await self._guarded(self._begun())

    async def _begun(self) -> None:
        self._feed(TermBegun(await self._term.begin_term()))

    async def _end(self, beginning: asyncio.Task[None] | None) -> None:
        if beginning is not None:
            beginning.cancel()
            await asyncio.gather(beginning, return_exceptions=True)
        await self._guarded(self._term.end_term())
        self._feed(TermEnded(self._clock()))

    async def _guarded(self, work: Awaitable[None]) -> None:
        """A term that cannot begin is over; the next try begins again."""
        try:
            await work
        except StoreError as error:
            self._failure = error
            self._feed(TermFailed(str(error)))
        except Exception as error:
            log.exception("a term could not be begun or ended, by a defect of the manager")
            self._failure = StoreError(f"a term could not be begun: a defect of the manager ({type(error).__name__})")
            self._feed(TermFailed(f"a defect of the manager ({type(error).__name__})"))
