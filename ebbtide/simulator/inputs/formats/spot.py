"""Spot capacity over time: availability series (JSON), polls of a fleet's size, additions and removals of nodes."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any, Final

import numpy as np

from ebbtide.simulator.errors import TraceError
from ebbtide.simulator.inputs.batches import CapacityBatch, SeriesBatch, unknown
from ebbtide.simulator.inputs.documents import DocumentFormat
from ebbtide.simulator.inputs.report import Fault, Report
from ebbtide.simulator.inputs.tables import Builder, Column, Form, Format, Malformed, Options, Rows, Table

_NODE_EVENTS: Final = ("add", "remove")


def _is_availability(document: Any) -> bool:
    return (
        isinstance(document, dict)
        and isinstance(document.get("metadata"), dict)
        and "gap_seconds" in document["metadata"]
        and isinstance(document.get("data"), list)
    )


def _availability(document: Any, options: Options, report: Report) -> Iterator[Rows]:
    gap_s = document["metadata"]["gap_seconds"]
    if not _is_number(gap_s) or gap_s <= 0:
        raise TraceError(report.file, f"is {_short(gap_s)}, not a number above 0", line=1, field="metadata.gap_seconds")
    values: list[float] = []
    places: list[int] = []
    for place, value in enumerate(document["data"], start=1):
        report.lines += 1
        if not _is_number(value) or value < 0:
            report.fault(Fault(place, "data", f"is {_short(value)}, not a number of instances"))
            report.check()
            continue
        report.read += 1
        values.append(float(value))
        places.append(place)
    if values:
        at_s = (np.array(places, np.float64) - 1) * gap_s
        yield Rows(SeriesBatch(at_s=at_s, value=np.array(values)), np.array(places, np.int64))


def _is_number(value: Any) -> bool:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    try:
        return math.isfinite(float(value))
    except OverflowError:
        return False


def _short(value: Any) -> str:
    return ascii(str(value)[:40])


AVAILABILITY: Final = DocumentFormat(
    name="spot-availability",
    title='spot availability: {"metadata": {"gap_seconds": s}, "data": [instances, ...]}',
    kind="series",
    recognises=_is_availability,
    read=_availability,
    unit="instances",
)


class _Nodes(Builder):
    def add(self, table: Table) -> Rows | None:
        added = table["event"] == 0
        batch = CapacityBatch(
            machine=table["node"],
            at_s=table["time_ms"] / 1000,
            cpu_cores=np.where(added, float(self.options["node_cores"]), 0.0),
            memory_mib=np.where(added, unknown(len(table)), 0.0),
        )
        return Rows(batch, table.lines)


NODES: Final = Format(
    name="spot-nodes",
    title="spot nodes that come and go: time_ms,add|remove,node (--option node_cores=4)",
    kind="capacity",
    columns=(
        Column("time_ms", minimum=0),
        Column("event", Form.CHOICE, choices=_NODE_EVENTS),
        Column("node", Form.TEXT),
    ),
    builder=_Nodes,
    defaults={"node_cores": 1.0},
)


def _poll(line: bytes) -> list[bytes]:
    cells = [cell.strip() for cell in line.split(b",")]
    if len(cells) != 3:
        raise Malformed("time" if len(cells) < 2 else "instances", f"is missing: the line has {len(cells)} of 3 fields")
    if not cells[0] or not cells[1]:
        raise Malformed("time", "is empty")
    return [cells[0] + b" " + cells[1], cells[2]]


class _Polls(Builder):
    def add(self, table: Table) -> Rows | None:
        return Rows(SeriesBatch(at_s=table["time"], value=table["instances"]), table.lines)


POLLS: Final = Format(
    name="spot-polls",
    title="polls of how many spot instances run: date, time, instances",
    kind="series",
    columns=(Column("time", Form.TIME), Column("instances", minimum=0, whole=True)),
    builder=_Polls,
    split=_poll,
    calendar=True,
    unit="instances",
)
