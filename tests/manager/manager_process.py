"""Real ``ebb-manager`` processes on one PostgreSQL database, of which one leads."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import socket
import sys
from pathlib import Path
from typing import Any

import aiohttp

from cluster_manager.store.database import PostgreSQL
from ebbtide.lab.state import write_private
from tests.manager.cluster import TOKEN
from tests.manager.fake_agent import HOSTS_KEY
from tests.waiting import until

REPO = Path(__file__).resolve().parents[2]


class ManagerProcess:
    """One manager on a port of its own, which it keeps over restarts."""

    def __init__(self, directory: Path, database: PostgreSQL, session: aiohttp.ClientSession) -> None:
        self._directory = directory
        self._database = database
        self._session = session
        with socket.create_server(("127.0.0.1", 0)) as probe:
            self.port = int(probe.getsockname()[1])
        self.url = f"http://127.0.0.1:{self.port}"
        self.log: list[str] = []
        self._process: asyncio.subprocess.Process | None = None
        self._reading: asyncio.Task[None] | None = None
        write_private(directory / "token", TOKEN)
        write_private(directory / "hosts.key", HOSTS_KEY)

    async def start(self) -> None:
        options = {
            "--listen": f"127.0.0.1:{self.port}",
            "--policy": "first-fit",
            "--token-file": str(self._directory / "token"),
            "--hosts-key-file": str(self._directory / "hosts.key"),
            "--database": self._database.url,
        }
        argv = [sys.executable, "-m", "cluster_manager.main", *(word for pair in options.items() for word in pair)]
        self._process = await asyncio.create_subprocess_exec(*argv, cwd=REPO, stderr=asyncio.subprocess.PIPE)
        listening = asyncio.Event()
        self._reading = asyncio.create_task(self._read(self._process, listening), name=f"log of {self.url}")
        async with asyncio.timeout(60):
            await listening.wait()
        assert self._process.returncode is None, self.log

    async def _read(self, process: asyncio.subprocess.Process, listening: asyncio.Event) -> None:
        assert process.stderr is not None
        while line := await process.stderr.readline():
            self.log.append(line.decode().strip())
            if b"event=listening" in line:
                listening.set()
        listening.set()

    def send(self, number: signal.Signals) -> None:
        assert self._process is not None
        self._process.send_signal(number)

    async def end(self, number: signal.Signals = signal.SIGKILL) -> int:
        """End it and wait for its end; harmless where it has ended."""
        assert self._process is not None
        with contextlib.suppress(ProcessLookupError):
            self.send(number)
        async with asyncio.timeout(30):
            code = await self._process.wait()
            if self._reading is not None:
                await self._reading
        return code

    def roles(self) -> list[str]:
        """The log's lines about its role."""
        return [line for line in self.log if 'event="this manager is ' in line]

    async def ask(self, path: str, limit_s: float = 5.0) -> tuple[int, Any]:
        """A status of 0 where nobody answers."""
        timeout = aiohttp.ClientTimeout(total=limit_s)
        headers = {"Authorization": f"Bearer {TOKEN}"}
        try:
            async with self._session.get(self.url + path, headers=headers, timeout=timeout) as response:
                return response.status, await response.json()
        except (aiohttp.ClientError, TimeoutError):
            return 0, None

    async def until(self, path: str, status: int, limit_s: float = 30.0) -> float:
        """Wait for that answer. Returns after how many seconds it came."""
        begin = asyncio.get_running_loop().time()

        async def answers() -> bool:
            return (await self.ask(path, 1.0))[0] == status

        await until(answers, f"{status} of {path}", limit_s)
        return asyncio.get_running_loop().time() - begin
