"""A memory device that tells when it has moved is looked at then, and seldom besides."""

from __future__ import annotations

import asyncio
from typing import Any

import libvirt
import pytest

from hostagent.libvirt import settling
from hostagent.libvirt.settling import settled
from hostagent.libvirt_connection import LibvirtConnection


class _Connection:
    def __init__(self) -> None:
        self.callbacks: dict[int, Any] = {}

    def isAlive(self) -> bool:
        return True

    def setKeepAlive(self, *_: int) -> None:
        """As libvirt's."""

    def close(self) -> None:
        """As libvirt's."""

    def domainEventRegisterAny(self, domain: Any, event: int, callback: Any, opaque: Any) -> int:
        self.callbacks[event] = callback
        return 1


class _Domain:
    def name(self) -> str:
        return "web"


async def test_a_device_that_tells_is_looked_at_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(settling, "FIRST_LOOK_S", 600.0)
    sizes, told = iter([512.0, 256.0, 0.0]), asyncio.Event()

    async def size() -> float:
        asyncio.get_running_loop().call_soon(told.set)
        return next(sizes)

    monkeypatch.setattr(settling, "TOLD_LOOK_S", 600.0)
    async with asyncio.timeout(10):
        assert await settled(size, 0.0, "the device", 60.0, told) == ""


async def test_a_device_whose_word_is_lost_is_looked_at_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(settling, "TOLD_LOOK_S", 0.01)
    sizes = iter([512.0, 256.0, 0.0])

    async def size() -> float:
        return next(sizes)

    async with asyncio.timeout(10):
        assert await settled(size, 0.0, "the device", 60.0, asyncio.Event()) == ""


async def test_a_device_that_says_nothing_is_given_up_when_its_time_is_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(settling, "TOLD_LOOK_S", 600.0)

    async def size() -> float:
        return 512.0

    async with asyncio.timeout(10):
        assert "when its time was up" in await settled(size, 0.0, "the device", 0.05, asyncio.Event())


async def test_what_libvirt_tells_reaches_those_who_wait_for_that_domain_only() -> None:
    made = _Connection()
    connection = LibvirtConnection("test:///", lambda _: made)
    try:
        web, other = connection.told_of("web"), connection.told_of("other")
        await connection.call(lambda _: None)
        tell = made.callbacks[libvirt.VIR_DOMAIN_EVENT_ID_MEMORY_DEVICE_SIZE_CHANGE]
        await asyncio.to_thread(tell, made, _Domain(), "ua-ebbtide-memory", 1024, None)
        async with asyncio.timeout(10):
            await web.wait()
        assert not other.is_set()
    finally:
        await connection.close()
