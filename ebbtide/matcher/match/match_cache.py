"""Cache of the part of a decision that the task's duration has nothing to do with.

Machines are weighed class by class: tasks that want the same cores and memory at the same moment find the same waits,
the same ages then, and, if they run about as long, the same room left. What has changed since the last decision (a
round gives room away task by task) is brought up to date machine by machine. At another moment those that had room have
it still, are older, and have more of it left in time. Where more has changed (what is known of changes) everything is
looked up again.
"""

from __future__ import annotations

import math
from bisect import bisect_left, insort
from dataclasses import dataclass
from typing import Final, NamedTuple

import numpy as np

from ebbtide.matcher.match.fleet import Fleet
from ebbtide.matcher.predict.ages import Floats, Value
from ebbtide.matcher.predict.completion_probability import Outlook, Standing
from ebbtide.matcher.predict.landmarks import ANY_CORES
from ebbtide.matcher.predict.rolling import GROWTH, Integers

#: Machines are looked at together that have room within so many seconds: no task is done sooner than after its wait and
#: its duration, so those that take longer are mostly out of the question.
REACHES_S: Final = (0.0, 30.0, 120.0, 480.0, 1920.0, 7680.0, 1e300)
EVER_S: Final = REACHES_S[-1]
#: As ``release_s``: what runs leaves nothing that counts.
NOTHING_S: Final = -math.inf
#: Classes of tasks that are kept.
CLASSES: Final = 64
#: With more machines changed than this share of all, and than so many, all are looked at again.
_SHARE: Final = 0.05
_FEW: Final = 12


class Stand(NamedTuple):
    """What an outlook is made of, whatever the moment. Arrays of shape (n + 1,) as in `Band`, but for the places."""

    #: Of the last changes.
    directions: Integers
    since: Floats
    #: Cores left free, with what is released in time, and held.
    free: Floats
    held: Floats
    #: Places of machines whose cores cannot be taken.
    lasting: Integers
    standing: Standing


@dataclass(slots=True, eq=False)
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
    #: At least until when what the stand counts as left free stays so, while nothing changes; and the first of that.
    free_until: Floats
    first_until: float
    #: By row: its place; -1: it is not among them.
    places: Integers

    @property
    def reach_s(self) -> float:
        """Machines with longer waits may be missing."""
        return self.reach_at - self.moment[0]


@dataclass(slots=True)
class _Class:
    """Tasks that want the same."""

    #: `Fleet.room_at` by row, shape (rows,). None: it is another moment than when that was asked for.
    at: Floats | None
    #: Machines that cost hardly more to weigh than those with room now.
    enough: float
    #: Up to where the fleet's changes are known.
    mark: int
    bands: list[Band]


