"""Writes the tables of docs/research/preemption.md, of experiments/results/preemption.json.

``preemption_tables.py [RESULTS]``: a directory that ``ebb sim run`` wrote is first kept as that file.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

import numpy as np
from kept_results import ROOT, Sweep, begin, filled, head, interval, placed, rewrite, row

PAGE = ROOT / "docs" / "research" / "preemption.md"
BEGIN = begin("preemption_tables.py")
PREEMPTIONS, LOST = "preemptions_per_day", "work_lost_core_h_per_day"
#: Overcommitment below which victims are too few for a ratio of what they lose.
FEW = 1.6
#: Metric, in words, digits, scale.
COLUMNS = (
    ("preempted_vms_share", "preempted %", 1, 100.0),
    (PREEMPTIONS, "preemptions a day", 0, 1.0),
    ("deflated_vm_h_share", "deflated % of VM-hours", 1, 100.0),
    ("taken_core_h_per_day", "1000 core-hours taken a day", 1, 0.001),
    ("back_median_s", "back, minutes", 0, 1 / 60.0),
    ("not_back_share", "not back %", 1, 100.0),
    (LOST, "core-hours of work lost a day", 0, 1.0),
    ("moves_per_day", "moves a day", 0, 1.0),
    ("moved_gib_per_day", "GiB moved a day", 0, 1.0),
)
METRICS = tuple(name for name, *_ in COLUMNS)
#: What `stop` loses that the others save: metric, policy, in words.
SAVED = (
    (PREEMPTIONS, "migration", "preemptions, `migration`"),
    (PREEMPTIONS, "rebalancing", "preemptions, `rebalancing`"),
    (PREEMPTIONS, "migration-10g", "preemptions, `migration-10g`"),
    (PREEMPTIONS, "rebalancing-10g", "preemptions, `rebalancing-10g`"),
    ("deflated_vm_h_share", "rebalancing", "deflated VM-hours, `rebalancing`"),
    ("deflated_vm_h_share", "rebalancing-10g", "deflated VM-hours, `rebalancing-10g`"),
    ("taken_core_h_per_day", "rebalancing", "core-hours taken, `rebalancing`"),
    ("taken_core_h_per_day", "rebalancing-10g", "core-hours taken, `rebalancing-10g`"),
)


def tables() -> Iterator[str]:
    """The lines."""
    sweep = Sweep("preemption")
    yield f"`{sweep.kept['command']}`,"
    yield filled(
        f"{sweep.seeds}; means ± half of the 95 % interval of coins, times and lives that are "
        "drawn: the tenants are the same in all seeds. "
        f"In brackets: how many of the {len(sweep.kept['seeds'])} seeds have such a figure, where not all do; in "
        "the others nobody was preempted."
    )
    yield ""
    yield from head("overcommitment", "policy", *(words for _, words, *_ in COLUMNS))
    for level in sweep.values("overcommitment"):
        for policy in sweep.values("policy"):
            case = {"overcommitment": level, "policy": policy}
            cells = (_cell(sweep, metric, digits, scale, case) for metric, _, digits, scale in COLUMNS)
            yield row(f"{level:.1f}", f"`{policy}`", *cells)
    yield from (
        "",
        "What moves save against `stop`, of its sum over the seeds, with jackknife intervals over the seeds:",
        "",
    )
    yield from head("overcommitment", *(words for *_, words in SAVED))
    for level in sweep.values("overcommitment"):
        cells = []
        for metric, policy, _ in SAVED:
            stop = {"overcommitment": level, "policy": "stop"}
            if sweep.of(metric, **stop).sum() > 0.5:
                change, half = sweep.relative(stop, metric, overcommitment=level, policy=policy)
                cells.append(f"{-change:.0f} ± {half:.0f} %")
            else:
                cells.append("-")
        yield row(f"{level:.1f}", *cells)
    for link in ("", "-10g"):
        more = []
        for level in sweep.values("overcommitment"):
            alone, both = (
                sweep.of(PREEMPTIONS, overcommitment=level, policy=f"{name}{link}")
                for name in ("migration", "rebalancing")
            )
            mean, half = interval(both - alone)
            more.append(f"{mean:+.0f} ± {half:.0f} at {level:.1f}")
        yield ""
        yield filled(
            f"Preemptions a day with `rebalancing{link}` beyond those with `migration{link}` alone: {', '.join(more)}."
        )
    yield from _only_rebalancing(sweep)
    times = []
    for level in sweep.values("overcommitment"):
        if level >= FEW:
            gone, off = (sweep.mean(LOST, overcommitment=level, policy=name) for name in ("delete", "stop"))
            times.append(f"{gone / off:.0f} times at {level:.1f}")
    yield ""
    yield filled(f"Work that `delete` loses to that which `stop` loses: {', '.join(times)}.")


def _only_rebalancing(sweep: Sweep) -> Iterator[str]:
    """Seeds in which somebody is preempted with it, and nobody under any policy that moves none for room."""
    for level in sweep.values("overcommitment"):
        found = {name: sweep.of(PREEMPTIONS, overcommitment=level, policy=name) for name in sweep.values("policy")}
        ours = found.pop("rebalancing")
        found.pop("rebalancing-10g")
        by_seed = zip(sweep.kept["seeds"], ours, np.sum(list(found.values()), axis=0), strict=True)
        mine = {seed: n for seed, n, others in by_seed if n > others == 0}
        if mine:
            seeds, counts = (" and ".join(words) for words in (map(str, mine), (f"{n:.1f}" for n in mine.values())))
            yield filled(
                f"At {level:.1f} it has {counts} preemptions a day in seeds {seeds}, where none without it has any."
            )


def _cell(sweep: Sweep, metric: str, digits: int, scale: float, case: dict[str, Any]) -> str:
    """The mean over seeds in which there is a figure, and how many these are if not all."""
    if metric.startswith("move") and not case["policy"].startswith(("migration", "rebalancing")):
        return "-"
    if (metric.startswith(("back", "not_back")) and case["policy"] == "delete") or not sweep.has(metric, **case):
        return "-"
    every = scale * sweep.of(metric, **case)
    values = every[~np.isnan(every)]
    if len(values) == 0:
        return "-"
    mean, half = interval(values)
    text = f"{mean:,.{digits}f}"
    if len(values) > 1 and float(f"{half:.{digits}f}") != 0.0:
        text += f" ± {half:,.{digits}f}"
    return text if len(values) == len(every) else f"{text} ({len(values)})"


def written(page: str) -> str:
    """The page with the tables of the kept results."""
    return placed(page, BEGIN, tables())


if __name__ == "__main__":
    rewrite(PAGE, written, sys.argv[1:], METRICS)
