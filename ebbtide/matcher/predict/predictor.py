"""The prediction engine: a pool's machines by name, and how likely each keeps its cores (Agarwal et al. 2023, §3.1.1).

Changes come one by one as they happen; a question takes one machine, or all of them at once. The work is done by the
kernel functions of `matcher.predict.rolling` and `matcher.predict.period` (what is counted), of
`matcher.predict.knowledge` (the curves) and of `matcher.predict.completion_probability` (the answers).
"""

from __future__ import annotations

import copy
import math
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, TypeVar

import numpy as np

from ebbtide.deflation.errors import InvalidField
from ebbtide.matcher.predict import completion_probability as completion
from ebbtide.matcher.predict import knowledge as knowing
from ebbtide.matcher.predict import landmarks as marks
from ebbtide.matcher.predict import period as periods
from ebbtide.matcher.predict import rolling as counting
from ebbtide.matcher.predict.ages import Floats, Value
from ebbtide.matcher.predict.changes import WINDOW_S, Change, Direction, LastChange, check_duration, whole_cores
from ebbtide.matcher.predict.knowledge import Lines
from ebbtide.matcher.predict.rolling import GROWTH, NONE, SHRINK, Integers

#: Names of the forms of P_c.
FORMS: Final = {
    "next-change": completion.NEXT_CHANGE,
    "next-shrink": completion.NEXT_SHRINK,
    "landmark": completion.LANDMARK,
}
#: Of times that cut the past into parts: time goes on part by part, and with tiny ones for ever.
LEAST_S: Final = 1.0
_State = TypeVar("_State", counting.Rolling, periods.Period)
_Arrays = TypeVar("_Arrays", counting.Rolling, periods.Period, knowing.Knowledge, Lines)


@dataclass(frozen=True, slots=True)
class PredictorOptions:
    """Switches of the prediction engine; the defaults are the paper's rule, with censored intervals counted."""

    #: Seconds of history that count.
    window_s: float = WINDOW_S
    #: ``next-change`` (Eq. 1), ``next-shrink`` (Eq. 3) or ``landmark`` (ours).
    form: str = "next-change"
    #: Count running intervals for the ages at which they were watched; False: completed intervals only.
    censored: bool = True
    #: A shrink that leaves a task its room is survived.
    sized: bool = False
    #: Landmarks: how long one is followed, and seconds between two of a machine.
    horizon_s: float = 4 * 3600.0
    look_every_s: float = 900.0
    #: Curves are as fresh as this, unless changes have added more than `fresh_share` to what was known.
    fresh_s: float = 60.0
    fresh_share: float = 0.02

    def __post_init__(self) -> None:
        """Raises InvalidField."""
        if self.form not in FORMS:
            raise InvalidField("form", f"must be one of {', '.join(FORMS)}, but is {self.form!r}")
        for name in ("window_s", "horizon_s", "look_every_s"):
            value = getattr(self, name)
            if not LEAST_S <= value < math.inf:
                raise InvalidField(name, f"must be at least {LEAST_S:g} and finite, but is {value!r}")
        if not 0 <= self.fresh_share <= 1:
            raise InvalidField("fresh_share", f"must be within [0, 1], but is {self.fresh_share!r}")

    @property
    def by_landmarks(self) -> bool:
        """Whether landmarks are counted."""
        return self.form == "landmark"

    @property
    def of_cores(self) -> bool:
        """Whether it is predicted that a machine keeps the cores that it has; else that no shrink comes."""
        return self.sized or self.by_landmarks


