"""Writes the tables of docs/research/steady.md, of experiments/results/steady.json and steady-compared.json.

``steady_tables.py [RESULTS...]``: directories that ``ebb sim run`` wrote are first kept as such files.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import kept_results
import numpy as np
from coaster_tables import Sweep, keep
from kept_results import ROOT, begin, filled, head, interval, placed, row
from numpy.typing import NDArray

PAGE = ROOT / "docs" / "research" / "steady.md"
BEGIN = begin("steady_tables.py")
#: Metric, in words, digits, scale.
ROWS = (
    ("at_once_share", "arrivals that fit at once, % of those offered", 1, 100.0),
    ("wait_mean_s", "mean wait of those placed, s", 1, 1.0),
    ("wait_p95_s", "95 % wait no longer than, s", 1, 1.0),
    ("refused_share", "refused, %", 1, 100.0),
    ("refault_mib_per_vm_h", "read again, MiB an hour and low-priority VM", 0, 1.0),
    ("refault_stall_share", "time that these reads take, %", 2, 100.0),
    ("trimmed_gib_per_day", "taken before it was asked for, GiB a day, all hosts", 0, 1.0),
    ("given_back_gib_per_day", "of it given back by the rule itself, GiB a day", 0, 1.0),
    ("reclaimed_gib_per_day", "taken when it was asked for, GiB a day", 0, 1.0),
    ("low_memory_share", "what low-priority VMs have of nominal, mean, %", 1, 100.0),
    ("free_memory_share", "free memory of the hosts, mean, %", 1, 100.0),
    ("reserve_memory_share", "reserve, mean, % of the hosts' memory", 1, 100.0),
)
SCHEMES = ("reactive", "steady", "proxmox-like")
#: The sweep that is kept by seed; metric, in words, digits, scale.
COMPARED = "steady-compared"
DIFFERENCES = (
    ("at_once_share", "fit at once, points", 1, 100.0),
    ("wait_mean_s", "mean wait, s", 2, 1.0),
    ("refault_mib_per_vm_h", "read again, MiB an hour and VM", 0, 1.0),
    ("low_memory_share", "low-priority VMs have of nominal, points", 2, 100.0),
)
#: Of the arrivals, the share that is to fit at once, %.
AIM = 95.0


def tables() -> Iterator[str]:
    """The lines."""
    sweep = Sweep("steady")
    seeds, demands = sweep.kept["seeds"], list(dict.fromkeys(case["demand"] for case in sweep.kept["cases"]))
    yield f"`{sweep.kept['command']}`,"
    yield filled(
        f"seeds {seeds[0]} to {seeds[-1]}; mean ± half of the 95 % interval of coins, times, lives and guests' habits, "
        "which are drawn: the tenants are the same in all seeds, so that intervals leave them out."
    )
    for demand in demands:
        hosts, arrivals = (sweep.mean(m, demand=demand, policy="steady") for m in ("nodes", "arrivals"))
        yield from ("", f"**Demand {demand:g}**: {hosts:.0f} hosts, {arrivals:.0f} arrivals a day.", "")
        yield from head("", *SCHEMES)
        for metric, words, digits, scale in ROWS:
            yield row(words, *(sweep.text(metric, digits, scale, demand=demand, policy=scheme) for scheme in SCHEMES))
    by_seed = kept_results.Sweep(COMPARED)
    yield ""
    yield filled(
        f"`steady` less the other two, seed by seed: `{by_seed.kept['command']}`. All schemes of a seed have the same "
        "coins, times, lives and guests, so that these intervals are narrower than those above; all seeds have the "
        "same list of arrivals, so that intervals of what fits at once are of a few arrivals of one list: the last "
        "column."
    )
    yield ""
    yield from head("demand", "less", *(words for _, words, *_ in DIFFERENCES), "arrivals more at once, by seed")
    for demand in demands:
        arrivals = sweep.mean("arrivals", demand=demand, policy="steady")
        for other in SCHEMES:
            if other == "steady":
                continue
            cells = []
            for metric, _, digits, scale in DIFFERENCES:
                mean, half = interval(scale * less(by_seed, metric, demand, other))
                cells.append(f"{mean:+.{digits}f} ± {half:.{digits}f}")
            more = ", ".join(f"{x:+.0f}" if x else "0" for x in arrivals_more(by_seed, arrivals, demand, other))
            yield row(f"{demand:g}", other, *cells, f"{more} of {arrivals:.0f}")
    aims = (
        f"at demand {demand:g} " + _aim(*interval(100.0 * by_seed.of("at_once_share", demand=demand, policy="steady")))
        for demand in demands
    )
    yield ""
    yield filled(f"The aim of steady mode, {AIM:g} % fit at once: {'; '.join(aims)}.")


def less(by_seed: kept_results.Sweep, metric: str, demand: float, other: str) -> NDArray[np.float64]:
    """What steady mode has of a metric less what another scheme has, by seed."""
    return by_seed.of(metric, demand=demand, policy="steady") - by_seed.of(metric, demand=demand, policy=other)


def arrivals_more(by_seed: kept_results.Sweep, arrivals: float, demand: float, other: str) -> list[int]:
    """How many more of the arrivals find room at once, by seed."""
    return [round(float(x)) for x in arrivals * less(by_seed, "at_once_share", demand, other)]


def _aim(mean: float, half: float) -> str:
    """Whether it is met, where the interval tells."""
    word = "missed" if mean + half < AIM else "met" if mean - half >= AIM else "not told"
    return f"{word} ({mean:.1f} ± {half:.1f})"


def written(page: str) -> str:
    """The page with the tables of the kept results."""
    return placed(page, BEGIN, tables())


if __name__ == "__main__":
    for directory in map(Path, sys.argv[1:]):
        if directory.name == COMPARED:
            kept_results.keep(directory, [metric for metric, *_ in DIFFERENCES])
        else:
            keep(directory)
    PAGE.write_text(written(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
