"""Harvest pools (Agarwal 2023 §2.1): on-demand VMs replayed onto servers, some of whose unallocated cores are the pool.

A replay starts with empty servers and is filling them for days; what comes before `from_s` is left out.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from ebbtide.simulator.errors import InvalidParameter
from ebbtide.simulator.generators.arrivals import jittered
from ebbtide.simulator.generators.harvest import HarvestSeries, Packing
from ebbtide.simulator.generators.power import Cut, PoweredSeries, power_steps
from ebbtide.simulator.generators.replayed import vm_batches, with_drawn_departures
from ebbtide.simulator.inputs.batches import CapacityBatch, Floats, Indices, SeriesBatch, VmBatch, texts
from ebbtide.simulator.matching.others import Others, left_by
from ebbtide.simulator.matching.variation import DURATIONS_S, drift, spread, stability

_DAY_S: Final = 86_400.0
_ROUNDING: Final = 1e-6


@dataclass(frozen=True, slots=True)
class PowerSettings:
    """How servers follow a power trace (Agarwal et al. 2023 §4.5).

    :param from_s: of the power trace, what falls on the first second of the VMs'.
    :param step_s: powered cores change so often; between the trace's values power is straight.
    """

    cut: Cut = Cut.SERVERS
    from_s: float = 0.0
    step_s: float = 900.0

    def __post_init__(self) -> None:
        """Raises InvalidParameter."""
        if not self.from_s >= 0:
            raise InvalidParameter("power_from_s", f"must be at least 0, but is {self.from_s:g}")
        if not 60 <= self.step_s <= _DAY_S:
            raise InvalidParameter("power_step_s", f"must be from 60 to 86400, but is {self.step_s:g}")


@dataclass(frozen=True, slots=True)
class PoolSettings:
    """Which servers, and which share of the VMs comes to them.

    :param share: of the tenants' batches; the VMs of one stay together.
    :param least_lifetime_s: VMs that live shorter are left out, which makes a calmer pool.
    :param followed_until_s: VMs that came before it and are not seen to depart were followed no longer: their lives are
        drawn (`replayed.drawn_departures`). 0: who is not seen to depart stays.
    :param grid_s: of the trace's times, over which arrivals and departures are spread evenly.
    :param machines: of the servers, drawn at random; each has one harvest VM.
    :param power: None: all cores have power all the time.
    :param drawn, together: of the placement (`HarvestSeries`).
    :param threads_per_core: each core of a server is so many hardware threads, which is what a harvest VM has and what
        its tasks want (Agarwal 2023 §2.1 count threads); a VM of the trace has whole cores.
    :param others: want some of what on-demand VMs leave, too.
    """

    packing: Packing
    servers: int
    share: float
    least_lifetime_s: float = 0.0
    cpu_cores: float = 48.0
    memory_mib: float = 262_144.0
    least_cpu_cores: float = 2.0
    grid_s: float = 300.0
    machines: int = 64
    from_s: float = 3 * _DAY_S
    until_s: float = 8 * _DAY_S
    power: PowerSettings | None = None
    drawn: int = 10
    together: bool = False
    threads_per_core: int = 1
    others: Others = field(default_factory=Others)
    followed_until_s: float = 0.0

    def __post_init__(self) -> None:
        """Raises InvalidParameter."""
        if not 1 <= self.machines <= self.servers:
            raise InvalidParameter("machines", f"must be from 1 to servers, {self.servers}, but is {self.machines}")
        if not 0 < self.share <= 1:
            raise InvalidParameter("share", f"must be above 0 and at most 1, but is {self.share:g}")
        if not 0 <= self.from_s < self.until_s:
            raise InvalidParameter("from_s", f"must be below until_s, but is {self.from_s:g}")


@dataclass(frozen=True, slots=True)
class Supply:
    """The power that all servers of a pool had, as steps, and what it did to on-demand VMs in the whole replay."""

    at_s: Floats
    #: Of all cores, those with power.
    share: Floats
    evicted: int
    deferred: int
    relaunched: int

    def statistics(self, from_s: float, until_s: float) -> dict[str, float]:
        """Figures by name; shares are those of a window."""
        first = max(int(np.searchsorted(self.at_s, from_s, side="right")) - 1, 0)
        share = self.share[first : max(int(np.searchsorted(self.at_s, until_s)), first + 1)]
        return {
            "power_mean": float(share.mean()),
            "power_least": float(share.min()),
            "power_most": float(share.max()),
            "vms_evicted": float(self.evicted),
            "vms_deferred": float(self.deferred),
            "vms_relaunched": float(self.relaunched),
        }


@dataclass(frozen=True, slots=True)
class Pool:
    """Changes of whole cores, in the order of their times; the first of each machine says what it begins with."""

    machine: Indices
    at_s: Floats
    cores: Indices
    machines: int
    until_s: float
    rejected_share: float
    supply: Supply | None = None
    #: When the last VM arrives; infinite: machines do not come from a trace.
    arrives_until_s: float = math.inf

    def beyond(self) -> tuple[str, ...]:
        """What is to be said of a pool that goes on where its trace has ended."""
        if self.until_s <= self.arrives_until_s:
            return ()
        last = f"the last VM of the trace arrives at {self.arrives_until_s:g} s"
        return (f"the pool ends at {self.until_s:g} s, and {last}; from then on machines only come to have more",)

    def batch(self) -> CapacityBatch:
        """As input of the engine; memory does not matter here."""
        names = texts(f"machine-{number}" for number in range(self.machines))
        return CapacityBatch(
            machine=names[self.machine],
            at_s=self.at_s,
            cpu_cores=self.cores.astype(np.float64),
            memory_mib=np.full(len(self.at_s), np.nan),
        )

    def mean_cores(self, from_s: float, until_s: float) -> float:
        """Cores of the whole pool, averaged over a window: what load is counted by."""
        area = 0.0
        for number in range(self.machines):
            mine = self.machine == number
            at_s = np.clip(np.append(self.at_s[mine], until_s), from_s, until_s)
            area += float((self.cores[mine] * np.diff(at_s)).sum())
        return area / (until_s - from_s)

    def statistics(self, from_s: float, until_s: float) -> dict[str, float]:
        """Inter-change times as Agarwal 2023 give them for C1 to C8: of changes within a window, by their ends."""
        supply = {} if self.supply is None else self.supply.statistics(from_s, until_s)
        # To the end of the replay: a window of some hours has too few.
        supply |= spread(self, from_s, self.until_s)
        gap_s, _, end_s = self._gaps(from_s, self.until_s)
        if len(gap_s):
            supply |= {
                f"stable_for_{duration_s / 60:g}_min": stability(gap_s, duration_s) for duration_s in DURATIONS_S
            }
            supply["gap_drift"] = drift(gap_s, end_s)
        gap_s, size, _ = self._gaps(from_s, until_s)
        known = {"mean_cores": self.mean_cores(from_s, until_s), "rejected_share": self.rejected_share}
        if not len(gap_s):
            return {"changes": 0.0, **known, **supply}
        return {
            "changes": float(len(gap_s)),
            "gap_mean_min": float(gap_s.mean()) / 60.0,
            "gap_p50_min": float(np.median(gap_s)) / 60.0,
            "gap_p95_min": float(np.percentile(gap_s, 95)) / 60.0,
            "within_10_min": float((gap_s <= 600.0).mean()),
            "within_1_h": float((gap_s <= 3600.0).mean()),
            "change_mean_cores": float(size.mean()),
            **known,
            **supply,
        }

    def _gaps(self, from_s: float, until_s: float) -> tuple[Floats, Floats, Floats]:
        """Times between changes that end within a window, the sizes of these changes, and when they were."""
        gaps, sizes, ends = [], [], []
        for number in range(self.machines):
            mine = self.machine == number
            at_s, cores = self.at_s[mine], self.cores[mine]
            late = (at_s[1:] >= from_s) & (at_s[1:] < until_s)
            # What a machine begins with is no change, and without cores it is not there.
            late[:1] = False
            late &= cores[:-1] > 0
            gaps.append(np.diff(at_s)[late])
            ends.append(at_s[1:][late])
            sizes.append(np.abs(np.diff(cores))[late])
        return np.concatenate(gaps), np.concatenate(sizes), np.concatenate(ends)


def pool(
    vms: Mapping[str, NDArray[Any]],
    settings: PoolSettings,
    seed: int,
    power: Iterable[SeriesBatch] = (),
    draw: int = 0,
) -> Pool:
    """The pool that a replay leaves.

    :param vms: columns as of `vm_columns`, in order.
    :param power: a power trace, where the settings have power.
    :param draw: above 0: the same tenants' VMs come and go, and all else is drawn anew: where they are placed, and
        which servers are the pool's. How long those stay whose lives are drawn is the same.
    :raises InvalidParameter: no VM arrives from ``from_s`` on, nothing changes from ``until_s`` on, or power ends.
    """
    generator = np.random.default_rng([seed, settings.servers])
    group = np.asarray(vms["group"])
    chosen = generator.random(int(group.max(initial=-1)) + 2) < settings.share
    kept = chosen[group]
    if (alone := group < 0).any():
        kept[alone] = generator.random(int(alone.sum())) < settings.share
    rows = np.flatnonzero(kept)
    # Draws of their own, the same whatever else is drawn anew.
    lives = np.random.default_rng([seed, settings.servers, 4])
    vms = with_drawn_departures(vms, rows, settings.followed_until_s, lives)
    if settings.least_lifetime_s:
        life_s = np.asarray(vms["departs_s"])[rows] - np.asarray(vms["arrives_s"])[rows]
        rows = rows[~(life_s < settings.least_lifetime_s)]
    arrives_until_s = float(np.asarray(vms["arrives_s"])[rows].max(initial=0.0))
    if settings.from_s > arrives_until_s:
        problem = f"is {settings.from_s:g}, but the last VM of the trace arrives at {arrives_until_s:g} s"
        raise InvalidParameter("from_s", problem)
    if draw:
        generator = np.random.default_rng([seed, settings.servers, 2, draw])
    series = _series(settings, generator, seed, power)
    taken = np.full(settings.servers, -1, np.int64)
    taken[np.sort(generator.choice(settings.servers, settings.machines, replace=False))] = np.arange(settings.machines)
    parts: list[tuple[Indices, Floats, Indices]] = []
    last_s = 0.0
    for batch in series.replay(_batches(vms, rows, settings, generator)):
        number = taken[[int(name.rpartition("-")[2]) for name in batch.machine]]
        kept = (number >= 0) & (batch.at_s < settings.until_s)
        cores = np.floor(batch.cpu_cores[kept] * settings.threads_per_core + _ROUNDING).astype(np.int64)
        parts.append((number[kept], batch.at_s[kept], cores))
        last_s = max(last_s, float(batch.at_s[-1]))
    if last_s < settings.until_s:
        raise InvalidParameter("until_s", f"must not be after the last change, at {last_s:g} s")
    counts = series.counts
    machine, at_s, cores = (np.concatenate(columns) for columns in zip(*parts, strict=True))
    rejected = counts.rejected / max(counts.placed + counts.rejected, 1)
    found = _cut(machine, at_s, cores, settings, rejected)
    if settings.others.share:
        # Draws of their own: on-demand VMs come and go as without them.
        draws = np.random.default_rng([seed, settings.servers, 3, draw])
        found = _cut(*left_by(found.machine, found.at_s, found.cores, settings.others, draws), settings, rejected)
    found = replace(found, arrives_until_s=arrives_until_s)
    if not isinstance(series, PoweredSeries):
        return found
    did = series.power_counts
    share = series.power.cores / (settings.servers * settings.cpu_cores)
    return replace(found, supply=Supply(series.power.at_s, share, did.evicted, did.deferred, did.relaunched))


def _series(
    settings: PoolSettings, generator: np.random.Generator, seed: int, power: Iterable[SeriesBatch]
) -> HarvestSeries:
    s = settings
    if s.power is None:
        return HarvestSeries(
            s.servers, s.cpu_cores, s.memory_mib, s.packing, generator, s.least_cpu_cores, s.drawn, s.together
        )
    steps = power_steps(power, s.servers * s.cpu_cores, s.power.from_s, s.until_s, s.power.step_s)
    # Draws of their own: who is cut moves no VM by itself.
    draws = np.random.default_rng([seed, s.servers, 1])
    sizes = (s.servers, s.cpu_cores, s.memory_mib)
    how = (s.drawn, s.together)
    return PoweredSeries(*sizes, s.packing, generator, s.least_cpu_cores, steps, s.power.cut, draws, *how)


def _batches(
    vms: Mapping[str, NDArray[Any]], rows: Indices, settings: PoolSettings, generator: np.random.Generator
) -> Iterable[VmBatch]:
    batches = vm_batches(vms, rows)
    if not settings.grid_s:
        return batches
    return jittered(generator, batches, settings.grid_s, together=True)  # type: ignore[return-value]


def _cut(machine: Indices, at_s: Floats, cores: Indices, settings: PoolSettings, rejected: float) -> Pool:
    """From ``from_s`` on, with what each machine had then as its first row, and without changes of no whole core."""
    order = np.lexsort((np.arange(len(at_s)), at_s, machine))
    machine, at_s, cores = machine[order], at_s[order], cores[order]
    early = at_s <= settings.from_s
    # The last row of each machine before the cut is what it begins with.
    last_early = early & ~np.append(early[1:] & (machine[1:] == machine[:-1]), False)
    kept = ~early | last_early
    machine, at_s, cores = machine[kept], np.maximum(at_s[kept], settings.from_s), cores[kept]
    real = np.ones(len(machine), bool)
    real[1:] = (machine[1:] != machine[:-1]) | (cores[1:] != cores[:-1])
    order = np.lexsort((machine[real], at_s[real]))
    until_s = settings.until_s if math.isfinite(settings.until_s) else float(at_s.max())
    return Pool(machine[real][order], at_s[real][order], cores[real][order], settings.machines, until_s, rejected)
