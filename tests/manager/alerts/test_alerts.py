"""Alerts of a real manager to a real receiver on loopback."""

from __future__ import annotations

import asyncio
import base64
import hashlib
import hmac
import json
import re
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from cluster_manager.alerts import outbox, sender
from cluster_manager.alerts.webhooks import Webhook
from cluster_manager.manager import Manager
from cluster_manager.settings import Settings
from tests.manager.cluster import LEADERSHIP, QUICK, TOKEN, Cluster, cluster_of, vm
from tests.manager.databases import Server
from tests.manager.fake_agent import HOSTS_KEY, FakeAgent
from tests.manager.plan_events import happen
from tests.promtool import check_metrics
from tests.waiting import until

KEY = b"a key of thirty-two bytes or so."


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sender, "LOOK_S", 0.02)
    monkeypatch.setattr(outbox, "PAUSE_S", 0.05)


@dataclass
class Receiver:
    """Takes deliveries whose signature holds, and answers as it is told."""

    #: Statuses of the next answers; then 200.
    answers: list[int] = field(default_factory=list)
    got: list[dict[str, Any]] = field(default_factory=list)
    ids: list[str] = field(default_factory=list)
    elsewhere: list[str] = field(default_factory=list)
    url: str = ""
    #: While it is clear, it takes requests and does not answer.
    awake: asyncio.Event = field(default_factory=asyncio.Event)

    async def take(self, request: web.Request) -> web.Response:
        body, headers = await request.read(), request.headers
        signed = f"{headers['webhook-id']}.{headers['webhook-timestamp']}.".encode() + body
        expected = base64.b64encode(hmac.new(KEY, signed, hashlib.sha256).digest()).decode()
        assert headers["webhook-signature"] == f"v1,{expected}"
        assert "Authorization" not in headers
        self.ids.append(headers["webhook-id"])
        await self.awake.wait()
        status = self.answers.pop(0) if self.answers else 200
        if status == 200:
            self.got.append(json.loads(body))
        return web.Response(status=status, headers={"Location": "/elsewhere"} if 300 <= status < 400 else {})

    async def other(self, request: web.Request) -> web.Response:
        self.elsewhere.append(request.path)
        return web.Response()

    def webhook(self, *kinds: str, name: str = "oncall") -> Webhook:
        return Webhook(name, self.url, KEY, frozenset(kinds))

    def sentences(self) -> list[str]:
        return [one["data"]["sentence"] for one in self.got]


@pytest.fixture
async def receiver() -> AsyncIterator[Receiver]:
    made, app = Receiver(), web.Application()
    made.awake.set()
    app.router.add_post("/hook", made.take)
    app.router.add_route("*", "/elsewhere", made.other)
    server = TestServer(app)
    await server.start_server()
    made.url = str(server.make_url("/hook"))
    yield made
    made.awake.set()
    await server.close()


async def metrics(cluster: Cluster) -> dict[str, float]:
    assert cluster.server is not None
    headers = {"Authorization": f"Bearer {TOKEN}"}
    async with cluster.session.get(cluster.server.make_url("/metrics"), headers=headers) as response:
        text = await response.read()
    check_metrics(text)
    found = re.findall(r"^ebbtide_manager_alert(\S+) (\S+)$", text.decode(), re.MULTILINE)
    return {name: float(value) for name, value in found}


@pytest.mark.usefixtures("each_store")
async def test_a_preemption_is_told_signed_and_once(tmp_path: Path, receiver: Receiver) -> None:
    agent = FakeAgent("host-a", cpu_cores=6.0, memory_mib=3600.0)
    async with cluster_of(tmp_path, agent, silent_after_s=60.0, webhooks=(receiver.webhook("preempted"),)) as cluster:
        await cluster.create(vm("low", cpu_cores=6.0, minimum={"cpu_cores": 5.0, "memory_mib": 300.0}))
        await cluster.create(vm("high", "fixed", cpu_cores=4.0))
        (row,) = await cluster.events("preempted")
        await until(lambda: bool(receiver.got))
        assert receiver.got == [{"type": "preempted", "timestamp": receiver.got[0]["timestamp"], "data": row}]
        found = await metrics(cluster)
        assert found['_tries_total{outcome="delivered",webhook="oncall"}'] == 1.0
        assert found['_drops_total{reason="overflow",webhook="oncall"}'] == 0.0
        assert found['s_waiting{webhook="oncall"}'] == 0.0


