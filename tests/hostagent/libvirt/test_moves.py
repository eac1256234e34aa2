"""What is known of a move before it is made."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

import pytest

from hostagent.libvirt.moves import LibvirtMoves, risk_of
from hostagent.libvirt.settings import LibvirtSettings
from hostagent.libvirt_connection import LibvirtConnection

NOT_ASKED: Any = None


@pytest.mark.parametrize(
    ("accelerator", "version", "risky"),
    [("qemu", 7_002_022, True), ("qemu", 9_000_000, False), ("kvm", 7_002_022, False), (None, 0, False)],
)
def test_an_emulated_guest_that_moves_under_an_old_qemu_may_lose_writes(
    accelerator: str | None, version: int, risky: bool
) -> None:
    assert ("may lose writes" in risk_of(accelerator, version)) == risky


@pytest.mark.parametrize(
    ("accelerator", "version", "allowed", "only"),
    [
        ("qemu", 7_002_022, False, True),
        ("qemu", 0, False, True),
        ("qemu", 7_002_022, True, False),
        ("qemu", 9_000_000, False, False),
        ("kvm", 7_002_022, False, False),
    ],
    ids=["old", "not known yet", "old, and allowed", "new", "kvm"],
)
def test_where_a_move_may_harm_its_guest_a_host_says_that_it_takes_a_command(
    accelerator: Literal["kvm", "qemu"], version: int, allowed: bool, only: bool, tmp_path: Path
) -> None:
    uri = "qemu+tls://host-a.example/system"
    settings = LibvirtSettings(
        "host-a", uri, accelerator, tmp_path, tmp_path, migration_uri=uri, migration_emulated=allowed
    )
    moves = LibvirtMoves(settings, LibvirtConnection(uri), NOT_ASKED)
    moves.qemu_version = version
    assert bool(moves.by_command_only) == only


async def test_the_version_is_that_of_the_libvirt_that_is_connected_to_now(tmp_path: Path) -> None:
    class Opened:
        alive = True

        def __init__(self, version: int) -> None:
            self._version = version

        def isAlive(self) -> bool:
            return self.alive

        def getVersion(self) -> int:
            return self._version

        def setKeepAlive(self, interval: int, count: int) -> None:
            """Nothing to keep alive."""

        def close(self) -> None:
            """Nothing to close."""

    opened = [Opened(9_000_000), Opened(7_002_022)]
    left = list(opened)
    connection = LibvirtConnection("test:///", lambda _: left.pop(0))
    moves = LibvirtMoves(LibvirtSettings("host-a", "test:///", "qemu", tmp_path, tmp_path), connection, NOT_ASKED)
    try:
        seen = [moves.qemu_version]
        for one in opened:
            await connection.call(lambda _: None)
            seen.append(moves.qemu_version)
            one.alive = False
        assert seen == [0, 9_000_000, 7_002_022]
    finally:
        await connection.close()
