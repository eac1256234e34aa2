"""The model "harvest-series": on-demand VMs replayed onto servers, and how restless the harvest VMs beside them are.

Seed 000 §2.1, Fig. 1-2: how long a harvest VM keeps its cores, how large changes are, how many cores it has.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from ebbtide.simulator.errors import InvalidParameter
from ebbtide.simulator.experiments.fields import Given
from ebbtide.simulator.experiments.model import POLICY, Input, Outcome, Progress
from ebbtide.simulator.experiments.shared import SharedArrays, fingerprint, shared_arrays
from ebbtide.simulator.generators import arrivals
from ebbtide.simulator.generators.durations import BoundedPareto
from ebbtide.simulator.generators.harvest import HarvestSeries, Packing
from ebbtide.simulator.generators.replayed import vm_batches, vm_columns, with_drawn_departures
from ebbtide.simulator.inputs.batches import Floats, Indices, VmBatch

_HOUR_S: Final = 3600.0
_DAY_S: Final = 86400.0
#: Sizes of generated VMs: cores and MiB, in Azure's proportion.
_SIZES: Final = ((1.0, 1792.0), (2.0, 3584.0), (4.0, 7168.0), (8.0, 14336.0))
#: Where the distribution of times between changes is written down; s.
_UPTO_S: Final = np.array([60, 120, 300, 600, 1200, 1800, 3600, 7200, 14400, 28800, 43200, 86400, 172800, 604800.0])
#: A kept core must not be lost to rounding of fractions.
_ROUNDING: Final = 1e-6


@dataclass(frozen=True, slots=True)
class HarvestSettings:
    """Settings of one case; docs/reference/experiments.md says what they mean."""

    packing: Packing
    servers: int
    cpu_cores: float
    memory_mib: float
    least_cpu_cores: float
    warm_up_s: float
    until_s: float
    share: float
    grid_s: float
    followed_until_s: float
    vms: Input | None
    arrivals_per_h: float
    lifetimes: BoundedPareto


#: What a run gives.
METRICS: Final = (
    *("gap_mean_s", "gap_p50_s", "gap_p95_s", "within_1_min", "within_10_min", "within_1_h"),
    *("change_mean_cores", "shrinks_share", "changes_per_server_day", "harvested_mean_cores", "placed"),
    *("rejected", "rejected_share"),
)


class HarvestModel:
    """One run: VMs arrive, servers are filled, what is left on each is a harvest VM's, floored to whole cores."""

    name = "harvest-series"
    metrics: Final = METRICS

    def settings(self, given: Mapping[str, Any]) -> HarvestSettings:
        fields = Given(given)
        (vms,) = fields.inputs("vms")
        generated = vms is None
        settings = HarvestSettings(
            packing=Packing(fields.choice(POLICY, [p.value for p in Packing], Packing.PACKING.value)),
            servers=fields.whole("servers", least=1, most=1_000_000),
            cpu_cores=fields.number("cpu_cores", 48.0, above=0),
            memory_mib=fields.number("memory_mib", 131072.0, above=0),
            least_cpu_cores=fields.number("least_cpu_cores", 0.0, least=0),
            warm_up_s=fields.number("warm_up_s", 3 * _DAY_S, least=0),
            until_s=fields.number("until_s", *((7 * _DAY_S,) if generated else (math.inf,)), above=0),
            share=fields.number("share", 1.0, above=0, most=1),
            grid_s=fields.number("grid_s", 0.0, least=0),
            followed_until_s=0.0 if generated else fields.number("followed_until_s", 0.0, least=0),
            vms=vms,
            arrivals_per_h=fields.number("arrivals_per_h", 60.0, above=0),
            lifetimes=_lifetimes(fields),
        )
        if not generated:
            for name in ("arrivals_per_h", "lifetime_shape", "lifetime_least_s", "lifetime_most_s"):
                if name in fields:
                    raise fields.wrong(name, "is for generated VMs; the experiment has an input vms")
        fields.end()
        if settings.warm_up_s >= settings.until_s:
            raise InvalidParameter("warm_up_s", f"must be below until_s, but is {settings.warm_up_s:g}")
        return settings

    def bounds(self, settings: HarvestSettings) -> dict[str, float]:
        """Of generated VMs: what they leave of a server's cores in the long run, if none is rejected (Little's law)."""
        if settings.vms is not None:
            return {}
        cores = sum(size for size, _ in _SIZES) / len(_SIZES)
        load = settings.share * settings.arrivals_per_h / _HOUR_S * settings.lifetimes.mean_s() * cores
        return {"unallocated_mean_cores": max(settings.cpu_cores - load / settings.servers, 0.0)}

    def prepare(self, settings: Sequence[HarvestSettings], progress: Progress) -> dict[str, SharedArrays]:
        """The VMs of each input, by its path."""
        inputs = {str(one.vms.path): one.vms for one in settings if one.vms is not None}
        found = {}
        for number, (path, given) in enumerate(inputs.items()):

            def report(done: int, total: int, before: int = number) -> None:
                progress((before + (done / total if total else 1.0)) / len(inputs))

            what = [self.name, 1, fingerprint(given.path), given.format, dict(given.options), given.order]

            def read(given: Input = given) -> dict[str, NDArray[Any]]:
                return vm_columns(given.batches(VmBatch, "vms", report, from_first=True))

            found[path] = shared_arrays(what, read)
        for one in settings:
            if one.vms is not None:
                _ends(one.warm_up_s, min(one.until_s, float(found[str(one.vms.path)]["arrives_s"][-1])))
        return found

    def run(self, settings: HarvestSettings, seed: int, prepared: Any, progress: Progress) -> Outcome:
        rng = np.random.default_rng(seed)
        vms = _generated(settings, rng) if settings.vms is None else _replayed(settings, prepared, rng, seed)
        clock = _Clock()
        servers = HarvestSeries(
            settings.servers,
            settings.cpu_cores,
            settings.memory_mib,
            settings.packing,
            rng,
            settings.least_cpu_cores,
        )
        at: list[Floats] = [np.empty(0)]
        cores: list[Floats] = [np.empty(0)]
        machine: list[Indices] = [np.empty(0, np.int64)]
        until_s = settings.until_s
        for batch in servers.replay(_before(clock.seen(vms), until_s)):
            at.append(batch.at_s)
            cores.append(np.floor(batch.cpu_cores + _ROUNDING))
            machine.append(np.array([int(name.rpartition("-")[2]) for name in batch.machine], np.int64))
            if math.isfinite(until_s):
                progress(min(float(batch.at_s[-1]) / until_s, 1.0))
        # Beyond the last arrival servers only empty; that is no part of the trace.
        end_s = min(until_s, clock.last_s) if settings.vms is not None else until_s
        _ends(settings.warm_up_s, end_s)
        changes = _Changes.of(np.concatenate(machine), np.concatenate(at), np.concatenate(cores), end_s)
        metrics = changes.metrics(settings.warm_up_s, end_s, settings.servers)
        counts = servers.counts
        arrived = counts.placed + counts.rejected
        metrics |= {
            "placed": float(counts.placed),
            "rejected": float(counts.rejected),
            "rejected_share": counts.rejected / arrived if arrived else math.nan,
        }
        warnings = []
        if counts.without_memory:
            none = f"{counts.without_memory} of {arrived} VMs say no memory, and are placed as if they wanted none"
            warnings.append(none)
        if end_s < until_s < math.inf:
            warnings.append(
                f"what is measured ends with the last VM of the trace, at {end_s:g} s, not at {until_s:g} s"
            )
        return Outcome(metrics, changes.tables(settings.warm_up_s, end_s, settings.servers), tuple(warnings))


