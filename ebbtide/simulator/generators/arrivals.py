"""When things arrive, and whole jobs and VMs made of arrivals, sizes and durations."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from typing import Final

import numpy as np

from ebbtide.simulator.errors import InvalidParameter
from ebbtide.simulator.generators.durations import Durations
from ebbtide.simulator.inputs.batches import Batch, Floats, JobBatch, Ragged, VmBatch, hints, same, texts, unknown
from ebbtide.simulator.inputs.ordering import BATCH_ROWS

_CHUNK: Final = BATCH_ROWS
#: A slip in a rate must not run for ever.
_MOST_ARRIVALS: Final = 1e10


def poisson(rng: np.random.Generator, per_s: float, until_s: float) -> Iterator[Floats]:
    """Arrivals of a Poisson process in [0, until_s), chunk by chunk, in order; s.

    :raises InvalidParameter: a rate or an end that is not positive and finite, or more arrivals than anybody waits for.
    """
    for name, value in (("per_s", per_s), ("until_s", until_s)):
        if not (math.isfinite(value) and value > 0):
            raise InvalidParameter(name, f"must be above 0 and finite, but is {value:g}")
    if per_s * until_s > _MOST_ARRIVALS:
        raise InvalidParameter("per_s", f"makes {per_s * until_s:.3g} arrivals; at most {_MOST_ARRIVALS:g} are allowed")
    now_s = 0.0
    while now_s < until_s:
        times = now_s + np.cumsum(rng.exponential(1 / per_s, _CHUNK))
        now_s = float(times[-1])
        times = times[times < until_s]
        if len(times):
            yield times


def jobs(
    rng: np.random.Generator,
    arrivals: Iterable[Floats],
    durations: Durations,
    cpu_cores: Sequence[float] = (1.0,),
    tasks: tuple[int, int] = (1, 1),
) -> Iterator[JobBatch]:
    """Jobs at these arrivals: cores drawn evenly from ``cpu_cores``, tasks evenly from the range (both ends in it).

    :raises InvalidParameter: no cores to draw from, or no range of tasks.
    """
    _sizes(cpu_cores)
    if not 1 <= tasks[0] <= tasks[1]:
        raise InvalidParameter("tasks", f"must be a range from 1 on, not {tasks[0]} to {tasks[1]}")
    number = 0
    for at_s in arrivals:
        count = len(at_s)
        counts = rng.integers(tasks[0], tasks[1], count, endpoint=True).astype(np.int64)
        task_runtime_s = Ragged.of(durations.draw(rng, int(counts.sum())), counts)
        yield JobBatch(
            id=texts(f"job-{number + i}" for i in range(count)),
            group=same("", count),
            submit_s=at_s,
            runtime_s=task_runtime_s.means(),
            cpu_cores=rng.choice(np.asarray(cpu_cores, np.float64), count),
            memory_mib=unknown(count),
            priority=hints(count),
            requested_s=unknown(count),
            task_runtime_s=task_runtime_s,
        )
        number += count


def vms(
    rng: np.random.Generator,
    arrivals: Iterable[Floats],
    lifetimes: Durations,
    sizes: Sequence[tuple[float, float]],
) -> Iterator[VmBatch]:
    """VMs at these arrivals, sizes drawn evenly from ``sizes``: pairs of cpu_cores and memory_mib.

    :raises InvalidParameter: no sizes to draw from, or one that is not positive.
    """
    _sizes([value for pair in sizes for value in pair])
    table = np.asarray(sizes, np.float64)
    number = 0
    for at_s in arrivals:
        count = len(at_s)
        chosen = rng.integers(0, len(table), count)
        yield VmBatch(
            id=texts(f"vm-{number + i}" for i in range(count)),
            group=same("", count),
            arrives_s=at_s,
            departs_s=at_s + lifetimes.draw(rng, count),
            cpu_cores=table[chosen, 0],
            memory_mib=table[chosen, 1],
            priority=hints(count),
            utilisation=unknown(count),
        )
        number += count


def jittered(
    rng: np.random.Generator, batches: Iterable[Batch], grid_s: float, together: bool = False
) -> Iterator[Batch]:
    """The same rows, each moved by its own part of ``grid_s``: for traces whose times stand on a grid, such as Azure's.

    A row stays in its place of the grid, its own times keep their distances; order is restored. Whoever shows figures
    of it says so: below ``grid_s`` they are chance and not the trace.

    :param together: rows of one ``group`` in one place of the grid move alike, as a tenant's VMs that were asked for
        at once; rows without a group move alone.
    :raises InvalidParameter: a grid that is not positive and finite.
    """
    if not (math.isfinite(grid_s) and grid_s > 0):
        raise InvalidParameter("grid_s", f"must be above 0 and finite, but is {grid_s:g}")
    held: Batch | None = None
    for batch in batches:
        part = batch if held is None else type(batch).joined([held, batch])
        # The last place of the grid may go on in the next batch; it is moved when it is complete.
        cut = int(np.searchsorted(part.keys, np.floor(part.keys[-1] / grid_s) * grid_s)) if len(part) else 0
        held = part.take(slice(cut, None))
        if cut:
            yield _moved(rng, part.take(slice(0, cut)), grid_s, together)
    if held is not None and len(held):
        yield _moved(rng, held, grid_s, together)


def _moved(rng: np.random.Generator, batch: Batch, grid_s: float, together: bool) -> Batch:
    by_s = rng.uniform(0, grid_s, len(batch))
    place = np.floor(batch.keys / grid_s) * grid_s
    if together and isinstance(batch, VmBatch | JobBatch):
        first: dict[tuple[float, str], int] = {}
        for i, (at_s, group) in enumerate(zip(place.tolist(), batch.group, strict=True)):
            if group:
                by_s[i] = by_s[first.setdefault((at_s, group), i)]
    # Wherever in its place of the grid a row stood, it stays inside.
    by_s = np.minimum(by_s, np.nextafter(place + grid_s, 0) - batch.keys)
    moved = batch.shifted(by_s)
    return moved.take(np.argsort(moved.keys, kind="stable"))


def _sizes(values: Sequence[float]) -> None:
    if not len(values):
        raise InvalidParameter("sizes", "must not be empty")
    for value in values:
        if not (math.isfinite(value) and value > 0):
            raise InvalidParameter("sizes", f"must be above 0 and finite, but has {value:g}")
