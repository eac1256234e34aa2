"""Every view in both themes by axe-core, and on a phone's width."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
from playwright.async_api import Browser

from tests.browser.chromium import Tab, tab_of
from tests.browser.stage import staged
from tests.manager.two_agents import two_hosts

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


async def test_the_focus_stays_on_a_row_while_others_go_and_the_order_changes(tmp_path: Path, browser: Browser) -> None:
    async with staged(tmp_path) as hosts:
        rows = (await hosts.cluster.get("/v1/vms"))["vms"]
        name = next(row["name"] for row in rows if 0 < row["current"]["cpu_cores"] < row["nominal"]["cpu_cores"])
        assert name > "database"
        tab = await tab_of(browser)
        await tab.enter(hosts.url, "vms")
        await tab.page.locator(f'[data-key="{name}"] th a').focus()
        await tab.go("vms?sort=CPU+lacking")
        await tab.until("#view tbody tr:first-child th", name)
        assert await tab.page.evaluate("document.activeElement.textContent") == name
        await tab.go("vms?sort=name")
        await tab.until("#view tbody tr:first-child th", "billing")
        await tab.page.evaluate("""() => {
            window.taken = [];
            new MutationObserver((rows) => {
                for (const { removedNodes } of rows) for (const one of removedNodes) taken.push(one.dataset.key);
            }).observe(document.querySelector("#view tbody"), { childList: true });
        }""")
        await hosts.cluster.delete("billing")
        await tab.page.locator('[data-key="billing"]').wait_for(state="detached")
        assert await tab.page.evaluate("taken") == ["billing"], "no other row is moved"
        assert await tab.page.evaluate("document.activeElement.textContent") == name


async def test_a_look_at_which_nothing_has_changed_is_not_read_out(tmp_path: Path, browser: Browser) -> None:
    async with two_hosts(tmp_path) as hosts:
        tab = await tab_of(browser)
        await tab.enter(hosts.url)
        said: Any = await tab.page.evaluate("""() => new Promise((told) => {
            const live = "[role=status], [role=alert], [aria-live]", found = [];
            new MutationObserver((rows) => {
                for (const { target } of rows) {
                    const element = target.nodeType === 1 ? target : target.parentElement;
                    if (element.closest(live)) found.push(element.textContent);
                    if (element.id === "summary") told(found);
                }
            }).observe(document.body, { childList: true, characterData: true, subtree: true });
        })""")
        assert said == []


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
