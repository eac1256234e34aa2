"""A browser for each test, which must have said nothing of errors at its end."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest_asyncio
from playwright.async_api import Browser

from tests.browser.chromium import chromium
from tests.manager.conftest import postgresql as postgresql


@pytest_asyncio.fixture
async def browser() -> AsyncIterator[Browser]:
    async with chromium() as made:
        yield made
