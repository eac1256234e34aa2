"""The tables on the site are those of the kept results."""

from __future__ import annotations

import json
import re
import runpy
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[3]
PAGE = ROOT / "docs" / "research" / "interval-aware.md"


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    monkeypatch.syspath_prepend(ROOT / "scripts")
    return runpy.run_path(str(ROOT / "scripts" / "interval_tables.py"))


def test_the_tables_of_the_page_are_those_of_the_kept_results(made: dict[str, Any]) -> None:
    page = PAGE.read_text()
    assert made["written"](page) == page


def test_another_figure_in_the_page_would_be_seen(made: dict[str, Any]) -> None:
    page = PAGE.read_text()
    begin = page.index(made["BEGIN"])
    changed = page[:begin] + re.sub(r" ± (\d)", r" ± 9\1", page[begin:], count=1)
    assert changed != page
    assert made["written"](changed) == page


def test_each_kept_result_says_how_it_was_made(made: dict[str, Any]) -> None:
    names = {path.stem for path in (ROOT / "experiments" / "results").glob("intervals-*.json")}
    assert names >= made["SECTIONS"].keys()
    for name in names:
        kept = json.loads((ROOT / "experiments" / "results" / f"{name}.json").read_text())
        file = re.match(r"ebb sim run (experiments/[\w-]+\.toml)", kept["command"])
        assert file is not None
        assert (ROOT / file[1]).exists()
        assert re.fullmatch(r"[0-9a-f]{40}", kept["commit"].partition("+")[0])
        assert len(kept["seeds"]) >= 3
