"""Records what an agent does to a VM: calls of the hypervisor port, calls of the guest, and calls of libvirt itself."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import inspect
import math
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Self

#: Calls of the port that change a VM's size; the others read it or keep the agent's books.
RESIZING = frozenset(
    {
        "set_quota", "set_balloon", "set_plugged", "ask_plugged", "set_disk", "set_network", "set_limit",
        "set_vcpus", "set_guest_cpus",
    }
)  # fmt: skip
#: The same of the guest.
GIVING = frozenset({"cpus.set", "cold.reclaim"})
#: Kinds of calls that change the VM or wait for it to change.
MOVING = frozenset({"application", "devices"})


@dataclass(frozen=True)
class Step:
    """One call: its name, its arguments without the domain's name, when it began and how long it took, in seconds."""

    name: str
    arguments: tuple[Any, ...]
    began_s: float
    seconds: float


@dataclass
class Recorder:
    """The calls of one operation, in the order in which they ended."""

    clock: Callable[[], float] = time.perf_counter
    steps: list[Step] = field(default_factory=list)

    @contextlib.contextmanager
    def span(self, name: str, arguments: tuple[Any, ...]) -> Iterator[None]:
        began_s = self.clock()
        try:
            yield
        finally:
            self.steps.append(Step(name, arguments, began_s, self.clock() - began_s))

    def take(self) -> list[Step]:
        """What was recorded so far, by its beginning; the record is empty afterwards."""
        steps, self.steps = self.steps, []
        return sorted(steps, key=lambda step: step.began_s)


class RecordingHypervisor:
    """A hypervisor whose calls on one domain are recorded; all else is the real one's."""

    def __init__(self, real: Any, recorder: Recorder) -> None:
        self._real = real
        self._recorder = recorder

    def __getattr__(self, name: str) -> Any:
        member = getattr(self._real, name)
        if name in ("sizes", "adoption"):
            return RecordingHypervisor(member, self._recorder)
        if not inspect.iscoroutinefunction(member):
            return member

        @functools.wraps(member)
        async def recorded(*arguments: Any, **named: Any) -> Any:
            with self._recorder.span(name, (*arguments[1:], *named.values())):
                return await member(*arguments, **named)

        return recorded


def record_guest(link: Any, recorder: Recorder) -> None:
    """Record the calls that go through a guest link from now on."""
    real = link.call

    async def recorded(method: str, params: Mapping[str, Any], *rest: Any, **more: Any) -> Any:
        with recorder.span(method, (dict(params),)):
            return await real(method, params, *rest, **more)

    link.call = recorded


def waits_for_the_guest(step: Step) -> bool:
    """Whether the guest answers when it has given what it was asked for."""
    return step.name == "status" and any("until_total_mib" in one for one in step.arguments)


def spent(steps: Sequence[Step], total_s: float) -> dict[str, float]:
    """Seconds by kind of call, which overlap; in which no call was under way (pauses, files, the loop) is ``rest``."""
    kinds: dict[str, float] = {}
    for step in steps:
        kind = _phase(step)
        kinds[kind] = kinds.get(kind, 0.0) + step.seconds
    kinds["rest"] = max(total_s - _under_way_s(steps), 0.0)
    return kinds


def outside(steps: Sequence[Step], total_s: float) -> tuple[float, float]:
    """Seconds of an operation outside its calls that move the VM: alone, and with those of other calls beside them.

    Nobody can tell by the times whether the next step waited for such another call. What the agent's looks, its queue
    and its choice of steps cost inside a call that moves the VM is in neither.
    """
    moving = [step for step in steps if _phase(step) in MOVING]
    own_s = _under_way_s([step for step in steps if _phase(step) not in MOVING])
    alone_s = max(total_s - _under_way_s(moving), 0.0)
    return alone_s, max(own_s + total_s - _under_way_s(steps), alone_s)


def _under_way_s(steps: Sequence[Step]) -> float:
    """In which any of these was under way."""
    seconds, end_s = 0.0, -math.inf
    for step in sorted(steps, key=lambda step: step.began_s):
        seconds += max(step.began_s + step.seconds - max(step.began_s, end_s), 0.0)
        end_s = max(end_s, step.began_s + step.seconds)
    return seconds


def _phase(step: Step) -> str:
    return "devices" if waits_for_the_guest(step) else kind_of(step.name)


def kind_of(name: str) -> str:
    """The phase that a call belongs to."""
    if name == "write_intent":
        return "intents"
    if name in ("read", "status", "domains", "survey", "findings"):
        return "readings"
    if name.startswith("application."):
        return "application"
    return "devices" if name in RESIZING | GIVING else "other calls"


class CallCounter:
    """Counts libvirt's own calls by name, with the seconds they took; they come from several threads."""

    def __init__(self) -> None:
        self.calls: Counter[str] = Counter()
        self.seconds: dict[str, float] = {}
        self._lock = threading.Lock()

    def clear(self) -> None:
        with self._lock:
            self.calls.clear()
            self.seconds.clear()

    def open(self, uri: str) -> Any:
        """Stands in for ``libvirt.open``."""
        import libvirt

        return self.wrap(libvirt.open(uri))

    def wrap(self, thing: Any) -> Any:
        """A connection or domain of libvirt-python that counts its calls, and those of the domains it hands out."""
        return _Counted(thing, self)

    def count(self, name: str, seconds: float) -> None:
        with self._lock:
            self.calls[name] += 1
            self.seconds[name] = self.seconds.get(name, 0.0) + seconds


#: Answered by the binding itself, without asking libvirt's daemon.
LOCAL_CALLS = frozenset(
    {"name", "UUIDString", "ID", "connect", "domainEventRegisterAny", "setKeepAlive", "isAlive", "close"}
)


class _Counted:
    def __init__(self, thing: Any, counter: CallCounter) -> None:
        self._thing = thing
        self._counter = counter

    def __getattr__(self, name: str) -> Any:
        member = getattr(self._thing, name)
        if not callable(member) or name in LOCAL_CALLS:
            return member

        def counted(*arguments: Any, **named: Any) -> Any:
            began_s = time.perf_counter()
            try:
                found = member(*arguments, **named)
            finally:
                self._counter.count(name, time.perf_counter() - began_s)
            if name.startswith("lookupBy") or name == "defineXML":
                return _Counted(found, self._counter)
            if name == "getAllDomainStats":
                return [(_Counted(domain, self._counter), stats) for domain, stats in found]
            if name == "listAllDomains":
                return [_Counted(domain, self._counter) for domain in found]
            return found

        return counted


class StallMonitor:
    """The longest time that the event loop did not turn, in seconds. Use as an asynchronous context manager."""

    LOOK_S = 0.005

    def __init__(self) -> None:
        self.longest_s = 0.0
        self._task: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Self:
        self._task = asyncio.create_task(self._look(), name="stalls")
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    async def _look(self) -> None:
        while True:
            began_s = time.perf_counter()
            await asyncio.sleep(self.LOOK_S)
            self.longest_s = max(self.longest_s, time.perf_counter() - began_s - self.LOOK_S)
