"""Google's cluster traces: task and machine events of 2011 (csv) and of 2019 (JSON lines, csv).

Times are microseconds that begin 600 s before the trace; what stands at 0 was there before. Requests are shares of the
largest machine: the options ``machine_cores`` and ``machine_memory_mib`` say how large that is.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, fields
from typing import Any, ClassVar, Final

import numpy as np

from ebbtide.simulator.inputs.batches import (
    HIGH,
    LOW,
    UNKNOWN,
    Batch,
    CapacityBatch,
    Floats,
    Indices,
    JobBatch,
    Ragged,
    Texts,
    texts,
    unknown,
)
from ebbtide.simulator.inputs.report import Report
from ebbtide.simulator.inputs.tables import SORT, Builder, Column, Form, Format, Malformed, Options, Rows, Table

_BEFORE_S: Final = 600.0
#: 2011: "after the end of the trace"; as a float, which holds it exactly.
_AFTER_US: Final = float(2**63)
_SCALE: Final = {"machine_cores": 1.0, "machine_memory_mib": 0.0}
_SUBMIT, _SCHEDULE, _FINISH, _UPDATE, _OTHER = "submit", "schedule", "finish", "update", ""


@dataclass(slots=True)
class _Task:
    submit_s: float
    start_s: float | None
    cpu: float
    memory: float
    priority: float


@dataclass(frozen=True, slots=True)
class _Events(Batch):
    """Events of tasks, a line each."""

    KEY: ClassVar[str] = "at_s"

    at_s: Floats
    job: Texts
    task: Floats
    #: What the code of the event means.
    event: Texts
    cpu: Floats
    memory: Floats
    priority: Floats
    line: Indices


class _Events2011(Builder):
    """What each event code means."""

    EVENTS: ClassVar[tuple[str, ...]] = (
        *(_SUBMIT, _SCHEDULE, "evicted", "failed", _FINISH, "killed", "lost", _UPDATE, _UPDATE),
    )

    def add(self, table: Table) -> Rows | None:
        batch = _Events(
            at_s=np.maximum(table["time"] / 1e6 - _BEFORE_S, 0.0),
            job=table["job"],
            task=table["task"],
            event=np.array(self.EVENTS, object)[table["event"].astype(np.int64)],
            cpu=table.number("cpu"),
            memory=table.number("memory"),
            priority=table.number("priority"),
            line=table.lines,
        )
        return Rows(batch, table.lines)


class _Events2019(_Events2011):
    EVENTS = (*(_SUBMIT, _OTHER, _OTHER, _SCHEDULE, "evicted", "failed", _FINISH, "killed", "lost", _UPDATE, _UPDATE),)

    def add(self, table: Table) -> Rows | None:
        kept = self.skip(table, {"event of an alloc set": table.number("collection_type") == 1})
        return super().add(kept) if len(kept) else None


class _Tasks:
    """A row for each run of a task that finished; memory grows with the tasks that are alive."""

    #: The priority from which on a task is production.
    PRODUCTION: ClassVar[int] = 0

    def __init__(self, options: Options, report: Report) -> None:
        self.report = report
        self._alive: dict[tuple[str, float], _Task] = {}
        self._cores = float(options["machine_cores"])
        self._memory_mib = float(options["machine_memory_mib"]) or np.nan

    @classmethod
    def of(cls, batches: Iterable[Batch], options: Options, report: Report) -> Iterator[Rows]:
        """Rows of events in the order of their times."""
        tasks = cls(options, report)
        for batch in batches:
            assert isinstance(batch, _Events)
            if (found := tasks.add(batch)) is not None:
                yield found
        if tasks._alive:
            report.skipped["not ended"] += len(tasks._alive)

    def add(self, events: _Events) -> Rows | None:
        """The rows that are complete with these events."""
        found: list[tuple[str, str, float, float, _Task]] = []
        lines: list[int] = []
        values = (getattr(events, one.name).tolist() for one in fields(events))
        for now_s, job, index, event, cpu, memory, priority, line in zip(*values, strict=True):
            key = (job, index)
            task = self._alive.get(key)
            if event == _SUBMIT and task is not None:
                # Of events of one instant nobody knows which was first.
                if task.submit_s == task.start_s == now_s:
                    continue
                self.report.skipped["submitted again without an end"] += 1
            if event == _SUBMIT or (event in (_SCHEDULE, _UPDATE) and task is None):
                task = self._alive[key] = _Task(now_s, None, cpu, memory, priority)
            if event == _SCHEDULE and task is not None:
                task.start_s = now_s
            elif event == _UPDATE and task is not None:
                task.cpu, task.memory = cpu, memory
            elif event == _FINISH:
                if task is not None and task.start_s is not None and now_s < _AFTER_US / 1e6 - _BEFORE_S:
                    found.append((f"{job}/{index:.0f}", job, now_s - task.start_s, now_s, task))
                    lines.append(line)
                else:
                    self.report.skipped["no beginning or no end"] += 1
                self._alive.pop(key, None)
            elif event not in (_SUBMIT, _SCHEDULE, _UPDATE, _OTHER):
                self.report.skipped[event] += 1
                self._alive.pop(key, None)
        return self._rows(found, lines) if found else None

    def _rows(self, found: list[tuple[str, str, float, float, _Task]], lines: list[int]) -> Rows | None:
        runtime_s = np.array([f[2] for f in found])
        cpu = np.array([f[4].cpu for f in found])
        # A task without a request is no job that a scheduler could place, one without a runtime is none at all.
        bad = np.isnan(cpu) | (cpu <= 0) | (runtime_s <= 0)
        if bad.any():
            self.report.skipped["no request or no runtime"] += int(bad.sum())
        priority = np.array([f[4].priority for f in found])
        batch = JobBatch(
            id=texts(f[0] for f in found),
            group=texts(f[1] for f in found),
            submit_s=np.array([f[4].submit_s for f in found]),
            runtime_s=runtime_s,
            cpu_cores=cpu * self._cores,
            memory_mib=np.array([f[4].memory for f in found]) * self._memory_mib,
            priority=np.where(np.isnan(priority), UNKNOWN, np.where(priority >= self.PRODUCTION, HIGH, LOW)).astype(
                np.int8
            ),
            requested_s=unknown(len(found)),
            task_runtime_s=Ragged.single(runtime_s),
        )
        rows = Rows(batch.take(~bad), np.array(lines, np.int64)[~bad])
        return rows if len(rows.batch) else None


class _Tasks2011(_Tasks):
    PRODUCTION = 9


class _Tasks2019(_Tasks):
    PRODUCTION = 120


class _Machines(Builder):
    """Capacity of machines: code 0 adds, 1 removes, 2 updates."""

    FIRST_CODE: ClassVar[int] = 0

    def add(self, table: Table) -> Rows | None:
        removed = table["event"] == self.FIRST_CODE + 1
        table = self.skip(table, {"no capacity": ~removed & np.isnan(table.number("cpu"))})
        if not len(table):
            return None
        removed = table["event"] == self.FIRST_CODE + 1
        memory_mib = float(self.options["machine_memory_mib"]) or np.nan
        batch = CapacityBatch(
            machine=table["machine"],
            at_s=np.maximum(table["time"] / 1e6 - _BEFORE_S, 0.0),
            cpu_cores=np.where(removed, 0.0, table.number("cpu") * float(self.options["machine_cores"])),
            memory_mib=np.where(removed, 0.0, table.number("memory") * memory_mib),
        )
        return Rows(batch, table.lines)


class _Machines2019(_Machines):
    FIRST_CODE = 1


def _json_cells(names: tuple[tuple[str, ...], ...]) -> Callable[[bytes], list[bytes]]:
    """A `split` for a JSON object a line; each name is a path, and what is missing an empty cell."""

    def split(line: bytes) -> list[bytes]:
        try:
            document = json.loads(line, parse_float=str, parse_int=str)
        except (ValueError, RecursionError) as error:
            raise Malformed(names[0][0], f"or a later field is no JSON: {error}") from None
        return [_cell(document, path) for path in names]

    return split


def _cell(document: Any, path: tuple[str, ...]) -> bytes:
    for name in path:
        if not isinstance(document, dict):
            raise Malformed(".".join(path), "is not where it belongs: there is no JSON object")
        document = document.get(name)
        if document is None:
            return b""
    if not isinstance(document, str):
        raise Malformed(".".join(path), f"is a {type(document).__name__}, neither number nor text")
    return document.encode("utf-8", "surrogatepass")


def _codes(*names: str) -> dict[str, float]:
    return {name: float(code) for code, name in enumerate(names)}


_EVENTS_2019: Final = _codes(
    "SUBMIT",
    "QUEUE",
    "ENABLE",
    "SCHEDULE",
    "EVICT",
    "FAIL",
    "FINISH",
    "KILL",
    "LOST",
    "UPDATE_PENDING",
    "UPDATE_RUNNING",
)

TASKS_2011: Final = Format(
    name="google-2011-tasks",
    title="Google 2011 task_events",
    kind="jobs",
    columns=(
        Column("time", minimum=0),
        Column("missing_info", Form.IGNORED),
        Column("job", Form.TEXT),
        Column("task", minimum=0, whole=True),
        Column("machine", Form.IGNORED),
        Column("event", minimum=0, maximum=8, whole=True),
        Column("user", Form.IGNORED),
        Column("scheduling_class", minimum=0, maximum=3, whole=True, optional=True),
        Column("priority", minimum=0, maximum=11, whole=True),
        Column("cpu", minimum=0, optional=True),
        Column("memory", minimum=0, optional=True),
        Column("disk", Form.IGNORED),
        Column("different_machine", Form.IGNORED),
    ),
    builder=_Events2011,
    pairs=_Tasks2011.of,
    defaults=_SCALE,
    order=SORT,
)

MACHINES_2011: Final = Format(
    name="google-2011-machines",
    title="Google 2011 machine_events",
    kind="capacity",
    columns=(
        Column("time", minimum=0),
        Column("machine", Form.TEXT),
        Column("event", minimum=0, maximum=2, whole=True),
        Column("platform", Form.IGNORED),
        Column("cpu", minimum=0, maximum=1, optional=True),
        Column("memory", minimum=0, maximum=1, optional=True),
    ),
    builder=_Machines,
    defaults=_SCALE,
)

_INSTANCE: Final = (
    Column("time", minimum=0),
    Column("event", minimum=0, maximum=10, whole=True, spelled=_EVENTS_2019, aliases=("type",)),
    Column("job", Form.TEXT, aliases=("collection_id",)),
    Column("task", minimum=0, whole=True, aliases=("instance_index",)),
    Column("priority", minimum=0, optional=True),
    Column("collection_type", spelled=_codes("JOB", "ALLOC_SET"), minimum=0, maximum=1, optional=True),
    Column("cpu", minimum=0, optional=True, aliases=("resource_request.cpus", "resource_request_cpus")),
    Column("memory", minimum=0, optional=True, aliases=("resource_request.memory", "resource_request_memory")),
)

TASKS_2019: Final = Format(
    name="google-2019-tasks",
    title="Google 2019 instance_events, JSON lines",
    kind="jobs",
    columns=_INSTANCE,
    builder=_Events2019,
    pairs=_Tasks2019.of,
    split=_json_cells(
        (
            ("time",),
            ("type",),
            ("collection_id",),
            ("instance_index",),
            ("priority",),
            ("collection_type",),
            ("resource_request", "cpus"),
            ("resource_request", "memory"),
        )
    ),
    defaults=_SCALE,
    order=SORT,
)

TASKS_2019_CSV: Final = Format(
    name="google-2019-tasks-csv",
    title="Google 2019 instance_events, csv with a header",
    kind="jobs",
    columns=_INSTANCE,
    builder=_Events2019,
    pairs=_Tasks2019.of,
    header="required",
    defaults=_SCALE,
    order=SORT,
)

MACHINES_2019: Final = Format(
    name="google-2019-machines",
    title="Google 2019 machine_events, JSON lines",
    kind="capacity",
    columns=(
        Column("time", minimum=0),
        Column("machine", Form.TEXT),
        Column(
            "event", minimum=1, maximum=3, whole=True, spelled=_codes("EVENT_TYPE_UNKNOWN", "ADD", "REMOVE", "UPDATE")
        ),
        Column("cpu", minimum=0, optional=True),
        Column("memory", minimum=0, optional=True),
    ),
    builder=_Machines2019,
    split=_json_cells((("time",), ("machine_id",), ("type",), ("capacity", "cpus"), ("capacity", "memory"))),
    defaults=_SCALE,
    order=SORT,
)
