"""Cache of the part of a decision that the task's duration has nothing to do with.

Machines are weighed class by class: tasks that want the same cores and memory at the same moment find the same waits,
the same ages then, and the same room left. What has changed since the last decision (a round gives room away task by
task) is brought up to date machine by machine. Everything else (the moment, what is known of changes) is looked up
again.
"""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass
from typing import Final

import numpy as np

from ebbtide.matcher.match.fleet import Fleet
from ebbtide.matcher.predict.ages import Floats
from ebbtide.matcher.predict.completion_probability import Aged, Outlook
from ebbtide.matcher.predict.landmarks import ANY_CORES
from ebbtide.matcher.predict.rolling import GROWTH, Integers

#: Machines are looked at together that have room within so many seconds: no task is done sooner than after its wait and
#: its duration, so those that take longer are mostly out of the question.
REACHES_S: Final = (0.0, 30.0, 120.0, 480.0, 1920.0, 7680.0, 1e300)
EVER_S: Final = REACHES_S[-1]
#: Classes of tasks that are kept.
CLASSES: Final = 16
#: With more machines changed than this share of all, all are looked at again.
_SHARE: Final = 0.05


@dataclass(slots=True)
class Band:
    """Machines that have room in time, in the order of their rows. Arrays of shape (n + 1,).

    The last one is the machine of Eq. 2's restart, which has just grown: it never has room.
    """

    #: -1: the restart's.
    rows: Integers
    #: s.
    waits: Floats
    outlook: Outlook
    #: Places of the machines of which history says nothing.
    silent: Integers
    #: Machines with longer waits may be missing.
    reach_s: float


@dataclass(slots=True)
class _Class:
    """Tasks that want the same."""

    #: By row: shape (rows,).
    waits: Floats
    #: Machines that cost hardly more to weigh than those with room now.
    enough: float
    #: Up to where the fleet's changes are known.
    mark: int
    #: By their place in `REACHES_S`.
    bands: dict[int, Band]


class MatchCache:
    """Of the machines of one fleet."""

    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet
        self._predictor = fleet.predictor
        self._sized = fleet.predictor.options.sized
        self._classes: dict[tuple[float, float], _Class] = {}
        self._moment: tuple[float, float, int] = (np.nan, np.nan, 0)

    def within(self, cores: float, memory_mib: float, now: float, reach_s: float) -> Band:
        """All machines that have room within a time, and maybe others.

        :param now: the predictor's clock has come to it.
        """
        fleet, predictor = self._fleet, self._predictor
        fleet.advance(now)
        predictor.known()
        moment = (now, predictor.now, predictor.version)
        if moment != self._moment:
            self._moment = moment
            self._classes.clear()
        found = self._classes.get((cores, memory_mib))
        if found is None or (found.mark != fleet.touched() and not self._refresh(found, cores, memory_mib, now)):
            if len(self._classes) >= CLASSES:
                del self._classes[next(iter(self._classes))]
            waits = fleet.waits_s(cores, memory_mib, now)
            enough = 1.2 * np.count_nonzero(waits == 0.0) + 100.0
            found = _Class(waits, enough, fleet.touched(), {})
            self._classes[cores, memory_mib] = found
        wanted = bisect_left(REACHES_S, reach_s)
        # A little more than is wanted costs less than a look of its own.
        for index in range(wanted, len(REACHES_S)):
            if (band := found.bands.get(index)) is not None and len(band.rows) < found.enough:
                return band
        if (band := found.bands.get(wanted)) is not None:
            return band
        rows = np.flatnonzero(found.waits <= REACHES_S[wanted])
        band = found.bands[wanted] = self.of(rows, found.waits[rows], cores, REACHES_S[wanted])
        return band

    def of(self, rows: Integers, waits: Floats, cores: float, reach_s: float = EVER_S) -> Band:
        """Some machines with their waits."""
        count = len(rows)
        all_rows: Integers = np.empty(count + 1, np.int64)
        all_rows[:count], all_rows[count] = rows, -1
        all_waits: Floats = np.empty(count + 1)
        all_waits[:count], all_waits[count] = waits, np.inf
        outlook = self._outlook(rows, waits, cores)
        return Band(all_rows, all_waits, outlook, _silent(outlook), reach_s)

    def _outlook(self, rows: Integers, waits: Floats, cores: float) -> Outlook:
        """With the restart's machine behind."""
        fleet, predictor = self._fleet, self._predictor
        count = len(rows)
        states: Integers = np.empty(count + 1, np.int64)
        states[:count], states[count] = predictor.directions()[rows], GROWTH
        elapsed_s, free, held = np.zeros(count + 1), np.zeros(count + 1), np.full(count + 1, ANY_CORES)
        elapsed_s[:count] = predictor.elapsed_s(rows) + waits
        free[:count] = fleet.free_cores(rows) - cores
        held[:count] = fleet.cores[rows]
        outlook = predictor.outlook(states, elapsed_s, free, held)
        outlook.fatal[:count][fleet.lasting[rows] > 0.0] = 0.0
        return outlook

    def _refresh(self, found: _Class, cores: float, memory_mib: float, now: float) -> bool:
        """Bring a class up to date with the fleet; False: it is better made again."""
        touched = self._fleet.touched_since(found.mark)
        if touched is None or len(touched) > max(_SHARE * len(found.waits), 1.0):
            return False
        rows = np.array(sorted(set(touched)), np.int64)
        waits = self._fleet.waits_s(cores, memory_mib, now, rows)
        # Who has room sooner may belong to other bands; who has it later does no harm where it is.
        before = found.waits[rows]
        if (waits < before).any():
            return False
        moved = waits > before
        found.mark = self._fleet.touched()
        if not self._sized:
            # What is left free counts for nothing else.
            rows, waits = rows[moved], waits[moved]
        if len(rows):
            found.waits[rows] = waits
            fresh = self._outlook(rows, waits, cores)
            for band in found.bands.values():
                places = np.searchsorted(band.rows[:-1], rows)
                here = np.flatnonzero(band.rows[places] == rows)
                if len(here):
                    places = places[here]
                    band.waits[places] = waits[here]
                    _put(band.outlook, places, fresh, here)
                    if len(band.silent) or np.isnan(fresh.fatal).any():
                        band.silent = _silent(band.outlook)
        return True


def _silent(outlook: Outlook) -> Integers:
    return np.flatnonzero(np.isnan(outlook.fatal))


def _put(outlook: Outlook, places: Integers, fresh: Outlook, here: Integers) -> None:
    for old, new in zip(_arrays(outlook), _arrays(fresh), strict=True):
        old[places] = new[here]


def _arrays(outlook: Outlook) -> tuple[Floats, ...]:
    aged: Aged = outlook.aged
    return (*aged, outlook.place, outlook.along, outlook.fatal)
