"""Writes the tables of docs/research/preemption.md, of experiments/results/preemption.json.

``preemption_tables.py [RESULTS]``: a directory that ``ebb sim run`` wrote is first kept as that file.
"""

from __future__ import annotations

import sys
import textwrap
from collections.abc import Iterator
from typing import Any

import numpy as np
from kept_results import ROOT, Sweep, begin, head, interval, placed, rewrite, row

PAGE = ROOT / "docs" / "research" / "preemption.md"
BEGIN = begin("preemption_tables.py")
#: Metric, in words, digits, scale.
COLUMNS = (
    ("preempted_vms_share", "preempted %", 1, 100.0),
    ("preemptions_per_day", "preemptions a day", 0, 1.0),
    ("deflated_vm_h_share", "deflated % of VM-hours", 1, 100.0),
    ("taken_core_h_per_day", "1000 core-hours taken a day", 1, 1e-3),
    ("back_median_s", "back, minutes", 0, 1 / 60),
    ("not_back_share", "not back %", 1, 100.0),
    ("work_lost_core_h_per_day", "core-hours of work lost a day", 0, 1.0),
    ("moves_per_day", "moves a day", 0, 1.0),
    ("moved_gib_per_day", "GiB moved a day", 0, 1.0),
)
METRICS = (*(name for name, *_ in COLUMNS), "nodes")


def cell(values: np.ndarray[Any, np.dtype[np.float64]], digits: int, scale: float) -> str:
    """The mean and half of its 95 % interval; nothing where a seed has none."""
    mean, half = interval(values * scale)
    return "-" if np.isnan(mean) else f"{mean:,.{digits}f} ± {half:,.{digits}f}"


def saved(sweep: Sweep, metric: str, over: float, policy: str) -> str:
    """What a policy saves against `stop`, per cent of that one's mean; the interval is of the differences by seed."""
    base = sweep.of(metric, overcommitment=over, policy="stop")
    if not base.mean():
        return "-"
    mean, half = interval(100.0 * (base - sweep.of(metric, overcommitment=over, policy=policy)) / base.mean())
    return f"{mean:.0f} ± {half:.0f} %"


def tables() -> Iterator[str]:
    """The lines."""
    sweep = Sweep("preemption")
    seeds = sweep.kept["seeds"]
    ran = f"`{sweep.kept['command']}`, seeds {seeds[0]} to {seeds[-1]}; means ± half of the 95 % interval."
    overs, policies = sweep.values("overcommitment"), sweep.values("policy")
    nodes = [sweep.mean("nodes", overcommitment=over, policy="stop") for over in (overs[0], overs[-1])]
    yield from (textwrap.fill(ran, 120, break_long_words=False, break_on_hyphens=False), "")
    yield from (f"{nodes[0]:.0f} nodes at {overs[0]:g}, {nodes[1]:.0f} at {overs[-1]:g}.", "")
    yield from head("overcommitment", "policy", *(words for _, words, *_ in COLUMNS))
    for over in overs:
        for policy in policies:
            cells = [
                cell(sweep.of(name, overcommitment=over, policy=policy), digits, scale)
                for name, _, digits, scale in COLUMNS
            ]
            yield row(f"{over:g}", f"`{policy}`", *cells)
    yield from (
        "",
        "What moves save against `stop`, of its mean, with the intervals of the differences seed by seed:",
        "",
    )
    yield from head(
        "overcommitment",
        "preemptions, `migration`",
        "preemptions, `rebalancing`",
        "deflated VM-hours, `rebalancing`",
        "core-hours taken, `rebalancing`",
    )
    for over in overs:
        yield row(
            f"{over:g}",
            *(saved(sweep, "preemptions_per_day", over, policy) for policy in ("migration", "rebalancing")),
            saved(sweep, "deflated_vm_h_share", over, "rebalancing"),
            saved(sweep, "taken_core_h_per_day", over, "rebalancing"),
        )
    yield from ("", "* **A kept disk is what counts.** Work lost with `delete` to that with `stop`:")
    ratios = []
    for over in overs:
        lost = [sweep.mean("work_lost_core_h_per_day", overcommitment=over, policy=who) for who in ("delete", "stop")]
        if lost[1]:
            ratios.append(f"{lost[0] / lost[1]:.0f} times at {over:g}")
    yield f"  {', '.join(ratios)}. That `delete` preempts less is no merit: who is gone needs no room any more."
    lost = [sweep.mean("work_lost_core_h_per_day", overcommitment=overs[-1], policy=p) for p in ("stop", "suspend")]
    yield f"* **Suspension** loses {lost[1] / lost[0]:.2f} of the work that `stop` loses at {overs[-1]:g}: it needs no"
    yield "  time for checkpoints, and no boot."
    yield "* **The rebalancer beside `migration` alone**, preemptions a day more or fewer:"
    more = []
    for over in overs[2:]:
        both = [sweep.of("preemptions_per_day", overcommitment=over, policy=p) for p in ("rebalancing", "migration")]
        mean, half = interval(both[0] - both[1])
        more.append(f"{mean:+.0f} ± {half:.0f} at {over:g}")
    yield f"  {', '.join(more)}. It moves where there is room, and costs preemptions where there is none."


def written(page: str) -> str:
    """The page with the tables of the kept results."""
    return placed(page, BEGIN, tables())


if __name__ == "__main__":
    rewrite(PAGE, written, sys.argv[1:], METRICS)
