"""Cache of the part of a decision that the task's duration has nothing to do with.

Machines are weighed class by class: tasks that want the same cores and memory at the same moment find the same waits,
the same ages then, and the same room left. What has changed since the last decision (a round gives room away task by
task) is brought up to date machine by machine. At another moment, if nothing else has changed, those that had room have
it still and are older. Everything else (what is known of changes) is looked up again.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from dataclasses import dataclass
from typing import Final, NamedTuple

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


class Stand(NamedTuple):
    """What an outlook is made of, whatever the moment. Arrays of shape (n + 1,) as in `Band`, but for the last."""

    #: Of the last changes.
    directions: Integers
    since: Floats
    #: Cores left free, and held.
    free: Floats
    held: Floats
    #: Places of machines whose cores cannot be taken.
    lasting: Integers


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
    #: Machines that have room later may be missing.
    reach_at: float
    #: Of what moment waits, outlook and silent are.
    moment: tuple[float, float, int]
    #: When they have room: `Fleet.room_at`; and the places of those that have none now.
    at: Floats
    busy: Integers
    stand: Stand

    @property
    def reach_s(self) -> float:
        """Machines with longer waits may be missing."""
        return self.reach_at - self.moment[0]


@dataclass(slots=True)
class _Class:
    """Tasks that want the same."""

    #: By row: shape (rows,). None: it is another moment than that of the bands.
    waits: Floats | None
    #: Machines that cost hardly more to weigh than those with room now.
    enough: float
    #: Up to where the fleet's changes are known.
    mark: int
    bands: list[Band]
    #: Whether the fleet has changed since the bands were made.
    refreshed: bool = False


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
            self._go_on(moment)
        found = self._classes.get((cores, memory_mib))
        if found is None or (found.mark != fleet.touched() and not self._refresh(found, cores, memory_mib, now)):
            if len(self._classes) >= CLASSES:
                del self._classes[next(iter(self._classes))]
            waits = fleet.waits_s(cores, memory_mib, now)
            enough = 1.2 * np.count_nonzero(waits == 0.0) + 100.0
            found = self._classes[cores, memory_mib] = _Class(waits, enough, fleet.touched(), [])
        # A little more than is wanted costs less than a look of its own.
        wanted_s = REACHES_S[bisect_left(REACHES_S, reach_s)]
        for band in found.bands:
            far_s = band.reach_at - now
            if far_s >= reach_s and (far_s <= wanted_s or len(band.rows) < found.enough):
                if band.moment != moment:
                    self._age(band, cores, memory_mib, moment)
                return band
        if found.waits is None:
            found.waits = fleet.waits_s(cores, memory_mib, now)
        # This one is asked for in place of those of before that reach no further.
        found.bands = [band for band in found.bands if band.moment == moment or band.reach_at > now + wanted_s]
        rows = np.flatnonzero(found.waits <= wanted_s)
        band = self.of(rows, fleet.room_at(cores, memory_mib, now, rows), cores, now, wanted_s)
        insort(found.bands, band, key=lambda one: one.reach_at)
        return band

    def of(self, rows: Integers, at: Floats, cores: float, now: float, reach_s: float = EVER_S) -> Band:
        """Some machines with when they have room."""
        count = len(rows)
        all_rows: Integers = np.empty(count + 1, np.int64)
        all_rows[:count], all_rows[count] = rows, -1
        all_at = np.append(at, np.inf)
        waits = np.maximum(all_at - now, 0.0)
        stand = self._stand(rows, cores)
        outlook = self._outlook(waits, stand)
        busy = np.flatnonzero(at > -np.inf)
        moment = (now, self._predictor.now, self._predictor.version)
        return Band(all_rows, waits, outlook, _silent(outlook), now + reach_s, moment, all_at, busy, stand)

    def _go_on(self, moment: tuple[float, float, int]) -> None:
        """To another moment. Bands of which nothing else has changed are kept: their machines are older, and others do
        not have room sooner than it was known, whatever overruns its estimate.
        """
        before, self._moment = self._moment, moment
        if before[2] != moment[2] or not moment[0] >= before[0]:
            self._classes.clear()
        self._classes = {wanted: found for wanted, found in self._classes.items() if not found.refreshed}
        for found in self._classes.values():
            found.waits = None

    def _age(self, band: Band, cores: float, memory_mib: float, moment: tuple[float, float, int]) -> None:
        """Bring a band to a later moment."""
        now, rows = moment[0], band.rows[:-1]
        busy = rows[band.busy]
        if self._fleet.overrun(busy, now):
            band.at[band.busy] = self._fleet.room_at(cores, memory_mib, now, busy)
        band.moment = moment
        band.waits = np.maximum(band.at - now, 0.0)
        band.outlook = self._outlook(band.waits, band.stand)
        band.silent = _silent(band.outlook)

    def _stand(self, rows: Integers, cores: float) -> Stand:
        """How machines stand, with the restart's machine behind."""
        fleet, predictor = self._fleet, self._predictor
        count = len(rows)
        states: Integers = np.empty(count + 1, np.int64)
        states[:count], states[count] = predictor.directions()[rows], GROWTH
        since, free, held = np.full(count + 1, np.inf), np.zeros(count + 1), np.full(count + 1, ANY_CORES)
        since[:count] = predictor.state.last_s[rows]
        free[:count] = fleet.free_cores(rows) - cores
        held[:count] = fleet.cores[rows]
        return Stand(states, since, free, held, np.flatnonzero(fleet.lasting[rows] > 0.0))

    def _outlook(self, waits: Floats, stand: Stand) -> Outlook:
        """Of machines when they have room."""
        elapsed_s = np.maximum(self._predictor.now - stand.since, 0.0)
        elapsed_s[:-1] += waits[:-1]
        outlook = self._predictor.outlook(stand.directions, elapsed_s, stand.free, stand.held)
        if len(stand.lasting):
            outlook.fatal[stand.lasting] = 0.0
        return outlook

    def _refresh(self, found: _Class, cores: float, memory_mib: float, now: float) -> bool:
        """Bring a class up to date with the fleet; False: it is better made again."""
        touched = self._fleet.touched_since(found.mark)
        if found.waits is None or touched is None or len(touched) > max(_SHARE * len(found.waits), 1.0):
            return False
        rows = np.array(sorted(set(touched)), np.int64)
        waits = self._fleet.waits_s(cores, memory_mib, now, rows)
        # Who has room sooner may belong to other bands; who has it later does no harm where it is.
        before = found.waits[rows]
        if (waits < before).any():
            return False
        moved = waits > before
        found.refreshed = True
        found.bands = [band for band in found.bands if band.moment == self._moment]
        found.mark = self._fleet.touched()
        if not self._sized:
            # What is left free counts for nothing else.
            rows, waits = rows[moved], waits[moved]
        if len(rows):
            found.waits[rows] = waits
            fresh = self._outlook(np.append(waits, np.inf), self._stand(rows, cores))
            for band in found.bands:
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
