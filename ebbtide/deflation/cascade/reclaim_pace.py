"""Pace of reclaiming memory from outside: steps that grow while nothing suffers and are halved when something does.

The rules are those that reclaimers by pressure follow (additive increase, multiplicative decrease; pressure and
refaults tell when pages are missed). Unlike those, which run for ever, this has a target and knows when to give up.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Final

#: Steps in MiB: the first, by how much a calm round lets the next one grow, and the least and most of any.
FIRST_MIB: Final = 16.0
GROWTH_MIB: Final = 16.0
LEAST_MIB: Final = 4.0
MOST_MIB: Final = 256.0
#: Above one of these a round was no calm one: share of time that something waited for memory, pages missed a second,
#: seconds that the kernel took for one step (a libvirt call waits that long).
CALM_PRESSURE_PERCENT: Final = 10.0
CALM_REFAULTS_S: Final = 1024.0
CALM_STEP_S: Final = 1.5
#: Less than this is no progress.
PROGRESS_MIB: Final = 1.0
#: So many rounds in a row without progress, or under strain at the smallest step, are the end.
MOST_FUTILE_ROUNDS: Final = 5


@dataclass(frozen=True, slots=True)
class PaceReading:
    """What one round brought and what it cost, measured."""

    #: Share of the time after the step in which something waited for memory, percent.
    pressure_percent: float
    #: Pages that had been reclaimed and were missed, a second.
    refaults_s: float
    reclaimed_mib: float
    #: What the step itself took.
    seconds: float

    @property
    def strained(self) -> str:
        """What was not calm, in words; empty if all was."""
        if self.pressure_percent > CALM_PRESSURE_PERCENT:
            return f"memory pressure of {self.pressure_percent:.0f} %"
        if self.refaults_s > CALM_REFAULTS_S:
            return f"{self.refaults_s:.0f} pages a second fetched back"
        if self.seconds > CALM_STEP_S:
            return f"{self.seconds:.1f} s for one step"
        return ""


@dataclass(frozen=True, slots=True)
class Pace:
    """The state between rounds."""

    #: What the next round may take.
    step_mib: float = FIRST_MIB
    #: Rounds in a row without progress, and under strain at the smallest step.
    futile: int = 0
    strained: int = 0


@dataclass(frozen=True, slots=True)
class Stop:
    """No further round, with the reason."""

    reason: str


def next_pace(pace: Pace, reading: PaceReading) -> Pace | Stop:
    """The next round after one that went as ``reading`` says."""
    futile = 0 if reading.reclaimed_mib >= PROGRESS_MIB else pace.futile + 1
    if strain := reading.strained:
        strained = pace.strained + 1 if pace.step_mib <= LEAST_MIB else 0
        if strained >= MOST_FUTILE_ROUNDS:
            return Stop(f"the memory is in use: {strain} at the smallest step")
        if futile >= MOST_FUTILE_ROUNDS:
            return Stop(f"{futile} steps in a row brought nothing, with {strain}")
        return Pace(max(pace.step_mib / 2, LEAST_MIB), futile, strained)
    if futile >= MOST_FUTILE_ROUNDS:
        return Stop(f"{futile} steps in a row brought nothing")
    if futile:
        # The kernel found less than it was asked for: ask for less, as with a write that it refuses.
        return Pace(max(pace.step_mib / 2, LEAST_MIB), futile)
    return replace(pace, step_mib=min(pace.step_mib + GROWTH_MIB, MOST_MIB), futile=0, strained=0)
