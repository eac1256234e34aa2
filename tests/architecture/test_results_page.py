"""The page of results says of each aim whether it is met, and nothing that is not so of all files."""

from __future__ import annotations

import importlib.util
import re
import shutil
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture
def hooks(monkeypatch: pytest.MonkeyPatch) -> Any:
    """docs/_hooks.py, without MkDocs, which only the site needs."""
    for name, words in (("mkdocs.config.defaults", ("MkDocsConfig",)), ("mkdocs.structure.files", ("File", "Files"))):
        module = ModuleType(name)
        for word in words:
            setattr(module, word, object)
        for part in (name.split(".")[0], name.rpartition(".")[0]):
            monkeypatch.setitem(sys.modules, part, ModuleType(part))
        monkeypatch.setitem(sys.modules, name, module)
    spec = importlib.util.spec_from_file_location("docs_hooks", ROOT / "docs" / "_hooks.py")
    assert spec is not None
    assert spec.loader is not None
    made = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(made)
    return made


def test_an_aim_is_met_or_missed_by_the_figure_beside_it(hooks: Any) -> None:
    assert hooks.aimed(1.79, "< 1.15") == "at most 1.15: **missed**"
    assert hooks.aimed(1.15, "< 1.15") == "at most 1.15: met"
    assert hooks.aimed(1.41, "> 1.8 (the paper)") == "at least 1.8 (the paper): **missed**"
    assert hooks.aimed(2.0, "> 1.8") == "at least 1.8: met"
    assert hooks.aimed(2.0, "") == ""


def test_every_aim_that_is_missed_is_marked_on_the_page_of_results(hooks: Any) -> None:
    page = hooks.results()
    rows = {what: row for row in page.splitlines() for *_, what, _ in hooks.HIGHLIGHTS if row.startswith(f"| {what} |")}
    assert set(rows) == {what for *_, what, _ in hooks.HIGHLIGHTS}, "each has its figure"
    assert "**missed**" in rows["two real guests deflated at once on two cores, beside one"]
    assert page.count("**missed**") == sum("**missed**" in row for row in rows.values())


def test_a_benchmark_has_as_many_runs_as_most_of_its_figures(hooks: Any) -> None:
    page = hooks.results()
    counts = {name: page.partition(f"\n## {name}\n")[2].split(" runs;")[0].split()[-1] for name in ("levels", "tasks")}
    assert counts == {"levels": "5", "tasks": "10"}


def test_a_file_that_is_not_to_be_quoted_is_refused(
    hooks: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    shutil.copy(ROOT / "benchmarks/results/top.json", tmp_path)
    (tmp_path / "cpu.json").write_text('{"quick": true, "figures": {}}')
    monkeypatch.setattr(hooks, "RESULTS", tmp_path)
    with pytest.raises(ValueError, match=r"^cpu: .*not to be quoted"):
        hooks.results()


def test_files_with_guests_are_those_whose_benchmarks_bring_up_a_host(hooks: Any) -> None:
    packages = ROOT / "benchmarks"
    runner = (packages / "runner.py").read_text()
    entries = re.findall(r'"([\w-]+)": (\w+)\.(\w+),', runner[: runner.index("TABLES")])
    found = set()
    for name, module, _ in entries:
        (path,) = packages.rglob(f"{module}.py")
        if re.search(r"\bbench\(", path.read_text()) and name != "metrics-manager":
            found.add(name)
    assert found == set(hooks.GUESTS)