@pytest.mark.usefixtures("each_store")
async def test_failures_are_tried_again_in_order_and_refusals_are_not(tmp_path: Path, receiver: Receiver) -> None:
    receiver.answers = [500, 503, 200, 307, 410]
    async with cluster_of(tmp_path, webhooks=(receiver.webhook("lost"),)) as cluster:
        assert cluster.manager is not None
        await until(lambda: bool(cluster.manager and cluster.manager.alerts.outboxes))
        for number in range(4):
            await happen(cluster.manager.store, "lost", f"number {number}")
        await until(lambda: len(receiver.got) == 2)
        assert receiver.sentences() == ["number 0", "number 3"]
        assert len(receiver.ids) == 6
        assert len(set(receiver.ids[:3])) == 1
        assert len(set(receiver.ids)) == 4
        assert receiver.elsewhere == []  # no redirection is followed
        await until(lambda: bool(cluster.manager and not cluster.manager.alerts.outboxes["oncall"].waiting))
        found = await metrics(cluster)
        assert found['_tries_total{outcome="failed",webhook="oncall"}'] == 2.0
        assert found['_tries_total{outcome="refused",webhook="oncall"}'] == 2.0
        assert found['_drops_total{reason="refused",webhook="oncall"}'] == 2.0


@pytest.mark.usefixtures("each_store")
async def test_a_receiver_that_hangs_holds_up_no_other_and_no_manager(tmp_path: Path, receiver: Receiver) -> None:
    other = Receiver()
    other.awake.set()
    app = web.Application()
    app.router.add_post("/hook", other.take)
    server = TestServer(app)
    await server.start_server()
    other.url = str(server.make_url("/hook"))
    receiver.awake.clear()
    webhooks = (receiver.webhook("lost"), other.webhook("lost", name="second"))
    async with cluster_of(tmp_path, webhooks=webhooks) as cluster:
        assert cluster.manager is not None
        await until(lambda: bool(cluster.manager and cluster.manager.alerts.outboxes))
        for number in range(3):
            await happen(cluster.manager.store, "lost", f"number {number}")
        await until(lambda: len(other.got) == 3)
        assert receiver.got == []
        assert (await metrics(cluster))['s_waiting{webhook="oncall"}'] == 3.0
    await server.close()


@pytest.mark.usefixtures("each_store")
async def test_a_manager_that_comes_back_goes_on_where_it_was(tmp_path: Path, receiver: Receiver) -> None:
    async with cluster_of(tmp_path, webhooks=(receiver.webhook("lost"),)) as cluster:
        assert cluster.manager is not None
        await until(lambda: bool(cluster.manager and cluster.manager.alerts.outboxes))
        await happen(cluster.manager.store, "lost", "before")
        await until(lambda: receiver.sentences() == ["before"])
        receiver.answers = [500] * 3
        await happen(cluster.manager.store, "lost", "meanwhile")
        await until(lambda: len(receiver.ids) >= 2)
        await cluster.stop_manager()
        await cluster.start_manager()
        await until(lambda: len(receiver.got) == 2)
        assert receiver.sentences() == ["before", "meanwhile"]


@pytest.mark.service
async def test_a_standby_sends_nothing_until_it_leads(
    postgresql: Server, receiver: Receiver, monkeypatch: pytest.MonkeyPatch
) -> None:
    database = postgresql.new()
    settings = Settings(
        database=database,
        token=TOKEN,
        hosts_key=HOSTS_KEY,
        agents=QUICK,
        leadership=LEADERSHIP,
        webhooks=(receiver.webhook("lost"),),
    )
    first, second = Manager(settings), Manager(settings)
    await first.start()
    try:
        await until(lambda: bool(first.alerts.outboxes))
        await second.start()
        assert not second.leadership.leads()
        await happen(first.store, "lost", "one")
        await until(lambda: receiver.sentences() == ["one"])
        assert second.alerts.outboxes == {}
        # A leader that was overtaken while it was held up reads the log, and sends nothing.
        monkeypatch.setattr(first.alerts, "_check", second.leadership.check)
        await happen(first.store, "lost", "two")
        await until(lambda: len(first.alerts.outboxes["oncall"].waiting) == 1)
        assert len(receiver.ids) == 1
        await first.stop()
        await until(second.leadership.leads)
        await until(lambda: len(receiver.got) == 2)
        assert receiver.sentences() == ["one", "two"]
    finally:
        await first.stop()
        await second.stop()
        postgresql.drop(database)
