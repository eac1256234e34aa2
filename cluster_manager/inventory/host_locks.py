"""Locks of hosts: one plan at a time acts on a host, in the order in which they asked for it."""

from __future__ import annotations

import asyncio
from collections import Counter


class HostLocks:
    """Which plan holds which host; a plan holds one at the most."""

    def __init__(self) -> None:
        self._locks: dict[str, asyncio.Lock] = {}
        self._held: dict[str, str] = {}
        #: By host: how many plans wait for it.
        self._waiting: Counter[str] = Counter()

    def of(self, host: str) -> asyncio.Lock:
        """The lock itself, for what is no plan."""
        return self._locks.setdefault(host, asyncio.Lock())

    async def hold(self, plan: str, host: str, limit_s: float | None = None) -> bool:
        """Take a host for a plan, which lets any other go.

        :returns: whether it was free within ``limit_s``.
        """
        if self._held.get(plan) == host:
            return True
        self.release(plan)
        self._waiting[host] += 1
        try:
            async with asyncio.timeout(limit_s):
                await self.of(host).acquire()
        except TimeoutError:
            return False
        finally:
            self._waiting[host] -= 1
            if not self._waiting[host]:
                del self._waiting[host]
        self._held[plan] = host
        return True

    def release(self, plan: str) -> None:
        """Let the plan's host go, if it holds one."""
        if (host := self._held.pop(plan, None)) is not None:
            self._locks[host].release()

    def held_by(self, plan: str) -> str | None:
        """The host that a plan holds."""
        return self._held.get(plan)

    def is_busy(self, host: str) -> bool:
        return host in self._locks and self._locks[host].locked()

    def in_line(self, host: str) -> int:
        """How many have a host or wait for it."""
        return self._waiting[host] + self.is_busy(host)

    @property
    def waited_for(self) -> bool:
        """Whether any host is waited for."""
        return bool(self._waiting)
