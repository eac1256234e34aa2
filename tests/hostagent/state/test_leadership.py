"""The agent takes commands of the manager that leads, in the order in which it gave them."""

from __future__ import annotations

from pathlib import Path

import pytest
from aiohttp.test_utils import TestClient, TestServer
from typer.testing import CliRunner

from ebbtide.cli.main import app
from ebbtide.deflation.fencing import MOST_STEP
from ebbtide.deflation.modes import HostMode
from ebbtide.messages.commands import Command
from ebbtide.rest.access import Access
from ebbtide.rest.roles import Role
from ebbtide.rest.tokens import principal
from hostagent.api.app import make_app
from hostagent.errors import RequestRefused
from hostagent.operations.agent import Agent
from hostagent.operations.requests import Leadership
from hostagent.state.journal import Journal
from hostagent.vm.host import Host
from tests.hostagent.conftest import Client


def command(epoch: int, order: int = 0) -> Command:
    return Command(request_id="r", epoch=epoch, order=order)


async def test_a_command_that_a_later_one_has_overtaken_is_refused(tmp_path: Path) -> None:
    leadership = Leadership(Journal(tmp_path))
    await leadership.follow(command(1, 7))
    await leadership.follow(command(1, 7))
    with pytest.raises(RequestRefused, match="order 6 was overtaken") as refused:
        await leadership.follow(command(1, 6))
    assert (refused.value.status, refused.value.field) == (409, "order")
    await leadership.follow(command(2, 1))


async def test_the_repetition_of_a_command_that_was_overtaken_gets_its_answer(client: Client, host: Host) -> None:
    first = {"request_id": "first", "epoch": 1, "order": 6, "need": {"cpu_cores": 1.0}}
    assert (await client.post("/v1/reclaims", json=first)).status == 202
    later = {"request_id": "later", "epoch": 1, "order": 7, "need": {"cpu_cores": 1.0}}
    assert (await client.post("/v1/reclaims", json=later)).status == 202
    again = await client.post("/v1/reclaims", json=first)
    assert (again.status, (await again.json())["request_id"]) == (202, "first")
    other = await client.post("/v1/reclaims", json=first | {"need": {"cpu_cores": 2.0}})
    assert (other.status, (await other.json())["field"]) == (409, "request_id")
    unknown = await client.post("/v1/reclaims", json=first | {"request_id": "held-back"})
    assert (unknown.status, (await unknown.json())["field"]) == (409, "order")
    # A manager whose leadership is over learns of it, whatever it repeats.
    host.journal.raise_epoch(2)
    over = await client.post("/v1/reclaims", json=first)
    assert (over.status, (await over.json())["field"]) == (409, "epoch")


async def test_a_manager_that_says_that_it_leads_shuts_the_old_one_out_for_good(client: Client, host: Host) -> None:
    response = await client.put("/v1/epoch", json={"epoch": 4})
    assert (response.status, await response.json(), host.journal.epoch) == (200, {"epoch": 4}, 4)
    body = {"request_id": "r", "epoch": 3, "need": {"cpu_cores": 1.0}}
    response = await client.post("/v1/reclaims", json=body)
    assert (response.status, (await response.json())["field"]) == (409, "epoch")
    for epoch, status in ((3, 409), (-1, 400)):
        response = await client.put("/v1/epoch", json={"epoch": epoch})
        assert (response.status, (await response.json())["field"]) == (status, "epoch")


async def test_an_epoch_that_cannot_be_stored_is_no_fault_of_the_command(
    client: Client, host: Host, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError("No space left on device")

    body = {"request_id": "r", "epoch": 3, "need": {"cpu_cores": 1.0}}
    with monkeypatch.context() as disk:
        disk.setattr("hostagent.state.journal._replace", full)
        response = await client.post("/v1/reclaims", json=body)
        assert (response.status, host.journal.epoch) == (503, 0)
        assert "No space left" in (await response.json())["error"]
    assert (await client.post("/v1/reclaims", json=body)).status == 202
    assert host.journal.epoch == 3


@pytest.mark.parametrize("epoch", [MOST_STEP + 5, 2**53])
async def test_an_implausible_epoch_is_refused_and_locks_no_manager_out(client: Client, host: Host, epoch: int) -> None:
    host.journal.raise_epoch(4)
    for method, path, body in (
        ("PUT", "/v1/epoch", {}),
        ("POST", "/v1/reclaims", {"request_id": "r", "need": {"cpu_cores": 1.0}}),
        ("PUT", "/v1/budget", {"number": 1, "room": {}}),
        ("DELETE", f"/v1/vms/web?request_id=d&epoch={epoch}", None),
    ):
        response = await client.request(method, path, json=None if body is None else body | {"epoch": epoch})
        assert (response.status, (await response.json())["field"]) == (409, "epoch"), path
    assert host.journal.epoch == 4
    assert (await client.put("/v1/epoch", json={"epoch": 4 + MOST_STEP})).status == 200


async def test_a_reader_raises_no_epoch(client: Client, host: Host) -> None:
    response = await client.get("/v1/operations/x", params={"epoch": str(2**53)})
    assert (response.status, (await response.json())["field"]) == (400, "epoch")
    assert host.journal.epoch == 0


@pytest.mark.parametrize("role", ["viewer", "operator", "admin"])
async def test_only_the_manager_has_others_refused(agent: Agent, host: Host, role: str) -> None:
    """Neither by an epoch nor by an order, which would lock the manager out until the next one."""
    host.journal.raise_epoch(4)
    bodies = (
        ("PUT", "/v1/epoch", {"epoch": 5}),
        ("POST", "/v1/reclaims", {"request_id": "r", "epoch": 5, "need": {"cpu_cores": 1.0}}),
        ("POST", "/v1/reclaims", {"request_id": "r", "epoch": 4, "order": 9, "need": {"cpu_cores": 1.0}}),
        ("PUT", "/v1/budget", {"epoch": 5, "number": 1, "room": {}}),
        ("PUT", "/v1/mode", {"request_id": "r", "epoch": 4, "order": 2**53, "mode": "paused"}),
        ("DELETE", "/v1/vms/web?request_id=d&epoch=5", None),
    )
    served = make_app(agent, Access([principal(role, Role(role), "secret")]))
    async with TestClient(TestServer(served), headers={"Authorization": "Bearer secret"}) as client:
        for method, path, body in bodies:
            response = await client.request(method, path, json=body)
            assert response.status == 403, await response.text()
    assert host.journal.epoch == 4
    assert host.modes.status().mode is HostMode.ACTIVE


async def test_the_epoch_can_be_forgotten_while_the_agent_is_stopped(tmp_path: Path) -> None:
    """After a manager's store was restored from a backup, whose epoch is lower."""
    Journal(tmp_path).raise_epoch(7)
    result = CliRunner().invoke(app, ["epoch", "--state-dir", str(tmp_path)])
    assert "epoch 7" in result.output
    result = CliRunner().invoke(app, ["epoch", "--state-dir", str(tmp_path), "--reset"])
    assert result.exit_code == 0, result.output
    await Leadership(Journal(tmp_path)).follow(command(2))
    result = CliRunner().invoke(app, ["epoch", "--state-dir", str(tmp_path / "none")])
    assert result.exit_code == 1
