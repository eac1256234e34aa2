"""Alibaba's cluster traces: openb pods and nodes (2023), DLRM instances (2025), batch tasks and machines (2018)."""

from __future__ import annotations

from typing import Final

import numpy as np

from ebbtide.simulator.inputs.batches import (
    HIGH,
    LOW,
    UNKNOWN,
    CapacityBatch,
    Floats,
    JobBatch,
    Mask,
    Ragged,
    VmBatch,
    hints,
    same,
    texts,
    unknown,
)
from ebbtide.simulator.inputs.tables import SORT, Builder, Check, Column, Form, Format, Rows, Table

_MIB_PER_GIB: Final = 1024.0
#: openb: deletion times of pods that were still there.
_OPENB_END_S: Final = 12_902_960.0
_QOS: Final = ("LS", "Guaranteed", "BE", "Burstable")
_QOS_HINTS: Final = np.array([HIGH, HIGH, LOW, UNKNOWN], np.int8)


class _Pods(Builder):
    def add(self, table: Table) -> Rows | None:
        table = self.skip(table, {"no time": table.number("deletion_time") == table.number("creation_time")})
        if not len(table):
            return None
        count = len(table)
        deleted = table.number("deletion_time")
        batch = VmBatch(
            id=table["name"],
            group=same("", count),
            arrives_s=table.number("creation_time"),
            departs_s=np.where(deleted >= float(self.options["end_s"]), np.nan, deleted),
            cpu_cores=table["cpu_milli"] / 1000,
            memory_mib=table["memory_mib"],
            priority=_QOS_HINTS[table["qos"].astype(np.int64)],
            utilisation=unknown(count),
        )
        return Rows(batch, table.lines)


def _ends_early(table: Table) -> Mask:
    return np.asarray(table.number("deletion_time") < table.number("creation_time"), bool)


OPENB_PODS: Final = Format(
    name="alibaba-openb-pods",
    title="Alibaba openb pods (gpu-v2023), priority by QoS",
    kind="vms",
    columns=(
        Column("name", Form.TEXT),
        Column("cpu_milli", minimum=1),
        Column("memory_mib", minimum=0),
        Column("num_gpu", minimum=0, whole=True),
        Column("qos", Form.CHOICE, choices=_QOS),
        Column("creation_time", minimum=0),
        Column("deletion_time", minimum=0),
    ),
    builder=_Pods,
    header="required",
    checks=(Check("deletion_time", "is before creation_time", _ends_early),),
    defaults={"end_s": _OPENB_END_S},
    order=SORT,
)


class _Nodes(Builder):
    def add(self, table: Table) -> Rows | None:
        batch = CapacityBatch(
            machine=table["sn"],
            at_s=np.zeros(len(table)),
            cpu_cores=table["cpu_milli"] / 1000,
            memory_mib=table["memory_mib"],
        )
        return Rows(batch, table.lines)


OPENB_NODES: Final = Format(
    name="alibaba-openb-nodes",
    title="Alibaba openb nodes (gpu-v2023)",
    kind="capacity",
    columns=(
        Column("sn", Form.TEXT),
        Column("cpu_milli", minimum=1),
        Column("memory_mib", minimum=1),
        Column("gpu", minimum=0, whole=True),
    ),
    builder=_Nodes,
    header="required",
)


class _Instances(Builder):
    def add(self, table: Table) -> Rows | None:
        created = np.nan_to_num(table.number("creation_time"), nan=0.0)
        table = self.skip(table, {"no time": table.number("deletion_time") == created})
        if not len(table):
            return None
        batch = VmBatch(
            id=table["instance_sn"],
            group=table["app_name"],
            # Empty: it was there before the trace began; an empty deletion: after it ended.
            arrives_s=np.nan_to_num(table.number("creation_time"), nan=0.0),
            departs_s=table.number("deletion_time"),
            cpu_cores=table["cpu_request"],
            memory_mib=table["memory_request"] * _MIB_PER_GIB,
            priority=hints(len(table), HIGH),
            utilisation=unknown(len(table)),
        )
        return Rows(batch, table.lines)


DLRM: Final = Format(
    name="alibaba-dlrm",
    title="Alibaba DLRM instances (gpu-v2025), all of high priority",
    kind="vms",
    columns=(
        Column("instance_sn", Form.TEXT),
        Column("app_name", Form.TEXT),
        Column("cpu_request", minimum=0.01),
        Column("memory_request", minimum=0),
        Column("creation_time", minimum=0, optional=True),
        Column("deletion_time", minimum=0, optional=True),
    ),
    builder=_Instances,
    header="required",
    checks=(Check("deletion_time", "is before creation_time", _ends_early),),
    order=SORT,
)


