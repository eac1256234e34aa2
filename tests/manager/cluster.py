"""A manager over real HTTP on loopback, and the fake agents that report to it."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import aiohttp
from aiohttp import web
from aiohttp.test_utils import TestServer

from cluster_manager.api.app import make_app
from cluster_manager.defaults import LeadershipTimes
from cluster_manager.manager import Manager
from cluster_manager.settings import AgentLimits, Settings
from cluster_manager.store.database import Database
from ebbtide.client import ManagerClient
from ebbtide.messages.operations import Operation, OperationState
from ebbtide.rest.descriptions import PROBLEM_JSON
from tests.manager.fake_agent import HOSTS_KEY, FakeAgent
from tests.waiting import AT_ONCE_S

TOKEN = "clients"
QUICK = AgentLimits(answer_s=5.0, absence_s=0.8, poll_s=0.5, pause_s=0.02, grace_s=0.5, start_stop_s=2.0, retry_s=0.05)

#: A host reports every few hundredths of a second; four processes on two cores may keep it from that for a second.
SILENT_AFTER_S = 3.0

#: Nobody is to lose the lead in a test because the machine is busy, but where that is the test.
LEADERSHIP = LeadershipTimes(check_s=0.1, limit_s=20.0, release_s=30.0, pause_s=0.1)


def database_in(directory: Path) -> Database:
    """The store of a cluster; the fixture ``each_store`` makes those of the manager's own tests."""
    return directory / "manager.sqlite"


def vm(name: str, priority: str = "deflatable", cpu_cores: float = 3.0, memory_mib: float = 1000.0, **more: Any) -> Any:
    """The body of a VM; deflatable ones shrink to half a core and 300 MiB."""
    minimum = {} if priority == "fixed" else {"minimum": {"cpu_cores": 0.5, "memory_mib": 300.0}}
    nominal = {"cpu_cores": cpu_cores, "memory_mib": memory_mib}
    return {"name": name, "priority": priority, "nominal": nominal, **minimum, **more}


class Listening(TestServer):
    """As the daemons listen: what was begun for a client that has hung up comes to its end."""

    async def _make_runner(self, **options: Any) -> web.BaseRunner:
        return await super()._make_runner(**{**options, "handler_cancellation": False})


@dataclass
class Cluster:
    """One manager and its agents; the manager can be killed and started again on the same database."""

    settings: Settings
    agents: Sequence[FakeAgent]
    session: aiohttp.ClientSession
    server: TestServer | None = None
    manager: Manager | None = None

    @property
    def url(self) -> str:
        assert self.server is not None
        return str(self.server.make_url("")).rstrip("/")

    def client(self, token: str = TOKEN) -> ManagerClient:
        return ManagerClient(self.url, token)

    async def start_manager(self) -> None:
        self.manager = Manager(self.settings)
        self.server = Listening(make_app(self.manager))
        await self.server.start_server(shutdown_timeout=AT_ONCE_S)
        for agent in self.agents:
            agent.manager = self.url

    async def stop_manager(self) -> None:
        assert self.server is not None
        await self.server.close()
        self.server = self.manager = None

    async def kill_manager(self) -> None:
        """What a kill leaves: no task gets to say or store anything more."""
        assert self.manager is not None
        tasks = list(self.manager.operations._tasks.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self.stop_manager()

    async def ready(self) -> None:
        """Until every living agent has reported to the present manager."""
        for agent in self.agents:
            if not agent.trouble.mute and agent._server is not None:
                await agent.send_report()

    async def call(self, method: str, path: str, token: str = TOKEN, **options: Any) -> tuple[int, Any]:
        headers = {"Authorization": f"Bearer {token}", "Accept": PROBLEM_JSON, **options.pop("headers", {})}
        async with self.session.request(method, self.url + (path or "/"), headers=headers, **options) as response:
            return response.status, await response.json()

    async def get(self, path: str) -> Any:
        status, body = await self.call("GET", path)
        assert status == 200, body
        return body

    async def create(self, body: Any, request_id: str | None = None, **more: Any) -> Operation:
        """Ask for a VM and wait for the end."""
        request_id = request_id or f"create-{body['name']}"
        request = {"request_id": request_id, "vm": body, "deadline_s": 3.0, **more}
        status, answer = await self.call("POST", "/v1/vms", json=request)
        assert status == 202, answer
        return await self.ended(request_id)

    async def delete(self, name: str, request_id: str | None = None) -> Operation:
        request_id = request_id or f"delete-{name}"
        status, answer = await self.call("DELETE", f"/v1/vms/{name}?request_id={request_id}")
        assert status == 202, answer
        return await self.ended(request_id)

    async def ended(self, request_id: str) -> Operation:
        async with asyncio.timeout(20):
            while True:
                found = Operation.model_validate(await self.get(f"/v1/operations/{request_id}?wait_s=5"))
                if found.state is not OperationState.RUNNING:
                    return found

    async def events(self, kind: str) -> list[Any]:
        return [row for row in (await self.get("/v1/events"))["events"] if row["kind"] == kind]


@contextlib.asynccontextmanager
async def cluster_of(path: Path, *agents: FakeAgent, **changes: Any) -> AsyncIterator[Cluster]:
    settings = Settings(
        database=database_in(path),
        token=TOKEN,
        hosts_key=HOSTS_KEY,
        silent_after_s=SILENT_AFTER_S,
        agents=QUICK,
        leadership=LEADERSHIP,
    )
    async with aiohttp.ClientSession() as session:
        cluster = Cluster(replace(settings, **changes), agents, session)
        for agent in agents:
            await agent.start()
        await cluster.start_manager()
        await cluster.ready()
        try:
            yield cluster
        finally:
            if cluster.server is not None:
                await cluster.stop_manager()
            for agent in agents:
                await agent.close()
