"""The manager as a process that is killed and started again, always at the same address."""

from __future__ import annotations

import asyncio
import contextlib
import signal
from pathlib import Path

import aiohttp

from ebbtide.lab.cluster import free_ports
from tests.chaos.manager_process import RECORD
from tests.forked import Forked
from tests.manager.cluster import TOKEN

START_S = 60.0


class ManagerProcess:
    """:param namespace: the network namespace that it is in."""

    def __init__(
        self, directory: Path, address: str = "127.0.0.1", port: int = 0, namespace: str | None = None
    ) -> None:
        self.directory = directory
        self.port = port or free_ports(1)[0]
        self.address = address
        self.url = f"http://{address}:{self.port}"
        self.database = directory / "manager.sqlite"
        self.log = directory / "manager.log"
        self._namespace = namespace
        self._process: Forked | None = None

    def client(self) -> aiohttp.ClientSession:
        timeout = aiohttp.ClientTimeout(total=10)
        return aiohttp.ClientSession(headers={"Authorization": f"Bearer {TOKEN}"}, timeout=timeout)

    async def start(self, record: str = "", **environment: str) -> None:
        """Start, and wait until it listens. ``record``: see `tests.chaos.manager_process`."""
        arguments = [str(self.directory), self.address, str(self.port)]
        changes = environment | ({RECORD: record} if record else {})
        before = self.log.stat().st_size if self.log.exists() else 0
        self.log.touch()
        self._process = await Forked.start("tests.chaos.manager_process", arguments, self.log, changes, self._namespace)
        async with asyncio.timeout(START_S):
            while not self._listens(before):
                if self._process.returncode is not None:
                    assert record, f"the manager ended before it listened: {self._tail()}"
                    return
                await asyncio.sleep(0.02)

    def _listens(self, offset: int) -> bool:
        with self.log.open("rb") as log:
            log.seek(offset)
            return b"event=listening" in log.read()

    def _tail(self) -> str:
        return self.log.read_text(errors="replace")[-2000:]

    async def killed_itself(self, limit_s: float) -> bool:
        """Whether it comes to the record that it is to end at."""
        assert self._process is not None
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(limit_s):
                await self._process.wait()
        return self._process.returncode is not None

    async def end(self, number: signal.Signals) -> int:
        """Send a signal and wait; nothing where it has ended already."""
        if self._process is None:
            return 0
        self._process.send_signal(number)
        async with asyncio.timeout(20):
            return await self._process.wait()

    def defects(self) -> list[str]:
        """Lines of its log that no weather explains."""
        lines = self.log.read_text(errors="replace").splitlines()
        words = ("Traceback", "defect", "never retrieved", "Unclosed")
        return [line for line in lines if any(word in line for word in words)]
