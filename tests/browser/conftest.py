"""A browser for each test, which must have said nothing of errors at its end."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator

import pytest
import pytest_asyncio
from playwright.async_api import Browser

from tests.browser.chromium import chromium
from tests.manager.databases import Server


@pytest_asyncio.fixture
async def browser() -> AsyncIterator[Browser]:
    async with chromium() as made:
        yield made


@pytest.fixture(scope="session")
def postgresql() -> Iterator[Server]:
    """One real PostgreSQL server."""
    server = Server()
    yield server
    server.stop()
