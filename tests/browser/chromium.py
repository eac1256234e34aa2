"""A headless Chromium of the tests' own, and tabs that note what went wrong in them."""

from __future__ import annotations

import contextlib
import re
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any

from playwright.async_api import Browser, Page, async_playwright

from benchmarks.watching.chromium import FLAGS, chromium_path
from tests.manager.cluster import TOKEN

LIMIT_MS = 90_000


@contextlib.asynccontextmanager
async def chromium() -> AsyncIterator[Browser]:
    async with async_playwright() as playwright:
        browser = await playwright.chromium.launch(executable_path=chromium_path(), args=list(FLAGS))
        try:
            yield browser
        finally:
            await browser.close()


@dataclass
class Tab:
    """One tab.

    :param errors: what its console said of errors, those of the Content-Security-Policy among them, and what no code
        of the page caught.
    """

    page: Page
    errors: list[str] = field(default_factory=list)
    asked: list[str] = field(default_factory=list)

    async def enter(self, url: str, view: str = "overview", token: str = TOKEN) -> None:
        """Load the page and give it a token; until it has read all of the cluster."""
        await self.page.goto(f"{url}/#{view}")
        await self.page.fill("#token", token)
        await self.page.press("#token", "Enter")
        await self.loaded()

    async def loaded(self) -> None:
        """Until hosts and VMs are read, and the token's role is known."""
        await self.page.locator("#summary").filter(has_text=re.compile("^as of .*, for ")).wait_for()

    async def go(self, view: str) -> None:
        await self.page.evaluate("view => { location.hash = view; }", view)
        await self.page.locator("#view h1").wait_for()
        await self.page.locator("#view").filter(has_not_text="Loading").wait_for()

    async def text(self, selector: str) -> str:
        return await self.page.inner_text(selector)

    async def until(self, selector: str, text: str) -> None:
        """Until an element says that."""
        await self.page.locator(selector).filter(has_text=text).first.wait_for()

    async def metrics(self) -> dict[str, float]:
        """Chromium's own figures of the tab: ``JSHeapUsedSize``, ``ScriptDuration``, ``Nodes`` and more."""
        session = await self.page.context.new_cdp_session(self.page)
        await session.send("Performance.enable")
        found = await session.send("Performance.getMetrics")
        return {row["name"]: row["value"] for row in found["metrics"]}


async def tab_of(browser: Browser, **options: Any) -> Tab:
    """A tab in a profile of its own."""
    context = await browser.new_context(**options)
    page = await context.new_page()
    page.set_default_timeout(LIMIT_MS)
    tab = Tab(page)
    page.on("console", lambda said: tab.errors.append(said.text) if said.type == "error" else None)
    page.on("pageerror", lambda error: tab.errors.append(str(error)))
    page.on("request", lambda request: tab.asked.append(request.url))
    return tab
