"""An agent that is told to end ends, also while libvirt or the kernel hangs."""

from __future__ import annotations

import asyncio
import json
import signal
import sys
from pathlib import Path

import pytest

from ebbtide.lab.state import write_private

pytestmark = pytest.mark.service

LIMIT_S = 30.0


async def told_to_end(tmp_path: Path, port: int, what: str, number: signal.Signals) -> None:
    """Have an agent begin and, once something is under way, end in time, with its state directory to itself."""
    write_private(tmp_path / "token", "of-the-manager")
    options = {
        "id": "host-a",
        "capacity": "cpu_cores=1,memory_mib=1024",
        "token-file": tmp_path / "token",
        "listen": f"127.0.0.1:{port}",
        "state-dir": tmp_path / "state",
        "image-dir": tmp_path,
        "disk-dir": tmp_path / "disks",
        "accelerator": "qemu",
        "uri": "stand-in",
    }
    words = [word for name, value in options.items() for word in (f"--{name}", str(value))]
    arguments = ["-m", "tests.hostagent.hanging_process", what, *words]
    with (tmp_path / "log").open("wb") as log:
        process = await asyncio.create_subprocess_exec(
            sys.executable, *arguments, stdout=asyncio.subprocess.PIPE, stderr=log
        )
    try:
        assert process.stdout is not None
        async with asyncio.timeout(LIMIT_S):
            while await process.stdout.readline() != b"under way\n":
                assert not process.stdout.at_eof(), (tmp_path / "log").read_text()
        process.send_signal(number)
        async with asyncio.timeout(LIMIT_S):
            said = await process.stdout.read()
            assert await process.wait() == 0, (tmp_path / "log").read_text()
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    assert said.splitlines()[-1] == b"alone", "no other agent begins before this one is gone"
    assert b"Traceback" not in said + (tmp_path / "log").read_bytes()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
@pytest.mark.parametrize("what", ["listAllDomains", "getAllDomainStats", "close", "reclaim"])
async def test_an_agent_ends_when_it_is_told_to_though_a_call_hangs(
    tmp_path: Path, unused_tcp_port: int, what: str, number: signal.Signals
) -> None:
    await told_to_end(tmp_path, unused_tcp_port, what, number)


async def test_what_is_being_written_down_when_an_agent_ends_is_written(tmp_path: Path, unused_tcp_port: int) -> None:
    await told_to_end(tmp_path, unused_tcp_port, "journal", signal.SIGTERM)
    assert json.loads((tmp_path / "state" / "state.json").read_text())["epoch"] == 0
