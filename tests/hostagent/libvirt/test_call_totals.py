"""How calls of libvirt are counted: by how they ended, with the time that they took."""

from __future__ import annotations

import threading
from typing import Any

import libvirt
import pytest

from hostagent.errors import DomainGone, HypervisorError, HypervisorTimeout
from hostagent.libvirt_connection import LibvirtConnection


class _Connection:
    def isAlive(self) -> bool:
        return True

    def setKeepAlive(self, *_: int) -> None:
        """As libvirt's."""

    def close(self) -> None:
        """As libvirt's."""


class _Error(libvirt.libvirtError):  # type: ignore[misc]  # libvirt has no types
    def __init__(self, code: int) -> None:
        super().__init__("an error of the test")
        self.code = code

    def get_error_code(self) -> int:
        return self.code


async def test_calls_are_counted_by_how_they_ended() -> None:
    connection, held = LibvirtConnection("test:///", lambda _: _Connection()), threading.Event()

    def fail(code: int) -> Any:
        raise _Error(code)

    try:
        await connection.call(lambda _: 1)
        with pytest.raises(HypervisorError):
            await connection.call(lambda _: fail(libvirt.VIR_ERR_INTERNAL_ERROR))
        with pytest.raises(DomainGone):
            await connection.call(lambda _: fail(libvirt.VIR_ERR_NO_DOMAIN))
        # The second waits for its turn in vain, since the first has not come back.
        for _ in range(2):
            with pytest.raises(HypervisorTimeout):
                await connection.call(lambda _: held.wait(30.0), modifies="web", limit_s=0.05)
        assert connection.calls.outcomes == {"ok": 1, "error": 1, "gone": 1, "timeout": 2}
        assert connection.calls.seconds.count == 5
        assert connection.calls.seconds.total >= 0.1
    finally:
        held.set()
        await connection.close()


class _Named(_Connection):
    """Knows one domain at a time under a name; each is gone when the next one is there."""

    def __init__(self) -> None:
        self.lookups = 0
        self.there = 1

    def lookupByName(self, name: str) -> Any:
        self.lookups += 1
        if not self.there:
            raise _Error(libvirt.VIR_ERR_NO_DOMAIN)
        return self.there

    def look(self, domain: Any) -> Any:
        if domain != self.there:
            raise _Error(libvirt.VIR_ERR_NO_DOMAIN)
        return domain


async def test_a_domain_that_is_read_is_looked_up_once_and_again_when_it_is_gone() -> None:
    named = _Named()
    connection = LibvirtConnection("test:///", lambda _: named)
    try:
        assert [await connection.read("web", named.look) for _ in range(3)] == [1, 1, 1]
        assert named.lookups == 1
        named.there = 2
        assert await connection.read("web", named.look) == 2, "another one of that name"
        assert named.lookups == 2
        named.there = 0
        for _ in range(2):
            with pytest.raises(DomainGone):
                await connection.read("web", named.look)
    finally:
        await connection.close()


async def test_what_is_changed_is_the_domain_that_has_the_name_now() -> None:
    named, changed = _Named(), list[Any]()
    connection = LibvirtConnection("test:///", lambda _: named)
    try:
        await connection.read("web", named.look)
        # Renamed: the domain that was read is still there, and another one has its name.
        named.there = 2
        await connection.change("web", changed.append)
        assert changed == [2]
    finally:
        await connection.close()


async def test_a_running_domain_is_adjusted_without_another_look_and_another_one_of_its_name_is_found() -> None:
    named = _Named()
    connection = LibvirtConnection("test:///", lambda _: named)
    try:
        await connection.read("web", named.look)
        assert await connection.adjust("web", named.look) == 1
        assert named.lookups == 1
        named.there = 2
        assert await connection.adjust("web", named.look) == 2
        named.there = 0
        with pytest.raises(DomainGone):
            await connection.adjust("web", named.look)
    finally:
        await connection.close()
