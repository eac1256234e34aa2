"""`ebb top` on a terminal (tmux), against a manager over HTTP and hosts that report to it."""

from __future__ import annotations

import asyncio
import functools
import json
import os
import subprocess
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import jsonschema
import pytest
import pytest_asyncio

from ebbtide.cli.schemas import schema_of
from tests.cli.top.screen import Screen, command, start
from tests.manager import cluster as clusters
from tests.manager.cluster import Cluster, cluster_of, vm
from tests.manager.fake_agent import FakeAgent
from tests.manager.with_agent import lab_of

pytestmark = pytest.mark.asyncio


@pytest.fixture
def screen(tmp_path: Path) -> Iterator[Screen]:
    made = Screen(tmp_path)
    try:
        yield made
    finally:
        made.tmux("kill-server")


@pytest_asyncio.fixture
async def cluster(tmp_path: Path) -> AsyncIterator[Cluster]:
    agents = [FakeAgent(f"host-{letter}", cpu_cores=8.0, memory_mib=8000.0) for letter in "ab"]
    async with cluster_of(tmp_path, *agents, silent_after_s=60.0) as made:
        for name in ("web", "db", "batch"):
            await made.create(vm(name))
        yield made


async def test_hosts_and_vms_are_shown_as_they_change_and_q_gives_the_terminal_back(
    cluster: Cluster, screen: Screen, tmp_path: Path
) -> None:
    start(screen, cluster, tmp_path)
    await screen.shows("2 hosts: 2 ready; 3 VMs: 3 running", "host-a", "host-b", "placed", "q quit")
    screen.press("Tab")
    await screen.shows("web", "db", "batch", "3/3")
    # A fourth one forces a deflation: bars, sizes and events follow.
    await cluster.create(vm("large", "fixed", cpu_cores=7.0, memory_mib=4000.0))
    await screen.shows("large", "4 VMs: 4 running", "7/7", "placed large")
    screen.press("/", "l", "a", "r", "Enter")
    shown = await screen.shows("filter 'lar': 1 VMs")
    assert "batch  " not in "\n".join(shown.splitlines()[4:6])
    screen.press("q")
    await screen.shows("ended with 0")
    async with asyncio.timeout(20):
        while not (tmp_path / "after").exists() or not (tmp_path / "after").read_text():
            await asyncio.to_thread(screen.text)
    assert (tmp_path / "after").read_text() == (tmp_path / "before").read_text()
    # The shell's own screen is back.
    assert "host-a  " not in screen.text()


async def test_another_size_is_filled_at_once_and_ctrl_c_ends_it(
    cluster: Cluster, screen: Screen, tmp_path: Path
) -> None:
    start(screen, cluster, tmp_path, "--vms")
    shown = await screen.shows("web", "GiB")
    assert "what happened last" not in shown
    screen.tmux("resize-window", "-x", "160", "-y", "40")
    shown = await screen.shows("what happened last", "placed web")
    assert "q quit" in shown.splitlines()[39]
    screen.tmux("resize-window", "-x", "40", "-y", "10")
    async with asyncio.timeout(40):
        while "what happened last" in screen.text():
            await asyncio.to_thread(screen.text)
    screen.press("C-c")
    await screen.shows("ended with 0")


async def test_a_manager_that_goes_and_comes_back_leaves_the_picture_standing(
    cluster: Cluster, screen: Screen, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    start(screen, cluster, tmp_path)
    await screen.shows("2 ready", "host-a")
    assert cluster.server is not None
    port = cluster.server.port
    await cluster.stop_manager()
    assert "host-a" in await screen.shows("old figures:")
    monkeypatch.setattr(clusters, "Listening", functools.partial(clusters.Listening, port=port))
    await cluster.start_manager()
    await cluster.ready()
    await screen.shows("q quit", "2 ready")
    screen.press("q")
    await screen.shows("ended with 0")


async def run(cluster: Cluster, directory: Path, *words: str, **environment: str) -> tuple[int, str, str]:
    process = await asyncio.create_subprocess_exec(
        *command(cluster, directory, *words), stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
        stderr=subprocess.PIPE, env={**os.environ, **environment},
    )  # fmt: skip
    out, err = await process.communicate()
    assert process.returncode is not None
    return process.returncode, out.decode(), err.decode()


async def test_without_a_terminal_it_says_so_or_prints_one_picture(cluster: Cluster, tmp_path: Path) -> None:
    code, out, err = await run(cluster, tmp_path)
    assert (code, out) == (1, "")
    assert "`ebb top` needs a terminal; `ebb top --once` prints one picture" in err
    code, out, err = await run(cluster, tmp_path, "--once", COLUMNS="100")
    assert (code, err) == (0, "")
    assert "2 hosts: 2 ready; 3 VMs: 3 running" in out
    assert "\x1b" not in out
    code, out, err = await run(cluster, tmp_path, "-o", "json")
    document = json.loads(out)
    jsonschema.validate(document, schema_of("top"))
    assert [row["name"] for row in document["vms"]] == ["batch", "db", "web"]
    assert document["events"][-1]["kind"] == "placed"


async def test_a_terminal_that_cannot_be_drawn_on_is_refused_in_a_sentence(
    cluster: Cluster, screen: Screen, tmp_path: Path
) -> None:
    screen.press("export TERM=dumb", "Enter")
    start(screen, cluster, tmp_path)
    await screen.shows("has no cursor that moves", "--once", "ended with 1")


async def test_enter_on_a_vm_shows_what_each_layer_can_do_and_gave(screen: Screen, tmp_path: Path) -> None:
    async with lab_of(tmp_path) as lab:
        await lab.create("web")
        await lab.create("large", priority="fixed", cpu_cores=5.0, memory_mib=2000.0)
        start(screen, lab.cluster, tmp_path, "--vms")
        await screen.shows("large", "web")
        screen.press("Home", "Enter")
        await screen.shows("layers of web", "can still give", "guest ")
        screen.tmux("resize-window", "-x", "160", "-y", "50")
        await screen.shows("application ", "guest ", "hypervisor ", "cpu_cores: asked", "verified")
        screen.press("Escape")
        await screen.shows("q quit")
        screen.press("q")
        await screen.shows("ended with 0")
