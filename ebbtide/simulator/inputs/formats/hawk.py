"""Jobs of many tasks as Hawk, Eagle and CloudCoaster (Ogden and Guo 2019) read them: ``arrival n mean d1 ... dn``."""

from __future__ import annotations

from typing import Final

import numpy as np

from ebbtide.simulator.inputs.batches import JobBatch, hints, same, texts, unknown
from ebbtide.simulator.inputs.linewise import number
from ebbtide.simulator.inputs.tables import Builder, Check, Column, Form, Format, Malformed, Rows, Table


class _Jobs(Builder):
    def add(self, table: Table) -> Rows | None:
        count = len(table)
        batch = JobBatch(
            id=texts(f"job-{line}" for line in table.lines.tolist()),
            group=same("", count),
            submit_s=table["arrival_s"],
            # As the file says, for its estimators go by it; it need not be the exact mean of the tasks.
            runtime_s=table["mean_task_s"],
            cpu_cores=np.ones(count),
            memory_mib=unknown(count),
            priority=hints(count),
            requested_s=unknown(count),
            task_runtime_s=table["task_s"],
        )
        return Rows(batch, table.lines)


def _split(line: bytes) -> list[bytes]:
    cells = line.split()
    if len(cells) < 4:
        name = ("arrival_s", "tasks", "mean_task_s", "task_s")[len(cells)]
        raise Malformed(name, f"is missing: the line has {len(cells)} fields, and at least 4 belong there")
    tasks = number("tasks", cells[1])
    if tasks != len(cells) - 3:
        raise Malformed("tasks", f"is {tasks:.12g}, but {len(cells) - 3} durations follow")
    return [*cells[:3], b";".join(cells[3:])]


TR: Final = Format(
    name="hawk-tr",
    title="Hawk and Eagle .tr: arrival_s tasks mean_task_s d1 d2 ...",
    kind="jobs",
    columns=(
        Column("arrival_s", minimum=0),
        Column("tasks", minimum=1, whole=True),
        Column("mean_task_s", minimum=0),
        Column("task_s", Form.LIST, minimum=0),
    ),
    builder=_Jobs,
    delimiter=None,
    split=_split,
    checks=(
        # Otherwise a policy that asks for the mean and one that runs the tasks see two different jobs.
        Check(
            "mean_task_s",
            "is zero, but the tasks are not",
            lambda t: np.asarray((t["mean_task_s"] == 0) & (t["task_s"].means() > 0), bool),
        ),
    ),
)