class _BatchTasks(Builder):
    def add(self, table: Table) -> Rows | None:
        reasons = {
            "not ended": np.isnan(table.number("end_time")) | (table.number("end_time") == 0),
            "no runtime": table.number("end_time") == table["start_time"],
            "no request": np.isnan(table.number("plan_cpu")) | (table.number("plan_cpu") == 0),
        }
        table = self.skip(table, reasons)
        return _jobs(table, table["start_time"], table.number("end_time") - table["start_time"]) if len(table) else None


class _SampleTasks(Builder):
    def add(self, table: Table) -> Rows | None:
        table = self.skip(table, {"no runtime": table["duration_s"] == 0})
        return _jobs(table, table["arrival_s"], table["duration_s"]) if len(table) else None


def _jobs(table: Table, submit_s: Floats, runtime_s: Floats) -> Rows:
    """A row for each task of the DAG, with its instances as tasks of equal length; the group is the DAG's job."""
    count = len(table)
    batch = JobBatch(
        id=texts(f"{job}/{task}" for job, task in zip(table["job_name"], table["task_name"], strict=True)),
        group=table["job_name"],
        submit_s=submit_s,
        runtime_s=runtime_s,
        cpu_cores=table.number("plan_cpu") / 100,
        memory_mib=unknown(count),
        priority=hints(count, LOW),
        requested_s=unknown(count),
        task_runtime_s=Ragged.equal(runtime_s, table["instance_num"]),
    )
    return Rows(batch, table.lines)


#: More instances than any task of the trace has, and few enough that one line cannot fill the memory.
_MOST_INSTANCES: Final = 1_000_000
_INSTANCES: Final = Column("instance_num", minimum=1, maximum=_MOST_INSTANCES, whole=True)

BATCH_TASKS: Final = Format(
    name="alibaba-batch-tasks",
    title="Alibaba v2018 batch_task.csv",
    kind="jobs",
    columns=(
        Column("task_name", Form.TEXT),
        _INSTANCES,
        Column("job_name", Form.TEXT),
        Column("task_type", minimum=0, whole=True),
        Column(
            "status",
            Form.CHOICE,
            choices=("Terminated", "Failed", "Waiting", "Running", "Ready", "Interrupted", "Cancelled"),
        ),
        Column("start_time", minimum=0),
        Column("end_time", minimum=0, optional=True),
        Column("plan_cpu", minimum=0, optional=True),
        Column("plan_mem", minimum=0, optional=True),
    ),
    builder=_BatchTasks,
    checks=(
        Check(
            "end_time",
            "is before start_time",
            lambda t: np.asarray((t.number("end_time") < t["start_time"]) & (t.number("end_time") > 0), bool),
        ),
    ),
    order=SORT,
    expands="instance_num",
)

SAMPLE_TASKS: Final = Format(
    name="alibaba-sample-tasks",
    title="tasks of Alibaba v2018 as samples give them: arrival_s,job,task,duration_s,cpu,memory,instances",
    kind="jobs",
    columns=(
        Column("arrival_s", minimum=0),
        Column("job_name", Form.TEXT),
        Column("task_name", Form.TEXT),
        Column("duration_s", minimum=0),
        Column("plan_cpu", minimum=0.01),
        Column("plan_mem", minimum=0),
        _INSTANCES,
    ),
    builder=_SampleTasks,
    order=SORT,
    expands="instance_num",
)


class _Machines(Builder):
    def add(self, table: Table) -> Rows | None:
        batch = CapacityBatch(
            machine=table["machine_id"],
            at_s=table["time_stamp"],
            cpu_cores=table["cpu_num"],
            memory_mib=unknown(len(table)),
        )
        return Rows(batch, table.lines)


MACHINES: Final = Format(
    name="alibaba-machines",
    title="Alibaba v2018 machine_meta.csv",
    kind="capacity",
    columns=(
        Column("machine_id", Form.TEXT),
        Column("time_stamp", minimum=0),
        Column("failure_domain_1", minimum=0, whole=True),
        Column("failure_domain_2", Form.TEXT),
        Column("cpu_num", minimum=0),
        Column("mem_size", minimum=0, maximum=100),
        Column("status", Form.TEXT),
    ),
    builder=_Machines,
    order=SORT,
)
