"""Microsoft Azure's public VM traces: `vmtable.csv` of V1 (2017) and V2 (2019), and the table derived from V1."""

from __future__ import annotations

from typing import Final

import numpy as np

from ebbtide.simulator.errors import InvalidParameter
from ebbtide.simulator.inputs.batches import HIGH, LOW, UNKNOWN, VmBatch, hints, same, texts, unknown
from ebbtide.simulator.inputs.report import Report
from ebbtide.simulator.inputs.tables import SORT, Builder, Check, Column, Form, Format, Options, Rows, Table

_MIB_PER_GIB: Final = 1024.0
#: Percent above which a utilisation is an error; the public files reach a little beyond 100.
_MOST_PERCENT: Final = 101.0
_CATEGORIES: Final = ("Delay-insensitive", "Interactive", "Unknown")
_HINTS: Final = np.array([LOW, HIGH, UNKNOWN], np.int8)
#: What becomes of VMs of which only a part of the lifetime was seen.
_CENSORED: Final = ("stay", "leave")
#: Beyond it a time or the number of a tenant's batch is no integer.
_LATEST: Final = 1e15
#: What the trace's own analysis puts for its open buckets of V2.
_CORES_ABOVE_24: Final = 30.0
_GIB_ABOVE_64: Final = 70.0


class _Vms(Builder):
    def add(self, table: Table) -> Rows | None:
        table = self.skip(table, {"no time": table["vmdeleted"] == table["vmcreated"]})
        end_s = float(self.options["end_s"])
        category = table["vmcategory"]
        batch = VmBatch(
            id=table["vmid"],
            group=table["deploymentid"] if "deploymentid" in table else same("", len(table)),
            arrives_s=table["vmcreated"],
            departs_s=np.where(table["vmdeleted"] >= end_s, np.nan, table["vmdeleted"]),
            cpu_cores=table["vmcorecount"],
            memory_mib=table["vmmemory"] * _MIB_PER_GIB,
            priority=_HINTS[category.astype(np.int64)] if len(table) else hints(0),
            utilisation=np.minimum(table.number("avgcpu") / 100, 1),
        )
        return Rows(batch, table.lines) if len(table) else None


VMTABLE: Final = Format(
    name="azure-vmtable",
    title="Azure V1 and V2 vmtable.csv",
    kind="vms",
    columns=(
        Column("vmid", Form.TEXT),
        Column("subscriptionid", Form.IGNORED),
        Column("deploymentid", Form.TEXT, optional=True),
        Column("vmcreated", minimum=0),
        Column("vmdeleted", minimum=0),
        Column("maxcpu", Form.IGNORED),
        Column("avgcpu", minimum=0, maximum=_MOST_PERCENT, optional=True),
        Column("p95maxcpu", Form.IGNORED),
        Column("vmcategory", Form.CHOICE, choices=_CATEGORIES),
        Column("vmcorecount", minimum=0.01, aliases=("vmcorecountbucket",), spelled={">24": _CORES_ABOVE_24}),
        Column("vmmemory", minimum=0.01, aliases=("vmmemorybucket",), spelled={">64": _GIB_ABOVE_64}),
    ),
    builder=_Vms,
    header="optional",
    checks=(Check("vmdeleted", "is before vmcreated", lambda t: np.asarray(t["vmdeleted"] < t["vmcreated"], bool)),),
    # The last reading of both traces: what is deleted at it was still there.
    defaults={"end_s": 2_591_700.0},
    order=SORT,
)


class _Derived(Builder):
    def __init__(self, options: Options, report: Report) -> None:
        super().__init__(options, report)
        if options["censored"] not in _CENSORED:
            raise InvalidParameter("censored", f"must be stay or leave, not {options['censored']!r}")

    def add(self, table: Table) -> Rows | None:
        arrives_s = table["arrival_s"]
        stays = (table["censored"] == 1) & (self.options["censored"] == "stay")
        batch = VmBatch(
            id=texts(f"vm-{line - 1}" for line in table.lines.tolist()),
            group=texts(
                f"{at_s}/{number}"
                for at_s, number in zip(
                    arrives_s.astype(np.int64).tolist(), table["batch"].astype(np.int64).tolist(), strict=True
                )
            ),
            arrives_s=arrives_s,
            departs_s=np.where(stays, np.nan, arrives_s + table["dur_s"]),
            cpu_cores=table["cores"],
            memory_mib=table["mem_gb"] * _MIB_PER_GIB,
            priority=hints(len(table)),
            utilisation=unknown(len(table)),
        )
        return Rows(batch, table.lines)


DERIVED: Final = Format(
    name="azure-derived",
    title="VMs of Azure V1 on a 300 s grid (arrival_s,batch,cores,mem_gb,dur_lo_s,dur_hi_s,censored,dur_s)",
    kind="vms",
    columns=(
        Column("arrival_s", minimum=0, maximum=_LATEST),
        Column("batch", minimum=0, maximum=_LATEST, whole=True),
        Column("cores", minimum=0.01),
        Column("mem_gb", minimum=0.01),
        Column("dur_lo_s", Form.IGNORED),
        Column("dur_hi_s", Form.IGNORED),
        Column("censored", minimum=0, maximum=1, whole=True),
        Column("dur_s", minimum=0),
    ),
    builder=_Derived,
    header="required",
    defaults={"censored": "stay"},
)
