"""Writes the tables of the benchmark `tasks` into docs/research/benchmarks.md, of benchmarks/results/tasks*.json.

python scripts/tasks_tables.py
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

import numpy as np
from kept_results import ROOT, begin, head, measured, of_sums, placed, row

PAGE: Final = ROOT / "docs/research/benchmarks.md"
RESULTS: Final = ROOT / "benchmarks/results"
BEGIN: Final = begin("tasks_tables.py")
KEYS: Final = ("preemptions", "lost_core_s", "mean_completion_s", "p90_completion_s")
OWN, SPREAD, MATCHED = "Slurm's own choice, its default", "Slurm's own choice, `LLN=YES`", "**matched**"
#: Tables of each file. Rows: side or scheme, and what it is; the first is what the others are held against.
FILES: Final = {
    "tasks": (
        {"own": OWN, "spread": SPREAD, "matched": MATCHED},
        {"spread": SPREAD, "matched": MATCHED},
    ),
    "tasks-simulated": (
        {
            "own": "first fit",
            "spread": "least loaded (as Slurm's `LLN=YES`)",
            "idle": "worst fit: the most idle cores",
            "capacity-random": "`capacity-random`",
            "live": "`live`: a manager's default, landmarks",
            "sized-live": "`sized-live`: as the real run, Eq. 1 with sizes",
            "oracle-no-kill": "`oracle-no-kill`",
        },
        {
            "spread": "least loaded (as Slurm's `LLN=YES`)",
            "live": "`live`",
            "sized-live": "`sized-live`",
            "oracle-no-kill": "`oracle-no-kill`",
        },
    ),
}


def table(figures: dict[str, Any], rows: dict[str, str]) -> Iterator[str]:
    """Means over the runs; behind them the change of their sum against the first row's, with its interval."""
    base = next(iter(rows))
    yield from head("", "preemptions", "work lost, core-s", "mean completion, s", "p90 completion, s")
    for name, words in rows.items():
        cells = []
        for key in KEYS:
            mine, theirs = (np.array(figures[f"{one}_{key}"]["runs"], np.float64) for one in (name, base))
            cell = f"{mine.mean():.1f}"
            if name != base:
                ratio, half = of_sums(mine, theirs)
                cell += f" ({ratio - 1.0:+.1%} ± {half:.1%})"
            cells.append(cell)
        yield row(words, *cells)


def tables() -> Iterator[str]:
    """All of it, of the files that there are."""
    for name, shown in FILES.items():
        path = RESULTS / f"{name}.json"
        if path.exists():
            figures = measured(path)
            runs = len(figures["own_preemptions"]["runs"])
            yield from ("", f"`python -m benchmarks {name} --runs {runs}`:")
            for rows in shown:
                yield from ("", *table(figures, rows))


def written(page: str) -> str:
    """The page with the tables as they are by the files."""
    return placed(page, BEGIN, tables())


if __name__ == "__main__":
    PAGE.write_text(written(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
