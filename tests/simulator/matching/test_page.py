"""The tables on the site are those of the kept results."""

from __future__ import annotations

import json
import runpy
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[3]
PAGE = ROOT / "docs" / "research" / "matching-simulated.md"


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    monkeypatch.syspath_prepend(ROOT / "scripts")
    return runpy.run_path(str(ROOT / "scripts" / "matcher_tables.py"))


def test_the_tables_of_the_page_are_those_of_the_kept_results(made: dict[str, Any]) -> None:
    page = PAGE.read_text()
    assert made["written"](page) == page


def test_another_figure_in_the_page_would_be_seen(made: dict[str, Any]) -> None:
    page = PAGE.read_text()
    changed = page.replace(" ± ", " ± 9", 1) if page.index(" ± ") > page.index(made["BEGIN"]) else ""
    changed = changed or page.replace(made["END"], f"| 1 |\n{made['END']}")
    assert changed != page
    assert made["written"](changed) == page


def test_each_kept_result_says_how_it_was_made(made: dict[str, Any]) -> None:
    kept_names = {path.stem for path in (ROOT / "experiments" / "results").glob("*.json")}
    names = kept_names & made["SECTIONS"].keys() - {"calibration"}
    assert len(names) >= 5
    for name in names:
        kept = json.loads((ROOT / "experiments" / "results" / f"{name}.json").read_text())
        assert kept["command"].startswith(f"ebb sim run experiments/{name}.toml")
        assert len(kept["commit"].partition("+")[0]) == 40
        assert kept["seeds"] == list(range(1, 11))
        assert (ROOT / "experiments" / f"{name}.toml").exists()
