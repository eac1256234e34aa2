"""VMs of a trace as columns, which processes share, and as batches again: what a replay goes through."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ebbtide.simulator.errors import InvalidParameter
from ebbtide.simulator.inputs.batches import Indices, VmBatch, hints, same, texts, unknown
from ebbtide.simulator.inputs.ordering import BATCH_ROWS


def vm_columns(batches: Iterable[VmBatch]) -> dict[str, NDArray[Any]]:
    """arrives_s, departs_s (NaN: not seen), cpu_cores, memory_mib and group (a number; -1: on its own), a row a VM.

    :raises InvalidParameter: there is no VM.
    """
    parts = [batch for batch in batches if len(batch)]
    if not parts:
        raise InvalidParameter("vms", "must have VMs, but have none")
    whole = VmBatch.joined(parts)
    names, group = np.unique(whole.group.astype(np.str_), return_inverse=True)
    return {
        "arrives_s": whole.arrives_s,
        "departs_s": whole.departs_s,
        "cpu_cores": whole.cpu_cores,
        "memory_mib": whole.memory_mib,
        "group": np.where(names[group] == "", -1, group).astype(np.int64),
    }


def vm_batches(columns: Mapping[str, NDArray[Any]], rows: Indices) -> Iterator[VmBatch]:
    """Some rows of `vm_columns`, in their order; groups are named by their numbers."""
    for begin in range(0, len(rows), BATCH_ROWS):
        part = rows[begin : begin + BATCH_ROWS]
        count = len(part)
        yield VmBatch(
            id=same("", count),
            group=texts("" if number < 0 else str(number) for number in columns["group"][part].tolist()),
            arrives_s=columns["arrives_s"][part],
            departs_s=columns["departs_s"][part],
            cpu_cores=columns["cpu_cores"][part],
            memory_mib=columns["memory_mib"][part],
            priority=hints(count),
            utilisation=unknown(count),
        )
