"""Clients and host agents with several managers: they find the one that leads, and follow when another takes over."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path

import aiohttp
import pytest
from aiohttp.test_utils import TestServer

from cluster_manager.api.app import make_app
from cluster_manager.manager import Manager
from cluster_manager.settings import Settings
from cluster_manager.store.database import Database
from ebbtide.client import ManagerClient, ManagerRefused, ManagerStandsBy, connection
from ebbtide.messages.commands import CreateCommand
from ebbtide.messages.vms import VMSpec
from ebbtide.rest.credentials import report_token
from hostagent.control.reporter import Reporter
from hostagent.errors import RequestRefused
from hostagent.libvirt.definitions import usable_boot_mib
from hostagent.libvirt.hypervisor import Hypervisor
from hostagent.operations.agent import Agent
from hostagent.state.journal import Journal
from hostagent.vm.host import Host, Slice
from tests.hostagent.agent_process import CAPACITY, OVERHEAD_MIB
from tests.hostagent.fake_hypervisor import FakeHypervisor
from tests.manager.cluster import LEADERSHIP, QUICK, TOKEN, cluster_of, vm
from tests.manager.databases import Server
from tests.manager.fake_agent import HOSTS_KEY
from tests.waiting import AT_ONCE_S, until


@dataclass
class Running:
    manager: Manager
    server: TestServer

    @property
    def url(self) -> str:
        return str(self.server.make_url("")).rstrip("/")


@contextlib.asynccontextmanager
async def running(database: Database, url: str) -> AsyncIterator[Running]:
    settings = Settings(
        database=database, token=TOKEN, hosts_key=HOSTS_KEY, agents=QUICK, leadership=LEADERSHIP, url=url
    )
    manager = Manager(settings)
    server = TestServer(make_app(manager))
    await server.start_server(shutdown_timeout=AT_ONCE_S)
    try:
        yield Running(manager, server)
    finally:
        await server.close()


@pytest.mark.service
async def test_a_standby_answers_for_its_health_and_names_the_leader(postgresql: Server) -> None:
    database = postgresql.new()
    async with (
        running(database, "http://first") as first,
        running(database, "http://second") as second,
        aiohttp.ClientSession() as session,
    ):

        async def ask(whom: Running, path: str, token: str = TOKEN) -> tuple[int, object, str | None]:
            headers = {"Authorization": f"Bearer {token}"}
            async with session.get(whom.url + path, headers=headers) as response:
                body = await response.json()
                # What it says, without what every problem has besides; which version runs is no matter here.
                body = body["detail"] if "detail" in body else {k: v for k, v in body.items() if k != "version"}
                return response.status, body, response.headers.get("Retry-After")

        assert await ask(first, "/healthz", "") == (200, {"status": "ok", "role": "leader"}, None)
        assert await ask(second, "/healthz", "") == (200, {"status": "ok", "role": "standby"}, None)
        ready = {"ready": True, "epoch": 1, "sentence": "this manager leads with epoch 1"}
        assert await ask(first, "/readyz", "") == (200, ready, None)
        unready = "this manager is a standby"
        assert await ask(second, "/readyz", "") == (503, unready, "1")
        problem = "this manager is a standby; the manager at http://first leads"
        for path in ("/v1/vms", "/v1/hosts", "/v1/operations/x"):
            assert await ask(second, path) == (503, problem, "1")
        joining = {"token": "A" * 43, "host": "host-b", "address": "127.0.0.1"}
        for whom, status in ((first, 403), (second, 503)):
            async with session.post(f"{whom.url}/v1/enrolments", json=joining) as response:
                assert response.status == status, "who may join only the leader knows"
        assert (await ask(second, "/v1/vms", "wrong"))[0] == 401
        assert (await ask(second, "/nothing"))[0] == 404
        # A leader that has not noticed yet that its store is gone is alive, and not ready.
        await first.manager.store._engine.dispose()
        postgresql.drop(database)
        status, body, _ = await ask(first, "/readyz")
        assert status == 503
        assert body in (unready, "the store does not answer")
        assert (await ask(first, "/healthz"))[0] == 200


@pytest.mark.service
async def test_a_client_of_several_managers_finds_the_one_that_leads_and_one_of_a_standby_hears_it(
    postgresql: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connection, "PAUSE_S", 0.05)
    database = postgresql.new()
    async with running(database, "http://first") as first, running(database, "http://second") as second:
        async with ManagerClient(second.url, TOKEN) as client:
            with pytest.raises(ManagerStandsBy, match="the manager at http://first leads"):
                await client.vms()
        async with ManagerClient(f"http://127.0.0.1:1,{second.url},{first.url}", TOKEN) as client:
            assert await client.vms() == []
            assert client.url == first.url
            await first.server.close()
            assert await client.vms() == []
            assert client.url == second.url
            with pytest.raises(ManagerRefused) as refused:
                await client.vm("none")
            assert refused.value.status == 404
    postgresql.drop(database)


@pytest.mark.usefixtures("each_store")
@pytest.mark.parametrize("each_store", ["sqlite"], indirect=True)
async def test_a_second_manager_on_a_file_is_refused(tmp_path: Path) -> None:
    async with cluster_of(tmp_path) as cluster:
        second = Manager(cluster.settings)
        with pytest.raises(Exception, match=r"another manager \(process \d+\) uses it"):
            await second.start()
        assert (await cluster.get("/v1/vms"))["vms"] == []


@pytest.mark.service
async def test_an_agent_reports_to_whichever_manager_leads_and_learns_the_new_epoch_by_that(
    postgresql: Server, tmp_path: Path
) -> None:
    database = postgresql.new()
    hypervisor: Hypervisor = FakeHypervisor(tmp_path / "socket")
    part = Slice("host-a", "http://127.0.0.1:1", CAPACITY, "qemu", OVERHEAD_MIB)
    host = Host(part, hypervisor, Journal(tmp_path / "agent"), lambda: 1e6)
    agent = Agent(host, usable_boot_mib)
    async with running(database, "http://first") as first, running(database, "http://second") as second:
        reporter = Reporter(host, [second.url, first.url], report_token(HOSTS_KEY, "host-a"))
        reporting = asyncio.create_task(reporter.run(), name="reporter")
        try:
            await until(lambda: host.journal.epoch == 1)
            assert first.manager.hosts.is_ready("host-a")
            assert not second.manager.hosts.is_ready("host-a")
            await first.server.close()
            await until(lambda: host.journal.epoch == 2)
            assert second.manager.hosts.is_ready("host-a")
            late = CreateCommand(request_id="late", epoch=1, vm=VMSpec.model_validate(vm("late")))
            with pytest.raises(RequestRefused, match="epoch 1 is over"):
                await agent.requests.leadership.follow(late)
        finally:
            reporting.cancel()
            await asyncio.gather(reporting, return_exceptions=True)
    postgresql.drop(database)
