"""The agent takes commands of the manager that leads, in the order in which it gave them."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
from aiohttp.test_utils import TestClient, TestServer
from typer.testing import CliRunner

from ebbtide.cli.main import app
from ebbtide.deflation.fencing import MOST_STEP
from ebbtide.deflation.modes import HostMode
from ebbtide.deflation.resources import ZERO
from ebbtide.messages.commands import Command
from ebbtide.messages.vms import VMState
from ebbtide.rest.access import Access
from ebbtide.rest.roles import Role
from ebbtide.rest.tokens import principal
from hostagent.api.app import make_app
from hostagent.errors import RequestRefused
from hostagent.operations.agent import Agent
from hostagent.operations.requests import Leadership
from hostagent.state.files import alone_in
from hostagent.state.intents import Phase
from hostagent.state.journal import Journal
from hostagent.vm.host import Host
from tests.hostagent.conftest import TOKEN, Client, low_vm, make_agent
from tests.hostagent.conftest import Command as Send
from tests.hostagent.world import World
from tests.waiting import until


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


async def test_a_report_says_which_manager_the_host_follows(client: Client, host: Host) -> None:
    before = host.report()
    assert before.epoch == 0
    assert (await client.put("/v1/epoch", json={"epoch": 7})).status == 200
    now = host.report()
    assert (now.epoch, now.sequence) == (7, before.sequence + 1)


CREATE = ("POST", "/v1/vms", {"request_id": "r", "epoch": 1, "order": 3, "vm": low_vm("web")})
START = ("POST", "/v1/vms/low-1/start", {"request_id": "r", "epoch": 1, "order": 3})


@pytest.mark.parametrize("late", [CREATE, START], ids=["create", "start"])
@pytest.mark.parametrize("overtaken", ["epoch", "order"])
@pytest.mark.usefixtures("two_vms")
async def test_a_command_is_not_carried_out_that_was_overtaken_while_it_was_looked_at(
    agent: Agent,
    client: Client,
    command: Send,
    host: Host,
    monkeypatch: pytest.MonkeyPatch,
    late: Any,
    overtaken: str,
) -> None:
    """The leader that follows asks for the operation, hears that there is none, and starts the VM elsewhere."""
    stop = {"request_id": "stop", "epoch": 1, "order": 1}
    assert (await command("POST", "/v1/vms/low-1/stop", stop)).state == "done"
    go_on, sample = asyncio.Event(), Host.sample

    async def slow(self: Host) -> None:
        await go_on.wait()
        await sample(self)

    monkeypatch.setattr(Host, "sample", slow)
    method, path, body = late
    sent = asyncio.create_task(client.request(method, path, json=body))
    await until(lambda: "r" in agent.requests._being_checked)
    if overtaken == "epoch":
        assert (await client.put("/v1/epoch", json={"epoch": 2})).status == 200
        assert (await client.get("/v1/operations/r")).status == 404
    else:
        later = {"request_id": "later", "epoch": 1, "order": 4}
        assert (await client.post("/v1/vms/low-2/stop", json=later)).status == 202
    go_on.set()
    answer = await sent
    assert (answer.status, (await answer.json())["field"]) == (409, overtaken)
    assert not host.vms["low-1"].running
    assert "web" not in host.vms
    # The name is free: the manager that leads can have it.
    done = await command(method, path, body | {"request_id": "again", "epoch": 2, "order": 5})
    assert done.state == "done", done.sentence


@pytest.mark.usefixtures("two_vms")
async def test_a_start_that_is_overtaken_while_it_waits_for_a_check_leaves_its_vm_as_it_is(
    client: Client, command: Send, host: Host
) -> None:
    stop = {"request_id": "stop", "epoch": 1, "order": 1}
    assert (await command("POST", "/v1/vms/low-1/stop", stop)).state == "done"
    vm = host.vms["low-1"]
    async with vm.lock:
        method, path, body = START
        sent = asyncio.create_task(client.request(method, path, json=body))
        await until(lambda: vm.lock.is_wanted)
        later = {"request_id": "later", "epoch": 1, "order": 4}
        assert (await client.post("/v1/vms/low-2/stop", json=later)).status == 202
    answer = await sent
    assert (answer.status, (await answer.json())["field"]) == (409, "order")
    assert (vm.intent.phase, vm.allocation().current) == (Phase.STOPPED, ZERO)
    done = await command(method, path, body | {"request_id": "again", "order": 5})
    assert done.state == "done", done.sentence


@pytest.mark.usefixtures("two_vms")
async def test_a_stop_that_is_overtaken_while_its_epoch_is_stored_leaves_its_vm_as_it_is(
    client: Client, host: Host, monkeypatch: pytest.MonkeyPatch
) -> None:
    follow = Leadership.follow

    async def overtaken(self: Leadership, sent: Command, known: bool = False) -> None:
        await follow(self, sent, known)
        await follow(self, command(1, 4))

    monkeypatch.setattr(Leadership, "follow", overtaken)
    response = await client.post("/v1/vms/low-1/stop", json={"request_id": "stop", "epoch": 1, "order": 3})
    assert (response.status, (await response.json())["field"]) == (409, "order")
    assert host.vms["low-1"].resizer.terminating == ""
    assert host.vms["low-1"].status().state is VMState.RUNNING


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
        assert "No space left" in (await response.json())["detail"]
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
    result = CliRunner().invoke(app, ["host", "epoch", "--state-dir", str(tmp_path)])
    assert "epoch 7" in result.output
    result = CliRunner().invoke(app, ["host", "epoch", "--state-dir", str(tmp_path), "--reset"])
    assert result.exit_code == 0, result.output
    await Leadership(Journal(tmp_path)).follow(command(2))
    result = CliRunner().invoke(app, ["host", "epoch", "--state-dir", str(tmp_path / "none")])
    assert result.exit_code == 1


def test_the_epoch_is_not_forgotten_beside_an_agent_that_runs_which_would_write_it_again(tmp_path: Path) -> None:
    Journal(tmp_path).raise_epoch(7)
    (tmp_path / "core-changes.jsonl").write_text('{"half of what it wri')
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    with alone_in(tmp_path):
        result = CliRunner().invoke(app, ["host", "epoch", "--state-dir", str(tmp_path), "--reset"])
        assert result.exit_code == 1
        assert "an agent runs" in str(result.exception)
        assert "epoch 7" in CliRunner().invoke(app, ["host", "epoch", "--state-dir", str(tmp_path)]).output
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir() if path.name != "lock"} == before


async def test_what_was_done_before_the_epoch_was_forgotten_is_not_done_again(world: World, tmp_path: Path) -> None:
    """A manager whose store was restored leads under a low epoch; what its predecessor sent comes once more."""

    def create(request_id: str, epoch: int) -> dict[str, Any]:
        return {"request_id": request_id, "epoch": epoch, "order": 1, "vm": low_vm("web")}

    delete = "/v1/vms/web?request_id=old-delete&epoch=7&order=2"
    async with serving(world, tmp_path) as send:
        assert (await send("POST", "/v1/vms", create("old-create", 7)))[0] == 202
        assert (await send("DELETE", delete))[0] == 202
    assert CliRunner().invoke(app, ["host", "epoch", "--state-dir", str(tmp_path), "--reset"]).exit_code == 0
    async with serving(world, tmp_path) as send:
        assert await send("PUT", "/v1/epoch", {"epoch": 2}) == (200, {"epoch": 2})
        assert (await send("POST", "/v1/vms", create("new-create", 2)))[0] == 202
        status, refusal = await send("POST", "/v1/vms", create("older-create", 1))
        assert (status, refusal["field"]) == (409, "epoch")
        status, done = await send("DELETE", delete)
        assert (status, done["sentence"].split(" by ")[0]) == (202, "web was removed")
        assert (await send("POST", "/v1/vms", create("old-create", 7)))[0] == 409
        assert list(world.domains) == ["ebb-host-a.web"]
        # That manager has not ended, as the way back asks for: it leads here again, and the other one is told.
        status, refusal = await send("POST", "/v1/reclaims", {"request_id": "r", "epoch": 2, "need": {"cpu_cores": 1}})
        assert (status, refusal["error"]) == (409, "epoch 2 is over: the manager with epoch 7 leads")


@contextlib.asynccontextmanager
async def serving(world: World, state_dir: Path) -> AsyncIterator[Callable[..., Awaitable[tuple[int, Any]]]]:
    """An agent from its start to its end; what is sent is waited for until it has ended."""
    made = make_agent(world, state_dir)
    await made.start()
    headers = {"Authorization": f"Bearer {TOKEN}"}
    async with TestClient(TestServer(make_app(made, TOKEN)), headers=headers) as client:

        async def send(method: str, path: str, body: Any = None) -> tuple[int, Any]:
            response = await client.request(method, path, json=body)
            answer = await response.json()
            if response.status == 202:
                ended = await client.get(f"/v1/operations/{answer['request_id']}", params={"wait_s": "20"})
                answer = await ended.json()
                assert answer["state"] == "done", answer
            return response.status, answer

        yield send
    await made.close()
