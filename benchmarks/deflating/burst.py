"""`burst`: what bursts spare a guest that waits for requests under a quota, and what a harvest VM costs a fixed one.

Both in control groups as libvirt makes them for VMs, with processes in place of vCPU threads: the kernel's scheduler
does not tell them apart, and a guest's own noise would be larger than what is looked for.

* Requests that come at random moments and need half of the quota together, with and without bursts; the same requests
  in both, one after the other in each run.
* Work of a process with the shares of a fixed VM, alone and beside one with those of a harvest VM on the same CPU.
"""

from __future__ import annotations

import contextlib
import os
import statistics
from collections.abc import Mapping
from typing import Final

from benchmarks.figures import Figure, Figures, ratios
from benchmarks.host.bench_host import only
from benchmarks.host.cpu_groups import Group, answered, groups, working
from benchmarks.passes import Pass
from ebbtide.deflation.allocations import Priority, cpu_shares
from hostagent.limits import burst

QUOTA_CORES: Final = 0.5
#: Between two requests, and of one, on average.
EVERY_S, TAKES_S = 0.04, 0.01
SERVES_S: Final = 15.0
WORKS_S: Final = 2.0
#: A harvest VM's shares before they were nearly idle ones, of one core.
EARLIER_SHARES: Final = 10


def run(how: Pass) -> Figures:
    """Raises BenchmarkFailed, OSError."""
    with only("burst"), groups("fixed", "harvest") as (fixed, harvest):
        return _tails(fixed, how) | _losses(fixed, harvest, how)


def _tails(group: Group, how: Pass) -> Figures:
    found: dict[str, list[list[float]]] = {"without": [], "with": []}
    shares: dict[str, list[float]] = {"without": [], "with": []}
    seconds = 5.0 if how.quick else SERVES_S
    for number in range(how.runs):
        for name, share in (("without", 0.0), ("with", burst.SHARE)):
            group.limit(QUOTA_CORES, share)
            before = group.times()
            with working(group, "serve", f"{seconds}", f"{EVERY_S}", f"{TAKES_S}", f"{number}") as process:
                answers = answered(process)
            stopped, periods = (now - then for now, then in zip(group.times(), before, strict=True))
            shares[name].append(100 * stopped / max(periods, 1))
            found[name].append([1000 * statistics.quantiles(answers, n=100)[at] for at in (49, 98)])
        words = ", ".join(f"{name} {runs[-1][1]:.1f} ms, {shares[name][-1]:.1f} %" for name, runs in found.items())
        how.report(f"run {number + 1} of {how.runs}: p99 and periods in which it was stopped: {words}")
    conditions = (
        f"{QUOTA_CORES:g} core by quota in periods of 100 ms; a request every {1000 * EVERY_S:g} ms that takes "
        f"{1000 * TAKES_S:g} ms of CPU, by chance; windows of {seconds:g} s; bursts of {burst.SHARE:g} of the quota"
    )
    figures = {f"stopped_{arm}": Figure.over(runs, "% of periods", conditions) for arm, runs in shares.items()}
    for at, name in enumerate(("p50", "p99")):
        had = {arm: [run[at] for run in runs] for arm, runs in found.items()}
        figures |= {f"{name}_{arm}_ms": Figure.over(runs, "ms", conditions) for arm, runs in had.items()}
        of = "the same without bursts in the same run"
        figures[f"{name}_with_to_without"] = Figure.over(ratios(had["with"], had["without"]), "ratio", of)
    return figures


def _losses(fixed: Group, harvest: Group, how: Pass) -> Figures:
    arms: Mapping[str, tuple[int, bool]] = {
        "harvest": (cpu_shares(Priority.HARVEST, 1.0), False),
        "earlier_shares": (EARLIER_SHARES, False),
        "cpu_idle": (0, True),
    }
    fixed.limit(None, 0.0)
    fixed.weigh(cpu_shares(Priority.FIXED, 1.0))
    losses: dict[str, list[float]] = {name: [] for name in arms}
    seconds = 1.0 if how.quick else WORKS_S
    cpu = max(os.sched_getaffinity(0))
    for number in range(how.runs):
        for name, (shares, idle) in arms.items():
            harvest.weigh(shares, idle)
            alone = _work(fixed, None, cpu, seconds)
            beside = _work(fixed, harvest, cpu, seconds)
            again = _work(fixed, None, cpu, seconds)
            losses[name].append(100 * (1 - 2 * beside / (alone + again)))
        harvest.weigh(2)
        words = ", ".join(f"{name} {runs[-1]:.2f} %" for name, runs in losses.items())
        how.report(f"run {number + 1} of {how.runs}: lost {words}")
    of = f"its work alone, before and after in the same run; windows of {seconds:g} s, both on one CPU, no quota"
    weighed = {"harvest": "as the agent weighs it", "earlier_shares": f"with {EARLIER_SHARES} shares a core"}
    return {
        f"fixed_loss_beside_{name}": Figure.over(runs, "%", f"{of}; harvest {weighed.get(name, 'with cpu.idle')}")
        for name, runs in losses.items()
    }


def _work(fixed: Group, harvest: Group | None, cpu: int, seconds: float) -> float:
    with contextlib.ExitStack() as stack:
        if harvest is not None:
            other = stack.enter_context(working(harvest, "count", f"{seconds + 60}"))
            os.sched_setaffinity(other.pid, {cpu})
        process = stack.enter_context(working(fixed, "count", f"{seconds}"))
        os.sched_setaffinity(process.pid, {cpu})
        return answered(process)[0]
