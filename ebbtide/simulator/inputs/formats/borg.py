"""Windows of Google's Borg trace as the variable-capacity simulator of Wijayawardana 2025 reads them."""

from __future__ import annotations

from typing import Final

from ebbtide.simulator.inputs.batches import JobBatch, Ragged, hints, same, unknown
from ebbtide.simulator.inputs.tables import SORT, Builder, Column, Form, Format, Rows, Table


class _Jobs(Builder):
    def add(self, table: Table) -> Rows | None:
        table = self.skip(table, {"no runtime": table["length_s"] == 0})
        count = len(table)
        batch = JobBatch(
            id=table["id"],
            group=same("", count),
            submit_s=table["arrival_s"],
            runtime_s=table["length_s"],
            cpu_cores=table["cores"],
            memory_mib=unknown(count),
            priority=hints(count),
            requested_s=unknown(count),
            task_runtime_s=Ragged.single(table["length_s"]),
        )
        return Rows(batch, table.lines) if count else None


WINDOW: Final = Format(
    name="borg-window",
    title="Borg windows of the variable-capacity simulator: id arrival_s length_s cores release|running",
    kind="jobs",
    columns=(
        Column("id", Form.TEXT),
        Column("arrival_s", minimum=0),
        Column("length_s", minimum=0),
        Column("cores", minimum=0.01),
        Column("release", Form.CHOICE, choices=("release", "running")),
    ),
    builder=_Jobs,
    delimiter=None,
    order=SORT,
)
