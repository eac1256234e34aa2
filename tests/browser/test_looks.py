"""What the page reads at each of its looks, and when."""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime, timedelta
from pathlib import Path
from urllib.parse import parse_qs, urlsplit

import pytest
from playwright.async_api import Browser, Route

from tests.browser.chromium import tab_of
from tests.browser.stage import place, staged
from tests.manager.cluster import TOKEN, vm
from tests.manager.two_agents import two_hosts

pytestmark = pytest.mark.service


@pytest.mark.parametrize("off_h", [2, -1])
async def test_history_ends_now_by_the_managers_clock(tmp_path: Path, browser: Browser, off_h: int) -> None:
    async with two_hosts(tmp_path) as hosts:
        await place(hosts, vm("shop"))
        tab = await tab_of(browser)
        await tab.page.clock.set_fixed_time(datetime.now(UTC) + timedelta(hours=off_h))
        async with tab.page.expect_response(lambda answer: "/history?" in answer.url) as read:
            await tab.enter(hosts.url, "vm/shop?range=1h")
        answer = await read.value
        assert answer.status == 200
        asked = parse_qs(urlsplit(answer.url).query)
        assert float(asked["to"][0]) == pytest.approx(datetime.now(UTC).timestamp(), abs=600)
        await tab.page.locator("#view .scroll").wait_for()
        assert not await tab.page.locator("#problem").is_visible()
        assert tab.errors == []


async def test_chances_for_one_duration_are_not_shown_as_those_for_another(tmp_path: Path, browser: Browser) -> None:
    answer = asyncio.Event()

    async def machines(route: Route) -> None:
        late = route.request.url.endswith("duration_s=3600")
        if late:
            await answer.wait()
        chance = 0.25 if late else 0.75
        await route.fulfill(json={"machines": [{**machine, "completion_probability": chance}], "next": None})

    async with staged(tmp_path) as hosts:
        machine = (await hosts.cluster.get("/v1/machines"))["machines"][0]
        tab = await tab_of(browser)
        await tab.enter(hosts.url)
        await tab.page.route("**/v1/machines?*", machines)
        await tab.page.evaluate("""async () => {
            const { el } = await import("/page/dom.js"), { tasks } = await import("/page/tasks.js");
            window.shown = (wanted) => el("div", null, tasks.draw("", { for: wanted })).textContent;
            shown("3600");
            window.first = tasks.load();
            shown("600");
            await tasks.load();
        }""")
        answer.set()
        text = await tab.page.evaluate("async () => { await first; return shown('600'); }")
        assert "75 %" in text
        assert "25 %" not in text
        text = await tab.page.evaluate("shown('3600')")
        assert "keeps its cores for 10 min" in text, "until the chances for the other one are there"
        assert tab.errors == []


async def test_a_look_that_fails_leaves_no_walk_over_the_vms_behind(tmp_path: Path, browser: Browser) -> None:
    go_on, walks = asyncio.Event(), 0

    async def refuse(route: Route) -> None:
        await route.fulfill(status=400, json={"title": "Bad Request", "detail": "no history of that"})

    async def late(route: Route) -> None:
        nonlocal walks
        walks += 1
        await go_on.wait()
        await route.continue_()

    async with two_hosts(tmp_path) as hosts:
        await place(hosts, vm("shop"))
        tab = await tab_of(browser)
        await tab.page.clock.install()
        await tab.page.route("**/v1/vms?*", late)
        await tab.page.route("**/history?*", refuse)
        await tab.page.goto(f"{hosts.url}/#vm/shop")
        await tab.page.fill("#token", TOKEN)
        async with tab.page.expect_response(lambda answer: "/history?" in answer.url):
            await tab.page.press("#token", "Enter")
        for _ in range(5):
            await tab.page.clock.run_for(5000)
        assert walks == 1
        go_on.set()
        await tab.until("#problem", "No history of that.")


async def test_lists_go_on_while_the_host_of_the_vm_on_show_hangs(tmp_path: Path, browser: Browser) -> None:
    go_on, asked = asyncio.Event(), 0

    async def hangs(route: Route) -> None:
        nonlocal asked
        asked += 1
        await go_on.wait()
        await route.continue_()

    async with two_hosts(tmp_path) as hosts:
        await place(hosts, vm("shop"))
        tab = await tab_of(browser)
        await tab.page.route("**/v1/vms/shop/explain", hangs)
        await tab.enter(hosts.url, "vm/shop")
        await place(hosts, vm("wiki"))
        for _ in range(2):
            async with tab.page.expect_response("**/v1/vms?*"):
                pass
        assert asked == 1
        await tab.go("vms")
        await tab.page.locator('#view [data-key="wiki"]').wait_for()
        go_on.set()
        assert tab.errors == []


async def test_a_hosts_page_says_when_it_reported_last_though_its_reports_are_alike(
    tmp_path: Path, browser: Browser
) -> None:
    async def nothing_new(route: Route) -> None:
        await route.fulfill(json={"hosts": [], "next": None, "changes": 1, "changed_since": 1, "gone": []})

    async with two_hosts(tmp_path) as hosts:
        tab = await tab_of(browser)
        await tab.enter(hosts.url, "host/host-a")
        await tab.page.route("**/v1/hosts?*", nothing_new)
        last = tab.page.locator("#view dt", has_text="last report").locator("xpath=..").locator("time")
        before = await last.get_attribute("datetime")
        await last.and_(tab.page.locator(f'time:not([datetime="{before}"])')).wait_for()
        assert tab.errors == []


async def test_vms_are_sorted_by_name_whichever_is_preempted_and_the_queue_by_place(
    tmp_path: Path, browser: Browser
) -> None:
    def preempted(name: str, place: int) -> dict[str, object]:
        waits_for = row["nominal"]
        waiting = {"position": place, "at": 1e9, "sentence": "it waits", "reason": "minimum", "waits_for": waits_for}
        return {**row, "name": name, "state": "preempted", "preempted": waiting}

    async def listed(route: Route) -> None:
        rows = [preempted("b", 2), {**row, "name": "c"}, {**row, "name": "a"}, preempted("d", 1)]
        await route.fulfill(json={"vms": rows, "next": None, "changes": 1, "changed_since": None, "gone": []})

    async with two_hosts(tmp_path) as hosts:
        await place(hosts, vm("shop"))
        row = (await hosts.cluster.get("/v1/vms"))["vms"][0]
        tab = await tab_of(browser)
        await tab.page.route("**/v1/vms?*", listed)
        await tab.enter(hosts.url, "vms")
        names = tab.page.locator("#view tbody tr th")
        assert await names.all_inner_texts() == ["a", "b", "c", "d"]
        await tab.go(f"host/{row['host']}")
        # The table of its history may be there already, below.
        assert (await names.all_inner_texts())[:4] == ["a", "b", "c", "d"]
        await tab.go("preempted")
        await tab.until("#view h1", "Queue")
        assert await tab.page.locator("#view tbody td a").all_inner_texts() == ["d", "b"]
        assert tab.errors == []
