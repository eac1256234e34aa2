"""The dashboard while tabs, connections and managers come and go."""

from __future__ import annotations

from pathlib import Path

import pytest
from playwright.async_api import Browser, Route

from tests.browser.address import address_of
from tests.browser.chromium import tab_of
from tests.browser.stage import place, staged
from tests.manager.cluster import vm
from tests.manager.databases import Server
from tests.manager.leadership.test_high_availability import pair
from tests.manager.two_agents import two_hosts

pytestmark = pytest.mark.service

#: What Chromium says of a request that nobody, or a standby, answered.
UNANSWERED = ("net::ERR_", "status of 503")


def unexpected(errors: list[str]) -> list[str]:
    return [error for error in errors if not any(words in error for words in UNANSWERED)]


async def test_two_tabs_show_the_same_and_have_each_its_own_token(tmp_path: Path, browser: Browser) -> None:
    async with two_hosts(tmp_path) as hosts:
        tabs = [await tab_of(browser) for _ in range(2)]
        for tab in tabs:
            await tab.enter(hosts.url, "vms")
        await place(hosts, vm("shop"))
        for tab in tabs:
            await tab.until('[data-key="shop"]', "3 of 3 cores")
        await tabs[0].page.click("#leave")
        assert await tabs[0].page.locator("#enter").is_visible()
        assert "shop" not in await tabs[0].page.content()
        await place(hosts, vm("wiki"))
        await tabs[1].until('[data-key="wiki"]', "3 of 3 cores")
        assert tabs[0].errors == tabs[1].errors == []


async def test_a_wrong_token_is_said_and_asked_for_again(tmp_path: Path, browser: Browser) -> None:
    async with two_hosts(tmp_path) as hosts:
        tab = await tab_of(browser)
        await tab.page.goto(hosts.url)
        await tab.page.fill("#token", "wrong")
        await tab.page.press("#token", "Enter")
        await tab.until("#problem", "right token")
        assert await tab.page.locator("#enter").is_visible()
        await tab.enter(hosts.url)


async def test_a_token_of_any_characters_is_sent_and_one_with_an_invisible_character_is_refused(
    tmp_path: Path, browser: Browser
) -> None:
    async with two_hosts(tmp_path) as hosts:
        tab = await tab_of(browser)
        await tab.page.goto(hosts.url)
        await tab.page.fill("#token", "wrong\u200b")
        await tab.page.press("#token", "Enter")
        await tab.until("#problem", "The token has white space or an invisible character")
        assert await tab.page.locator("#enter").is_visible()
        assert [url for url in tab.asked if "/v1/" in url] == []
        await tab.page.fill("#token", "schlüssel-€")
        async with tab.page.expect_request("**/v1/whoami") as sent:
            await tab.page.press("#token", "Enter")
        value = (await sent.value).headers["authorization"]
        assert value.encode("latin-1").decode() == "Bearer schlüssel-€"
        await tab.until("#problem", "right token")


async def test_what_was_read_with_a_token_is_gone_with_it(tmp_path: Path, browser: Browser) -> None:
    async def no_answer(route: Route) -> None:
        """It hangs."""

    async with staged(tmp_path) as hosts:
        done = (await hosts.cluster.get("/v1/operations"))["operations"][0]["request_id"]
        held = [
            ("vm/shop", "#view .outcome"),
            ("vm/shop?range=1h", "#view .scroll"),
            ("tasks", '#view [data-key="train"]'),
            ("task/train", "#view dl"),
            ("operations", f'#view [data-key="{done}"]'),
            (f"operation/{done}", "#view .outcome"),
        ]
        tab = await tab_of(browser)
        await tab.enter(hosts.url)
        for view, selector in held:
            await tab.go(view)
            await tab.page.locator(selector).wait_for()
        await tab.page.get_by_role("button", name="Keys").click()
        await tab.page.keyboard.press("Escape")
        await tab.go("overview")
        await tab.page.click("#leave")
        assert await tab.page.locator("#view *, dialog *").count() == 0
        await tab.page.route("**/v1/**", no_answer)
        await tab.page.fill("#token", "nonsense")
        await tab.page.press("#token", "Enter")
        left: list[str] = []
        for view, selector in held:
            await tab.page.evaluate(
                """view => new Promise((drawn) => {
                    addEventListener("hashchange", drawn, { once: true });
                    location.hash = view;
                })""",
                view,
            )
            left += [view] * await tab.page.locator(selector).count()
        assert left == tab.errors == []


