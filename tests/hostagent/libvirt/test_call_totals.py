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
