"""VMs of a trace as columns, which processes share, and as batches again: what a replay goes through.

How long VMs stay that the trace lost sight of can be drawn.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ebbtide.simulator.errors import InvalidParameter
from ebbtide.simulator.inputs.batches import Floats, Indices, VmBatch, hints, same, texts, unknown
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


def drawn_departures(arrives_s: Floats, departs_s: Floats, followed_until_s: float, rng: np.random.Generator) -> Floats:
    """When VMs depart; those that the trace followed only until then leave as others did that had reached their age.

    A lifetime is that of any VM that was seen for longer; where that one was not seen to depart either, of one that was
    seen for longer still, until there is none: then the VM stays. That is the Kaplan-Meier estimate.

    :param arrives_s: in order; shape (n,), as ``departs_s``, which is infinite or NaN for those not seen to depart.
    :param followed_until_s: who came before and was not seen to depart; 0: nobody.
    :returns: shape (n,); infinite for a VM that stays though it was looked for.
    """
    seen = np.isfinite(departs_s)
    cut = ~seen & (arrives_s < followed_until_s)
    if not cut.any():
        return departs_s
    ends_s = np.where(cut, followed_until_s, float(arrives_s[-1]))
    life_s = np.where(seen, departs_s, ends_s) - arrives_s
    order = np.argsort(life_s, kind="stable")
    known_s, complete = life_s[order], seen[order]
    rows = np.flatnonzero(cut)
    while len(rows):
        first = np.searchsorted(known_s, life_s[rows], side="right")
        beyond = first == len(known_s)
        life_s[rows[beyond]] = np.inf
        rows = rows[~beyond]
        picked = rng.integers(first[~beyond], len(known_s))
        life_s[rows] = known_s[picked]
        rows = rows[~complete[picked]]
    found: Floats = np.where(cut, arrives_s + life_s, departs_s)
    return found


def with_drawn_departures(
    columns: Mapping[str, NDArray[Any]], rows: Indices, followed_until_s: float, rng: np.random.Generator
) -> Mapping[str, NDArray[Any]]:
    """The columns of `vm_columns` with `drawn_departures` of some rows, in order, by those alone."""
    if not followed_until_s or not len(rows):
        return columns
    arrives_s, departs_s = np.asarray(columns["arrives_s"])[rows], np.array(columns["departs_s"])
    departs_s[rows] = drawn_departures(arrives_s, departs_s[rows], followed_until_s, rng)
    return {**columns, "departs_s": departs_s}


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
