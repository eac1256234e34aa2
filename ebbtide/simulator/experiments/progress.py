"""Progress of a sweep, and how long it may still take."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias


@dataclass(frozen=True, slots=True)
class Status:
    """Where a sweep stands.

    :param stage: what is being done, in words.
    :param total: runs in all; ``reused`` of them were there before.
    :param done: runs made now, ``failed`` of them without an outcome.
    :param under_way: what is done of runs that go on, in runs.
    :param elapsed_s: since the first run began.
    """

    stage: str
    total: int = 0
    reused: int = 0
    done: int = 0
    failed: int = 0
    under_way: float = 0.0
    elapsed_s: float = 0.0

    @property
    def share(self) -> float:
        """What is done, 0 to 1; of a stage before the runs 0."""
        return min((self.reused + self.done + self.under_way) / self.total, 1.0) if self.total else 0.0

    @property
    def left_s(self) -> float | None:
        """How long it may still take, at the pace so far; None where nothing says."""
        made = self.done + self.under_way
        left = self.total - self.reused - made
        return None if made <= 0 or self.elapsed_s <= 0 else max(left, 0.0) * self.elapsed_s / made

    def __str__(self) -> str:
        words = [f"{self.reused + self.done} of {self.total} runs"]
        if self.reused:
            words.append(f"{self.reused} of them kept from before")
        if self.failed:
            words.append(f"{self.failed} failed")
        left_s = self.left_s
        if left_s is not None and self.done + self.reused < self.total:
            words.append(f"about {in_words(left_s)} left")
        return ", ".join(words)


#: Is told where a sweep stands.
Listener: TypeAlias = Callable[[Status], None]


def in_words(seconds: float) -> str:
    """A duration: 47 s, 3 min 20 s, 2 h 05 min."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02d} s"
    return f"{whole // 3600} h {whole % 3600 // 60:02d} min"
