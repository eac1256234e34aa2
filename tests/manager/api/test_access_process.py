"""A manager with HTTPS and a tokens file as a process: SIGHUP, no token in its log, and the command line against it."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path

import aiohttp
import pytest

from cluster_manager.store.database import PostgreSQL
from ebbtide.lab import processes
from ebbtide.lab.cluster import free_ports, program
from ebbtide.lab.state import Process, write_private
from ebbtide.rest.tokens import digest_of
from tests.manager import cluster as clusters
from tests.rest.pki import Pki

pytestmark = [pytest.mark.service, pytest.mark.usefixtures("each_store")]

ADMIN, AGENTS = "secret-of-the-admin", "secret-of-agents"


def entry(name: str, role: str, token: str) -> str:
    return f'[[token]]\nname = "{name}"\nrole = "{role}"\nsha256 = "{digest_of(token).hex()}"\n'


@dataclass
class Running:
    process: Process
    url: str
    home: Path
    tls: Pki

    async def status(self, token: str, method: str = "GET") -> int:
        """Of a look at the VMs, or of another request for them; 0 where nobody answers."""
        connector = aiohttp.TCPConnector(ssl=self.tls.client())
        headers = {"Authorization": f"Bearer {token}"}
        async with aiohttp.ClientSession(connector=connector) as session:
            try:
                async with session.request(method, f"{self.url}/v1/vms", headers=headers) as response:
                    return response.status
            except aiohttp.ClientError:
                return 0

    async def until(self, token: str, status: int) -> None:
        async with asyncio.timeout(60):
            while await self.status(token) != status:
                assert processes.running(self.process), self.log()
                await asyncio.sleep(0.05)

    def log(self) -> str:
        return (self.home / "log").read_text()


@contextlib.asynccontextmanager
async def manager(home: Path) -> AsyncIterator[Running]:
    """An ``ebb-manager`` with HTTPS and a tokens file."""
    for name, token in (("admin", ADMIN), ("agents", AGENTS)):
        write_private(home / name, token)
    write_private(home / "tokens.toml", entry("looker", "viewer", "secret-of-looker"))
    pki = Pki(home / "pki")
    own = pki.pair("ebb-manager")
    (port,) = free_ports(1)
    database = clusters.database_in(home)
    argv = [program("ebb-manager"), "--listen", f"127.0.0.1:{port}", "--log-level", "debug"]
    argv += ["--token-file", str(home / "admin"), "--hosts-key-file", str(home / "agents")]
    where = database.url if isinstance(database, PostgreSQL) else str(database)
    argv += ["--tokens-file", str(home / "tokens.toml"), "--database", where]
    argv += ["--tls-certificate", str(own.certificate), "--tls-key", str(own.key), "--client-ca", str(pki.ca)]
    process = processes.start("manager", argv, home / "log")
    try:
        yield Running(process, f"https://127.0.0.1:{port}", home, pki)
    finally:
        assert processes.stop([process]) == [], "the manager did not end by SIGTERM"


async def test_a_manager_reads_its_tokens_again_and_says_none_of_them(tmp_path: Path) -> None:
    async with manager(tmp_path) as running:
        await running.until("secret-of-looker", 200)
        assert await running.status("secret-of-looker", "POST") == 403
        assert await running.status(ADMIN, "POST") == 400
        assert await running.status("secret-of-ci") == 401
        tokens = tmp_path / "tokens.toml"
        tokens.write_text(entry("ci", "operator", "secret-of-ci"))
        os.kill(running.process.pid, signal.SIGHUP)
        await running.until("secret-of-ci", 200)
        assert await running.status("secret-of-looker") == 401
        tokens.write_text(entry("ci", "king", "secret-of-king"))
        os.kill(running.process.pid, signal.SIGHUP)
        async with asyncio.timeout(30):
            while "nothing was reloaded" not in running.log():
                await asyncio.sleep(0.05)
        assert await running.status("secret-of-ci") == 200
        # Nor is anything where its own token is not there for a moment; the next signal counts again.
        own = (tmp_path / "admin").read_text()
        (tmp_path / "admin").unlink()
        tokens.write_text(entry("ci", "operator", "secret-of-last"))
        os.kill(running.process.pid, signal.SIGHUP)
        async with asyncio.timeout(30):
            while running.log().count("nothing was reloaded") < 2:
                await asyncio.sleep(0.05)
        assert await running.status("secret-of-last") == 401
        write_private(tmp_path / "admin", own)
        os.kill(running.process.pid, signal.SIGHUP)
        await running.until("secret-of-last", 200)
        said = running.log()
    assert "token.0.role" in said
    for secret in (ADMIN, AGENTS, "secret-of-looker", "secret-of-ci", "secret-of-king"):
        assert secret not in said
        assert digest_of(secret).hex() not in said


def ignores_reloads(pid: int) -> bool:
    status = Path(f"/proc/{pid}/status").read_text()
    mask = next(line.split()[1] for line in status.splitlines() if line.startswith("SigIgn:"))
    return bool(int(mask, 16) & (1 << signal.SIGHUP - 1))


async def test_a_manager_that_is_told_to_reload_while_it_starts_or_stops_starts_and_stops(tmp_path: Path) -> None:
    async with manager(tmp_path) as running:
        pid = running.process.pid
        async with asyncio.timeout(60):
            while not ignores_reloads(pid):
                assert "event=listening" not in running.log()
                await asyncio.sleep(0.01)
        os.kill(pid, signal.SIGHUP)
        await running.until(ADMIN, 200)
        assert not ignores_reloads(pid)
        os.kill(pid, signal.SIGTERM)
        async with asyncio.timeout(60):
            while not ignores_reloads(pid):
                assert processes.running(running.process), processes.how_ended(running.process)
                await asyncio.sleep(0.001)
            os.kill(pid, signal.SIGHUP)
            while processes.running(running.process):
                await asyncio.sleep(0.01)
        assert processes.how_ended(running.process) == "ended with status 0"


async def test_the_command_line_speaks_tls_with_the_files_it_is_given(tmp_path: Path) -> None:
    async with manager(tmp_path) as running:
        await running.until(ADMIN, 200)
        words = ["--manager", running.url, "--token-file", str(tmp_path / "admin")]
        clean = {name: value for name, value in os.environ.items() if not name.startswith("EBB_")}
        ca = str(running.tls.ca)
        for before, more, code, said in (
            ([], {"EBB_CA": ca}, 0, "[]"),
            (["--ca", ca], {}, 0, "[]"),
            ([], {}, 1, "name its CA by --ca or EBB_CA"),
        ):
            argv = [sys.executable, "-m", "ebbtide.cli.main", *before, "vm", "list", "-o", "json", *words]
            done = await asyncio.to_thread(
                subprocess.run, argv, capture_output=True, text=True, timeout=60, check=False, env={**clean, **more}
            )
            assert done.returncode == code, done.stderr
            assert said in (done.stdout if code == 0 else done.stderr)
            assert done.stderr.count("\n") == code
