"""Adapters whose methods are coroutine functions, run on the service's own event loop (aio.py)."""

from __future__ import annotations

import asyncio
import concurrent.futures
import threading
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Callable, Coroutine, TypeVar, Union

from app_adapters.adapter import Adapter, Answer, Capabilities, Deadline, Promise, Refusal, Release
from app_adapters.errors import ApplicationError

#: How long a decision may take: the guest agent waits 1.5 s for capabilities and 2.5 s for an answer to a target.
DECISION_LIMIT_S = 2.5
#: How long work may go on after its deadline or after it was called off; then it is cancelled.
GRACE_S = 1.0
#: How long cancelled work may put things in order before the next operation may begin.
CANCEL_LIMIT_S = 10.0
LOOK_S = 0.05

T = TypeVar("T")


@dataclass(frozen=True)
class AsyncPromise:
    """As Promise; `work` is a coroutine function, called once on the loop.

    It is cancelled a second after its deadline, so it should look at the deadline, and measure, before.
    """

    promised: dict[str, float]
    expected_s: float
    work: Callable[[], Coroutine[object, object, Release]]
    reason: str = ""


AsyncAnswer = Union[AsyncPromise, Refusal]


class AsyncAdapter(ABC):
    """As Adapter, for asyncio. Its methods must not block the loop; `deadline.wait` would."""

    #: What it gives. A target names at least one of these and nothing else.
    components: tuple[str, ...] = ("memory_mib",)

    @abstractmethod
    async def capabilities(self) -> Capabilities:
        """Sizes that the application can have. Raises: ApplicationError where it cannot be asked."""

    @abstractmethod
    async def deflate(self, target: dict[str, float], mode: str, deadline: Deadline) -> AsyncAnswer:
        """Decide, quickly, about shrinking to `target`. Raises: ApplicationError, which counts as a refusal."""

    @abstractmethod
    async def reinflate(self, target: dict[str, float], deadline: Deadline) -> AsyncAnswer:
        """Decide, quickly, about growing again. Raises: ApplicationError, which counts as a refusal."""

    async def preemption(self, seconds_left: float | None, kind: str, reason: str) -> None:  # noqa: B027
        """As `Adapter.preemption`. Default: nothing."""

    async def status(self) -> dict[str, float]:
        """What it has now, by component. Raises: ApplicationError where it cannot be asked."""
        return {name: range_.current for name, range_ in (await self.capabilities()).resources.items()}


class OnLoop(Adapter):
    """An AsyncAdapter as the hook's threads see it. Its calls must not come from the loop's own thread."""

    def __init__(self, adapter: AsyncAdapter, loop: asyncio.AbstractEventLoop) -> None:
        self._adapter = adapter
        self._loop = loop
        self.components = adapter.components

    def capabilities(self) -> Capabilities:
        """Raises: ApplicationError, also where the loop does not come to it."""
        return self._decided(self._adapter.capabilities())

    def status(self) -> dict[str, float]:
        """Raises: ApplicationError, also where the loop does not come to it."""
        return self._decided(self._adapter.status())

    def preemption(self, seconds_left: float | None, kind: str, reason: str) -> None:
        """Raises: ApplicationError, also where the loop does not come to it."""
        self._decided(self._adapter.preemption(seconds_left, kind, reason))

    def deflate(self, target: dict[str, float], mode: str, deadline: Deadline) -> Answer:
        """Raises: ApplicationError, also where the loop does not come to it."""
        return self._plain(self._decided(self._adapter.deflate(target, mode, deadline)), deadline)

    def reinflate(self, target: dict[str, float], deadline: Deadline) -> Answer:
        """Raises: ApplicationError, also where the loop does not come to it."""
        return self._plain(self._decided(self._adapter.reinflate(target, deadline)), deadline)

    def _plain(self, answer: AsyncAnswer, deadline: Deadline) -> Answer:
        if not isinstance(answer, AsyncPromise):  # a refusal; of whatever else it is, checks.py says so
            return answer
        work = answer.work
        return Promise(answer.promised, answer.expected_s, lambda: self._worked(work(), deadline), answer.reason)

    def _decided(self, call: Coroutine[object, object, T]) -> T:
        future = self._begin(call)
        try:
            return future.result(DECISION_LIMIT_S)
        except concurrent.futures.TimeoutError:
            future.cancel()
            raise ApplicationError(f"the service's event loop did not answer within {DECISION_LIMIT_S:g} s") from None
        except concurrent.futures.CancelledError:
            raise ApplicationError("the service's event loop is ending") from None

    def _worked(self, call: Coroutine[object, object, Release], deadline: Deadline) -> Release:
        ended = threading.Event()

        async def whole() -> Release:
            try:
                return await call
            except SystemExit as error:  # of a task it would end the service's loop
                raise RuntimeError(f"SystemExit: {error}") from error
            finally:
                ended.set()

        future = self._begin(whole())
        over = None
        while not future.done():
            if deadline.passed and over is None:
                over = Deadline(GRACE_S)
            if over is not None and over.passed:
                future.cancel()  # which counts as done at once: what the work still puts in order is waited for
                ended.wait(CANCEL_LIMIT_S)
                raise ApplicationError("the deadline passed, and the work was cancelled")
            concurrent.futures.wait([future], timeout=LOOK_S if over is not None else min(deadline.remaining_s, 0.5))
        try:
            return future.result()
        except concurrent.futures.CancelledError:
            raise ApplicationError("the work was cancelled") from None

    def _begin(self, call: Coroutine[object, object, T]) -> concurrent.futures.Future[T]:
        try:
            return asyncio.run_coroutine_threadsafe(call, self._loop)
        except RuntimeError:  # the loop is closed
            call.close()
            raise ApplicationError("the service's event loop has ended") from None


__all__ = ["AsyncAdapter", "AsyncAnswer", "AsyncPromise", "OnLoop"]
