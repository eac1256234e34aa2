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
        checks=(_LEAVES,) if kind == "vms" else (),
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
        checks=(_LEAVES,) if kind == "vms" else (),
    )
    for kind, columns in _COLUMNS.items()
)
