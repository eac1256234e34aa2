"""Writes the tables of docs/research/matching-simulated.md, of experiments/results/*.json.

``matcher_tables.py [RESULTS...]``: directories that ``ebb sim run`` wrote are first kept as such files: of each case
the values by seed of what is compared, and the means of all else.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator

from kept_results import ROOT, begin, placed, rewrite, sections
from matcher_sections.claims import claims
from matcher_sections.orders import drawn, heartbeats, loads, nine, orders, rivals
from matcher_sections.plain import plain
from matcher_sections.pools import acquirer, allocations, bounds, calm, costs, equal, mixed, others, persistent, wind
from matcher_sections.predictions import calibration, estimated, foresight, known, runtimes

PAGE = ROOT / "docs" / "research" / "matching-simulated.md"
BEGIN = begin("matcher_tables.py")


#: Sections by the results that they are made of.
SECTIONS = {
    "rivals": rivals,
    "orders": orders,
    "heartbeats": heartbeats,
    "persistent": persistent,
    "mixed": mixed,
    "acquirer-persistent": acquirer,
    "acquirer-bounds": bounds,
    "acquirer": allocations,
    "costs-persistent": costs,
    "costs-others": others,
    "costs-equal": equal,
    "matching": nine,
    "matching-load": loads,
    "runtimes": runtimes,
    "estimates": estimated,
    "calm": calm,
    "wind": wind,
    "calibration": calibration,
    "foresight": foresight,
    "known": known,
    "drawn-lives": drawn,
}


def first() -> Iterator[str]:
    """What is made of several results."""
    yield from claims()
    yield ""
    yield from plain()


def written(page: str) -> str:
    """The page with the tables in their place."""
    return placed(page, BEGIN, sections(first, SECTIONS))


if __name__ == "__main__":
    rewrite(PAGE, written, sys.argv[1:])
