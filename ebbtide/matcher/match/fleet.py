"""Fleet of machines, what runs on each and when it will have room: a of Eq. 2 for one task on all machines at once.

A machine's tasks end at known times, so the room that it will have grows in known steps; they are kept as a table, by
whole cores and by whole steps of memory, of when there is so much. Room that is promised to tasks that wait counts as
taken: without, all that wait wait for the same machine.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Set
from dataclasses import dataclass
from typing import Final, TypeAlias

import numpy as np
from numpy.typing import NDArray

from ebbtide.deflation.errors import InvalidField
from ebbtide.matcher.predict.ages import Floats
from ebbtide.matcher.predict.expected_time import leaves_in_time_until_s, remaining_s
from ebbtide.matcher.predict.predictor import Predictor
from ebbtide.matcher.predict.rolling import Integers

#: Steps of memory in the table: the largest machine has so many.
MEMORY_STEPS: Final = 64
_EPSILON: Final = 1e-9
#: So long before it changes what a machine has released is looked at again, s: far more than times are rounded by.
_SLACK_S: Final = 1e-3
#: Changes that are kept to be told.
_TOLD: Final = 10_000
#: Of some machines, by row.
Marks: TypeAlias = NDArray[np.bool_]
#: When so much becomes free.
_Ends: TypeAlias = list[tuple[float, float]]


@dataclass(frozen=True, slots=True)
class Running:
    """A task that holds room of a machine, or is promised it."""

    task: str
    cores: float
    memory_mib: float
    #: When it began (for a promise: now) and is expected to end, on the predictor's clock.
    started_at: float
    ends_at: float


class Fleet:
    """The machines that tasks can run on. Rows of the arrays are the predictor's.

    :param most_cores: that a task may wait for; a larger one runs where it has room at once, or not at all.
    :param memory_step_mib: memory that becomes free counts in whole steps; what is free now counts exactly.
    """

    def __init__(self, predictor: Predictor, most_cores: int = 128, memory_step_mib: float = 2048.0) -> None:
        for name, value in (("most_cores", most_cores), ("memory_step_mib", memory_step_mib)):
            if not (math.isfinite(value) and value > 0):
                raise InvalidField(name, f"must be above 0 and finite, but is {value!r}")
        self.predictor = predictor
        self._most_cores = most_cores
        self._step_mib = memory_step_mib
        self._running: dict[int, list[Running]] = {}
        self._promised: dict[int, list[Running]] = {}
        self._names: dict[int, str] = {}
        self.cores: Floats = np.zeros(0)
        self.memory_mib: Floats = np.zeros(0)
        #: Of each task that runs: row, when it began and is expected to end, cores. In any order, with places to spare;
        #: and the places by task, the tasks by place.
        self._held_rows: Integers = np.zeros(0, np.int64)
        self._held: Floats = np.zeros((3, 0))
        self._places: dict[str, int] = {}
        self._placed: list[str] = []
        #: What runs, and what is promised beside it.
        self.used_cores: Floats = np.zeros(0)
        self.used_mib: Floats = np.zeros(0)
        self.promised_cores: Floats = np.zeros(0)
        self.promised_mib: Floats = np.zeros(0)
        #: 1: the machine's cores cannot be taken.
        self.lasting: Floats = np.zeros(0)
        #: When the first of what runs should end; the moment of the last question, and that of each machine's table:
        #: tasks that overrun end ever later. NaN: it is stale.
        self._first_end: Floats = np.zeros(0)
        self._now = predictor.now
        self._filled_at: Floats = np.zeros(0)
        #: Rows to count again. Rows that changed, one after another; and how many of the first have been forgotten.
        self._stale: set[int] = set()
        self._touched: list[int] = []
        self._untold = 0
        #: When each machine has row-many cores (steps of memory); -inf: now, inf: never.
        self._cores_at: Floats = np.zeros((most_cores + 1, 0))
        self._memory_at: Floats = np.zeros((MEMORY_STEPS + 1, 0))

    def put(self, machine: str, cores: float, memory_mib: float = math.inf, lasting: bool = False) -> None:
        """A machine has so much now, whatever runs there. Without a figure memory does not matter.

        :param lasting: its cores cannot be taken, so that the history of the others says nothing of it.
        :raises InvalidField: sizes that are negative or no numbers.
        """
        for name, value in (("cores", cores), ("memory_mib", memory_mib)):
            if not value >= 0:
                raise InvalidField(name, f"must not be negative, but is {value!r}")
        row = self.predictor.row(machine)
        self._fit()
        self._names[row] = machine
        if self.lasting[row] != float(lasting):
            self._forget_touched()
        self.cores[row], self.memory_mib[row], self.lasting[row] = cores, memory_mib, float(lasting)
        self._changed(row)

    def remove(self, machine: str) -> list[str]:
        """A machine is gone; returns the tasks that ran there."""
        row = self.predictor.rows.get(machine)
        if row is None or row not in self._names:
            return []
        ended = self._running.pop(row, [])
        for task in ended:
            self._release(task.task)
        self._promised.pop(row, None)
        del self._names[row]
        self.cores[row] = self.memory_mib[row] = 0.0
        self._changed(row)
        return [task.task for task in ended]

    def start(self, machine: str, task: Running) -> None:
        """A task runs on a machine now. More than there is room for is taken as it is: the machine may have shrunk.

        :raises InvalidField: an unknown machine, or a task that runs already.
        """
        row = self.predictor.rows.get(machine)
        if row is None or row not in self._names:
            raise InvalidField("machine", f"{machine!r} is not known")
        if task.task in self._places:
            raise InvalidField("task", f"{task.task!r} runs already")
        self._running.setdefault(row, []).append(task)
        place = self._places[task.task] = len(self._placed)
        self._placed.append(task.task)
        if place == len(self._held_rows):
            more = max(place, 16)
            self._held_rows = np.concatenate([self._held_rows, np.zeros(more, np.int64)])
            self._held = np.concatenate([self._held, np.zeros((3, more))], axis=1)
        self._held_rows[place] = row
        self._held[:, place] = task.started_at, task.ends_at, task.cores
        self._changed(row)

    def end(self, task: str) -> None:
        """A task does not run any more. One that is not known is none."""
        if task in self._places:
            row = self._held_rows.item(self._places[task])
            self._release(task)
            self._running[row] = [other for other in self._running[row] if other.task != task]
            self._changed(row)

    def promise(self, row: int, task: Running) -> None:
        """Room of a machine is kept for a task that waits, until `forget_promises`."""
        self._promised.setdefault(row, []).append(task)
        self._changed(row)

    def forget_promises(self) -> None:
        """A new round of decisions begins."""
        rows, self._promised = list(self._promised), {}
        for row in rows:
            self._changed(row)

    def marked(self, machines: Set[str]) -> Marks:
        """Whether the machine of a row is one of these, by row. Unknown ones are none."""
        self._fit()
        rows = (self.predictor.rows.get(machine, -1) for machine in machines)
        found: Marks = np.zeros(len(self.cores), bool)
        found[[row for row in rows if row in self._names]] = True
        return found

    def lasts(self, row: int) -> bool:
        """Whether the cores of a row's machine cannot be taken."""
        return bool(self.lasting[row] > 0.0)

    def name(self, row: int) -> str:
        """The machine of a row."""
        return self._names[row]

    def rows(self) -> Collection[int]:
        """The rows of the machines that there are."""
        return self._names.keys()

    def tasks(self, machine: str) -> list[Running]:
        """What runs on a machine, in the order in which it began."""
        row = self.predictor.rows.get(machine)
        return list(self._running.get(row, [])) if row is not None else []

    def free_cores(self, rows: Integers | None = None) -> Floats:
        """Cores not in use, by row or of some rows, promised ones among them.

        Below 0 where a machine has shrunk under what runs.
        """
        self.advance(self._now)
        return self.cores - self.used_cores if rows is None else self.cores[rows] - self.used_cores[rows]

    def released(self, rows: Integers, within_s: float) -> tuple[Floats, Floats]:
        """Cores that what runs on some machines leaves within a time, as expected at the moment of the last `advance`;
        and until when that stays so at least, if nothing begins or ends there. By row.

        :param rows: each once.
        """
        now, on = self._now, np.zeros(len(self.cores), bool)
        on[rows] = True
        here = np.flatnonzero(on[self._held_rows[: len(self._placed)]])
        of, (began, ends, cores) = self._held_rows[here], self._held[:, here]
        done = np.where(ends > now, ends, now + remaining_s(ends, began, now)) <= now + within_s
        found: Floats = np.bincount(of[done], cores[done], len(on)).astype(np.float64)[rows]
        begins = ends - within_s
        changes = np.where(begins > now, begins, leaves_in_time_until_s(ends, began, within_s))
        until = np.full(len(on), np.inf)
        np.minimum.at(until, of, np.where(changes > now, changes, np.inf))
        return found, until[rows] - _SLACK_S

    def released_of(self, row: int, within_s: float) -> tuple[float, float]:
        """`released` of one row."""
        now, running = self._now, self._running.get(row, ())
        cores = math.fsum(task.cores for task in running if _end_of(task, now) <= now + within_s)
        until = math.inf
        for task in running:
            at = task.ends_at - within_s
            if at <= now:
                at = float(leaves_in_time_until_s(task.ends_at, task.started_at, within_s))
            until = min(until, at if at > now else until)
        return cores, until - _SLACK_S

    def touched(self) -> int:
        """A mark, for `touched_since`."""
        return self._untold + len(self._touched)

    def touched_since(self, mark: int) -> list[int] | None:
        """Rows of machines whose room has changed since a mark; None: too many to be told, or more than their room."""
        return self._touched[mark - self._untold :] if mark >= self._untold else None

    def advance(self, now: float) -> None:
        """What has changed is counted; tables of when machines have room are filled as they are asked for."""
        self._fit()
        self._now = now
        if self._stale:
            for row in self._stale:
                self._count(row)
            self._stale.clear()

    def waits_s(self, cores: float, memory_mib: float, now: float, rows: Integers | None = None) -> Floats:
        """a of Eq. 2: how long until each machine has room, by row, or of some rows; infinite where it never will."""
        waits: Floats = np.maximum(self.room_at(cores, memory_mib, now, rows) - now, 0.0)
        return waits

    def room_at(self, cores: float, memory_mib: float, now: float, rows: Integers | None = None) -> Floats:
        """When each machine has room, by row, or of some rows: -inf: now, inf: never.

        The same as `simulator.nodes.backfilling.reservation`, which the simulator asks machine by machine, but that
        memory that becomes free counts in whole steps. A task that overruns its estimate is expected to end after a
        share of its age.
        """
        self.advance(now)
        whole, steps = self._whole(cores, memory_mib)
        of = slice(None) if rows is None else rows
        free = (self.cores[of] - self.used_cores[of] - self.promised_cores[of] >= cores - _EPSILON) & (
            self.memory_mib[of] - self.used_mib[of] - self.promised_mib[of] >= memory_mib - _EPSILON
        )
        # Of a machine that has no room it matters when its tasks end; that changes if some should have ended.
        filled_at = self._filled_at[of]
        late = np.flatnonzero(~(self._first_end[of] > np.maximum(filled_at, now)) & (filled_at != now) & ~free)
        for row in (late if rows is None else rows[late]).tolist():
            self._fill(row)
        at = np.maximum(
            self._cores_at[whole][of] if whole <= self._most_cores else np.inf,
            self._memory_at[steps][of] if steps <= MEMORY_STEPS else np.inf,
        )
        return np.where(free, -np.inf, at)

    def room_of(self, row: int, cores: float, memory_mib: float) -> float:
        """`room_at` of one row, at the moment of the last `advance`."""
        has, has_mib = self.cores.item(row), self.memory_mib.item(row)
        if (
            has - self.used_cores.item(row) - self.promised_cores.item(row) >= cores - _EPSILON
            and has_mib - self.used_mib.item(row) - self.promised_mib.item(row) >= memory_mib - _EPSILON
        ):
            return -math.inf
        whole, steps = self._whole(cores, memory_mib)
        if row not in self._names or whole > self._most_cores or steps > MEMORY_STEPS:
            return math.inf
        ends = self._by_end(row)
        at = _first_at(has, 1.0, [(at, held) for at, held, _ in ends], whole)
        if math.isinf(has_mib):
            return at
        return max(at, _first_at(has_mib, self._step_mib, [(at, held) for at, _, held in ends], steps))

    def overrun(self, rows: Integers, now: float) -> Integers:
        """Places of the rows with tasks that overrun their estimates: `room_at` is another than it was before."""
        return (self._first_end[rows] <= now).nonzero()[0]

    def _fit(self) -> None:
        """As many columns as the predictor has rows."""
        size, wanted = len(self.cores), len(self.predictor.state.last_s)
        if size == wanted:
            return
        more = wanted - size
        for name in (
            "cores",
            "memory_mib",
            "used_cores",
            "used_mib",
            "promised_cores",
            "promised_mib",
            "lasting",
        ):
            setattr(self, name, np.concatenate([getattr(self, name), np.zeros(more)]))
        self._first_end = np.concatenate([self._first_end, np.full(more, np.inf)])
        self._filled_at = np.concatenate([self._filled_at, np.zeros(more)])
        for name in ("_cores_at", "_memory_at"):
            table = getattr(self, name)
            setattr(self, name, np.concatenate([table, np.full((len(table), more), np.inf)], axis=1))

    def _release(self, task: str) -> None:
        """The last of what is held goes to the place of one that ends."""
        place, other = self._places.pop(task), self._placed.pop()
        if other != task:
            last = len(self._placed)
            self._placed[place], self._places[other] = other, place
            self._held_rows[place], self._held[:, place] = self._held_rows[last], self._held[:, last]

    def _changed(self, row: int) -> None:
        """What is known of a machine is stale; its columns are filled when they are asked for."""
        self._stale.add(row)
        self._touched.append(row)
        if len(self._touched) > _TOLD:
            self._forget_touched()

    def _forget_touched(self) -> None:
        """More has changed than is told."""
        self._untold += len(self._touched) + 1
        self._touched.clear()

    def _count(self, row: int) -> None:
        """What is in use on one machine; its columns of the table are stale."""
        running, promised = self._running.get(row, ()), self._promised.get(row, ())
        self.used_cores[row] = math.fsum([task.cores for task in running])
        self.used_mib[row] = math.fsum([task.memory_mib for task in running])
        self.promised_cores[row] = math.fsum([task.cores for task in promised])
        self.promised_mib[row] = math.fsum([task.memory_mib for task in promised])
        self._first_end[row] = min([task.ends_at for task in running], default=math.inf)
        self._filled_at[row] = math.nan

    def _fill(self, row: int) -> None:
        """The table's columns of one machine: when there will be how much room."""
        self._filled_at[row] = self._now
        cores, memory = self._cores_at[:, row], self._memory_at[:, row]
        if row not in self._names:
            cores[:] = memory[:] = np.inf
            return
        ends = self._by_end(row)
        _fill_column(cores, self.cores.item(row), 1.0, [(at, held) for at, held, _ in ends])
        _fill_column(memory, self.memory_mib.item(row), self._step_mib, [(at, held) for at, _, held in ends])

    def _whole(self, cores: float, memory_mib: float) -> tuple[int, int]:
        """What a task wants, in steps of the table."""
        return math.ceil(cores - _EPSILON), math.ceil(memory_mib / self._step_mib - _EPSILON)

    def _by_end(self, row: int) -> list[tuple[float, float, float]]:
        """When tasks are expected to end on a machine, in that order, and the cores and memory that they hold."""
        now = self._now
        ends = [(_end_of(task, now), task.cores, task.memory_mib) for task in self._running.get(row, ())]
        ends += [(task.ends_at, task.cores, task.memory_mib) for task in self._promised.get(row, ())]
        ends.sort()
        return ends


