"""Writes the tables of the benchmark `tasks` into docs/research/benchmarks.md, of benchmarks/results/tasks*.json.

python scripts/tasks_tables.py
"""

from __future__ import annotations

import json
import math
import statistics
from pathlib import Path
from typing import Any, Final

from scipy import stats

REPO: Final = Path(__file__).parents[1]
PAGE: Final = REPO / "docs/research/benchmarks.md"
RESULTS: Final = REPO / "benchmarks/results"
FIRST, LAST = "<!-- tasks: written by scripts/tasks_tables.py -->", "<!-- tasks: up to here -->"
KEYS: Final = ("preemptions", "lost_core_s", "mean_completion_s", "p90_completion_s")
#: Rows of each file: side or scheme, and what it is; the first is what the others are held against.
FILES: Final = {
    "tasks": {"own": "Slurm's own choice", "matched": "**matched**"},
    "tasks-simulated": {
        "own": "first fit (Slurm's own choice)",
        "capacity-random": "`capacity-random`",
        "live": "`live`: a manager's default, landmarks",
        "sized-live": "`sized-live`: as the real run, Eq. 1 with sizes",
        "oracle-no-kill": "`oracle-no-kill`",
    },
}


def half_width(values: list[float]) -> float:
    """Of the 95 % interval of the mean, by Student's t."""
    if len(values) < 2:
        return math.nan
    return float(stats.t.ppf(0.975, len(values) - 1)) * statistics.stdev(values) / math.sqrt(len(values))


def table(figures: dict[str, Any], rows: dict[str, str]) -> list[str]:
    """Means over the runs; behind them the mean difference to the first row, pair by pair, with its interval."""
    base = next(iter(rows))
    lines = [
        "| | preemptions | work lost, core-s | mean completion, s | p90 completion, s |",
        "|---|---|---|---|---|",
    ]
    for name, words in rows.items():
        cells = []
        for key in KEYS:
            mine, theirs = figures[f"{name}_{key}"]["runs"], figures[f"{base}_{key}"]["runs"]
            mean, other = statistics.mean(mine), statistics.mean(theirs)
            cell = f"{mean:.1f}"
            if name != base:
                apart = [a - b for a, b in zip(mine, theirs, strict=True)]
                cell += f" ({statistics.mean(apart) / other:+.1%} ± {half_width(apart) / other:.1%})"
            cells.append(cell)
        lines.append(f"| {words} | {' | '.join(cells)} |")
    return lines


def written() -> str:
    """All of it, of the files that there are."""
    parts = []
    for name, rows in FILES.items():
        path = RESULTS / f"{name}.json"
        if path.exists():
            figures = json.loads(path.read_text())["figures"]
            runs = len(figures["own_preemptions"]["runs"])
            parts += ["", f"`python -m benchmarks {name} --runs {runs}`:", "", *table(figures, rows)]
    return "\n".join([*parts, "", ""])


def page(text: str) -> str:
    """The page with the tables as they are by the files."""
    before, _, rest = text.partition(FIRST + "\n")
    _, _, after = rest.partition(LAST)
    return f"{before}{FIRST}\n{written()}{LAST}{after}"


if __name__ == "__main__":
    PAGE.write_text(page(PAGE.read_text()))
