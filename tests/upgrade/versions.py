"""Two versions of Ebbtide side by side: daemons of either, as processes, over one make-believe host and one store."""

from __future__ import annotations

import asyncio
import contextlib
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import aiohttp

from ebbtide.lab.cluster import free_ports
from ebbtide.lab.state import write_private
from tests.hostagent.world import World

NOW = Path(__file__).resolve().parents[2]
#: The commit of 0.1.0, one minor version before this one.
EARLIER = "b19e118e9cf828bbef1a8de43ddd5595ac912bcc"
TOKEN, KEY = "token-of-an-admin-of-two-versions", "key-of-hosts-of-two-versions"
LIMIT_S = 60.0


def checkout(into: Path) -> Path:
    """The earlier version's files.

    :raises AssertionError: this is no clone with its history.
    """
    archived = subprocess.run(["git", "archive", EARLIER], cwd=NOW, capture_output=True, check=False)
    assert archived.returncode == 0, (
        f"commit {EARLIER} of the earlier version is not here, so nothing can be said of upgrades: run this in a clone "
        f"with its history (git fetch --unshallow); git says: {archived.stderr.decode().strip()}"
    )
    into.mkdir()
    subprocess.run(["tar", "-x", "-C", str(into)], input=archived.stdout, check=True)
    return into


class Daemon:
    """A process of one version; stopped, another version can take its place."""

    def __init__(self, home: Path, name: str) -> None:
        self._log = home / f"{name}.log"
        self._process: subprocess.Popen[bytes] | None = None

    def run(self, version: Path, *argv: str) -> None:
        self.stop()
        environment = {**os.environ, "PYTHONPATH": str(version), "PYTHONDONTWRITEBYTECODE": "1"}
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-P", *argv], cwd=version, env=environment, stdout=log, stderr=log
            )

    def stop(self) -> None:
        """As `systemctl stop` does."""
        if self._process is not None:
            self._process.terminate()
            self._process.wait(30)
            self._process = None

    def died(self) -> bool:
        return self._process is not None and self._process.poll() is not None

    def said(self) -> str:
        return self._log.read_text()[-4000:] if self._log.exists() else ""


class Versions:
    """A manager and one host agent, each of a version of its own."""

    def __init__(self, home: Path, world: World, session: aiohttp.ClientSession) -> None:
        self.home, self.world = home, world
        self._session = session
        self._agent, self._manager = Daemon(home, "agent"), Daemon(home, "manager")
        self._agent_port, self._manager_port = free_ports(2)
        self.url = f"http://127.0.0.1:{self._manager_port}"
        self._number = 0
        write_private(home / "token", TOKEN)
        write_private(home / "hosts.key", KEY)

    async def manager(self, version: Path) -> None:
        """The manager of this version, from now on."""
        options = {
            "--listen": f"127.0.0.1:{self._manager_port}",
            "--token-file": str(self.home / "token"),
            "--hosts-key-file": str(self.home / "hosts.key"),
            "--database": str(self.home / "manager.sqlite"),
        }
        words = [word for pair in options.items() for word in pair]
        await asyncio.to_thread(self._manager.run, version, "-m", "cluster_manager.main", *words)
        await self.until(self._answers)

    async def agent(self, version: Path) -> None:
        """The host agent of this version, from now on."""
        words = [self.world.socket, self.home / "agent", self._agent_port, self.url, KEY]
        script = str(Path(__file__).with_name("agent_main.py"))
        await asyncio.to_thread(self._agent.run, version, script, str(version), *map(str, words))
        await self.ready()

    async def ready(self) -> None:
        """Until the manager has heard of its host."""
        await self.until(self._is_ready)

    async def _answers(self) -> bool:
        with contextlib.suppress(aiohttp.ClientError):
            return (await self.ask("GET", "/healthz"))[0] == 200
        return False

    async def _is_ready(self) -> bool:
        with contextlib.suppress(aiohttp.ClientError):
            status, found = await self.ask("GET", "/v1/hosts")
            return status == 200 and [host["state"] for host in found["hosts"]] == ["ready"]
        return False

    def stop(self) -> None:
        self._agent.stop()
        self._manager.stop()

    async def ask(self, method: str, path: str, body: Any = None) -> tuple[int, Any]:
        headers = {"Authorization": f"Bearer {TOKEN}"}
        async with self._session.request(method, self.url + path, json=body, headers=headers) as response:
            return response.status, await response.json()

    async def ended(self, method: str, path: str, body: Any = None) -> Any:
        """An operation from its beginning to its end."""
        self._number += 1
        request_id = f"request-{self._number}"
        if method == "DELETE":
            path += f"?request_id={request_id}"
        else:
            body = {"request_id": request_id, **(body or {})}
        status, found = await self.ask(method, path, body)
        assert status == 202, f"{found}\n{self.said()}"
        return (await self.ask("GET", f"/v1/operations/{found['request_id']}?wait_s=60"))[1]

    async def do(self, method: str, path: str, body: Any = None) -> Any:
        """An operation from its beginning to its end, which must be good."""
        ended = await self.ended(method, path, body)
        assert ended["state"] == "done", f"{ended}\n{self.said()}"
        return ended

    async def vm(self, name: str) -> Any:
        status, found = await self.ask("GET", f"/v1/vms/{name}")
        assert status == 200, found
        return found

    async def state(self, name: str) -> str:
        """Of a VM; empty: there is none."""
        status, found = await self.ask("GET", f"/v1/vms/{name}")
        return str(found["state"]) if status == 200 else ""

    async def until(self, condition: Callable[[], Any]) -> None:
        """Wait for what one daemon hears of the other."""
        try:
            async with asyncio.timeout(LIMIT_S):
                while not await condition():
                    assert not any(daemon.died() for daemon in (self._agent, self._manager)), self.said()
                    await asyncio.sleep(0.2)
        except TimeoutError:
            raise AssertionError(self.said()) from None

    def said(self) -> str:
        """The last of both logs."""
        return f"manager: {self._manager.said()}\nagent: {self._agent.said()}"
