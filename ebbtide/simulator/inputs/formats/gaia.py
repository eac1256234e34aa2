"""Jobs as the GAIA scheduler's samples give them: in hours, the sample of a thousand in seconds."""

from __future__ import annotations

from typing import Final

from ebbtide.simulator.errors import InvalidParameter
from ebbtide.simulator.inputs.batches import JobBatch, Ragged, hints, same, texts, unknown
from ebbtide.simulator.inputs.report import Report
from ebbtide.simulator.inputs.tables import Builder, Column, Format, Options, Rows, Table

_UNITS_S: Final = {"h": 3600.0, "s": 1.0}


class _Jobs(Builder):
    def __init__(self, options: Options, report: Report) -> None:
        super().__init__(options, report)
        if options["time_unit"] not in _UNITS_S:
            raise InvalidParameter("time_unit", f"must be h or s, not {options['time_unit']!r}")
        self._unit_s = _UNITS_S[str(options["time_unit"])]

    def add(self, table: Table) -> Rows | None:
        table = self.skip(table, {"no runtime": table["length"] == 0})
        count = len(table)
        runtime_s = table["length"] * self._unit_s
        batch = JobBatch(
            id=texts(f"job-{line - 1}" for line in table.lines.tolist()),
            group=same("", count),
            submit_s=table["arrival_time"] * self._unit_s,
            runtime_s=runtime_s,
            cpu_cores=table["cpus"],
            memory_mib=unknown(count),
            priority=hints(count),
            requested_s=unknown(count),
            task_runtime_s=Ragged.single(runtime_s),
        )
        return Rows(batch, table.lines) if count else None


GAIA: Final = Format(
    name="gaia",
    title="GAIA samples: arrival_time,length,cpus in hours (--option time_unit=s for seconds)",
    kind="jobs",
    columns=(
        Column("arrival_time", minimum=0),
        Column("length", minimum=0),
        Column("cpus", minimum=0.01),
    ),
    builder=_Jobs,
    header="required",
    defaults={"time_unit": "h"},
)
