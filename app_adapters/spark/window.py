"""Collection of the VMs' requests, so that one decision is taken for all of them. Pure: events in,
instructions out; the time comes with each event.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Union

from app_adapters.spark.policy import Deflation

#: The guest agent gives a hook 2.5 s for its answer.
WINDOW_S = 2.0


@dataclass(frozen=True)
class Read:
    """Begin to read what the cluster does; the decision is due when the window closes."""

    window: int


@dataclass(frozen=True)
class Decide:
    """Take the decision for these VMs; the vector has all VMs that are known, by host."""

    window: int
    asking: tuple[str, ...]
    vector: dict[str, Deflation]


Instruction = Union[Read, Decide]


@dataclass
class _Open:
    number: int
    since_s: float
    read: bool = False  # the master has told who there is
    asking: dict[str, Deflation] = field(default_factory=dict)


@dataclass
class Windows:
    """One window at a time. `deflated` is what each VM has lost so far, by this cluster's own means or by others."""

    length_s: float = WINDOW_S
    deflated: dict[str, Deflation] = field(default_factory=dict)
    cores: dict[str, float] = field(default_factory=dict)  # of every VM at full size, as far as is known
    _open: _Open | None = None
    _count: int = 0

    def asked(self, host: str, wanted: Deflation, now_s: float) -> tuple[int, list[Instruction]]:
        """A VM is to lose something: the number of the window that will decide, and what is to be done."""
        instructions: list[Instruction] = []
        if self._open is None:
            self._count += 1
            self._open = _Open(self._count, now_s)
            instructions.append(Read(self._count))
        self._open.asking[host] = wanted
        self.cores[host] = wanted.cores
        return self._open.number, instructions + self.passed(now_s)

    def known(self, window: int, cores: dict[str, float], now_s: float) -> list[Instruction]:
        """The hosts that the master has, with their cores, as read for a window; a lost one stays while deflated."""
        asking = set() if self._open is None else set(self._open.asking)
        for host in set(self.cores) - set(cores) - set(self.deflated) - asking:
            del self.cores[host]
        for host, count in cores.items():
            self.cores[host] = max(self.cores.get(host, 0.0), count)
        if self._open is not None and self._open.number == window:
            self._open.read = True
        return self.passed(now_s)

    def passed(self, now_s: float) -> list[Instruction]:
        """Close the window when its time is over, or when all VMs have asked and none is waited for."""
        window = self._open
        if window is None:
            return []
        everyone = window.read and set(window.asking) >= set(self.cores)
        if now_s < window.since_s + self.length_s and not everyone:
            return []
        self._open = None
        none = {host: Deflation(0.0, 0.0, cores) for host, cores in self.cores.items()}
        return [Decide(window.number, tuple(window.asking), {**none, **self.deflated, **window.asking})]

    def closes_s(self) -> float | None:
        """When the open window closes at the latest."""
        return None if self._open is None else self._open.since_s + self.length_s

    def set_deflation(self, host: str, size: Deflation) -> None:
        """What a VM has lost from now on; nothing after a full return."""
        self.cores[host] = size.cores
        if size.vm <= 0 and size.own <= 0:
            self.deflated.pop(host, None)
        else:
            self.deflated[host] = size