async def test_a_lost_connection_is_said_and_what_happened_meanwhile_is_shown_after_it(
    tmp_path: Path, browser: Browser
) -> None:
    async with two_hosts(tmp_path) as hosts, address_of(lambda: hosts.url) as address:
        await place(hosts, vm("shop"))
        tab = await tab_of(browser)
        await tab.enter(address.url, "vms")
        address.cut = True
        address.hang_up()
        await tab.until("#problem", "The manager does not answer")
        assert "3 of 3 cores" in await tab.text('[data-key="shop"]'), "what was known stays"
        await place(hosts, vm("wiki"))
        address.cut = False
        await tab.until('[data-key="wiki"]', "3 of 3 cores")
        await tab.page.locator("#problem").wait_for(state="hidden")
        await tab.go("events")
        shown = await tab.page.locator(".events li").count()
        assert shown == len((await hosts.cluster.get("/v1/events"))["events"]), "none is missing, none is there twice"
        assert unexpected(tab.errors) == []


async def test_a_network_that_dies_without_a_word_is_said_and_the_stream_is_opened_again_after_it(
    tmp_path: Path, browser: Browser
) -> None:
    async with two_hosts(tmp_path) as hosts, address_of(lambda: hosts.url) as address:
        await place(hosts, vm("shop"))
        tab = await tab_of(browser)
        await tab.page.goto(address.url)
        await tab.page.evaluate(
            "async () => { const { limits } = await import('/page/api.js'); Object.assign(limits, "
            "{ answer_ms: 1500, silence_ms: 4000 }); }"
        )
        await tab.enter(address.url, "events")
        await tab.until(".events li", "shop")
        streams = sum("stream" in url for url in tab.asked)
        address.stall()
        await tab.until("#problem", "The manager does not answer. What is shown may be out of date.")
        await place(hosts, vm("wiki"))
        address.stalled = False
        await tab.page.locator("#problem").wait_for(state="hidden")
        await tab.until(".events li", "wiki")
        assert sum("stream" in url for url in tab.asked) > streams
        assert unexpected(tab.errors) == []


async def test_an_operation_whose_host_does_not_answer_once_is_asked_for_again(
    tmp_path: Path, browser: Browser
) -> None:
    async def no_answer(route: Route) -> None:
        await route.fulfill(status=503, json={"title": "Service Unavailable", "detail": "host-a does not answer"})

    async with two_hosts(tmp_path) as hosts:
        tab = await tab_of(browser)
        await tab.enter(hosts.url, "host/host-a")
        await tab.page.route("**/v1/hosts/host-a/operations/*", no_answer, times=1)
        await tab.page.get_by_role("button", name="Drain").click()
        await tab.page.locator('#act button[value="do"]').click()
        await tab.until("dialog .outcome", "done")
        assert await tab.page.locator("dialog .error").count() == 0
        assert unexpected(tab.errors) == []


async def test_an_operation_that_its_host_has_forgotten_is_said_to_be_unknown(tmp_path: Path, browser: Browser) -> None:
    async def unknown(route: Route) -> None:
        await route.fulfill(status=404, json={"title": "Not Found", "detail": "host-a knows no such operation"})

    async with two_hosts(tmp_path) as hosts:
        tab = await tab_of(browser)
        await tab.enter(hosts.url, "host/host-a")
        await tab.page.route("**/v1/hosts/host-a/operations/*", unknown)
        await tab.page.get_by_role("button", name="Drain").click()
        await tab.page.locator('#act button[value="do"]').click()
        await tab.until("dialog .error", "host-a knows no such operation")


async def test_the_page_goes_on_with_a_manager_that_was_killed_and_started_again(
    tmp_path: Path, browser: Browser
) -> None:
    async with two_hosts(tmp_path) as hosts, address_of(lambda: hosts.url) as address:
        await place(hosts, vm("shop"))
        tab = await tab_of(browser)
        await tab.enter(address.url, "vms")
        await hosts.kill("manager")
        address.hang_up()
        await tab.until("#problem", "The manager does not answer")
        await hosts.start("manager")
        await hosts.ready()
        await tab.page.locator("#problem").wait_for(state="hidden")
        await place(hosts, vm("wiki"))
        await tab.until('[data-key="wiki"]', "3 of 3 cores")
        assert unexpected(tab.errors) == []


async def test_a_page_of_a_standby_says_who_leads_and_goes_on_once_it_does_itself(
    tmp_path: Path, browser: Browser, postgresql: Server
) -> None:
    async with pair(tmp_path, postgresql) as two:
        first, second = two.managers
        tab = await tab_of(browser)
        await tab.page.goto(f"{second.url}/#overview")
        await tab.page.fill("#token", "clients")
        await tab.page.press("#token", "Enter")
        await tab.until("#problem", f"the manager at {first.url} leads")
        await first.end()
        await tab.loaded()
        await tab.page.locator("#problem").wait_for(state="hidden")
        await tab.until(".hosts", "host-a")
        assert unexpected(tab.errors) == []
