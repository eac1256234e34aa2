"""Every view in both themes by axe-core, and on a phone's width."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
from playwright.async_api import Browser

from tests.browser.chromium import Tab, tab_of
from tests.browser.stage import staged

pytestmark = pytest.mark.service

AXE = Path(sys.prefix) / "npm-browser/node_modules/axe-core/axe.min.js"
VIEWS = ("overview", "vms", "tasks", "preempted", "operations", "events", "host/host-a", "vm/shop", "task/vacuum")
SERIOUS = ("serious", "critical")


async def violations(tab: Tab) -> list[tuple[str, Any]]:
    found: Any = await tab.page.evaluate("axe.run(document, { resultTypes: ['violations'] })")
    return [
        (row["id"], [(node["html"][:150], node["failureSummary"][:300]) for node in row["nodes"][:3]])
        for row in found["violations"]
        if row["impact"] in SERIOUS
    ]


@pytest.mark.parametrize("theme", ["light", "dark"])
async def test_no_view_has_a_serious_violation_or_says_an_error(tmp_path: Path, browser: Browser, theme: Any) -> None:
    async with staged(tmp_path) as hosts:
        assert hosts.cluster.manager is not None
        await hosts.cluster.manager.recorder.look()
        tab = await tab_of(browser, color_scheme=theme)
        await tab.page.goto(hosts.url)
        await tab.page.evaluate(AXE.read_text(encoding="utf-8"))
        found = {"token": await violations(tab)}
        await tab.enter(hosts.url)
        operation = (await hosts.cluster.get("/v1/operations?vm=database"))["operations"][0]["request_id"]
        for view in (*VIEWS, f"operation/{operation}"):
            await tab.go(view)
            found[view] = await violations(tab)
        await tab.go("vms")
        await tab.page.keyboard.press("n")
        await tab.page.locator("#act").wait_for()
        found["a form"] = await violations(tab)
        assert {view: rows for view, rows in found.items() if rows} == {}
        assert tab.errors == []


async def test_nothing_is_cut_off_on_a_phone(tmp_path: Path, browser: Browser) -> None:
    async with staged(tmp_path) as hosts:
        assert hosts.cluster.manager is not None
        await hosts.cluster.manager.recorder.look()
        tab = await tab_of(browser, viewport={"width": 400, "height": 800})
        await tab.enter(hosts.url)
        for view in VIEWS:
            await tab.go(view)
            assert await tab.page.evaluate("document.documentElement.scrollWidth") <= 400, view
            # Nothing but charts and tables of figures may be scrolled sideways.
            wide = "[...document.querySelectorAll('#view .table')].filter(one => one.scrollWidth > one.clientWidth + 1)"
            assert await tab.page.evaluate(f"{wide}.length") == 0, view


async def test_the_switch_of_the_theme_wins_over_the_system_and_is_kept(tmp_path: Path, browser: Browser) -> None:
    async with staged(tmp_path) as hosts:
        tab = await tab_of(browser, color_scheme="light")
        await tab.enter(hosts.url)
        ground = "getComputedStyle(document.body).backgroundColor"
        light = await tab.page.evaluate(ground)
        await tab.page.click("#theme")
        dark = await tab.page.evaluate(ground)
        assert (await tab.page.reload(), await tab.page.evaluate(ground))[1] == dark
        assert await tab.text("#theme") == "Theme: dark"
        assert await tab.page.evaluate("JSON.stringify(localStorage)") == '{"theme":"dark"}', "and nothing else is kept"
        await tab.page.emulate_media(color_scheme="dark")
        await tab.page.click("#theme")
        assert (await tab.page.evaluate(ground), dark) == (light, "rgb(17, 22, 28)")
        await tab.page.click("#theme")
        assert await tab.page.evaluate("localStorage.length") == 0