MODEL: Final = HarvestModel()


def _lifetimes(fields: Given) -> BoundedPareto:
    """Of generated VMs. Raises InvalidParameter, by the names of the settings."""
    given = (
        fields.number("lifetime_shape", 0.6, above=0),
        fields.number("lifetime_least_s", 300.0, above=0),
        fields.number("lifetime_most_s", 3 * _DAY_S, above=0),
    )
    try:
        return BoundedPareto(*given)
    except InvalidParameter as error:
        problem = re.sub(r"\b(least_s|most_s)\b", r"lifetime_\1", error.problem)
        raise fields.wrong(f"lifetime_{error.field}", problem) from error


def _ends(warm_up_s: float, end_s: float) -> None:
    """:raises InvalidParameter: nothing is left of the VMs after the warm-up."""
    if end_s <= warm_up_s:
        raise InvalidParameter("warm_up_s", f"must end before the VMs do, at {end_s:g} s, but is {warm_up_s:g}")


class _Clock:
    """Remembers the last arrival."""

    def __init__(self) -> None:
        self.last_s = 0.0

    def seen(self, vms: Iterable[VmBatch]) -> Iterator[VmBatch]:
        for batch in vms:
            if len(batch):
                self.last_s = float(batch.arrives_s[-1])
                yield batch


