"""Summary of a trace in memory that does not grow with it: counts, span, means and percentiles."""

from __future__ import annotations

import math
from collections import Counter
from typing import Any, Final

import numpy as np

from ebbtide.simulator.inputs.batches import HINTS, Batch, CapacityBatch, Floats, JobBatch, SeriesBatch, VmBatch

PERCENTILES: Final = (50, 90, 95, 99)
#: Bins are this much wider each: a percentile is at most half of it off.
_GROWTH: Final = math.log(1.01)
#: Below it everything falls into one bin (and so does what is not positive, apart).
_LEAST: Final = 1e-6
_BINS: Final = int(math.log(1e20 / _LEAST) / _GROWTH) + 3
_SECONDS_PER_HOUR: Final = 3600.0


class Distribution:
    """Mean, extremes and percentiles of a stream of numbers.

    Percentiles come from bins 1 % wide and are the mean of what fell into the bin: within 1 %, and exact where a bin
    holds only equal values, as with numbers of cores.
    """

    def __init__(self) -> None:
        self.count = 0
        self._least = math.inf
        self._most = -math.inf
        # Sums of positive and of other values, in bins of their size.
        self._counts = np.zeros((2, _BINS), np.int64)
        self._sums = np.zeros((2, _BINS))

    def add(self, values: Floats) -> None:
        """More numbers; NaN is left out."""
        values = values[~np.isnan(values)]
        if not len(values):
            return
        self.count += len(values)
        self._least = min(self._least, float(values.min()))
        self._most = max(self._most, float(values.max()))
        size = np.abs(values)
        bins = np.where(size < _LEAST, 0, np.log(np.maximum(size, _LEAST) / _LEAST) / _GROWTH + 1)
        bins = np.minimum(bins.astype(np.int64), _BINS - 1)
        side = (values > 0).astype(np.int64)
        np.add.at(self._counts, (side, bins), 1)
        np.add.at(self._sums, (side, bins), values)

    def as_json(self) -> dict[str, float] | None:
        """Count, mean, least, p50 to p99, most; None of no numbers."""
        if not self.count:
            return None
        # In the order of values: those not above zero from the largest size down, then the others.
        counts = np.concatenate([self._counts[0][::-1], self._counts[1]])
        sums = np.concatenate([self._sums[0][::-1], self._sums[1]])
        upto = np.cumsum(counts)
        found: dict[str, float] = {"count": self.count, "mean": float(sums.sum() / self.count), "min": self._least}
        for percent in PERCENTILES:
            i = int(np.searchsorted(upto, math.ceil(self.count * percent / 100)))
            found[f"p{percent}"] = float(sums[i] / counts[i])
        return found | {"max": self._most}


class Summary:
    """Fed with the batches of one trace; `as_json` says what was in them."""

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self.rows = 0
        self.first_s = math.nan
        self.last_s = math.nan
        self.figures: dict[str, float] = {}
        self.priorities: Counter[str] = Counter()
        self.distributions: dict[str, Distribution] = {}
        self._machines: set[str] = set()
        self._before_s = math.nan

    def add(self, batch: Batch) -> None:
        """The next batch; of one trace they come in order."""
        if not len(batch):
            return
        self.first_s = float(batch.keys[0]) if not self.rows else self.first_s
        self.last_s = float(batch.keys[-1])
        self.rows += len(batch)
        if isinstance(batch, VmBatch):
            self._vms(batch)
        elif isinstance(batch, JobBatch):
            self._jobs(batch)
        elif isinstance(batch, CapacityBatch):
            self._capacity(batch)
        elif isinstance(batch, SeriesBatch):
            self._put("value", batch.value)
            self._gaps(batch.at_s)

    def as_json(self) -> dict[str, Any]:
        """Everything, as JSON knows it."""
        return {
            "kind": self.kind,
            "rows": self.rows,
            "first_s": self.first_s if self.rows else None,
            "last_s": self.last_s if self.rows else None,
            **self.figures,
            **({"priorities": dict(self.priorities)} if self.priorities else {}),
            "distributions": {name: found for name, d in self.distributions.items() if (found := d.as_json())},
        }

    def _vms(self, batch: VmBatch) -> None:
        self._count("still_there_at_the_end", float(np.isnan(batch.departs_s).sum()))
        lifetime_s = batch.departs_s - batch.arrives_s
        self._count("core_hours", float(np.nansum(batch.cpu_cores * lifetime_s)) / _SECONDS_PER_HOUR)
        self._put("lifetime_s", lifetime_s)
        self._put("cpu_cores", batch.cpu_cores)
        self._put("memory_mib", batch.memory_mib)
        self._put("utilisation", batch.utilisation)
        self._hints(batch.priority)

    def _jobs(self, batch: JobBatch) -> None:
        tasks = batch.task_runtime_s
        cores = np.repeat(batch.cpu_cores, tasks.lengths)
        self._count("tasks", float(tasks.lengths.sum()))
        self._count("core_hours", float((cores * tasks.values).sum()) / _SECONDS_PER_HOUR)
        self._put("runtime_s", batch.runtime_s)
        self._put("task_runtime_s", tasks.values)
        self._put("tasks", tasks.lengths.astype(np.float64))
        self._put("cpu_cores", batch.cpu_cores)
        self._put("memory_mib", batch.memory_mib)
        self._hints(batch.priority)

    def _capacity(self, batch: CapacityBatch) -> None:
        self._machines.update(batch.machine)
        self.figures["machines"] = len(self._machines)
        self._put("cpu_cores", batch.cpu_cores)
        self._put("memory_mib", batch.memory_mib)

    def _gaps(self, at_s: Floats) -> None:
        self._put("gap_s", np.diff(np.append(self._before_s, at_s)))
        self._before_s = float(at_s[-1])

    def _put(self, name: str, values: Floats) -> None:
        self.distributions.setdefault(name, Distribution()).add(values)

    def _count(self, name: str, value: float) -> None:
        self.figures[name] = self.figures.get(name, 0.0) + value

    def _hints(self, priority: Any) -> None:
        for hint, count in zip(*np.unique(priority, return_counts=True), strict=True):
            self.priorities[HINTS[int(hint)]] += int(count)
