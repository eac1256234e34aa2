"""Check of the recipes in CONTRIBUTING.md: at most four files each, which exist and define the symbols named."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
MOST_FILES = 4


def recipes() -> dict[str, list[tuple[str, list[str]]]]:
    """The rows of each recipe's table: a file and its symbols."""
    _, _, text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8").partition("## Ten changes")
    found: dict[str, list[tuple[str, list[str]]]] = {}
    for part in text.split("\n### ")[1:]:
        title, _, body = part.partition("\n")
        rows = [line.strip("| ").split("|") for line in body.splitlines() if line.startswith("| `")]
        found[title] = [(file.strip(" `"), re.findall(r"`([^`]+)`", symbols)) for file, symbols, *_ in rows]
    return found


def defined_in(path: Path) -> set[str]:
    """Names of functions, methods, classes, and of assignments outside of functions."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            found.add(node.name)
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            found |= {target.id for target in targets if isinstance(target, ast.Name)}
    return found


def test_there_are_ten_recipes() -> None:
    assert len(recipes()) == 10


@pytest.mark.parametrize("title", recipes())
def test_a_recipe_names_at_most_four_files_that_exist_with_their_symbols(title: str) -> None:
    rows = recipes()[title]
    assert 1 <= len(rows) <= MOST_FILES
    for file, symbols in rows:
        path = ROOT / file
        assert path.is_file(), file
        if symbols:
            assert set(symbols) - defined_in(path) == set(), file