class MatchCache:
    """Of the machines of one fleet."""

    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet
        self._predictor = fleet.predictor
        self._sized = fleet.predictor.options.sized
        self._classes: dict[tuple[float, float, float], _Class] = {}
        self._moment: tuple[float, float, int] = (np.nan, np.nan, 0)

    def within(self, cores: float, memory_mib: float, now: float, reach_s: float, release_s: float = NOTHING_S) -> Band:
        """All machines that have room within a time, and maybe others.

        :param now: the predictor's clock has come to it.
        :param release_s: what leaves a machine that has room within so many seconds counts as left free.
        """
        fleet, predictor = self._fleet, self._predictor
        fleet.advance(now)
        predictor.known()
        moment = (now, predictor.now, predictor.version)
        if moment != self._moment:
            self._go_on(moment)
        wanted = (cores, memory_mib, release_s)
        found = self._classes.get(wanted)
        if found is None or (found.mark != fleet.touched() and not self._refresh(found, *wanted)):
            if len(self._classes) >= CLASSES:
                del self._classes[next(iter(self._classes))]
            at = fleet.room_at(cores, memory_mib, now)
            enough = 1.2 * np.count_nonzero(at <= now) + 100.0
            found = self._classes[wanted] = _Class(at, enough, fleet.touched(), [])
        # A little more than is wanted costs less than a look of its own.
        wanted_s = REACHES_S[bisect_left(REACHES_S, reach_s)]
        for band in found.bands:
            far_s = band.reach_at - now
            if far_s >= reach_s and (far_s <= wanted_s or len(band.rows) < found.enough):
                if band.moment != moment:
                    self._age(band, *wanted, moment)
                return band
        if found.at is None:
            found.at = fleet.room_at(cores, memory_mib, now)
        # This one is asked for in place of those of before that reach no further.
        found.bands = [band for band in found.bands if band.moment == moment or band.reach_at > now + wanted_s]
        rows = np.flatnonzero(found.at - now <= wanted_s)
        band = self.of(rows, found.at[rows], cores, now, wanted_s, release_s)
        insort(found.bands, band, key=lambda one: one.reach_at)
        return band

    def of(
        self,
        rows: Integers,
        at: Floats,
        cores: float,
        now: float,
        reach_s: float = EVER_S,
        release_s: float = NOTHING_S,
    ) -> Band:
        """Some machines with when they have room."""
        count = len(rows)
        all_rows: Integers = np.empty(count + 1, np.int64)
        all_rows[:count], all_rows[count] = rows, -1
        all_at = np.append(at, np.inf)
        waits = np.maximum(all_at - now, 0.0)
        free, until = self._left_free(rows, cores, at, now, release_s)
        stand = self._stand(rows, free)
        outlook = self._outlook(waits, stand)
        moment = (now, self._predictor.now, self._predictor.version)
        places: Integers = np.full(len(self._fleet.cores), -1)
        places[rows] = np.arange(count)
        silent, busy, first = _silent(outlook), _busy(all_at), _first(until)
        return Band(all_rows, waits, outlook, silent, now + reach_s, moment, all_at, busy, stand, until, first, places)

    def _go_on(self, moment: tuple[float, float, int]) -> None:
        """To another moment. Bands are kept if nothing else is known: their machines are older, and others do not have
        room sooner than it was known, whatever overruns its estimate.
        """
        before, self._moment = self._moment, moment
        if before[2] != moment[2] or not moment[0] >= before[0]:
            self._classes.clear()
        for found in self._classes.values():
            found.at = None

    def _age(
        self, band: Band, cores: float, memory_mib: float, release_s: float, moment: tuple[float, float, int]
    ) -> None:
        """Bring a band to a later moment."""
        fleet, now, rows = self._fleet, moment[0], band.rows[band.busy]
        late = fleet.overrun(rows, now)
        if len(late):
            later = [fleet.room_of(row, cores, memory_mib) for row in rows[late].tolist()]
            band.at[band.busy[late]] = later
            if release_s != NOTHING_S:
                band.free_until[band.busy[late]] = later
                band.first_until = min(band.first_until, *later)
        band.moment = moment
        band.waits = np.maximum(band.at - now, 0.0)
        if now >= band.first_until:
            # What runs there ends sooner, seen from now.
            due = np.flatnonzero(band.free_until <= now)
            here = band.rows[due]
            free, band.free_until[due] = self._left_free(here, cores, band.at[due], now, release_s)
            band.first_until = _first(band.free_until)
            if not np.array_equal(free, band.stand.free[due]):
                band.stand.free[due] = free
                fresh = self._predictor.standing(self._predictor.directions()[here], free, band.stand.held[due])
                band.stand.standing.likely[due], band.stand.standing.place[due] = fresh
        band.outlook = self._outlook(band.waits, band.stand)
        band.silent = _silent(band.outlook)

    def _stand(self, rows: Integers, left_free: Floats) -> Stand:
        """How machines stand, with the restart's machine behind."""
        fleet, predictor = self._fleet, self._predictor
        count = len(rows)
        states: Integers = np.empty(count + 1, np.int64)
        states[:count], states[count] = predictor.directions()[rows], GROWTH
        since, free, held = np.full(count + 1, np.inf), np.zeros(count + 1), np.full(count + 1, ANY_CORES)
        since[:count] = predictor.state.last_s[rows]
        free[:count] = left_free
        held[:count] = fleet.cores[rows]
        lasting = np.flatnonzero(fleet.lasting[rows] > 0.0)
        return Stand(states, since, free, held, lasting, predictor.standing(states, free, held))

    def _left_free(
        self, rows: Integers, cores: float, at: Floats, now: float, release_s: float
    ) -> tuple[Floats, Floats]:
        """Cores that a task leaves free, and until when that stays so at least, while nothing changes.

        :param at: when each has room.
        """
        free, until = self._fleet.free_cores(rows) - cores, np.full(len(rows), np.inf)
        if release_s != NOTHING_S:
            has_room = at <= now
            here = rows[has_room]
            if len(here) > _FEW:
                more, until[has_room] = self._fleet.released(here, release_s)
            else:
                found = [self._fleet.released_of(row, release_s) for row in here.tolist()]
                more, until[has_room] = np.reshape(found, (-1, 2)).T
            free[has_room] += more
            until[~has_room] = at[~has_room]
        return free, until

    def _outlook(self, waits: Floats, stand: Stand) -> Outlook:
        """Of machines when they have room."""
        elapsed_s = np.maximum(self._predictor.now - stand.since, 0.0)
        elapsed_s[:-1] += waits[:-1]
        outlook = self._predictor.outlook_then(stand.standing, elapsed_s)
        if len(stand.lasting):
            outlook.fatal[stand.lasting] = 0.0
        return outlook

    def _refresh(self, found: _Class, cores: float, memory_mib: float, release_s: float) -> bool:
        """Bring a class up to date with the fleet; False: it is better made again."""
        fleet = self._fleet
        touched = fleet.touched_since(found.mark)
        if touched is None or len(touched) > max(_SHARE * len(fleet.cores), _FEW):
            return False
        found.mark = fleet.touched()
        for row in set(touched):
            at = fleet.room_of(row, cores, memory_mib)
            if found.at is not None:
                found.at[row] = at
            held = fleet.cores.item(row)
            # What is left free counts for nothing else than the size of shrinks.
            free = held - fleet.used_cores.item(row) - cores if self._sized else 0.0
            until = math.inf
            if release_s != NOTHING_S:
                more, until = fleet.released_of(row, release_s) if at <= self._moment[0] else (0.0, at)
                free += more
            fresh: tuple[Standing, Outlook] | None = None
            for band in found.bands[:]:
                place, stand = band.places.item(row), band.stand
                if place < 0:
                    if at <= band.reach_at:
                        # It has room sooner than it was known: the band is none without it.
                        found.bands.remove(band)
                    continue
                band.free_until[place] = until
                band.first_until = min(band.first_until, until)
                if (
                    at != band.at.item(place)
                    or held != stand.held.item(place)
                    or (self._sized and free != stand.free.item(place))
                ):
                    fresh = fresh or self._fresh(row, at, free, held)
                    stand.held[place], stand.free[place] = held, free
                    self._put(band, place, at, *fresh)
        return True

    def _fresh(self, row: int, at: float, free: float, held: float) -> tuple[Standing, Outlook]:
        """A machine as it stands, and its outlook when it has room."""
        predictor, state = self._predictor, self._predictor.state
        then_s = max(predictor.now - state.last_s.item(row), 0.0) + max(at - self._moment[0], 0.0)
        stands = predictor.standing(state.direction.item(row), free, held)
        outlook = predictor.outlook_then(stands, then_s)
        return stands, outlook._replace(fatal=0.0) if self._fleet.lasts(row) else outlook

    def _put(self, band: Band, place: int, at: float, stands: Standing, outlook: Outlook) -> None:
        """One of a band's machines as it stands now."""
        before = band.at.item(place)
        band.at[place] = at
        if (at == -np.inf) != (before == -np.inf):
            band.busy = _busy(band.at)
        band.stand.standing.likely[place], band.stand.standing.place[place] = stands
        if band.moment == self._moment:
            band.waits[place] = max(at - self._moment[0], 0.0)
            for old, new in zip(_arrays(band.outlook), _arrays(outlook), strict=True):
                old[place] = new
            if len(band.silent) or np.isnan(outlook.fatal):
                band.silent = _silent(band.outlook)


def _silent(outlook: Outlook) -> Integers:
    silent: Integers = np.isnan(outlook.fatal).nonzero()[0]
    return silent


def _first(until: Floats) -> float:
    return float(until.min(initial=np.inf))


def _busy(at: Floats) -> Integers:
    """Places, but for the last, of machines without room now."""
    return (at[:-1] > -np.inf).nonzero()[0]


def _arrays(outlook: Outlook) -> tuple[Value, ...]:
    return (*outlook.aged, outlook.place, outlook.along, outlook.fatal)
