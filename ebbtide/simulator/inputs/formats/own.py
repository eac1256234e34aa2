"""The own format: a table a kind, as csv with a header or as Parquet, with the names of `simulator.inputs.batches`."""

from __future__ import annotations

from dataclasses import fields
from typing import Any, ClassVar, Final

import numpy as np

from ebbtide.simulator.inputs.batches import HINTS, Batch, CapacityBatch, JobBatch, SeriesBatch, VmBatch, hints, same
from ebbtide.simulator.inputs.parquet import ParquetFormat
from ebbtide.simulator.inputs.tables import Builder, Check, Column, Form, Format, Rows, Table


class _Own(Builder):
    """Columns are rows already; optional ones that the file lacks are filled in."""

    BATCH: ClassVar[type[Batch]]

    def add(self, table: Table) -> Rows | None:
        count = len(table)
        columns: dict[str, Any] = {}
        for field in fields(self.BATCH):
            name = field.name
            if name == "priority":
                columns[name] = np.nan_to_num(table[name]).astype(np.int8) if name in table else hints(count)
            elif name in table:
                columns[name] = table[name]
            else:
                columns[name] = same("", count) if name == "group" else table.number(name)
        return Rows(self.BATCH(**columns), table.lines)


class _Vms(_Own):
    BATCH = VmBatch


class _Jobs(_Own):
    BATCH = JobBatch


class _Capacity(_Own):
    BATCH = CapacityBatch


class _Series(_Own):
    BATCH = SeriesBatch


_PRIORITY: Final = Column("priority", Form.CHOICE, choices=HINTS, optional=True)
_MEMORY: Final = Column("memory_mib", minimum=0, optional=True)
_GROUP: Final = Column("group", Form.TEXT, optional=True)
_LEAVES: Final = Check(
    "departs_s", "is before arrives_s", lambda t: np.asarray(t.number("departs_s") < t["arrives_s"], bool)
)
#: By so much rounding may move a mean, s (where it is written as whole ones) and as a share of it.
_ROUNDING_S: Final = 1.0
_ROUNDING: Final = 1e-9


def _contradicts_its_tasks(table: Table) -> Any:
    """Otherwise who asks for the runtime and who runs the tasks see two different jobs."""
    tasks, bad = table["task_runtime_s"], np.zeros(len(table), bool)
    # Rows without tasks are named elsewhere.
    some = tasks.lengths > 0
    begins, runtime_s = tasks.offsets[:-1][some], table["runtime_s"][some]
    if len(begins):
        least, most = (bound.reduceat(tasks.values, begins) for bound in (np.minimum, np.maximum))
        slack_s = _ROUNDING_S + _ROUNDING * most
        bad[some] = (runtime_s < least - slack_s) | (runtime_s > most + slack_s)
    return bad


_MEAN: Final = Check("runtime_s", "is not between the least and the largest of task_runtime_s", _contradicts_its_tasks)
_CHECKS: Final = {"vms": (_LEAVES,), "jobs": (_MEAN,)}

_COLUMNS: Final[dict[str, tuple[Column, ...]]] = {
    "vms": (
        Column("id", Form.TEXT),
        _GROUP,
        Column("arrives_s", minimum=0),
        Column("departs_s", minimum=0, optional=True),
        Column("cpu_cores", minimum=0),
        _MEMORY,
        _PRIORITY,
        Column("utilisation", minimum=0, maximum=1, optional=True),
    ),
    "jobs": (
        Column("id", Form.TEXT),
        _GROUP,
        Column("submit_s", minimum=0),
        Column("runtime_s", minimum=0),
        Column("cpu_cores", minimum=0),
        _MEMORY,
        _PRIORITY,
        Column("requested_s", minimum=0, optional=True),
        Column("task_runtime_s", Form.LIST, minimum=0),
    ),
    "capacity": (
        Column("machine", Form.TEXT),
        Column("at_s", minimum=0),
        Column("cpu_cores", minimum=0),
        _MEMORY,
    ),
    "series": (Column("at_s", minimum=0), Column("value")),
}
_BUILDERS: Final[dict[str, type[Builder]]] = {"vms": _Vms, "jobs": _Jobs, "capacity": _Capacity, "series": _Series}

TABLES: Final = tuple(
    Format(
        name=kind,
        title=f"own csv of {kind}",
        kind=kind,
        columns=columns,
        builder=_BUILDERS[kind],
        header="required",
        checks=_CHECKS.get(kind, ()),
    )
    for kind, columns in _COLUMNS.items()
)

PARQUETS: Final = tuple(
    ParquetFormat(
        name=f"{kind}-parquet",
        title=f"own Parquet of {kind}",
        kind=kind,
        columns=columns,
        builder=_BUILDERS[kind],
        checks=_CHECKS.get(kind, ()),
    )
    for kind, columns in _COLUMNS.items()
)
