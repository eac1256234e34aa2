"""The promise of v1: today's OpenAPI documents against those in `tests/rest/base`, and the rule itself.

The base is what clients may rely on. At a release it is replaced by the documents of that release:
``cp docs/openapi/*.json tests/rest/base/``.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ebbtide.cli.openapi import documents
from tests.rest.compatibility import broken

BASE = Path(__file__).parent / "base"
Change = Callable[[dict[str, Any]], object]


@pytest.mark.parametrize("name", ["manager.json", "hostagent.json"])
def test_nothing_that_clients_rely_on_is_gone(name: str) -> None:
    assert broken(json.loads((BASE / name).read_text()), documents()[name]) == []


def vms(document: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = document["paths"]["/v1/vms"]
    return found


def schema(document: dict[str, Any], name: str) -> dict[str, Any]:
    found: dict[str, Any] = document["components"]["schemas"][name]
    return found


BREAKING: dict[str, tuple[Change, str]] = {
    "a route goes": (lambda d: d["paths"].pop("/v1/engine"), "GET /v1/engine is gone"),
    "a parameter goes": (lambda d: vms(d)["get"]["parameters"].pop(0), "GET /v1/vms: limit is gone"),
    "a parameter is required": (
        lambda d: vms(d)["get"]["parameters"][2].update(required=True),
        "GET /v1/vms: host is required now",
    ),
    "a field of a request goes": (
        lambda d: schema(d, "VMSpecInput")["properties"].pop("template"),
        "VMSpecInput.template is gone",
    ),
    "a field of a request is required": (
        lambda d: schema(d, "VMSpecInput")["required"].append("template"),
        "VMSpecInput.template is required now",
    ),
    "a limit is lower": (
        lambda d: schema(d, "VMRequest")["properties"]["deadline_s"].update(maximum=10),
        "VMRequest.deadline_s: maximum is lower",
    ),
    "a default changes": (
        lambda d: schema(d, "VMRequest")["properties"]["deadline_s"].update(default=1.0),
        "VMRequest.deadline_s has another default",
    ),
    "a word is no longer taken": (
        lambda d: schema(d, "Priority")["enum"].remove("harvest"),
        "Priority: takes fewer words",
    ),
    "a field of an answer goes": (
        lambda d: schema(d, "ClusterVM")["properties"].pop("sentence"),
        "ClusterVM.sentence is gone",
    ),
    "a field of an answer may be missing": (
        lambda d: schema(d, "ClusterVM")["required"].remove("sentence"),
        "ClusterVM.sentence is no longer always there",
    ),
    "a field of an answer may be null": (
        lambda d: schema(d, "ClusterVM")["properties"].update(
            sentence={"anyOf": [{"type": "string"}, {"type": "null"}]}
        ),
        "ClusterVM.sentence: now null",
    ),
    "an answer goes": (lambda d: vms(d)["post"]["responses"].pop("409"), "POST /v1/vms: 409 is gone"),
    "a header goes": (
        lambda d: vms(d)["post"]["responses"]["202"].pop("headers"),
        "POST /v1/vms: 202: the header Location is gone",
    ),
}
HARMLESS: dict[str, Change] = {
    "a route comes": lambda d: d["paths"].update({"/v1/new": copy.deepcopy(vms(d))}),
    "a parameter comes": lambda d: vms(d)["get"]["parameters"].append(
        {"name": "new", "in": "query", "required": False, "schema": {"type": "string"}}
    ),
    "a field of a request comes": lambda d: schema(d, "VMSpecInput")["properties"].update(new={"type": "string"}),
    "a field of an answer comes": lambda d: schema(d, "ClusterVM")["properties"].update(new={"type": "string"}),
    "a kind of event comes": lambda d: schema(d, "Event")["properties"]["kind"]["enum"].append("new"),
    "a limit is higher": lambda d: schema(d, "VMRequest")["properties"]["deadline_s"].update(maximum=1e6),
}


@pytest.mark.parametrize("name", BREAKING)
def test_what_breaks_clients_is_found(name: str) -> None:
    change, told = BREAKING[name]
    before = documents()["manager.json"]
    now = copy.deepcopy(before)
    change(now)
    assert told in broken(before, now)


@pytest.mark.parametrize("name", HARMLESS)
def test_what_clients_do_not_see_is_let_pass(name: str) -> None:
    before = documents()["manager.json"]
    now = copy.deepcopy(before)
    HARMLESS[name](now)
    assert now != before
    assert broken(before, now) == []
