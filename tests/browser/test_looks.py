"""What the page reads at each of its looks, and when."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from pathlib import Path
from urllib.parse import parse_qs, urlsplit

import pytest
from playwright.async_api import Browser

from tests.browser.chromium import tab_of
from tests.browser.stage import place
from tests.manager.cluster import vm
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
