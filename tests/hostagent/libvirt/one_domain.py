"""One domain behind a connection, for tests of single calls."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import libvirt

from hostagent.errors import HypervisorError


class OneDomain:
    """Knows one domain, by any name; errors as the real connection raises them."""

    def __init__(self, domain: Any) -> None:
        self._domain = domain

    async def call(self, function: Callable[[Any], Any], *, modifies: str | None = None) -> Any:
        try:
            return function(self)
        except libvirt.libvirtError as error:
            raise HypervisorError(str(error)) from error

    async def read(self, domain: str, function: Callable[[Any], Any]) -> Any:
        return await self.call(lambda _: function(self._domain))

    adjust = read

    def told_of(self, domain: str) -> asyncio.Event:
        """Nothing is told of."""
        return asyncio.Event()

    def lookupByName(self, name: str) -> Any:
        return self._domain
