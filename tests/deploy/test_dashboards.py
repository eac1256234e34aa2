"""The dashboards: made by their generator, of metrics that exist, and laid out without overlap."""

from __future__ import annotations

import json
import re
from itertools import combinations
from typing import Any

import pytest

from deploy.grafana.dashboards import ALL, DIRECTORY, WIDE, document_of, expressions, text_of
from deploy.prometheus.reference import PAGE, page
from tests.deploy.names import unknown_names


@pytest.mark.parametrize("name", ALL)
def test_what_is_checked_in_is_what_the_generator_writes(name: str) -> None:
    assert (DIRECTORY / name).read_text() == text_of(ALL[name]), "make metrics writes them anew"


@pytest.mark.parametrize("name", ALL)
def test_every_panel_asks_for_metrics_that_exist(name: str) -> None:
    document = json.loads((DIRECTORY / name).read_text())
    asked = expressions(document)
    assert len(asked) > 20
    for expression in asked:
        assert re.search(r"\b(ebbtide|process)[_:]", expression)
        assert not unknown_names(expression), expression


@pytest.mark.parametrize("name", ALL)
def test_panels_do_not_overlap(name: str) -> None:
    places = [panel["gridPos"] for panel in document_of(ALL[name])["panels"]]
    for one, other in combinations(places, 2):
        beside = one["x"] + one["w"] <= other["x"] or other["x"] + other["w"] <= one["x"]
        above = one["y"] + one["h"] <= other["y"] or other["y"] + other["h"] <= one["y"]
        assert beside or above, (one, other)
    assert max(place["x"] + place["w"] for place in places) == WIDE
    assert len({panel["id"] for panel in document_of(ALL[name])["panels"]}) == len(places)


def panels_that_ask(pattern: str) -> list[tuple[dict[str, Any], re.Match[str]]]:
    panels = [panel for dashboard in ALL.values() for panel in document_of(dashboard)["panels"]]
    asked = [(panel, target["expr"]) for panel in panels for target in panel.get("targets", ())]
    return [(panel, found) for panel, expression in asked if (found := re.search(pattern, expression))]


def test_what_divides_like_by_like_is_shown_as_a_share() -> None:
    divided = panels_that_ask(r"_(cpu_cores|bytes|seconds)\S* / \S*_\1\b")
    assert len(divided) == 2
    assert [panel["title"] for panel, _ in divided if panel["fieldConfig"]["defaults"]["unit"] != "percentunit"] == []


def test_what_is_always_1_is_shown_by_its_name() -> None:
    flags = panels_that_ask(r" == 1$")
    assert [(panel["title"], panel["options"]["textMode"]) for panel, _ in flags] == [
        ("State", "name"),
        ("Mode", "name"),
    ]


def test_the_reference_is_made_from_the_declarations() -> None:
    assert PAGE.read_text(encoding="utf-8") == page(), "make metrics writes it anew"
