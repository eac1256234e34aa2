"""The dashboard as it is served: nothing comes from elsewhere, and the policy lets nothing else run."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from html.parser import HTMLParser
from pathlib import Path

import aiohttp
import pytest

from cluster_manager import dashboard
from cluster_manager.dashboard import NAMES, PAGE, POLICY, file_of
from tests.manager.with_agent import lab_of

FOLDER = Path(dashboard.__file__).parent
MODULES = sorted(name for name in NAMES if name.endswith(".js") and not name.startswith("uPlot"))


def text_of(name: str) -> str:
    return file_of(name).content.decode()


class Elements(HTMLParser):
    """Every element with its attributes."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[tuple[str, dict[str, str | None]]] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, dict(attrs)))


@pytest.fixture
def elements() -> Elements:
    parser = Elements()
    parser.feed(text_of(PAGE))
    return parser


@pytest.mark.usefixtures("each_store")
async def test_the_page_is_served_without_a_token_and_with_its_policy(tmp_path: Path) -> None:
    async with lab_of(tmp_path) as lab, aiohttp.ClientSession() as session:
        async with session.get(f"{lab.url}/") as answer:
            assert (answer.status, answer.content_type) == (200, "text/html")
            assert answer.headers["Content-Security-Policy"] == POLICY
            assert answer.headers["Cache-Control"] == "no-cache"
            assert await answer.text() == text_of(PAGE)
        async with session.get(f"{lab.url}/?token=secret") as answer:
            assert answer.status == 400, "a token does not belong into a URL"
        async with session.get(f"{lab.url}/v1/hosts") as answer:
            assert answer.status == 401, "the page is open, the data are not"


@pytest.mark.usefixtures("each_store")
async def test_its_parts_are_served_as_what_they_are_and_not_again_while_they_stay_the_same(tmp_path: Path) -> None:
    async with lab_of(tmp_path) as lab, aiohttp.ClientSession() as session:
        for name in NAMES:
            async with session.get(f"{lab.url}/page/{name}") as answer:
                kind = "text/css" if name.endswith(".css") else "text/javascript"
                assert (answer.status, answer.content_type) == (200, kind)
                assert answer.headers["X-Content-Type-Options"] == "nosniff"
                assert await answer.read() == file_of(name).content
                tag = answer.headers["ETag"]
            async with session.get(f"{lab.url}/page/{name}", headers={"If-None-Match": tag}) as answer:
                assert (answer.status, await answer.read()) == (304, b"")
        for other in ("nothing.js", PAGE, "__init__.py", "uPlot-LICENSE", "%2e%2e%2fmain.js"):
            async with session.get(f"{lab.url}/page/{other}") as answer:
                assert answer.status in (400, 404), other


@pytest.mark.usefixtures("each_store")
async def test_a_token_is_told_its_name_and_role(tmp_path: Path) -> None:
    async with lab_of(tmp_path) as lab:
        said = await lab.cluster.get("/v1/whoami")
        assert (said["name"], said["role"]) == ("token-file", "admin")
        assert (await lab.cluster.call("GET", "/v1/whoami", token="wrong"))[0] == 401


def test_only_what_the_manager_serves_is_run_applied_and_asked() -> None:
    rules = dict(rule.split(" ", 1) for rule in POLICY.split("; "))
    assert rules["default-src"] == rules["base-uri"] == rules["form-action"] == rules["frame-ancestors"] == "'none'"
    assert rules["script-src"] == rules["style-src"] == rules["connect-src"] == "'self'"
    assert (rules["require-trusted-types-for"], rules["trusted-types"]) == ("'script'", "'none'")


def test_nothing_comes_from_elsewhere_and_nothing_is_run_by_an_attribute(elements: Elements) -> None:
    for tag, attributes in elements.found:
        assert not [name for name in attributes if name.startswith("on") or name in ("style", "action")], tag
        for name in ("src", "href"):
            assert re.fullmatch(r"data:,|#[a-z]+|/page/[A-Za-z.]+", attributes.get(name) or "data:,"), attributes
            served = (attributes.get(name) or "").removeprefix("/page/")
            assert served in NAMES or not (attributes.get(name) or "").startswith("/")
    for name in (*MODULES, "style.css"):
        # The name of a namespace is no address that is asked.
        assert set(re.findall(r"\w+://[^\"\s]+", text_of(name))) <= {"http://www.w3.org/2000/svg"}, name
        assert set(re.findall(r'from "([^"]+)"', text_of(name))) <= {f"./{other}" for other in MODULES}, name
    assert "<style" not in text_of(PAGE)
    assert not re.findall(r"<script(?![^>]* src=)", text_of(PAGE))


def test_what_comes_from_the_cluster_is_set_as_text_and_the_token_stays_in_one_module() -> None:
    for name in MODULES:
        for never in ("innerHTML", "outerHTML", "insertAdjacentHTML", "document.write", "eval(", "Function("):
            assert never not in text_of(name), name
        for store in ("localStorage", "sessionStorage", "indexedDB", "document.cookie"):
            assert store not in text_of(name) or (name, store) == ("main.js", "localStorage"), name
        # The address holds which view is on show: what the token's module does not know, it cannot put there.
        if "location" in text_of(name) or "history.replaceState" in text_of(name):
            assert name == "main.js"
    assert set(re.findall(r"\w+\.(?:set|get|remove)Item\(([^,)]*)", text_of("main.js"))) == {'"theme"'}
    assert [name for name in MODULES if "Bearer" in text_of(name)] == ["api.js"]
    assert text_of("api.js").count("${token}") == 1, "in the header only"
    assert "export let" not in text_of("api.js")


@pytest.mark.parametrize("name", MODULES)
def test_every_module_is_one_that_a_browser_can_read(name: str) -> None:
    node = shutil.which("node")
    assert node is not None, "install what scripts/install-deps.sh test does"
    run = subprocess.run(
        [node, "--check", "--input-type=module", "-"], input=text_of(name), capture_output=True, text=True, check=False
    )
    assert run.returncode == 0, run.stderr


def test_a_layer_of_which_nothing_is_known_is_drawn_as_a_hole_not_as_nothing() -> None:
    drawing = re.search(r"function stacked\(.*?\n}\n", text_of("chart.js"), re.DOTALL)
    assert drawing is not None
    columns = {"hypervisor_m": [1, 1, None], "guest_m": [2, 2, None], "application_m": [1, None, None]}
    script = f"{drawing[0]} console.log(JSON.stringify(stacked({json.dumps(columns)}, 'm')))"
    run = subprocess.run(["node", "-e", script], capture_output=True, text=True, check=True)
    assert json.loads(run.stdout) == [[3, 3, None], [2, 2, None], [1, None, None]]


def test_every_element_that_a_module_looks_for_is_in_the_page(elements: Elements) -> None:
    places = {attributes["id"] for _, attributes in elements.found if "id" in attributes}
    texts = "".join(map(text_of, MODULES))
    looked_for = set(re.findall(r'(?:byId|getElementById)\("([a-z-]+)"\)', texts))
    assert looked_for - {"dialog-title"} <= places


def test_the_chart_library_is_shipped_with_its_version_and_licence() -> None:
    licence = (FOLDER / "vendor/uPlot-LICENSE").read_text()
    assert licence.startswith("The MIT License (MIT)")
    assert "uPlot (v1.6.32)" in text_of("uPlot.iife.min.js")[:80]
    assert '"dashboard/*", "dashboard/vendor/*"' in (FOLDER.parents[1] / "pyproject.toml").read_text()
