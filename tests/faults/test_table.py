"""docs/reference/faults.md is held against the tests: none is made up, none is left out."""

from __future__ import annotations

import ast
import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
TABLE = ROOT / "docs" / "reference" / "faults.md"
LEAST_FAULTS = 25


def rows() -> list[list[str]]:
    lines = [line for line in TABLE.read_text().splitlines() if line.startswith("|")]
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    return [row for row in cells if row[0] not in ("fault", "---")]


def named() -> set[str]:
    return {test for row in rows() for test in re.findall(r"`(tests/\S+::\w+)`", row[-1])}


def functions_of(path: Path) -> set[str]:
    functions = (ast.FunctionDef, ast.AsyncFunctionDef)
    found = [node.name for node in ast.parse(path.read_text()).body if isinstance(node, functions)]
    return {f"{path.relative_to(ROOT)}::{name}" for name in found if name.startswith("test_")}


def test_the_table_has_25_faults_with_all_that_belongs_to_them() -> None:
    assert len(rows()) >= LEAST_FAULTS
    assert len({row[0] for row in rows()}) == len(rows())
    assert [row for row in rows() if len(row) != 4 or not all(row)] == []
    assert [row[0] for row in rows() if not re.fullmatch(r"`tests/\S+::\w+`(, `tests/\S+::\w+`)*", row[3])] == []


def test_every_test_of_the_table_exists() -> None:
    there = {test for path in {test.partition("::")[0] for test in named()} for test in functions_of(ROOT / path)}
    assert named() - there == set()


def test_every_test_of_a_fault_stands_in_the_table() -> None:
    here = {test for path in Path(__file__).parent.glob("test_*.py") for test in functions_of(path)}
    assert here - functions_of(Path(__file__)) - named() == set()
