"""Interface of a deflatable service: it may give all, some or nothing, or refuse (Sharma et al. 2019, §4)."""

from __future__ import annotations

import threading
import time
from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import Callable, Union

from app_adapters.messages import Capabilities, SizeRange

__all__ = ["FULL_SHARE", "Adapter", "Answer", "Capabilities", "Deadline", "Promise", "Refusal", "Release", "SizeRange"]

#: From this share of the full size on everything is as before: sizes that come from budgets are never exact.
FULL_SHARE = 0.9


class Deadline:
    """The moment by which work must have ended; `cancel()` makes it now."""

    def __init__(self, seconds: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._end = clock() + seconds
        self._cancelled = threading.Event()

    @property
    def remaining_s(self) -> float:
        """Seconds left, never negative."""
        return 0.0 if self._cancelled.is_set() else max(self._end - self._clock(), 0.0)

    @property
    def passed(self) -> bool:
        """Whether no time is left."""
        return self.remaining_s == 0.0

    @property
    def called_off(self) -> bool:
        """Whether what it is for is not wanted any more: nothing is to be forced then."""
        return self._cancelled.is_set()

    def cancel(self) -> None:
        """Call the work off: let it end at its next look at the deadline."""
        self._cancelled.set()

    def wait(self, seconds: float) -> bool:
        """Sleep, at most to the deadline; returns whether it has passed."""
        self._cancelled.wait(min(seconds, self.remaining_s))
        return self.passed


@dataclass(frozen=True)
class Release:
    """What was measured after the work: amounts that came free (0 after a reinflation), by what, and why so much."""

    released: dict[str, float]
    measured_by: str
    reason: str
    complete: bool = True


@dataclass(frozen=True)
class Promise:
    """The application will release these amounts by `work`, which is called once, in a thread of its own."""

    promised: dict[str, float]
    expected_s: float
    work: Callable[[], Release]
    reason: str = ""


@dataclass(frozen=True)
class Refusal:
    """The application gives nothing. That is normal; another layer takes over.

    Of a reinflation it is a refusal for now, and is told again, unless it is `for_good`.
    """

    reason: str
    retry_after_s: float | None = None
    floor: dict[str, float] = field(default_factory=dict)
    for_good: bool = False


Answer = Union[Promise, Refusal]


class Adapter(ABC):
    """One application. Calls come one at a time, but `capabilities` and `status` also while work runs."""

    #: What it gives. A target names at least one of these and nothing else.
    components: tuple[str, ...] = ("memory_mib",)

    @abstractmethod
    def capabilities(self) -> Capabilities:
        """Sizes that the application can have. Raises: ApplicationError where it cannot be asked."""

    @abstractmethod
    def deflate(self, target: dict[str, float], mode: str, deadline: Deadline) -> Answer:
        """Decide, quickly, about shrinking to `target`: resident MiB, cores; what is not named stays.

        The work itself belongs into the promise.

        Raises: ApplicationError, which counts as a refusal.
        """

    @abstractmethod
    def reinflate(self, target: dict[str, float], deadline: Deadline) -> Answer:
        """Decide, quickly, about growing to `target` again.

        Raises: ApplicationError, which counts as a refusal for now: it is told again.
        """

    def begin(self) -> None:  # noqa: B027
        """Called once by `ebb-adapter` before it serves, and not for --check: what has to run beside it is started.

        Raises: AdapterError, and nothing is served.
        """

    def preemption(self, seconds_left: float | None, kind: str, reason: str) -> None:  # noqa: B027
        """The VM goes in so many seconds, stopped, suspended or deleted as `kind` says. None: it stays after all.

        Called once for a notice and once for its end, and again where it raised, possibly while work runs. Take note
        quickly, and do what takes long in a thread. Default: nothing.

        Raises: ApplicationError where it cannot take note: it is told again.
        """

    def status(self) -> dict[str, float]:
        """What it has now, by component. Raises: ApplicationError where it cannot be asked."""
        return {name: range_.current for name, range_ in self.capabilities().resources.items()}
