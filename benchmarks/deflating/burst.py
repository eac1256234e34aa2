"""`burst`: what bursts spare a guest that waits for requests under a quota, and what a harvest VM costs a fixed one.

Both in control groups as libvirt makes them for VMs, with processes in place of vCPU threads: the kernel's scheduler
does not tell them apart, and a guest's own noise would be larger than what is looked for. All on one CPU.

* Requests that come at random moments and need half of the quota together, with and without bursts in turn, the same
  requests in both. What other work on the machine took of the CPU meanwhile is known for each request, so that its
  answer is also reckoned without.
* What a process with the shares of a harvest VM takes of the CPU time of one with those of a fixed VM, and how much
  work that one does in a second of CPU time, alone and beside it. Neither depends on other work on the machine.
"""

from __future__ import annotations

import contextlib
import statistics
from collections.abc import Mapping, Sequence
from typing import Final

from benchmarks.figures import Figure, Figures, ratios
from benchmarks.host.cpu_groups import Group, answered, groups, working
from benchmarks.passes import Pass
from ebbtide.deflation.allocations import Priority, cpu_shares
from hostagent.limits import burst

QUOTA_CORES: Final = 0.5
#: Between two requests, and of one, on average.
EVERY_S, TAKES_S = 0.04, 0.01
#: Windows with bursts and without take turns, so many of each in a run.
TURNS: Final = 4
SERVES_S: Final = 10.0
ALONE_S: Final = 4.0
BESIDE_S: Final = 10.0
#: A harvest VM's shares before they were nearly idle ones, of one core.
EARLIER_SHARES: Final = 10
ARMS: Final = {"without": 0.0, "with": burst.SHARE}


def run(how: Pass) -> Figures:
    """Raises BenchmarkFailed, OSError."""
    with groups("fixed", "harvest") as (fixed, harvest):
        return _tails(fixed, how) | _losses(fixed, harvest, how)


def without_others(rows: Sequence[Sequence[float]]) -> list[float]:
    """Answers, in seconds, had no other work taken the CPU: each request waits for the one before, for its own CPU time
    and for the quota.

    :param rows: of one window, as `cpu_work` says them.
    """
    answers, ends_s = [], 0.0
    for due_s, _, cpu_s, _, stopped_s in rows:
        ends_s = max(ends_s, due_s) + cpu_s + stopped_s
        answers.append(ends_s - due_s)
    return answers


def _tails(group: Group, how: Pass) -> Figures:
    found: dict[str, list[dict[str, float]]] = {arm: [] for arm in ARMS}
    turns, seconds = (1, 3.0) if how.quick else (TURNS, SERVES_S)
    for number in range(how.runs):
        windows: dict[str, list[_Window]] = {arm: [] for arm in ARMS}
        for turn in range(turns):
            # In the order ABBA: what grows or shrinks over a run falls on both.
            for arm in ARMS if turn % 2 == 0 else reversed(ARMS):
                group.limit(QUOTA_CORES, ARMS[arm])
                windows[arm].append(_window(group, seconds, number * turns + turn))
        for arm, those in windows.items():
            found[arm].append(_of_run(those, turns * seconds))
        words = "; ".join(
            f"{arm} {runs[-1]['p99_ms']:.1f} ms, {runs[-1]['own_p99_ms']:.1f} ms without other work, "
            f"{runs[-1]['stopped']:.1f} % of periods"
            for arm, runs in found.items()
        )
        how.report(f"run {number + 1} of {how.runs}: p99 and where the quota stopped it: {words}")
    conditions = (
        f"{QUOTA_CORES:g} core by quota in periods of 100 ms; a request every {1000 * EVERY_S:g} ms that takes "
        f"{1000 * TAKES_S:g} ms of CPU, by chance; {turns} windows of {seconds:g} s; bursts of {burst.SHARE:g} of the "
        f"quota; own: reckoned without what other work on the machine took"
    )
    units = {"stopped": "% of periods", "stopped_time": "% of time", "taken_by_others": "% of time"}
    figures: Figures = {}
    for name in found["without"][0]:
        had = {arm: [run[name] for run in runs] for arm, runs in found.items()}
        figures |= {f"{name}_{arm}": Figure.over(runs, units.get(name, "ms"), conditions) for arm, runs in had.items()}
        if name not in units:
            of = "the same without bursts in the same run"
            figures[f"{name}_with_to_without"] = Figure.over(ratios(had["with"], had["without"]), "ratio", of)
    return figures


