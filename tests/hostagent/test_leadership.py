"""The agent takes commands of the manager that leads, in the order in which it gave them."""

from __future__ import annotations

from pathlib import Path

import pytest

from deflation.messages import Command
from hostagent.errors import RequestRefused
from hostagent.host import Host
from hostagent.journal import Journal
from hostagent.leadership import Leadership
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


async def test_a_question_of_a_new_manager_shuts_the_old_one_out_for_good(tmp_path: Path) -> None:
    await Leadership(Journal(tmp_path)).follow_epoch(3)
    with pytest.raises(RequestRefused, match="epoch 2 is over"):
        await Leadership(Journal(tmp_path)).follow(command(2, 9))


async def test_the_route_of_operations_shuts_an_older_manager_out(client: Client, host: Host) -> None:
    response = await client.get("/v1/operations/nobody-knows", params={"epoch": "4"})
    assert response.status == 404
    assert host.journal.epoch == 4
    body = {"request_id": "r", "epoch": 3, "need": {"cpu_cores": 1.0}}
    response = await client.post("/v1/reclaims", json=body)
    assert (response.status, (await response.json())["field"]) == (409, "epoch")
    response = await client.get("/v1/operations/nobody-knows", params={"epoch": "-1"})
    assert (response.status, (await response.json())["field"]) == (400, "epoch")
