"""Contention over a VM's limits: another program undoes again and again what was put right."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final

#: So many repairs within so many seconds are no accident.
LEAST: Final = 3
WINDOW_S: Final = 180.0


@dataclass(slots=True)
class Contention:
    """The repairs of one VM lately, by the clock of the caller."""

    _repairs: list[float] = field(default_factory=list)
    #: With its rate; empty while there is none.
    sentence: str = ""

    def repaired(self, now: float) -> None:
        """Something was put right."""
        self._repairs = [at for at in self._repairs if now - at < WINDOW_S] + [now]
        self._judge(now)

    def looked(self, now: float) -> None:
        """Nothing had to be put right."""
        self._repairs = [at for at in self._repairs if now - at < WINDOW_S]
        self._judge(now)

    def _judge(self, now: float) -> None:
        count = len(self._repairs)
        if count < LEAST:
            self.sentence = ""
            return
        seconds = max(now - self._repairs[0], 1.0)
        self.sentence = f"another program undoes what is put right: {count} times in {seconds:.0f} s"