#: One window: the rows of its requests, periods in which the quota stopped the group, and all periods.
_Window = tuple[list[list[float]], int, int]


def _window(group: Group, seconds: float, seed: int) -> _Window:
    before = group.times()
    words = (f"{seconds}", f"{EVERY_S}", f"{TAKES_S}", f"{seed}", f"{group.stat}")
    with working(group, "serve", *words) as process:
        rows = answered(process)
    stopped, periods = (now - then for now, then in zip(group.times(), before, strict=True))
    return rows, stopped, periods


def _of_run(windows: Sequence[_Window], seconds: float) -> dict[str, float]:
    """All windows of one arm together."""
    rows = [row for window, _, _ in windows for row in window]
    own = [answer for window, _, _ in windows for answer in without_others(window)]
    found: dict[str, float] = {}
    for name, answers in (("", [row[1] for row in rows]), ("own_", own)):
        cuts = statistics.quantiles(answers, n=100)
        found |= {f"{name}p50_ms": 1000 * cuts[49], f"{name}p99_ms": 1000 * cuts[98]}
    return found | {
        "stopped": 100 * sum(window[1] for window in windows) / max(sum(window[2] for window in windows), 1),
        "stopped_time": 100 * sum(row[4] for row in rows) / seconds,
        "taken_by_others": 100 * sum(row[3] - row[4] for row in rows) / seconds,
    }


def _losses(fixed: Group, harvest: Group, how: Pass) -> Figures:
    arms: Mapping[str, tuple[int, bool]] = {
        "harvest": (cpu_shares(Priority.HARVEST, 1.0), False),
        "earlier_shares": (EARLIER_SHARES, False),
        "cpu_idle": (0, True),
    }
    fixed.limit(None, 0.0)
    fixed.weigh(cpu_shares(Priority.FIXED, 1.0))
    taken: dict[str, list[float]] = {name: [] for name in arms}
    rates: dict[str, list[float]] = {name: [] for name in arms}
    alone_s, beside_s = (1.0, 2.0) if how.quick else (ALONE_S, BESIDE_S)
    for number in range(how.runs):
        alone, _ = _work(fixed, None, alone_s)
        for name, (shares, idle) in arms.items():
            harvest.weigh(shares, idle)
            beside, share = _work(fixed, harvest, beside_s)
            again, _ = _work(fixed, None, alone_s)
            taken[name].append(100 * share)
            rates[name].append(2 * beside / (alone + again))
            alone = again
        harvest.weigh(2)
        words = "; ".join(f"{name} {taken[name][-1]:.3f} %, {rates[name][-1]:.4f}" for name in arms)
        how.report(f"run {number + 1} of {how.runs}: CPU time taken, and work in a second: {words}")
    weighed = {"harvest": "as the agent weighs it", "earlier_shares": f"with {EARLIER_SHARES} shares a core"}
    figures: Figures = {}
    for name in arms:
        of = f"harvest {weighed.get(name, 'with cpu.idle')}; windows of {beside_s:g} s, both on one CPU, no quota"
        both = f"the CPU time that both had together; {of}"
        figures[f"fixed_loses_to_{name}"] = Figure.over(taken[name], "% of CPU time", both)
        rate = f"its work in a second of CPU time alone, before and after in the same run; {of}"
        figures[f"fixed_work_per_cpu_s_beside_{name}"] = Figure.over(rates[name], "ratio", rate)
    return figures


def _work(fixed: Group, harvest: Group | None, seconds: float) -> tuple[float, float]:
    """Rounds in a second of CPU time, and the share of both's CPU time that the harvest one had."""
    with contextlib.ExitStack() as stack:
        beside = []
        if harvest is not None:
            other = stack.enter_context(working(harvest, "count", f"{seconds + 60}"))
            beside = [f"{other.pid}"]
        process = stack.enter_context(working(fixed, "count", f"{seconds}", *beside))
        ((rounds, had_s, others_s),) = answered(process)
    return rounds / had_s, others_s / (had_s + others_s)