class Predictor:
    """What a pool of machines has shown, and what follows from it.

    Every machine has a row, which arrays over machines (here and in `matcher.match.fleet.Fleet`) go by; a row of
    a machine that is gone is used again.

    :param now: seconds on the clock of the changes.
    """

    def __init__(self, now: float, options: PredictorOptions | None = None) -> None:
        self.options = options or PredictorOptions()
        self.rows: dict[str, int] = {}
        #: Changes that came out of order or of a machine unknown to have begun, and were not counted.
        self.late = 0
        self.now = now
        #: What happened before has not been watched: an interval that began then counts from here on.
        self.since = now
        #: Says up to when the changes of machines are known; of one that it leaves out, and if it is None, up to now.
        #: Who has not been heard of is not seen to have kept its cores.
        self.known_until: Callable[[], Mapping[str, float]] | None = None
        #: Goes up when an answer may be another than it was at the same moment.
        self.version = 0
        self._form = FORMS[self.options.form]
        self.by_landmarks = self.options.by_landmarks
        self._free: list[int] = []
        self._last: dict[str, LastChange] = {}
        #: Machines that are gone, by when their landmarks' horizon is over, and when they went.
        self._gone: deque[tuple[float, str, float]] = deque()
        self.state = counting.rolling(0, self.options.window_s, now)
        self.period = self._fresh_period(0)
        self._knowledge = knowing.nothing_known(self.options.horizon_s)
        self._fresh_until = -math.inf
        self._news = 0
        self._looked = -math.inf
        self._learned = (-math.inf, 0)

    def observe(self, change: Change, now: float | None = None, teaches: bool = True) -> None:
        """Take one change in: O(1), but for the cuts of the window, whatever is known already.

        Changes of one machine come in their order; one that is older than the machine's last is counted as `late` and
        otherwise passed over. Unchanged whole cores are no change.

        :param now: if it is not the time of the change: clocks of hosts differ, and only this one moves the window.
        :param teaches: whether the machine belongs to the pool. One that does not (its cores cannot be taken) is known
            by its last change only.
        """
        self.advance(change.at if now is None else now)
        direction = change.direction
        if direction is None:
            return
        before = self._last.get(change.machine)
        if before is not None and change.at < before.at:
            self.late += 1
            return
        self._last[change.machine] = LastChange(change.at, direction, whole_cores(change.cores_after), change.ends)
        if change.ends:
            self._gone.append((self.now + 2.0 * self.options.horizon_s, change.machine, change.at))
        if not teaches:
            return
        row = self.row(change.machine)
        self._news += 1
        self.version += 1
        x = GROWTH if direction is Direction.GROWTH else SHRINK
        cores = float(whole_cores(change.cores_after))
        if change.by_owner or (change.starts and self.state.direction[row] != NONE):
            counting.leave(self.state, row, change.at)
            self._stands(row, change.at, -1.0, x)
        if change.by_owner and change.ends:
            return
        if change.by_owner or change.starts:
            counting.begin(self.state, row, change.at, x)
        else:
            size = abs(whole_cores(change.cores_before) - cores)
            counting.change(self.state, row, change.at, x, size, change.ends)
        if change.at < self.since and not change.ends:
            self.state.counted_s[row] = self.since - change.at
            self.state.opened_counted_s[row, self.state.opened[row] - 1] = self.since - change.at
        self._stands(row, change.at, cores, x)

    def advance(self, now: float) -> None:
        """Let time go on, never backwards."""
        if now <= self.now:
            return
        self.now = now
        counting.roll(self.state, now)
        if self.by_landmarks and self.period.clock[0] <= now:
            self._look(now)
        while self._gone and self._gone[0][0] <= now:
            _, machine, at = self._gone.popleft()
            # One that came back meanwhile may have gone again, and has an entry of its own.
            if (last := self._last.get(machine)) is not None and last.gone and last.at == at:
                self.forget(machine)

    def forget(self, machine: str) -> None:
        """A machine that will not be asked for again; its row is used for another. What it taught stays."""
        self._last.pop(machine, None)
        row = self.rows.pop(machine, None)
        if row is not None:
            self.version += 1
            counting.leave(self.state, row, self.now)
            if self.by_landmarks:
                periods.leaves(self.period, row)
            self._free.append(row)

    def last_of(self, machine: str) -> LastChange | None:
        """The last change of a machine, also of one that does not teach; None if none is known."""
        return self._last.get(machine)

    def lasts(self) -> dict[str, LastChange]:
        """The last change of every machine."""
        return dict(self._last)

    def take_over(
        self,
        rows: dict[str, int],
        last: dict[str, LastChange],
        state: counting.Rolling,
        late: int,
        since: float,
        seen: periods.Period | None = None,
    ) -> None:
        """Go on with what another predictor knew (`matcher.predict.memory`).

        :param seen: None: it did not count landmarks, and they begin with how the machines stand.
        """
        size = len(state.last_s)
        if any(not 0 <= row < size for row in rows.values()) or len(set(rows.values())) != len(rows):
            raise ValueError("rows that are not the machines'")
        fresh = self._fresh_period(size)
        if seen is not None and (len(seen.stood_s) != size or seen.watched.shape != fresh.watched.shape):
            raise ValueError("landmarks on another grid")
        self.rows, self._last, self.state, self.late = rows, last, state, late
        self.since = since
        if self.by_landmarks:
            self.period = seen or self._stood(rows, last, size)
        self._free = sorted(set(range(size)) - set(rows.values()), reverse=True)
        until = self.now + 2.0 * self.options.horizon_s
        gone = [(until, name, known.at) for name, known in last.items() if known.gone]
        self._gone = deque(gone)
        self.changed()

    def copy(self) -> Predictor:
        """One that knows the same and has its own memory: to be asked elsewhere while this one goes on learning.

        It does not hear of machines that fall silent: it is for the time until this one has taken a look (`looks`).
        """
        made = copy.copy(self)
        made.known_until = None
        made.rows, made._last = dict(self.rows), dict(self._last)
        made._free, made._gone = list(self._free), deque(self._gone)
        made.state = _copied(self.state)
        made.period = _copied(self.period)
        made._knowledge = _copied(self._knowledge)
        return made

    def changed(self) -> None:
        """The counts are others than they were: the next question brings the curves up to date."""
        self._fresh_until = self._looked = -math.inf
        self.version += 1

    def row(self, machine: str) -> int:
        """The row of a machine, a new one if need be."""
        row = self.rows.get(machine)
        if row is None:
            if not self._free:
                self._grow()
            row = self.rows[machine] = self._free.pop()
        return row

    def known(self) -> knowing.Knowledge:
        """The curves as they are now."""
        total = self._knowledge.totals[0]
        stale = self.now >= self._fresh_until or self._news > self.options.fresh_share * total
        # Nothing has changed since they were learned a moment ago.
        if stale and self._learned != (self.now, self.version):
            knowing.learn(self._knowledge, self.state, self.now, self.options.censored)
            if self.by_landmarks and self.period.clock[0] != self._looked:
                self._knowledge.totals[2] = periods.fill_lasts_of_period(self.period, self._knowledge.lasts)
                self._looked = float(self.period.clock[0])
            self._fresh_until = self.now + self.options.fresh_s
            self._news = 0
            self.version += 1
            self._learned = (self.now, self.version)
        return self._knowledge

    def probability(
        self,
        direction: Value,
        elapsed_s: Value,
        duration_s: Value,
        free: Value = 0.0,
        cores: Value = marks.ANY_CORES,
    ) -> Value:
        """P_c by the options' form, for one machine or arrays of them; NaN where history is silent.

        :param direction: GROWTH, SHRINK or NONE of `matcher.predict.rolling`; an array must be of integers.
        :param elapsed_s: since the last change; not below 0.
        :param free: cores left free when the task runs; counts with the switch ``sized`` only.
        :param cores: that the machine has; counts with landmarks only.
        """
        knowledge = self.known()
        form = completion.form_now(knowledge, self._form)
        sized = self.options.sized
        return completion.completion_probability(knowledge, form, sized, direction, elapsed_s, duration_s, free, cores)

    def outlook(self, direction: Value, elapsed_s: Value, free: Value, cores: Value) -> completion.Outlook:
        """What P_c goes by, whatever the duration; good for as long as `version` stays and the clock."""
        return self.outlook_then(self.standing(direction, free, cores), elapsed_s)

    def standing(self, direction: Value, free: Value, cores: Value) -> completion.Standing:
        """The part of `outlook` that is good for as long as `version` stays."""
        knowledge = self.known()
        form = completion.form_now(knowledge, self._form)
        return completion.standing(knowledge, form, self.options.sized, direction, free, cores)

    def outlook_then(self, machines: completion.Standing, elapsed_s: Value) -> completion.Outlook:
        """The rest of `outlook`, at once or later."""
        knowledge = self._knowledge
        return completion.outlook_then(knowledge, completion.form_now(knowledge, self._form), machines, elapsed_s)

    def failure_and_loss(self, machines: completion.Outlook, duration_s: Value) -> tuple[Value, Value]:
        """Of what `outlook` has said: ``1 - P_c``, NaN where history is silent, and w of Eq. 2 in seconds."""
        knowledge = self._knowledge
        return completion.failure_and_loss(knowledge, completion.form_now(knowledge, self._form), machines, duration_s)

    def probabilities_of(self, machines: Sequence[str], now: float, duration_s: float) -> list[float | None]:
        """P_c of each machine, all at once; None where history is silent: never a guess.

        :raises InvalidField: a duration that is negative or not finite.
        """
        check_duration(duration_s)
        self.advance(now)
        rows = np.array([self.rows.get(name, -1) for name in machines], np.int64)
        found: list[float | None] = [None] * len(rows)
        here = np.flatnonzero(rows >= 0)
        if len(here):
            rows = rows[here]
            elapsed_s = np.maximum(now - self.state.last_s[rows], 0.0)
            cores = self.period.stood_cores[rows] if self.by_landmarks else np.full(len(rows), marks.ANY_CORES)
            values = self.probability(self.state.direction[rows], elapsed_s, duration_s, np.zeros(len(rows)), cores)
            for index, value in zip(here.tolist(), values.tolist(), strict=True):
                found[index] = None if math.isnan(value) else min(max(value, 0.0), 1.0)
        return found

    def directions(self) -> Integers:
        """The direction of each row's last change."""
        return self.state.direction

    def elapsed_s(self, rows: Integers | None = None) -> Floats:
        """How long ago the last change of each row was, or of some rows; nothing for rows without one."""
        last_s = self.state.last_s if rows is None else self.state.last_s[rows]
        return np.maximum(self.now - last_s, 0.0)

    @property
    def looks(self) -> int:
        """How many looks at landmarks have been taken."""
        return int(self.period.clock[5])

    def _look(self, now: float) -> None:
        if self.known_until is None:
            periods.watch(self.period, now)
            return
        known_s = np.full(len(self.period.stood_s), np.inf)
        for machine, until in self.known_until().items():
            if (row := self.rows.get(machine)) is not None:
                known_s[row] = until
        periods.watch_known(self.period, now, known_s)

    def _stands(self, row: int, at: float, cores: float, x: int) -> None:
        if self.by_landmarks:
            periods.stands(self.period, row, at, cores, x)

    def _fresh_period(self, machines: int) -> periods.Period:
        options = self.options
        if not self.by_landmarks:
            return periods.no_period()
        return periods.period(machines, options.window_s, options.horizon_s, options.look_every_s, self.now)

    def _stood(self, rows: dict[str, int], last: dict[str, LastChange], size: int) -> periods.Period:
        """Counts of nothing yet, of machines as they stand."""
        made = self._fresh_period(size)
        for name, row in rows.items():
            if (known := last.get(name)) is not None and not known.gone:
                x = GROWTH if known.direction is Direction.GROWTH else SHRINK
                periods.stands(made, row, known.at, float(known.cores), x)
        return made

    def _grow(self) -> None:
        """Twice as many rows."""
        size = len(self.state.last_s)
        wanted = max(2 * size, 16)
        options = self.options
        self.state = _larger(self.state, counting.rolling(wanted, options.window_s, self.now), size)
        if self.by_landmarks:
            self.period = _larger(self.period, self._fresh_period(wanted), size)
        self._free.extend(range(wanted - 1, size - 1, -1))
        self.version += 1


#: Arrays that have one row a machine.
_PER_MACHINE: Final = frozenset(
    (
        *("last_s", "counted_s", "direction", "opened_s", "opened_counted_s", "opened"),
        *("stood_s", "stood_cores", "stood_direction", "noted", "noted_cores", "lost", "counted", "lost_step"),
    )
)


def _larger(state: _State, fresh: _State, rows: int) -> _State:
    """``fresh`` with what ``state`` holds; only arrays per machine are longer there."""
    values: list[Any] = []
    for name, old, new in zip(state._fields, state, fresh, strict=True):
        if name in _PER_MACHINE:
            new[:rows] = old
            values.append(new)
        else:
            values.append(old)
    return type(state)(*values)


def _copied(arrays: _Arrays) -> _Arrays:
    """The same values in arrays of their own."""
    values: list[Any] = [_copied(array) if isinstance(array, tuple) else array.copy() for array in arrays]
    return type(arrays)(*values)
