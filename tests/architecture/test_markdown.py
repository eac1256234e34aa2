"""Check of Markdown files: lines of at most 120 characters, but for rows of tables; links lead to what is there."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
LONGEST_LINE = 120
#: Pages that `make docs` writes.
MADE = {"configuration.md", "cli.md", "modules.md", "results.md"}
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *(ROOT / "vagrant").rglob("*.md")])


def long_lines(text: str) -> Iterator[str]:
    """Lines that are too long, with their numbers. A row of a table cannot be broken."""
    for number, line in enumerate(text.splitlines(), 1):
        if len(line) > LONGEST_LINE and not line.lstrip().startswith("|"):
            yield f"{number}: {line[:60]}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_lines_are_short(page: Path) -> None:
    assert not list(long_lines(page.read_text(encoding="utf-8")))


def without_code(text: str) -> str:
    return re.sub(r"`[^`\n]*`", "", re.sub(r"```.*?```", "", text, flags=re.DOTALL))


def anchors(text: str) -> set[str]:
    """Of a page's headings, as the site makes them."""
    found = set()
    for heading in re.findall(r"^#+ (.*)$", re.sub(r"```.*?```", "", text, flags=re.DOTALL), re.MULTILINE):
        words = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading)
        found.add(re.sub(r"\s+", "-", re.sub(r"[^\w\s-]", "", words).strip().lower()))
    return found


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_to_pages_and_headings_that_are_there(page: Path) -> None:
    nowhere = []
    for target, heading in re.findall(r"\]\(\s*([^)#\s]*)(?:#([^)\s]+))?\)", without_code(page.read_text("utf-8"))):
        place = page.parent / target if target else page
        if "://" in target or target.startswith("mailto:") or place.name in MADE:
            continue
        if not place.exists() or (
            heading and place.suffix == ".md" and heading not in anchors(place.read_text("utf-8"))
        ):
            nowhere.append(f"{target}#{heading}")
    assert not nowhere
