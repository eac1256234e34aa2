"""The dashboard as it is served: one page, nothing from elsewhere, and a policy that lets nothing else run."""

from __future__ import annotations

import base64
import hashlib
import re
from html.parser import HTMLParser
from pathlib import Path

import aiohttp
import pytest

from cluster_manager.dashboard import page
from tests.manager.with_agent import lab_of


class Elements(HTMLParser):
    """Every element with its attributes, and the texts of scripts and styles."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[tuple[str, dict[str, str | None]]] = []
        self.texts: dict[str, list[str]] = {"script": [], "style": []}
        self._inside = ""

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, dict(attrs)))
        self._inside = tag

    def handle_endtag(self, tag: str) -> None:
        self._inside = ""

    def handle_data(self, data: str) -> None:
        if self._inside in self.texts:
            self.texts[self._inside].append(data)


@pytest.fixture
def elements() -> Elements:
    parser = Elements()
    parser.feed(page().html)
    return parser


@pytest.mark.usefixtures("each_store")
async def test_the_page_is_served_without_a_token_and_with_its_policy(tmp_path: Path) -> None:
    async with lab_of(tmp_path) as lab, aiohttp.ClientSession() as session:
        async with session.get(f"{lab.url}/") as answer:
            assert (answer.status, answer.content_type) == (200, "text/html")
            assert answer.headers["Content-Security-Policy"] == page().policy
            assert answer.headers["Cache-Control"] == "no-store"
            assert await answer.text() == page().html
        async with session.get(f"{lab.url}/?token=secret") as answer:
            assert answer.status == 400, "a token does not belong into a URL"
        async with session.get(f"{lab.url}/v1/hosts") as answer:
            assert answer.status == 401, "the page is open, the data are not"


def test_only_what_is_in_the_page_is_run_and_applied(elements: Elements) -> None:
    rules = dict(rule.split(" ", 1) for rule in page().policy.split("; "))
    assert rules["default-src"] == rules["base-uri"] == rules["form-action"] == rules["frame-ancestors"] == "'none'"
    assert rules["connect-src"] == "'self'"
    for tag in ("script", "style"):
        (text,) = elements.texts[tag]
        digest = base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
        assert rules[f"{tag}-src"] == f"'sha256-{digest}'"


def test_nothing_comes_from_elsewhere_and_nothing_is_run_by_an_attribute(elements: Elements) -> None:
    for tag, attributes in elements.found:
        assert not [name for name in attributes if name.startswith("on") or name in ("src", "style", "action")], tag
        assert attributes.get("href", "data:,") == "data:,"
    # The name of a namespace is no address that is asked.
    assert re.findall(r"\w+://[^\"\s]+", page().html) == ["http://www.w3.org/2000/svg"]


def test_what_comes_from_the_cluster_is_set_as_text_and_the_token_stays_in_memory(elements: Elements) -> None:
    (script,) = elements.texts["script"]
    for never in ("innerHTML", "outerHTML", "insertAdjacentHTML", "document.write", "eval(", "Function("):
        assert never not in script
    for store in ("localStorage", "sessionStorage", "indexedDB", "document.cookie", "location.", "history."):
        assert store not in script
    assert script.count("${token}") == 1, "in the header only"
    assert "Authorization: `Bearer ${token}`" in script


def test_every_place_that_the_script_fills_is_in_the_page(elements: Elements) -> None:
    (script,) = elements.texts["script"]
    places = {attributes["id"] for _, attributes in elements.found if "id" in attributes}
    assert set(re.findall(r'byId\("([a-z-]+)"\)', script)) <= places
    listed = re.search(r"for \(const id of \[([^\]]+)\]", script)
    assert listed is not None
    assert set(re.findall(r'"([a-z-]+)"', listed[1])) <= places


def test_a_preempted_vm_is_shown_with_its_place_in_the_queue(elements: Elements) -> None:
    (script,) = elements.texts["script"]
    assert "`, ${vm.preempted.sentence}`" in script
    assert 'vm.saved_mib == null ? "" : " (suspended)"' in script
