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
RESIZING = frozenset({"set_quota", "set_balloon", "set_plugged", "ask_plugged", "set_disk", "set_network", "set_limit"})
#: Calls of the guest that change something or wait for it to change.
IN_GUEST = frozenset({"cpus.set", "application.deflate", "application.status", "application.reinflate"})
MEMORY_DEVICES = frozenset({"ask_plugged", "set_plugged", "set_balloon"})


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
    """Record the calls that go through a guest link from now on.

    A look at what an application has released is kept with what it found, which is what the next step was built on.
    """
    real = link.call

    async def recorded(method: str, params: Mapping[str, Any], *rest: Any, **more: Any) -> Any:
        kept = dict(params)
        with recorder.span(method, (kept,)):
            found = await real(method, params, *rest, **more)
            if method == "application.status":
                kept["until_released_mib"] = found.released.memory_mib
            return found

    link.call = recorded


@dataclass(frozen=True)
class Replayable:
    """A step to do again, and the positions of the steps that had come to their ends before it began."""

    step: Step
    after: tuple[int, ...]


def replayable(steps: Sequence[Step]) -> list[Replayable]:
    """What has to be done again to move the VM as the agent did, overlapping as the agent's calls did.

    :param steps: of one operation, by their beginnings.
    """
    kept: list[Step] = []
    ends_s: list[float] = []
    asked: int | None = None
    for step in steps:
        if step.name in RESIZING | IN_GUEST:
            kept.append(step)
            ends_s.append(step.began_s + step.seconds)
            if step.name in MEMORY_DEVICES:
                asked = len(kept) - 1 if step.name == "ask_plugged" else None
        elif asked is not None and waits_for_the_guest(step):
            # The device is asked at once; it has got there when the guest says so.
            ends_s[asked] = step.began_s + step.seconds
    return [
        Replayable(step, tuple(before for before in range(at) if ends_s[before] <= step.began_s))
        for at, step in enumerate(kept)
    ]


def waits_for_the_guest(step: Step) -> bool:
    """Whether the guest answers when it has given what it was asked for."""
    return step.name == "status" and any("until_total_mib" in one for one in step.arguments)


def spent(steps: Sequence[Step], total_s: float) -> dict[str, float]:
    """Seconds by kind of call, which overlap; in which no call was under way (pauses, files, the loop) is ``rest``.

    :param steps: by their beginnings.
    """
    kinds: dict[str, float] = {}
    rest_s, end_s = total_s, -math.inf
    for step in steps:
        kind = "devices" if waits_for_the_guest(step) else kind_of(step.name)
        kinds[kind] = kinds.get(kind, 0.0) + step.seconds
        rest_s -= max(step.began_s + step.seconds - max(step.began_s, end_s), 0.0)
        end_s = max(end_s, step.began_s + step.seconds)
    kinds["rest"] = max(rest_s, 0.0)
    return kinds


def kind_of(name: str) -> str:
    """The phase that a call belongs to."""
    if name == "write_intent":
        return "intents"
    if name in ("read", "status", "domains", "survey", "findings"):
        return "readings"
    if name.startswith("application."):
        return "application"
    return "devices" if name in RESIZING | {"cpus.set"} else "other calls"


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
