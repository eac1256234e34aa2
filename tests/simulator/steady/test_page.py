"""The table on the site is that of the kept results."""

from __future__ import annotations

import runpy
from pathlib import Path

ROOT = Path(__file__).parents[3]


def test_the_table_of_the_page_is_that_of_the_kept_results_and_another_figure_would_be_seen() -> None:
    made = runpy.run_path(str(ROOT / "scripts" / "steady_tables.py"))
    page = (ROOT / "docs" / "research" / "steady.md").read_text()
    assert made["written"](page) == page
    changed = page.replace("| arrivals that fit at once, % of those offered | ", "| arrivals that fit at once | 99")
    assert changed != page
    assert made["written"](changed) == page
