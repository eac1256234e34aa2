"""What a dialog shows is what it does, whatever the page behind it shows by then."""

from __future__ import annotations

import asyncio
from pathlib import Path
from urllib.parse import urlsplit

import pytest
from playwright.async_api import Browser, Route

from tests.browser.chromium import Tab, tab_of
from tests.browser.stage import place
from tests.manager.cluster import TOKEN, vm
from tests.manager.two_agents import two_hosts

pytestmark = pytest.mark.service


def paths_of(tab: Tab, last: str) -> list[str]:
    """Of what was asked for, by the last word of its path."""
    return [path for path in (urlsplit(url).path for url in tab.asked) if path.rsplit("/", 1)[-1] == last]


async def test_a_dialog_acts_on_the_host_it_names_after_a_step_back(tmp_path: Path, browser: Browser) -> None:
    async with two_hosts(tmp_path) as hosts:
        tab = await tab_of(browser)
        await tab.enter(hosts.url, "host/host-b")
        await tab.until("#view h1", "Host host-b")
        await tab.go("host/host-a")
        await tab.until("#view h1", "Host host-a")
        await tab.page.get_by_role("button", name="Drain").click()
        await tab.page.go_back()
        await tab.until("#view h1", "Host host-b")
        await tab.page.get_by_role("button", name="Drain host-a").click()
        await tab.page.locator("dialog .outcome").first.wait_for()
        assert paths_of(tab, "mode") == ["/v1/hosts/host-a/mode"]
        assert tab.errors == []


async def test_a_dialog_calls_off_the_placement_that_it_was_opened_for(tmp_path: Path, browser: Browser) -> None:
    async with two_hosts(tmp_path) as hosts:
        await place(hosts, vm("shop"))
        under_way = {**(await hosts.cluster.get("/v1/operations"))["operations"][0], "state": "running"}

        async def running(route: Route) -> None:
            await route.fulfill(json={"operations": [under_way], "next": None, "position": 0})

        under_way["request_id"] = "op-1"
        tab = await tab_of(browser)
        await tab.page.route("**/v1/operations?state=running*", running)
        await tab.enter(hosts.url, "vm/shop")
        await tab.page.get_by_role("button", name="Call it off").click()
        under_way["request_id"] = "op-2"
        await tab.page.locator('#view [data-operation="op-2"]').wait_for()
        await tab.page.get_by_role("button", name="Call the placement of shop off").click()
        await tab.page.locator("#act .error").wait_for()
        assert paths_of(tab, "cancel") == ["/v1/operations/op-1/cancel"]


async def test_what_is_asked_of_a_vm_is_meant_for_the_one_on_show_while_the_list_still_loads(
    tmp_path: Path, browser: Browser
) -> None:
    go_on = asyncio.Event()

    async def late(route: Route) -> None:
        await go_on.wait()
        await route.continue_()

    async with two_hosts(tmp_path) as hosts:
        await place(hosts, vm("shop"))
        tab = await tab_of(browser)
        await tab.page.route("**/v1/vms?*", late)
        await tab.page.goto(f"{hosts.url}/#overview")
        await tab.page.fill("#token", TOKEN)
        await tab.page.press("#token", "Enter")
        await tab.go("vm/shop")
        await tab.page.get_by_role("button", name="Delete").click()
        await tab.page.fill("#confirm", "shop")
        shown = (await hosts.cluster.get("/v1/vms/shop"))["version"]
        async with tab.page.expect_request(lambda request: request.method == "DELETE") as sent:
            await tab.page.locator("#act .destroys").click()
        assert (await sent.value).headers.get("if-match") == f'"{shown}"'
        go_on.set()
        await tab.until("dialog .outcome", "done")
        assert [error for error in tab.errors if "status of 404" not in error] == []


async def test_the_limits_that_a_dialog_tells_are_taken_by_the_api(tmp_path: Path, browser: Browser) -> None:
    async with two_hosts(tmp_path) as hosts:
        await place(hosts, vm("shop"))
        row = (await hosts.cluster.get("/v1/vms"))["vms"][0]
        for name, cores, memory in (("current", 0.58, 512.25), ("nominal", 0.58, 1024.129), ("minimum", 0.29, 384.401)):
            row[name] |= {"cpu_cores": cores, "memory_mib": memory, "disk_mib_s": 0.0, "network_mib_s": 0.0}

        async def listed(route: Route) -> None:
            await route.fulfill(json={"vms": [row], "next": None, "changes": 1, "changed_since": None, "gone": []})

        tab = await tab_of(browser)
        await tab.page.route("**/v1/vms?*", listed)
        await tab.enter(hosts.url, "vm/shop")
        await tab.page.get_by_role("button", name="Sell as another size").click()
        assert await tab.page.locator("#act p").first.inner_text() == (
            "It has 0.58 cores, 512.25 MiB of 0.58 cores, 1024.12 MiB, and never less than 0.29 cores, 384.41 MiB."
        )
        assert tab.errors == []
