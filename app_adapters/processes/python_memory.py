"""A Python service: shrinks what it holds by its own callbacks, then hands the freed heap back to the kernel.

Freed objects alone change little: CPython keeps arenas and glibc keeps its heap. `malloc_trim(0)` gives back whole free
pages, also from the middle of the heap (malloc_trim(3)); where the C library has none, only large objects come back.
What was given back is still the heap's: a cache of constant size that replaces its values soon touches all of it again
(measured: 43 MiB of values grew from 70 to 106 MiB resident while 40 MiB were replaced). So it is trimmed again and
again for as long as the process is to be small.
"""

from __future__ import annotations

import gc
import threading
import time
from typing import Any, Callable, TypeVar

from app_adapters import __version__
from app_adapters.adapter import Adapter, Answer, Capabilities, Deadline, Promise, Refusal, Release, SizeRange
from app_adapters.processes.process import own_proportional_mib

TOLERANCE_MIB = 2.0
#: How often `shrink` is asked again for what its first attempt left over.
ROUNDS = 3
#: How often a process that is to be small is looked at, in seconds, and by how much it may have grown, in MiB.
KEEP_LOOK_S = 1.0
KEEP_MIB = 4.0
#: Looks take so much of the time at most: each goes through the page tables, some 10 ms for a GiB.
LOOK_SHARE = 0.01
MEASURED_BY = "PSS of this process"
#: Less progress than this in a round, in MiB: another would not help.
PROGRESS_MIB = 1.0

Clear = TypeVar("Clear", bound=Callable[[], Any])


