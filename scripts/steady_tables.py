"""Writes the table of docs/research/steady.md, of experiments/results/steady.json.

``steady_tables.py [RESULTS]``: a directory that ``ebb sim run`` wrote is first kept as that file.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

from coaster_tables import Sweep, keep
from kept_results import begin, placed

PAGE = Path(__file__).parents[1] / "docs" / "research" / "steady.md"
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


def tables() -> Iterator[str]:
    """The lines."""
    sweep = Sweep("steady")
    demands = list(dict.fromkeys(case["demand"] for case in sweep.kept["cases"]))
    yield from (f"{sweep.command};", "mean ± half of the 95 % interval over seeds.")
    for demand in demands:
        hosts, arrivals = (sweep.mean(m, demand=demand, policy="steady") for m in ("nodes", "arrivals"))
        yield from ("", f"**Demand {demand:g}**: {hosts:.0f} hosts, {arrivals:.0f} arrivals a day.", "")
        yield f"| | {' | '.join(SCHEMES)} |"
        yield "|---|---|---|---|"
        for metric, words, digits, scale in ROWS:
            cells = (sweep.text(metric, digits, scale, demand=demand, policy=scheme) for scheme in SCHEMES)
            yield f"| {words} | {' | '.join(cells)} |"


def written(page: str) -> str:
    """The page with the table of the kept results."""
    return placed(page, BEGIN, tables())


if __name__ == "__main__":
    for directory in sys.argv[1:]:
        keep(Path(directory))
    PAGE.write_text(written(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
