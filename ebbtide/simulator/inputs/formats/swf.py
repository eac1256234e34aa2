"""Standard Workload Format of the Parallel Workloads Archive: 18 numbers a line, -1 where nothing is known."""

from __future__ import annotations

from typing import Final

import numpy as np

from ebbtide.simulator.inputs.batches import JobBatch, Ragged, hints, texts
from ebbtide.simulator.inputs.tables import Builder, Column, Form, Format, Rows, Table

_KIB_PER_MIB: Final = 1024.0


class _Jobs(Builder):
    def add(self, table: Table) -> Rows | None:
        processors = np.where(
            table["allocated_processors"] > 0, table["allocated_processors"], table["requested_processors"]
        )
        reasons = {"no runtime": table["run_time_s"] <= 0, "no processors": processors <= 0}
        kept = self.skip(table, reasons)
        if not len(kept):
            return None
        cores = np.where(kept["allocated_processors"] > 0, kept["allocated_processors"], kept["requested_processors"])
        memory_kib = np.where(kept["requested_memory_kib"] > 0, kept["requested_memory_kib"], kept["used_memory_kib"])
        runtime_s = kept["run_time_s"]
        batch = JobBatch(
            id=texts(f"{number:.0f}" for number in kept["job"].tolist()),
            group=texts("" if user < 0 else f"user {user:.0f}" for user in kept["user"].tolist()),
            submit_s=kept["submit_s"],
            runtime_s=runtime_s,
            cpu_cores=cores,
            memory_mib=np.where(memory_kib > 0, memory_kib * cores / _KIB_PER_MIB, np.nan),
            priority=hints(len(kept)),
            requested_s=np.where(kept["requested_s"] > 0, kept["requested_s"], np.nan),
            task_runtime_s=Ragged.single(runtime_s),
        )
        return Rows(batch, kept.lines)


def _field(name: str, whole: bool = False) -> Column:
    return Column(name, minimum=-1, whole=whole)


SWF: Final = Format(
    name="swf",
    title="Standard Workload Format (Parallel Workloads Archive)",
    kind="jobs",
    columns=(
        Column("job", minimum=0, whole=True),
        Column("submit_s", minimum=0),
        Column("wait_s", Form.IGNORED),
        _field("run_time_s"),
        _field("allocated_processors", whole=True),
        Column("average_cpu_s", Form.IGNORED),
        _field("used_memory_kib"),
        _field("requested_processors", whole=True),
        _field("requested_s"),
        _field("requested_memory_kib"),
        Column("status", Form.IGNORED),
        _field("user", whole=True),
        Column("user_group", Form.IGNORED),
        Column("executable", Form.IGNORED),
        Column("queue", Form.IGNORED),
        Column("partition", Form.IGNORED),
        Column("preceding_job", Form.IGNORED),
        Column("think_time_s", Form.IGNORED),
    ),
    builder=_Jobs,
    delimiter=None,
    comment=b";",
    # Logs of other archives have columns of their own behind the 18.
    longer=True,
)
