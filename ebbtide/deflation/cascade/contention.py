"""Contention over a VM's limits: another program undoes again and again what was put right."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final

from ebbtide.deflation.cascade.reconcile import Repair
from ebbtide.deflation.resources import ResourceVector

#: So often within so many seconds is no accident.
LEAST: Final = 3
WINDOW_S: Final = 180.0

Kinds = frozenset[type[Repair]]


@dataclass(slots=True)
class Contention:
    """What was undone of one VM lately, by the clock of the caller.

    A repair that falls short, as where a guest is slow, is undone by nobody: only those count that had reached what
    they were for, as long as the same is wanted.
    """

    _undone: list[float] = field(default_factory=list)
    #: What repairs have reached, and of which size of the VM.
    _reached: Kinds = frozenset()
    _wanted: ResourceVector | None = None
    #: With its rate; empty while there is none.
    sentence: str = ""

    def repaired(self, wanted: ResourceVector, reached: Kinds) -> None:
        """Something was put right, as a reading after it says."""
        self._reached = reached | (self._reached if wanted == self._wanted else frozenset())
        self._wanted = wanted

    def looked(self, now: float, wanted: ResourceVector, needed: Kinds) -> None:
        """The VM was read: what is to be put right."""
        self._undone = [at for at in self._undone if now - at < WINDOW_S]
        if wanted == self._wanted and self._reached & needed:
            self._undone.append(now)
        self._reached -= needed
        self.sentence = ""
        if (count := len(self._undone)) >= LEAST:
            seconds = max(now - self._undone[0], 1.0)
            self.sentence = f"another program undoes what is put right: {count} times in {seconds:.0f} s"
