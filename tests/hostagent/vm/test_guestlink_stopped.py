"""The real guest agent behind the link: stopped, killed, and its own words passed on."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
import tempfile
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from app_adapters.request_more import ask_for_more
from ebbtide.messages.guest import GuestStatus, Hello, Notice, RequestNotice
from hostagent.errors import GuestSilent, GuestUnreachable
from hostagent.vm.guest_link import GuestLink
from tests.guestagent.harness import BOOT_ID, GuestTree
from tests.waiting import until


class Port:
    """What QEMU does: one end for the guest, one for the host, each of which may come and go."""

    def __init__(self, root: Path) -> None:
        self.guest_path, self.host_path = root / "guest.sock", root / "host.sock"
        self._ends: dict[str, asyncio.StreamWriter] = {}

    async def open(self) -> list[asyncio.Server]:
        return [
            await asyncio.start_unix_server(lambda r, w: self._relay(r, w, "guest", "host"), str(self.guest_path)),
            await asyncio.start_unix_server(lambda r, w: self._relay(r, w, "host", "guest"), str(self.host_path)),
        ]

    async def _relay(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, this: str, other: str) -> None:
        self._ends[this] = writer
        with contextlib.suppress(OSError):
            while data := await reader.read(65536):
                if other in self._ends:
                    self._ends[other].write(data)
        if self._ends.get(this) is writer:
            del self._ends[this]
        writer.close()


class RealGuest:
    """The agent's process and a link to it."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.port = Port(root)
        self.tree = GuestTree(root)
        self.hellos: list[Hello] = []
        self.notices: list[Notice] = []
        self.link = GuestLink("low-1", self._find, self.hellos.append, on_notice=self.notices.append)
        self.process: asyncio.subprocess.Process | None = None

    async def _find(self) -> Path:
        return self.port.host_path

    async def start_agent(self) -> asyncio.subprocess.Process:
        argv = ["--port", str(self.port.guest_path), "--run-dir", str(self.root / "run")]
        argv += ["--adapters-dir", str(self.root), "--procfs", str(self.tree.procfs), "--sysfs", str(self.tree.sysfs)]
        self.process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "guestagent", *argv, stderr=asyncio.subprocess.DEVNULL
        )
        return self.process

    async def end_agent(self) -> None:
        if self.process is not None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.process.pid, signal.SIGKILL)
            await self.process.wait()


@pytest.fixture
async def guest() -> AsyncIterator[RealGuest]:
    with tempfile.TemporaryDirectory(prefix="ebb") as directory:
        made = RealGuest(Path(directory))
        servers = await made.port.open()
        await made.start_agent()
        task = asyncio.create_task(made.link.run())
        try:
            await until(lambda: made.link.connected, limit_s=60)
            yield made
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            await made.end_agent()
            for server in servers:
                server.close()


async def test_nobody_waits_for_a_stopped_agent_longer_than_the_shortest_limit_and_hello_ends_it(
    guest: RealGuest,
) -> None:
    assert guest.process is not None
    guest.process.send_signal(signal.SIGSTOP)
    limits_s = [0.5, *[250.0] * 5]
    async with asyncio.timeout(60):
        said = await asyncio.gather(
            *(guest.link.call("status", {}, GuestStatus, limit_s) for limit_s in limits_s), return_exceptions=True
        )
    assert [type(answer) for answer in said] == [GuestSilent] * 6
    assert "did not answer status in 0.5 s" in str(said[0])
    assert all("broke off" in str(answer) for answer in said[1:])
    with pytest.raises(GuestUnreachable, match="not connected"):
        await guest.link.call("status", {}, GuestStatus, 250.0)
    guest.process.send_signal(signal.SIGCONT)
    await until(lambda: guest.link.connected, limit_s=60)
    assert len(guest.hellos) == 2
    assert (await guest.link.call("status", {"brief": True}, GuestStatus, 20.0)).boot_id == BOOT_ID


async def test_an_agent_that_was_killed_is_greeted_again(guest: RealGuest) -> None:
    await guest.end_agent()
    with pytest.raises(GuestUnreachable):
        await guest.link.call("status", {}, GuestStatus, 0.5)
    await guest.start_agent()
    await until(lambda: guest.link.connected, limit_s=60)
    assert (await guest.link.call("status", {}, GuestStatus, 20.0)).cpus.unpluggable == [3, 2, 1]


async def test_what_is_asked_for_in_the_guest_arrives(guest: RealGuest) -> None:
    path = str(guest.root / "run/request.sock")
    await asyncio.to_thread(ask_for_more, memory_mib=96, reason="a batch job starts", path=path)
    await until(lambda: bool(guest.notices))
    assert guest.notices == [RequestNotice(memory_mib=96, reason="a batch job starts")]
