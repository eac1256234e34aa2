"""A cluster that is upgraded while it runs: each daemon of this version beside the other of the one before."""

from __future__ import annotations

import contextlib
import sqlite3
from collections.abc import AsyncIterator
from pathlib import Path
from tempfile import TemporaryDirectory

import aiohttp
import pytest

from tests.hostagent.world import World
from tests.upgrade.versions import NOW, Versions, checkout

pytestmark = [pytest.mark.service, pytest.mark.timeout(600)]

LOW = {"cpu_cores": 4.0, "memory_mib": 2000.0}
HIGH = {"cpu_cores": 4.0, "memory_mib": 1000.0}
LEAST = {"cpu_cores": 1.0, "memory_mib": 300.0}


@pytest.fixture(scope="module")
def earlier(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return checkout(tmp_path_factory.mktemp("earlier") / "ebbtide")


@contextlib.asynccontextmanager
async def versions_of(home: Path) -> AsyncIterator[Versions]:
    with TemporaryDirectory(prefix="ebb") as directory:
        world = World(Path(directory))
        await world.start()
        async with aiohttp.ClientSession() as session:
            made = Versions(home, world, session)
            try:
                yield made
            finally:
                made.stop()
        await world.stop()


async def place_low(both: Versions, name: str = "low") -> None:
    await both.do("POST", "/v1/vms", {"vm": {"name": name, "nominal": LOW, "minimum": LEAST}})
    await both.until(lambda: connected(both, name))


async def connected(both: Versions, name: str) -> bool:
    return bool((await both.vm(name))["guest_connected"])


async def has(both: Versions, name: str, cpu_cores: float) -> bool:
    """Whether the cluster says that a VM has so much, and the hypervisor holds it to that."""
    return bool((await both.vm(name))["current"]["cpu_cores"] == cpu_cores)


async def runs(both: Versions, name: str) -> bool:
    return await both.state(name) == "running"


async def reach(both: Versions, name: str, target: dict[str, float]) -> None:
    """Set a VM's target, as a client does: once more where the VM has changed while it was asked for its generation."""
    for _ in range(5):
        generation = (await both.vm(name))["generation"]
        ended = await both.ended("PUT", f"/v1/vms/{name}/target", {"generation": generation + 1, "target": target})
        if f"which {name} has" not in ended["sentence"]:
            break
    assert ended["state"] == "done", ended


async def work(both: Versions, keeps: bool) -> None:
    """All that a cluster does for its VMs: `low` is there, at its nominal size.

    :param keeps: whether this manager keeps what it preempts.
    """
    domain = both.world.domains["ebb-host-a.low"]
    await both.do("POST", "/v1/vms", {"vm": {"name": "high", "priority": "fixed", "nominal": HIGH}})
    assert await has(both, "low", 2.0)
    assert min(domain.cap or 99.0, (domain.quota or 99.0) * len(domain.online)) == pytest.approx(2.0, abs=0.1)
    status, found = await both.ask("GET", "/v1/vms/low/explain")
    assert status == 200, found
    await both.do("DELETE", "/v1/vms/high")
    await both.until(lambda: has(both, "low", 4.0))
    await reach(both, "low", {"cpu_cores": 1.5, "memory_mib": 2000.0})
    assert await has(both, "low", 1.5)
    await both.do("POST", "/v1/vms/low/stop", {"limit_s": 2.0})
    await both.do("POST", "/v1/vms/low/start")
    await both.until(lambda: connected(both, "low"))
    await reach(both, "low", LOW)
    await both.until(lambda: has(both, "low", 4.0))
    await both.do("PATCH", "/v1/vms/low", {"minimum": {"memory_mib": 400.0}})
    await both.do("PATCH", "/v1/vms/low", {"minimum": {"memory_mib": 300.0}})
    await preempt(both, keeps)


async def preempt(both: Versions, keeps: bool) -> None:
    """A VM that leaves no room for another one's minimum: that one goes."""
    await both.do("POST", "/v1/vms", {"vm": {"name": "small", "nominal": LEAST, "minimum": LEAST}})
    huge = {"cpu_cores": 4.5, "memory_mib": 1000.0}
    await both.do("POST", "/v1/vms", {"vm": {"name": "huge", "priority": "fixed", "nominal": huge}})
    assert await both.state("low") == "running"
    # The earlier version's way is to remove it.
    kept = await both.state("small")
    assert kept == ("preempted" if keeps else "")
    await both.do("DELETE", "/v1/vms/huge")
    if kept:
        await both.until(lambda: runs(both, "small"))
        await both.do("DELETE", "/v1/vms/small")
    await both.until(lambda: has(both, "low", 4.0))


def store_version(both: Versions) -> int:
    with contextlib.closing(sqlite3.connect(both.home / "manager.sqlite")) as connection:
        return int(connection.execute("SELECT max(number) FROM migrations").fetchone()[0])


async def test_a_newer_manager_leads_older_agents_which_are_upgraded_later(earlier: Path, tmp_path: Path) -> None:
    async with versions_of(tmp_path) as both:
        await both.manager(earlier)
        await both.agent(earlier)
        await place_low(both)
        before = store_version(both)
        await both.manager(NOW)
        await both.ready()
        assert store_version(both) > before
        assert (await both.vm("low"))["state"] == "running"
        await work(both, keeps=True)
        await both.agent(NOW)
        assert await has(both, "low", 4.0)
        await work(both, keeps=True)


async def test_a_newer_agent_serves_an_older_manager_which_is_upgraded_later(earlier: Path, tmp_path: Path) -> None:
    async with versions_of(tmp_path) as both:
        await both.manager(earlier)
        await both.agent(earlier)
        await place_low(both)
        await both.agent(NOW)
        assert await has(both, "low", 4.0)
        await work(both, keeps=False)
        await both.manager(NOW)
        await both.ready()
        assert await has(both, "low", 4.0)
        await work(both, keeps=True)