def _end_of(task: Running, now: float) -> float:
    """When a task that runs is expected to end."""
    return task.ends_at if task.ends_at > now else now + float(remaining_s(task.ends_at, task.started_at, now))


def _first_at(has: float, step: float, tasks: _Ends, steps: int) -> float:
    """When so many steps are free; infinite: never."""
    return next((at for at, free in _growing(has, step, tasks) if free >= steps), math.inf)


def _growing(has: float, step: float, tasks: _Ends) -> Iterator[tuple[float, float]]:
    """When how many steps become free: as the tasks end, one after another."""
    if math.isinf(has):
        yield -math.inf, math.inf
        return
    free = has - math.fsum([amount for _, amount in tasks])
    yield -math.inf, math.floor(free / step + _EPSILON)
    for at, amount in tasks:
        free += amount
        yield at, math.floor(free / step + _EPSILON)


def _fill_column(column: Floats, has: float, step: float, tasks: _Ends) -> None:
    """When so many steps are free."""
    if math.isinf(has) and column[-1] == -math.inf:
        # As it mostly was.
        return
    filled = 0
    for at, free in _growing(has, step, tasks):
        until = int(min(max(free, -1), len(column) - 1)) + 1
        if until > filled:
            column[filled:until] = at
            filled = until
    column[filled:] = math.inf
