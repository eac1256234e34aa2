"""The port of the metrics alone: real daemons' own metrics on loopback without a token, and nothing else."""

from __future__ import annotations

import asyncio
import json
import re
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import pytest_asyncio
from aiohttp import web

from ebbtide.lab.state import write_private
from ebbtide.rest.listener import holding
from ebbtide.rest.metrics.port import ADDRESS, metrics_port
from hostagent.api import metrics as of_agent
from hostagent.api.forms import AGENT
from tests.manager.manager_process import REPO
from tests.manager.with_agent import lab_of
from tests.promtool import check_metrics


@pytest_asyncio.fixture
async def port(tmp_path: Path) -> AsyncIterator[int]:
    """Of a manager's process that was given ``--metrics-port``."""
    write_private(tmp_path / "token", "clients")
    write_private(tmp_path / "hosts.key", "agents")
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "cluster_manager.main", "--listen", "127.0.0.1:0", "--metrics-port", "0",
        "--token-file", str(tmp_path / "token"), "--hosts-key-file", str(tmp_path / "hosts.key"),
        "--database", str(tmp_path / "db"), cwd=REPO, stderr=asyncio.subprocess.PIPE,
    )  # fmt: skip
    assert process.stderr is not None
    try:
        async with asyncio.timeout(60):
            while (
                found := re.search(rb"metrics url=http://127.0.0.1:(\d+)/metrics", line := await _line(process))
            ) is None:
                assert line, "it has ended"
        yield int(found[1])
    finally:
        process.terminate()
        await process.communicate()


async def _line(process: asyncio.subprocess.Process) -> bytes:
    assert process.stderr is not None
    return (await process.stderr.readline()).replace(b"event=", b"")


@pytest.mark.asyncio
async def test_a_manager_answers_its_metrics_there_without_a_token_and_nothing_else(port: int) -> None:
    url = f"http://127.0.0.1:{port}"
    async with aiohttp.ClientSession() as session:
        async with session.get(f"{url}/metrics") as answer:
            text = await answer.read()
            assert answer.status == 200
        check_metrics(text)
        assert b"ebbtide_manager_leader " in text
        for path in ("/v1/vms", "/v1/prometheus/targets", "/", "/healthz"):
            async with session.get(url + path) as answer:
                assert answer.status == 404
        async with session.post(f"{url}/metrics") as answer:
            assert answer.status == 405
        # A page of another name that resolves to loopback.
        async with session.get(f"{url}/metrics", headers={"Host": "evil.example"}) as answer:
            assert answer.status == 403
        async with session.get(f"{url}/metrics", headers={"Host": f"localhost:{port}"}) as answer:
            assert answer.status == 200


@pytest.mark.asyncio
async def test_a_host_header_that_is_none_is_refused(port: int) -> None:
    for host in (b"localhost:99999999", b"localhost:abc", b"\xff"):
        reader, writer = await asyncio.open_connection(ADDRESS, port)
        writer.write(b"GET /metrics HTTP/1.1\r\nHost: " + host + b"\r\nConnection: close\r\n\r\n")
        head, _, body = (await reader.read()).partition(b"\r\n\r\n")
        writer.close()
        await writer.wait_closed()
        assert head.startswith(b"HTTP/1.1 400 "), (host, head)
        assert json.loads(body)["field"] == "Host", host


@pytest.mark.asyncio
async def test_a_host_agent_answers_the_same_there_as_on_its_own_port(
    each_store: None, tmp_path: Path, unused_tcp_port: int
) -> None:
    async with lab_of(tmp_path) as lab:
        await lab.create("web")
        parts: dict[web.AppKey[Any], Any] = {AGENT: lab.agent, of_agent.LOOP: lab.agent_server.app[of_agent.LOOP]}
        async with (
            holding(ADDRESS, unused_tcp_port) as held,
            metrics_port(held, "host agent", of_agent.metrics, parts),
            aiohttp.ClientSession() as session,
            session.get(f"http://127.0.0.1:{unused_tcp_port}/metrics") as answer,
        ):
            text = await answer.read()
        check_metrics(text)
        assert b'ebbtide_vm_nominal_cpu_cores{vm="web"} 3.0' in text
