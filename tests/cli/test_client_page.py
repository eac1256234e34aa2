"""The examples of docs/reference/client.md, run as they stand there, one after the other."""

from __future__ import annotations

import asyncio
import os
import re
import sys
from pathlib import Path

import pytest

from ebbtide.client import ManagerRefused, SyncManagerClient
from tests.manager.cluster import TOKEN, cluster_of
from tests.manager.fake_agent import FakeAgent

PAGE = Path(__file__).resolve().parents[2] / "docs/reference/client.md"


async def test_the_examples_of_the_page_run(tmp_path: Path) -> None:
    examples = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    said = []
    async with cluster_of(tmp_path, FakeAgent("host-a", cpu_cores=8.0, memory_mib=8000.0)) as cluster:
        variables = {**os.environ, "EBB_MANAGER": cluster.url, "EBB_TOKEN": TOKEN}
        for text in examples:
            process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-c", text),
                env=variables,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.STDOUT,
            )
            output = (await process.communicate())[0].decode()
            assert process.returncode == 0, output
            said.append(output)
    assert len(said) == 2
    assert said[0].startswith("done placed web")
    assert "['vm.name']" in said[0]
    assert said[0].splitlines()[-1].startswith("resized ")
    assert said[1].startswith("web host-a 1.0")
    assert said[1].splitlines()[-1].startswith("deleted ")


async def test_the_client_without_asyncio_raises_what_the_other_one_does(tmp_path: Path) -> None:
    def ask(url: str) -> int:
        with SyncManagerClient(url, TOKEN) as manager, pytest.raises(ManagerRefused) as caught:
            manager.do(lambda m: m.vm("nobody"))
        return caught.value.status

    async with cluster_of(tmp_path) as cluster:
        assert await asyncio.to_thread(ask, cluster.url) == 404


def test_it_is_for_its_context_only() -> None:
    with pytest.raises(RuntimeError, match="outside of its context"):
        SyncManagerClient("http://127.0.0.1:7100", "token").do(lambda m: m.vms())
