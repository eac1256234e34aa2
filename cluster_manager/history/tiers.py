"""Tiers of the history: steps that grow coarser with age, and where one is read and the next one goes on. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

HOUR_S: Final = 3600
DAY_S: Final = 86_400


#: Of the packs that are written as samples come: the store may have been away for some time.
LONGEST_S: Final = HOUR_S


@dataclass(frozen=True, slots=True)
class Tier:
    """Steps of one length.

    :param kept_s: for how long it is what is read.
    :param span_s: so much of it is folded out of the tier before at a time, as one pack of a host.
    """

    step_s: int
    kept_s: int
    span_s: int

    @property
    def longest_s(self) -> int:
        """No pack of it is longer."""
        return max(self.span_s, LONGEST_S)


#: Finest first. The first comes from samples.
TIERS: Final = (Tier(60, 6 * HOUR_S, 0), Tier(600, 3 * DAY_S, HOUR_S), Tier(3600, 30 * DAY_S, DAY_S))
#: A span is folded when it has been over for so long: by then the steps of all hosts have been written.
LATE_S: Final = 600
#: By length of step: up to where it has been folded.
Folded = Mapping[int, int]


@dataclass(frozen=True, slots=True)
class Stretch:
    """A time that is read from one tier."""

    tier: Tier
    begin: int
    end: int


def folded_by(folded: Folded, now: float) -> dict[int, int]:
    """Up to where each tier has been folded, not beyond now: a clock that was ahead, and has been set back, would stop
    the folding until that time has come.
    """
    here = {tier.step_s: int(now // tier.span_s) * tier.span_s for tier in TIERS[1:]}
    return {step_s: min(folded[step_s], last) for step_s, last in here.items() if step_s in folded}


def due(tier: Tier, before: Tier, folded: Folded, oldest: int | None, now: float) -> list[tuple[int, int]]:
    """The spans that are to be folded into a tier, oldest first.

    :param oldest: where the first pack of the tier before begins; None: there is none.
    """
    last = int((now - LATE_S) // tier.span_s) * tier.span_s
    if before.span_s:
        last = min(last, folded.get(before.step_s, 0) // tier.span_s * tier.span_s)
    if oldest is None:
        return []
    # What no tier keeps: a clock may have been far behind, and back there are hundreds of thousands of spans.
    lost = int(now - TIERS[-1].kept_s - TIERS[-1].span_s) // tier.span_s * tier.span_s
    # A manager that was away for long goes on where it was: what it had not folded is still there.
    begin = max(folded.get(tier.step_s, 0), oldest // tier.span_s * tier.span_s, lost)
    return [(start, start + tier.span_s) for start in range(begin, last, tier.span_s)]


def stretches(begin: float, end: float, folded: Folded, now: float) -> list[Stretch]:
    """Which tier is read for which part of a time, oldest first: the finest that has it.

    What is to come from a coarser tier, and has not been folded into it yet, still is in the finer one.
    """
    found: list[Stretch] = []
    until = int(end) + 1
    for finer, coarser in zip(TIERS, (*TIERS[1:], None), strict=True):
        since = int(begin)
        if coarser is not None:
            aged = int((now - finer.kept_s) // coarser.span_s) * coarser.span_s
            since = min(aged, folded.get(coarser.step_s, aged))
        if since < until:
            found.append(Stretch(finer, max(since, int(begin)), until))
            until = since
        if until <= begin:
            break
    return found[::-1]


def outlived(tier: Tier, coarser: Tier | None, folded: Folded, now: float) -> float:
    """Before which moment nothing of a tier is read any more."""
    oldest = now - tier.kept_s
    if coarser is None:
        return oldest - tier.span_s
    aged = oldest // coarser.span_s * coarser.span_s
    # A pack begins before what it holds ends.
    return min(aged, folded.get(coarser.step_s, 0)) - tier.longest_s
