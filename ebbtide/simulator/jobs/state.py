"""The engine's arrays: made, grown when more is alive than they hold, and as a mapping for checkpoints."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, get_type_hints

import numpy as np
from numpy.typing import NDArray

from ebbtide.simulator.jobs import columns as c
from ebbtide.simulator.jobs.columns import Ints, State
from ebbtide.simulator.jobs.ends import widened
from ebbtide.simulator.jobs.measures import fresh

#: Rows to begin with.
_TASKS = 1024
_JOBS = 1024
#: Rows that are written down before the engine hands them out.
ROWS = 1 << 14


def empty_state() -> State:
    """Nothing has happened, and there is no machine."""
    bins, bin_sums, moments = fresh()
    s = State(
        tasks=np.empty((0, c.TASK_INTS), np.int64),
        times=np.empty((0, c.TASK_FLOATS)),
        ends_at=np.empty(0),
        ends_task=np.empty(0, np.int64),
        jobs=np.empty((0, c.JOB_INTS), np.int64),
        job_times=np.empty((0, c.JOB_FLOATS)),
        machines=np.empty((0, c.MACHINE_INTS), np.int64),
        machine_times=np.empty((0, c.MACHINE_FLOATS)),
        queues=np.empty((0, c.QUEUE_INTS), np.int64),
        active=np.empty(0, np.int64),
        counts=np.zeros(c.COUNTS, np.int64),
        options=np.zeros(c.OPTIONS, np.int64),
        sums=np.zeros(c.SUMS),
        bins=bins,
        bin_sums=bin_sums,
        moments=moments,
        scratch=np.empty(0, np.int64),
        scratch_times=np.empty(0),
        scratch_more=np.empty(0, np.int64),
        scratch_lost=np.empty(0),
        in_at=np.empty(0),
        in_queue=np.empty(0, np.int64),
        in_offsets=np.zeros(1, np.int64),
        in_runtime=np.empty(0),
        in_estimate=np.empty(0),
        change_at=np.empty(0),
        changes=np.empty((0, c.CHANGE_INTS), np.int64),
        done=np.empty((0, len(c.DONE_COLUMNS))),
        attempts=np.empty((0, len(c.ATTEMPT_COLUMNS))),
    )
    s.counts[c.COUNT.free_task] = s.counts[c.COUNT.free_job] = s.counts[c.COUNT.reserved] = -1
    s.options[c.OPTION.checkpointed] = 1
    s.options[c.OPTION.most_mib] = c.UNLIMITED_MIB
    s.sums[c.SUM.wake] = s.sums[c.SUM.until] = s.sums[c.SUM.to_s] = np.inf
    s.sums[c.SUM.from_s] = -np.inf
    return with_jobs(with_tasks(s, _TASKS), _JOBS)


def with_tasks(s: State, rows: int) -> State:
    """The same with room for so many tasks."""
    before = len(s.tasks)
    tasks = _longer(s.tasks, rows)
    chain(tasks, c.TASK.next, before, int(s.counts[c.COUNT.free_task]))
    tasks[before:, c.TASK.machine] = -2
    s.counts[c.COUNT.free_task] = before
    s.counts[c.COUNT.task_room] += rows - before
    ends_at, ends_task = widened(s.ends_at, s.ends_task, rows)
    return s._replace(
        tasks=tasks,
        times=_longer(s.times, rows),
        ends_at=ends_at,
        ends_task=ends_task,
        scratch=_longer(s.scratch, rows),
        scratch_times=_longer(s.scratch_times, rows),
        scratch_more=_longer(s.scratch_more, rows),
        scratch_lost=_longer(s.scratch_lost, rows),
        attempts=_longer(s.attempts, rows + ROWS) if s.options[c.OPTION.attempts] else s.attempts,
    )


def with_jobs(s: State, rows: int) -> State:
    """The same with room for so many jobs."""
    before = len(s.jobs)
    jobs = _longer(s.jobs, rows)
    chain(jobs, c.JOB.next, before, int(s.counts[c.COUNT.free_job]))
    jobs[before:, c.JOB.number] = -1
    s.counts[c.COUNT.free_job] = before
    s.counts[c.COUNT.job_room] += rows - before
    return s._replace(jobs=jobs, job_times=_longer(s.job_times, rows))


def with_machines(s: State, rows: int, now_s: float) -> State:
    """The same with so many machines; the new ones have no cores."""
    before = len(s.machines)
    machines = _longer(s.machines, rows)
    machines[before:, c.MACHINE.first] = machines[before:, c.MACHINE.last] = -1
    machines[before:, c.MACHINE.direction] = 1
    machine_times = _longer(s.machine_times, rows)
    machine_times[before:, c.MACHINE_TIME.changed] = now_s
    return s._replace(machines=machines, machine_times=machine_times)


def with_queues(s: State, demands: Ints) -> State:
    """The same with one queue more for each row of ``demands``: rank, cores, MiB."""
    before = len(s.queues)
    queues = _longer(s.queues, before + len(demands))
    queues[before:, [c.QUEUE.rank, c.QUEUE.cores, c.QUEUE.memory]] = demands
    queues[before:, [c.QUEUE.first, c.QUEUE.last, c.QUEUE.active, c.QUEUE.cursor]] = -1
    return s._replace(queues=queues, active=_longer(s.active, len(queues)))


def with_rows(s: State) -> State:
    """The same with room for what is written down."""
    done = np.empty((ROWS, len(c.DONE_COLUMNS))) if s.options[c.OPTION.done] else s.done
    attempts = np.empty((len(s.tasks) + ROWS, len(c.ATTEMPT_COLUMNS))) if s.options[c.OPTION.attempts] else s.attempts
    return s._replace(done=done, attempts=attempts)


def chain(rows: Ints, column: int, begin: int, last: int) -> None:
    """Chain the rows from ``begin`` on; ``last`` follows on them."""
    rows[begin:, column] = np.arange(begin + 1, len(rows) + 1)
    if len(rows) > begin:
        rows[-1, column] = last


def as_mapping(values: Any, prefix: str) -> dict[str, NDArray[Any]]:
    """A tuple of arrays by the names of its fields; of tuples within it, by both names with a point between."""
    found: dict[str, NDArray[Any]] = {}
    for name, value in zip(values._fields, values, strict=True):
        nested = hasattr(value, "_fields")
        found |= as_mapping(value, f"{prefix}{name}.") if nested else {f"{prefix}{name}": value}
    return found


def from_mapping(kind: Any, saved: Mapping[str, NDArray[Any]], prefix: str) -> Any:
    """The tuple that `as_mapping` saved; its arrays are its own."""
    made = {}
    for name, within in get_type_hints(kind).items():
        nested = isinstance(within, type) and hasattr(within, "_fields")
        key = f"{prefix}{name}"
        made[name] = from_mapping(within, saved, f"{key}.") if nested else np.ascontiguousarray(saved[key])
    return kind(**made)


def _longer(array: NDArray[Any], rows: int) -> Any:
    longer = np.zeros((rows, *array.shape[1:]), array.dtype)
    longer[: len(array)] = array
    return longer
