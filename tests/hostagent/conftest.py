"""An agent's host over a make-believe hypervisor, inside the test's own loop."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
from aiohttp.test_utils import TestClient, TestServer

from ebbtide.messages.operations import Operation
from hostagent.api.app import make_app
from hostagent.control import reconciler
from hostagent.libvirt.definitions import usable_boot_mib
from hostagent.operations.agent import Agent
from hostagent.state.journal import Journal
from hostagent.vm import guest_link
from hostagent.vm.host import Host, Slice
from tests.hostagent.agent_process import CAPACITY, OVERHEAD_MIB
from tests.hostagent.fake_hypervisor import FakeHypervisor
from tests.hostagent.world import Domain, World
from tests.waiting import until

TOKEN = "token-of-the-test"
Client = TestClient[Any, Any]
Command = Callable[..., Awaitable[Operation]]


@pytest.fixture(autouse=True)
def brisk(monkeypatch: pytest.MonkeyPatch) -> None:
    """Looks and retries come ten times as often: sockets and processes cannot run in faked time."""
    monkeypatch.setattr(reconciler, "SURVEY_S", 0.2)
    monkeypatch.setattr(reconciler, "CHECK_S", 0.2)
    monkeypatch.setattr(reconciler, "OWNERS_S", 0.4)
    monkeypatch.setattr(guest_link, "RETRY_S", 0.2)


@pytest.fixture
async def world() -> AsyncIterator[World]:
    # A short path: the name of a unix socket has room for 107 bytes only.
    with tempfile.TemporaryDirectory(prefix="ebb") as directory:
        made = World(Path(directory))
        await made.start()
        yield made
        await made.stop()


@pytest.fixture
async def agent(world: World, tmp_path: Path) -> AsyncIterator[Agent]:
    made = make_agent(world, tmp_path)
    await made.start()
    yield made
    await made.close()


@pytest.fixture
def host(agent: Agent) -> Host:
    return agent.host


@pytest.fixture
def unnoted(agent: Agent, monkeypatch: pytest.MonkeyPatch) -> None:
    """The agent is killed before it can write down that a stop or deletion has come to its end."""
    monkeypatch.setattr(agent.host.journal, "add_carried_out", lambda _: None)


def make_agent(world: World, state_dir: Path) -> Agent:
    part = Slice("host-a", "http://127.0.0.1:1", CAPACITY, "qemu", OVERHEAD_MIB)
    host = Host(part, FakeHypervisor(world.socket), Journal(state_dir), lambda: 1e6)
    return Agent(host, usable_boot_mib)


@contextlib.asynccontextmanager
async def succeeding(world: World, state_dir: Path) -> AsyncIterator[Agent]:
    """The next agent of a host whose agent is gone."""
    agent = make_agent(world, state_dir)
    try:
        await agent.start()
        yield agent
    finally:
        await agent.close()


async def has_failed(agent: Agent, request_id: str) -> None:
    """Look whether an agent answers an operation as failed."""
    operation = await agent.requests.operations.get(request_id, 5.0)
    assert operation is not None
    assert operation.state == "failed", operation.sentence


@pytest.fixture
async def client(agent: Agent) -> AsyncIterator[Client]:
    headers = {"Authorization": f"Bearer {TOKEN}", "Accept": "application/problem+json"}
    async with TestClient(TestServer(make_app(agent, TOKEN)), headers=headers) as made:
        yield made


@pytest.fixture
def command(client: Client) -> Command:
    """Send a command and wait until its operation has ended."""

    async def send(method: str, path: str, body: dict[str, Any] | None = None) -> Operation:
        response = await client.request(method, path, json=body)
        text = await response.text()
        assert response.status == 202, text
        operation = Operation.model_validate_json(text)
        response = await client.get(f"/v1/operations/{operation.request_id}", params={"wait_s": "20"})
        return Operation.model_validate_json(await response.text())

    return send


def low_vm(name: str, **fields: Any) -> dict[str, Any]:
    """A deflatable VM of 3 cores and 1024 MiB, half of it boot memory."""
    return {
        "name": name,
        "priority": "deflatable",
        "nominal": {"cpu_cores": 3.0, "memory_mib": 1024.0},
        "minimum": {"cpu_cores": 0.5, "memory_mib": 320.0},
        **fields,
    }


@pytest.fixture
async def two_vms(command: Command, host: Host, world: World) -> list[Domain]:
    """low-1 and low-2, both with 500 MiB of cache, their guests connected."""
    for name in ("low-1", "low-2"):
        operation = await command("POST", "/v1/vms", {"request_id": f"c-{name}", "vm": low_vm(name)})
        assert operation.state == "done", operation.sentence
    await until(lambda: all(vm.link.connected for vm in host.vms.values()))
    for domain in world.domains.values():
        domain.cache_mib = 500.0
    return list(world.domains.values())
