"""Check of the form of Markdown files: lines of at most 120 characters, but for rows of tables."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
LONGEST_LINE = 120
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *(ROOT / "vagrant").rglob("*.md")])


def long_lines(text: str) -> Iterator[str]:
    """Lines that are too long, with their numbers. A row of a table cannot be broken."""
    for number, line in enumerate(text.splitlines(), 1):
        if len(line) > LONGEST_LINE and not line.lstrip().startswith("|"):
            yield f"{number}: {line[:60]}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_lines_are_short(page: Path) -> None:
    assert not list(long_lines(page.read_text(encoding="utf-8")))