@dataclass(frozen=True, slots=True)
class _Changes:
    """Changes of whole cores, server by server, in order; the first of each is its beginning and no change.

    A row where the whole cores stay as they are is no event (docs/internals/contracts.md, core changes).
    """

    machine: Indices
    at_s: Floats
    cores: Floats

    @classmethod
    def of(cls, machine: Indices, at_s: Floats, cores: Floats, end_s: float) -> _Changes:
        kept = at_s <= end_s
        machine, at_s, cores = machine[kept], at_s[kept], cores[kept]
        order = np.lexsort((at_s, machine))
        machine, at_s, cores = machine[order], at_s[order], cores[order]
        real = np.ones(len(machine), bool)
        real[1:] = (machine[1:] != machine[:-1]) | (cores[1:] != cores[:-1])
        return cls(machine[real], at_s[real], cores[real])

    def gaps(self, warm_up_s: float) -> tuple[Floats, Floats]:
        """Times between changes that follow each other, both after the warm-up, s; and all changes after it, cores."""
        follows = self.machine[1:] == self.machine[:-1]
        begins = np.append(True, ~follows)[: len(self.machine)]
        # The beginning of a server is no change, wherever the warm-up ends.
        both = follows & (self.at_s[:-1] >= warm_up_s) & ~begins[:-1]
        late = follows & (self.at_s[1:] >= warm_up_s)
        return np.diff(self.at_s)[both], np.diff(self.cores)[late]

    def metrics(self, warm_up_s: float, end_s: float, servers: int) -> dict[str, float]:
        gaps, sizes = self.gaps(warm_up_s)
        days = servers * (end_s - warm_up_s) / _DAY_S
        p50, p95 = np.percentile(gaps, [50, 95]).tolist() if len(gaps) else (math.nan, math.nan)
        return {
            "gap_mean_s": _mean(gaps),
            "gap_p50_s": p50,
            "gap_p95_s": p95,
            "within_1_min": _mean(gaps <= 60),
            "within_10_min": _mean(gaps <= 600),
            "within_1_h": _mean(gaps <= _HOUR_S),
            "change_mean_cores": _mean(np.abs(sizes)),
            "shrinks_share": _mean(sizes < 0),
            "changes_per_server_day": len(sizes) / days,
            "harvested_mean_cores": float(self._mean_cores(np.array([warm_up_s, end_s]), servers)[0]),
        }

    def tables(self, warm_up_s: float, end_s: float, servers: int) -> dict[str, dict[str, NDArray[Any]]]:
        gaps, _ = self.gaps(warm_up_s)
        share = np.array([_mean(gaps <= upto) for upto in _UPTO_S])
        edges = np.append(np.arange(0.0, end_s, _HOUR_S), end_s)
        return {
            "gaps": {"upto_s": _UPTO_S, "share": share},
            "hours": {"from_s": edges[:-1], "harvested_mean_cores": self._mean_cores(edges, servers)},
        }

    def _mean_cores(self, edges: Floats, servers: int) -> Floats:
        """Mean cores of a server between each two edges, from the integral of all servers' steps."""
        step = self.cores.copy()
        follows = self.machine[1:] == self.machine[:-1]
        step[1:][follows] = np.diff(self.cores)[follows]
        order = np.argsort(self.at_s, kind="stable")
        at_s, level = self.at_s[order], np.cumsum(step[order])
        area = np.concatenate([[0.0], np.cumsum(level[:-1] * np.diff(at_s))]) if len(at_s) else np.zeros(1)
        last = np.searchsorted(at_s, edges, side="right") - 1
        # All servers begin at 0 s, so there is a step before each edge.
        upto = area[last] + level[last] * (edges - at_s[last])
        found: Floats = np.diff(upto) / np.diff(edges) / servers
        return found


def _mean(values: NDArray[Any]) -> float:
    return float(values.mean()) if len(values) else math.nan


def _replayed(settings: HarvestSettings, prepared: Any, rng: np.random.Generator, seed: int) -> Iterable[VmBatch]:
    """The trace's VMs, or a share of them: VMs of one group stay together."""
    assert settings.vms is not None
    columns = prepared[str(settings.vms.path)]
    group = np.asarray(columns["group"])
    rows = np.arange(len(group))
    if settings.share < 1:
        chosen = rng.random(int(group.max(initial=-1)) + 1) < settings.share
        alone = rng.random(len(group)) < settings.share
        rows = np.flatnonzero(np.where(group < 0, alone, np.append(chosen, False)[group]))
    columns = with_drawn_departures(columns, rows, settings.followed_until_s, np.random.default_rng([seed, 1]))
    batches = vm_batches(columns, rows)
    if settings.grid_s:
        return arrivals.jittered(rng, batches, settings.grid_s, together=True)  # type: ignore[return-value]
    return batches


def _generated(settings: HarvestSettings, rng: np.random.Generator) -> Iterable[VmBatch]:
    at = arrivals.poisson(rng, settings.share * settings.arrivals_per_h / _HOUR_S, settings.until_s)
    return arrivals.vms(rng, at, settings.lifetimes, _SIZES)


def _before(vms: Iterable[VmBatch], until_s: float) -> Iterator[VmBatch]:
    for batch in vms:
        if not len(batch) or batch.arrives_s[-1] < until_s:
            yield batch
            continue
        yield batch.take(batch.arrives_s < until_s)
        return
