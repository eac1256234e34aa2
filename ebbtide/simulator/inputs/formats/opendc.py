"""Tasks of OpenDC's workloads, SURF's Lisa cluster (Ambati et al. 2021) among them: Parquet; times are in milliseconds
or timestamps.
"""

from __future__ import annotations

from typing import Final

import numpy as np

from ebbtide.simulator.inputs.batches import JobBatch, Ragged, hints, same, unknown
from ebbtide.simulator.inputs.parquet import ParquetFormat
from ebbtide.simulator.inputs.tables import SORT, Builder, Column, Form, Rows, Table

#: The end of the year 9999.
_LATEST_S: Final = 253_402_300_799


class _Jobs(Builder):
    def add(self, table: Table) -> Rows | None:
        table = self.skip(table, {"no runtime": table["duration"] == 0})
        count = len(table)
        if not count:
            return None
        runtime_s = table["duration"] / 1000
        memory_mib = table.number("mem_capacity")
        batch = JobBatch(
            id=table["id"],
            group=same("", count),
            submit_s=table["submission_time"],
            runtime_s=runtime_s,
            cpu_cores=table["cpu_count"],
            memory_mib=np.where(memory_mib > 0, memory_mib, np.nan),
            priority=hints(count),
            requested_s=unknown(count),
            task_runtime_s=Ragged.single(runtime_s),
        )
        return Rows(batch, table.lines)


TASKS: Final = ParquetFormat(
    name="opendc-tasks",
    title="OpenDC tasks.parquet (SURF Lisa, Bitbrains)",
    kind="jobs",
    columns=(
        Column("id", Form.TEXT),
        Column("submission_time", Form.TIME, minimum=0, maximum=_LATEST_S),
        Column("duration", minimum=0),
        Column("cpu_count", minimum=1),
        Column("mem_capacity", minimum=0, optional=True),
    ),
    builder=_Jobs,
    order=SORT,
    calendar=True,
)
