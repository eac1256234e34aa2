"""`placement`, part one: how long one decision takes, beside a plain NumPy pass over all hosts, on one core.

Hosts change as they would: the VM goes to the host that is chosen, another one leaves somewhere, and some hosts report
new figures, all between two decisions. The pass is over the same hosts at the same moment: does the demand fit, the
cosine of each, the largest of those that fit. The table gives sixteen hosts in their order, the pass only one.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from statistics import median
from typing import Final, ParamSpec

import numpy as np

from benchmarks.figures import Figure, Figures, ratios
from benchmarks.passes import Pass, one_core
from benchmarks.placing.placement_hosts import Fleet, Matrix, demand, host_name
from ebbtide.deflation.placement.fitness import HostTable
from ebbtide.deflation.placement.policy_names import PlacementPolicy
from ebbtide.deflation.resources import ResourceVector

P = ParamSpec("P")

SIZES: Final = (100, 1000, 10_000, 100_000)
DECISIONS: Final = 2000
#: Hosts that report new figures between two decisions.
REPORTS: Final = 4
#: As the manager asks: the hosts that a plan keeps in line.
LINE: Final = 16


@dataclass
class _Times:
    """Seconds of one run with so many hosts."""

    decisions: list[float] = field(default_factory=list)
    #: The decisions' own CPU time, which other processes do not lengthen.
    cpu: list[float] = field(default_factory=list)
    passes: list[float] = field(default_factory=list)
    changes: list[float] = field(default_factory=list)
    refusals: list[float] = field(default_factory=list)
    building: float = 0.0

    @property
    def p50_ms(self) -> float:
        return 1000 * median(self.decisions)

    @property
    def p99_ms(self) -> float:
        return 1000 * float(np.percentile(self.decisions, 99))


def measure(how: Pass) -> Figures:
    """The figures of part one."""
    sizes = SIZES[:2] if how.quick else SIZES
    count = 200 if how.quick else DECISIONS
    figures: Figures = {}
    kept: dict[int, list[_Times]] = {size: [] for size in sizes}
    with one_core():
        for number in range(how.runs):
            for size in sizes:
                times = _run(size, count, PlacementPolicy.BEST_FIT, number)
                kept[size].append(times)
                how.report(f"run {number + 1}: {size} hosts: {times.p50_ms:.3f} ms, p99 {times.p99_ms:.3f} ms")
        for policy in (PlacementPolicy.FIRST_FIT, PlacementPolicy.TWO_CHOICES):
            runs = [_run(sizes[-1], count, policy, number).p99_ms for number in range(how.runs)]
            key = f"{policy.value.replace('-', '_')}_{sizes[-1]}_p99_ms"
            figures[key] = Figure.over(runs, "ms", f"a decision of {policy.value} over {sizes[-1]} hosts")
    for size, runs_of in kept.items():
        figures |= _figures(size, runs_of)
    few, many = kept[sizes[1 if len(sizes) > 2 else 0]], kept[sizes[-1]]
    few_hosts = sizes[1 if len(sizes) > 2 else 0]
    growth = ratios([times.p50_ms for times in many], [times.p50_ms for times in few])
    figures[f"growth_{few_hosts}_to_{sizes[-1]}"] = Figure.over(
        growth, "ratio", f"the median decision with {few_hosts} hosts; linear growth would be {sizes[-1] // few_hosts}"
    )
    return figures


def _figures(size: int, runs: list[_Times]) -> Figures:
    where = f"best-fit over {size} hosts, one core, {LINE} hosts in their order"
    plain = f"one plain NumPy pass over the same {size} hosts for the single best host"
    own = [median(times.decisions) for times in runs]
    return {
        f"decisions_{size}_per_s": Figure.over([1 / (sum(t.decisions) / len(t.decisions)) for t in runs], "1/s", where),
        f"decision_{size}_p50_ms": Figure.over([times.p50_ms for times in runs], "ms", where),
        f"decision_{size}_p99_ms": Figure.over([times.p99_ms for times in runs], "ms", where),
        f"decision_{size}_cpu_p99_ms": Figure.over(
            [1000 * float(np.percentile(t.cpu, 99)) for t in runs], "ms", f"{where}; CPU time of the thread alone"
        ),
        f"decision_{size}_to_numpy": Figure.over(ratios(own, [median(t.passes) for t in runs]), "ratio", plain),
        f"refusal_{size}_p99_ms": Figure.over(
            [1000 * float(np.percentile(t.refusals, 99)) for t in runs], "ms", f"no host of {size} can hold the VM"
        ),
        f"change_{size}_us": Figure.over(
            [1e6 * median(t.changes) for t in runs], "us", f"new figures of one of {size} hosts taken into the table"
        ),
        f"build_{size}_ms": Figure.over(
            [1000 * times.building for times in runs],
            "ms",
            f"the first decision over {size} hosts, which orders their ids",
        ),
    }


def _run(size: int, count: int, policy: PlacementPolicy, seed: int) -> _Times:
    generator = np.random.default_rng([seed, size])
    fleet = Fleet(size, generator)
    table, times = HostTable(), _Times()
    capacity = [tuple(row) for row in fleet.capacity.tolist()]

    def put(row: int) -> None:
        table.put(host_name(row), capacity[row], fleet.availability[row].tolist())

    for row in range(size):
        put(row)
    times.building = _seconds(table.rank, ResourceVector(1, 1024), LINE)
    too_much = ResourceVector(2000, 1024)
    placed: deque[tuple[int, Matrix]] = deque()
    for number in range(count):
        vm = demand(generator)
        began, began_cpu = time.perf_counter(), time.thread_time()
        chosen = table.rank(vm, LINE, policy, generator)
        times.decisions.append(time.perf_counter() - began)
        times.cpu.append(time.thread_time() - began_cpu)
        if number % 20 == 0:
            times.passes.append(_seconds(plain_pass, vm, fleet.availability, fleet.capacity))
            times.refusals.append(_seconds(table.rank, too_much, LINE, policy, generator))
        if chosen:
            row = int(chosen[0].removeprefix("host-"))
            taken = np.minimum(np.array(list(vm)), fleet.availability[row])
            fleet.availability[row] -= taken
            placed.append((row, taken))
            put(row)
        if len(placed) > 50:
            row, taken = placed.popleft()
            fleet.availability[row] += taken
            put(row)
        for row in generator.integers(0, size, REPORTS).tolist():
            share = generator.uniform(0.9, 1.1, 4)
            fleet.availability[row] = np.minimum(np.round(fleet.availability[row] * share, 2), fleet.capacity[row])
            times.changes.append(_seconds(put, row))
    return times


def plain_pass(vm: ResourceVector, availability: Matrix, capacity: Matrix) -> int:
    """The row of the fittest host that can hold a VM, or -1: what one would write first."""
    wanted, factor = np.array(list(vm)), 1.0 / capacity.max(axis=0)
    scaled, have = wanted * factor, availability * factor
    fits = ((availability >= wanted) | (capacity == 0)).all(axis=1)
    norms = np.sqrt((have * have).sum(axis=1)) * np.sqrt((scaled * scaled).sum())
    cosine = np.divide(have @ scaled, norms, out=np.zeros(len(have)), where=norms > 0)
    best = int(np.where(fits, cosine, -1.0).argmax())
    return best if fits[best] else -1


def _seconds(function: Callable[P, object], *args: P.args, **named: P.kwargs) -> float:
    began = time.perf_counter()
    function(*args, **named)
    return time.perf_counter() - began
