"""Figures that README and docs quote are those of the files in benchmarks/results.

A paragraph that quotes says of what, in a comment that no reader of the page sees, in it or right below (of a table):

    A report costs 2.17 ms, 0.99 of what it does without history (0.97 to 1.07); 300 hosts.
    <!-- figures of history-cost: 2.17 report_cpu_ms, 0.99 report_to_without, 0.97 report_to_without.least,
    1.07 report_to_without.most; given: 300 -->

Each is a figure as it stands in the text and its key (`.least` or `.most` of its runs, else the median; `*1000` or
`/1000` where the page has another unit; `1-` where it tells what is missing to 1). `given`: numbers that are none.
`not kept`: numbers that were measured and stand in no file, in a paragraph that calls them *not kept*.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "benchmarks" / "results"
PAGES = sorted([ROOT / "README.md", *(ROOT / "docs").rglob("*.md")])
#: Pages in which a number with a unit is a claim, unless it is marked as given.
FRONT = [ROOT / "README.md", ROOT / "docs" / "index.md"]
MARK = re.compile(r"<!-- figures of ([\w-]+):\s(.*?)-->", re.DOTALL)
GENERATED = re.compile(r"<!-- from here on: written by .*?<!-- up to here -->", re.DOTALL)
QUOTE = re.compile(r"([\d.,]*\d) (1-)?(\w+)(?:\.(least|most))?(?:([*/])(\d+))?")
NUMBER = re.compile(r"(?<![\w.^,])(?:\d+(?:,\d{3})*(?:\.\d+)?|\.\d+)(?![\w^])")
UNIT = re.compile(r"\d (?:s|ms|us|MiB|%|times|seconds|points)\b|\d%")
#: What a paragraph says of figures that are in no file, and what one of measured figures says.
NOT_KEPT = re.compile(r"\*not\s+kept\*")
MEASURED = re.compile(
    rf"\bMeasured \(|{NOT_KEPT.pattern}|\*Missed|benchmarks/results/[\w-]+\.json`? ?[,;)]|[Mm]edians of five"
)


def blocks(text: str) -> Iterator[tuple[str, list[tuple[str, str]]]]:
    """Paragraphs and tables without code and generated parts, each with its marks: file, and what they say."""
    text = re.sub(r"^( *)```.*?^\1```", "", GENERATED.sub("", text), flags=re.MULTILINE | re.DOTALL)
    before = ""
    for block in re.split(r"\n\s*\n", text):
        marks = MARK.findall(block)
        prose = MARK.sub("", block).strip()
        if before and (prose or not marks):
            yield before, []
            before = ""
        if marks:
            yield prose or before, marks
            before = ""
        else:
            before = prose
    if before:
        yield before, []


def numbers(prose: str) -> list[str]:
    """Numbers in it, as they stand there; not those in code, links, and names as p99 or Fig. 8b."""
    return NUMBER.findall(re.sub(r"`[^`]*`|\]\([^)]*\)", " ", prose))


@cache
def figures_of(file: str) -> dict[str, Any]:
    return dict(json.loads((RESULTS / f"{file}.json").read_text())["figures"])


def parts(mark: str) -> dict[str, list[str]]:
    """What a mark says: figures and keys under an empty name, other numbers by their kind."""
    found = (part.rpartition(": ") for part in " ".join(mark.split()).split("; "))
    return {kind: words.split(", ") for kind, _, words in found}


def wrong(prose: str, marks: list[tuple[str, str]]) -> Iterator[str]:
    """What of a paragraph is not in the files, in words."""
    known: set[str] = set()
    for file, mark in marks:
        said = parts(mark)
        yield from (f"`{kind}` is no kind of number" for kind in set(said) - {"", "given", "not kept"})
        known |= {*said.get("given", ()), *said.get("not kept", ())}
        for number in said.get("not kept", ()):
            if number not in numbers(prose) or not NOT_KEPT.search(prose):
                yield f"{number} is not in the text, or that is not called *not kept*"
        for quote in said.get("", ()):
            found = QUOTE.fullmatch(quote)
            if found is None:
                yield f"`{quote}` is no figure and key"
                continue
            shown, rest, key, end, sign, factor = found.groups()
            known.add(shown)
            if key not in figures_of(file):
                yield f"{file}.json has no {key}"
                continue
            figure = figures_of(file)[key]
            value = {"least": min, "most": max}[end](figure["runs"]) if end else figure["value"]
            value *= {"*": float(factor or 1), "/": 1 / float(factor or 1), None: 1}[sign]
            value = 1 - value if rest else value
            if not alike(shown, value):
                yield f"{shown} is {value:.6g} in {file}.json ({key})"
            if shown not in numbers(prose):
                yield f"{shown} ({key}) is not in the text"
    if marks:
        yield from (f"{number} has no mark" for number in numbers(prose) if number not in known)


def alike(shown: str, value: float) -> bool:
    """Whether this is the value, rounded as it is shown; of whole numbers zeros at the end, from the third digit on."""
    plain = shown.replace(",", "")
    digits = len(plain.partition(".")[2])
    if "." not in plain:
        digits = -min(len(plain) - len(plain.rstrip("0")), max(len(plain) - 2, 0))
    return abs(abs(value) - float(plain)) <= 0.5001 * 10.0**-digits


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_figures_in_a_page_are_those_of_the_files(page: Path) -> None:
    found = [(prose[:60], words) for prose, marks in blocks(page.read_text()) for words in wrong(prose, marks)]
    assert not found


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_what_tells_measured_figures_says_of_which_file(page: Path) -> None:
    bare = []
    for prose, marks in blocks(page.read_text()):
        claims = MEASURED.search(prose) or (page in FRONT and UNIT.search(prose))
        if not marks and claims and numbers(prose):
            bare.append(prose[:80])
    assert not bare


def test_another_figure_would_be_seen() -> None:
    (prose, marks), *_ = (found for found in blocks((ROOT / "README.md").read_text()) if found[1])
    assert not list(wrong(prose, marks))
    shown = QUOTE.findall(marks[0][1])[0][0]
    assert list(wrong(prose.replace(f"{shown} ", f"{int(shown) + 1} "), marks))
    (file, mark), *_ = marks
    assert list(wrong(prose, [(file, mark.replace(f"{shown} ", f"{int(shown) + 1} ", 1))]))


def test_a_figure_of_no_file_stands_where_it_is_called_not_kept() -> None:
    mark = [("idle", "not kept: 59.8")]
    assert not list(wrong("The libraries alone have 59.8 (*not kept*).", mark))
    assert list(wrong("The libraries alone have 59.8.", mark))
    assert list(wrong("The libraries alone have 59.9 (*not kept*).", mark))
    assert list(wrong("The libraries alone have 59.8.", [("idle", "lost: 59.8")]))


def test_a_paragraph_that_has_figures_of_no_file_needs_a_mark() -> None:
    assert MEASURED.search("The day before it was 2.7 % (*not kept*).")