class PythonAdapter(Adapter):
    """The process that it is in. Sizes are the resident size of the whole process, in MiB, pages that it shares with
    others by their share (`own_proportional_mib`).

    :param maximum_mib: the size up to which the service may grow when nothing presses.
    :param minimum_mib: it is not asked for less; the interpreter alone takes some 10 to 30 MiB.
    :param shrink: bring the service's own caches down, so that the process may have `target_mib`; asked again with a
        lower figure where that was not enough. Memory is measured when it returns.
    :param grow: the service may grow up to `target_mib` again.

    Callbacks are called in the hook's thread, one at a time. What must not be dropped under a request's feet, the
    service locks itself; an asyncio service hands them to its loop (`asyncio.run_coroutine_threadsafe(...).result()`).
    """

    def __init__(
        self,
        maximum_mib: float,
        minimum_mib: float = 0.0,
        shrink: Callable[[float], None] | None = None,
        grow: Callable[[float], None] | None = None,
        name: str = "python",
        resident_mib: Callable[[], float] = own_proportional_mib,
    ) -> None:
        # As it is told: what is given back is that, and would never reach one with more decimals.
        self._maximum_mib = round(maximum_mib, 3)
        self._minimum_mib = minimum_mib
        self._shrink = shrink
        self._grow = grow
        self._name = name
        self._resident_mib = resident_mib
        self._caches: list[Callable[[], Any]] = []
        self._trim = find_malloc_trim()
        self._held_mib = self._maximum_mib
        self._large = threading.Event()  # set: it need not be kept small any more
        self._seconds_per_mib = 0.005  # replaced by what the last deflation took

    def drops(self, clear: Clear) -> Clear:
        """Register what empties a cache (`cached.cache_clear`, `table.clear`), also as a decorator; called in order."""
        self._caches.append(clear)
        return clear

    def capabilities(self) -> Capabilities:
        """Resident sizes. Raises: ApplicationError where the process cannot be measured."""
        now_mib = self._resident_mib()
        minimum_mib = min(self._minimum_mib, now_mib)
        memory = SizeRange(round(now_mib, 3), round(minimum_mib, 3), round(max(self._maximum_mib, now_mib), 3), 1.0)
        return Capabilities(
            self._name,
            __version__,
            {"memory_mib": memory},
            self._expected_s(now_mib - minimum_mib),
            True,
            ["ask", "force"],
        )

    def deflate(self, target: dict[str, float], mode: str, deadline: Deadline) -> Answer:
        """Promise what lies between the resident size and the target. Raises: ApplicationError."""
        now_mib = self._resident_mib()
        floor = {"memory_mib": round(min(self._minimum_mib, now_mib), 3)}
        if self._shrink is None and not self._caches:
            return Refusal("the service has registered nothing that it could drop", None, {"memory_mib": now_mib})
        if now_mib <= self._minimum_mib and target["memory_mib"] < now_mib:  # else it is to stay below its target
            return Refusal(f"holds {now_mib:.0f} MiB, its minimum is {self._minimum_mib:.0f} MiB", None, floor)
        target_mib = max(target["memory_mib"], self._minimum_mib)
        amount_mib = max(now_mib - target_mib, 0.0)
        return Promise(
            {"memory_mib": round(amount_mib, 3)},
            self._expected_s(amount_mib),
            lambda: self._release(target_mib, deadline),
            f"{now_mib:.0f} to {target_mib:.0f} MiB" + ("" if self._trim else "; this C library cannot trim its heap"),
        )

    def reinflate(self, target: dict[str, float], deadline: Deadline) -> Answer:
        """Let the service grow; memory comes on demand."""
        size_mib = min(max(target["memory_mib"], self._minimum_mib), self._maximum_mib)

        def work() -> Release:
            self._held_mib = size_mib
            if size_mib >= self._maximum_mib:
                self._large.set()
            if self._grow is not None:
                self._grow(size_mib)
            return Release({"memory_mib": 0.0}, MEASURED_BY, f"may grow to {size_mib:.0f} MiB")

        return Promise({}, 0.1, work, f"may grow to {size_mib:.0f} MiB")

    def _release(self, target_mib: float, deadline: Deadline) -> Release:
        began = time.monotonic()
        before_mib = self._resident_mib()
        self._held_mib = target_mib
        done = []
        after_mib = self._shrink_in_rounds(target_mib, before_mib, deadline)
        for clear in self._caches:
            if after_mib <= target_mib + TOLERANCE_MIB or deadline.passed:
                break
            clear()
            done.append(getattr(clear, "__qualname__", type(clear).__name__))
            after_mib = self._returned_mib()
        self._keep_small()
        released_mib = max(before_mib - after_mib, 0.0)
        if released_mib > PROGRESS_MIB:
            self._seconds_per_mib = (time.monotonic() - began) / released_mib
        reason = f"resident {before_mib:.0f} to {after_mib:.0f} MiB"
        if done:
            reason += f"; emptied {', '.join(done)}"
        if after_mib > target_mib + TOLERANCE_MIB:
            reason += f"; {after_mib - target_mib:.0f} MiB over the target stay resident"
        return Release({"memory_mib": round(released_mib, 3)}, MEASURED_BY, reason)

    def _shrink_in_rounds(self, target_mib: float, before_mib: float, deadline: Deadline) -> float:
        """Ask `shrink`, and again for what it left over; returns the resident size, which it need not know exactly."""
        # Also with a target above what is held: the service is to stay below it.
        size_mib, asked_mib = before_mib, target_mib
        for _ in range(ROUNDS if self._shrink is not None else 0):
            assert self._shrink is not None
            self._shrink(max(asked_mib, 0.0))
            last_mib, size_mib = size_mib, self._returned_mib()
            over_mib = size_mib - target_mib
            if over_mib <= TOLERANCE_MIB or last_mib - size_mib < PROGRESS_MIB or deadline.passed:
                break
            asked_mib -= over_mib
        return size_mib

    def _keep_small(self) -> None:
        """Have the heap trimmed while the process is to be small; the thread ends when it may grow to its maximum."""
        if self._trim is None:
            return
        self._large.set()  # of an earlier one; a new one each, so that none misses its end
        self._large = threading.Event()
        arguments = (self._trim, self._large)
        threading.Thread(target=self._keep, args=arguments, name="python-memory", daemon=True).start()

    def _keep(self, trim: Callable[[int], int], large: threading.Event) -> None:
        wait_s = KEEP_LOOK_S
        while not large.wait(wait_s):
            began = time.monotonic()
            before_mib = self._resident_mib()
            wait_s = max(KEEP_LOOK_S, (time.monotonic() - began) / LOOK_SHARE)
            if before_mib > self._held_mib + KEEP_MIB:
                trim(0)
                # Where that gives nothing back, it is in use: look rarely.
                if before_mib - self._resident_mib() < PROGRESS_MIB:
                    wait_s *= 10

    def _returned_mib(self) -> float:
        """Collect cycles, give free pages back, and look. Holds up other threads for the collection."""
        gc.collect()
        if self._trim is not None:
            self._trim(0)
        return self._resident_mib()

    def _expected_s(self, amount_mib: float) -> float:
        return round(0.2 + max(amount_mib, 0.0) * self._seconds_per_mib, 1)


def find_malloc_trim() -> Callable[[int], int] | None:
    """glibc's malloc_trim(3); None with another C library."""
    try:
        import ctypes

        trim = ctypes.CDLL(None).malloc_trim
        trim.argtypes = [ctypes.c_size_t]
        trim.restype = ctypes.c_int
    except (ImportError, OSError, AttributeError):  # no ctypes in this build, or musl
        return None
    found: Callable[[int], int] = trim
    return found
