"""Two real managers on one real PostgreSQL: one leads, the other takes over, nothing is lost and nothing is doubled."""

from __future__ import annotations

import asyncio
import collections
import contextlib
import signal
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path

import aiohttp
import pytest

from cluster_manager.store.database import PostgreSQL
from ebbtide.client import ManagerClient, ManagerRefused, ManagerUnreachable
from ebbtide.deflation.resources import ZERO
from ebbtide.messages.commands import CreateCommand
from ebbtide.messages.operations import OperationState
from ebbtide.messages.vms import VMSpec
from ebbtide.rest.credentials import command_token
from tests.manager.cluster import TOKEN, vm
from tests.manager.databases import Server, rows_of
from tests.manager.fake_agent import HOSTS_KEY, FakeAgent
from tests.manager.manager_process import ManagerProcess
from tests.waiting import until

pytestmark = pytest.mark.service

#: What another manager may need to take over, seconds.
TAKE_OVER_S = 10.0
#: All that a leader changes; not the terms, which a new leader adds to.
TABLES = ("plans", "vms", "events", "hosts", "core_changes", "counters")


@dataclass
class Pair:
    """Two managers, the first leads; two hosts, which know both."""

    managers: tuple[ManagerProcess, ManagerProcess]
    agents: tuple[FakeAgent, FakeAgent]
    database: PostgreSQL

    @property
    def urls(self) -> str:
        return ",".join(manager.url for manager in self.managers)

    def contents(self) -> dict[str, list[tuple[object, ...]]]:
        return {table: sorted(rows_of(self.database, f"SELECT * FROM {table}"), key=repr) for table in TABLES}

    async def hosts_ready(self, client: ManagerClient) -> None:
        async with asyncio.timeout(30):
            while [host.state for host in await client.hosts()] != ["ready", "ready"]:
                for agent in self.agents:
                    agent.reported.clear()
                    await agent.reported.wait()


@contextlib.asynccontextmanager
async def pair(directory: Path, server: Server) -> AsyncIterator[Pair]:
    database = server.new()
    async with contextlib.AsyncExitStack() as stack:
        stack.callback(server.drop, database)
        session = await stack.enter_async_context(aiohttp.ClientSession())
        first, second = (ManagerProcess(directory, database, session) for _ in range(2))
        for manager in (first, second):
            await manager.start()
            stack.push_async_callback(manager.end)
        made = Pair(
            (first, second),
            (
                FakeAgent("host-a", cpu_cores=200.0, memory_mib=200_000.0),
                FakeAgent("host-b", cpu_cores=200.0, memory_mib=200_000.0),
            ),
            database,
        )
        for agent in made.agents:
            agent.manager = made.urls
            await agent.start()
            stack.push_async_callback(agent.close)
        await first.until("/readyz", 200)
        yield made


def spec(name: str, priority: str = "deflatable") -> VMSpec:
    return VMSpec.model_validate(vm(name, priority, 1.0, 400.0))


class Stream:
    """A client that asks for VMs and deletes them, all the time."""

    def __init__(self, client: ManagerClient) -> None:
        self._client = client
        #: Request ids that were answered with an operation, and the refusals.
        self.accepted: list[str] = []
        self.failures: list[str] = []
        self._stop = asyncio.Event()
        self._task = asyncio.create_task(self._run(), name="stream of requests")

    async def _run(self) -> None:
        number = 0
        while not self._stop.is_set():
            number += 1
            try:
                request_id = f"create-{number}"
                await self._client.create(spec(f"vm-{number}"), request_id=request_id, deadline_s=20.0)
                self.accepted.append(request_id)
                if number > 4:
                    request_id = f"delete-{number - 4}"
                    await self._client.delete(f"vm-{number - 4}", request_id=request_id)
                    self.accepted.append(request_id)
            except ManagerRefused as error:
                # A VM that a plan is at work on cannot be deleted.
                if error.status != 409:
                    raise
                self.failures.append(str(error))
            except ManagerUnreachable as error:
                self.failures.append(str(error))
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(0.05):
                    await self._stop.wait()

    async def more(self, count: int) -> None:
        """Until so many more requests have been accepted."""
        goal = len(self.accepted) + count
        await until(lambda: len(self.accepted) >= goal or self._task.done())
        assert len(self.accepted) >= goal, self._task

    async def end(self) -> None:
        self._stop.set()
        await self._task


async def test_a_killed_leader_is_followed_by_the_other_and_every_accepted_request_ends_once(
    tmp_path: Path, postgresql: Server
) -> None:
    loop = asyncio.get_running_loop()
    async with pair(tmp_path, postgresql) as made, ManagerClient(made.urls, TOKEN) as client:
        first, second = made.managers
        status, health = await second.ask("/healthz")
        assert (status, health["status"], health["role"]) == (200, "ok", "standby")
        status, problem = await second.ask("/v1/vms")
        assert (status, problem["detail"]) == (503, f"this manager is a standby; the manager at {first.url} leads")
        await made.hosts_ready(client)
        stream = Stream(client)
        try:
            await stream.more(12)
            begin = loop.time()
            await first.end(signal.SIGKILL)
            await stream.more(1)
            assert loop.time() - begin < TAKE_OVER_S
            assert (await second.ask("/readyz"))[0] == 200
            await first.start()
            assert (await first.ask("/readyz"))[0] == 503
            await stream.more(8)
        finally:
            await stream.end()
        operations = {name: await client.wait(await client.operation(name), limit_s=60) for name in stream.accepted}
        failed = {name: row.sentence for name, row in operations.items() if row.state is not OperationState.DONE}
        # One that is deleted while its place is looked for is called off.
        called_off = {name.replace("delete", "create") for name in operations if name.startswith("delete-")}
        assert not {name: said for name, said in failed.items() if name not in called_off or "called off" not in said}
        ends = collections.Counter(row[0] for row in rows_of(made.database, "SELECT request_id FROM plans"))
        assert {name: ends[name] for name in stream.accepted} == dict.fromkeys(stream.accepted, 1)
        placed = collections.Counter(
            name for (name,) in rows_of(made.database, "SELECT vm FROM events WHERE kind = 'placed'")
        )
        assert set(placed.values()) == {1}
        running = {(row.name, row.host) for row in await client.vms() if row.state == "running"}
        assert running == {(name, agent.id) for agent in made.agents for name in agent.vms}
        for agent in made.agents:
            creations = collections.Counter(name for kind, name in agent.done if kind == "create")
            assert set(creations.values()) <= {1}
            assert sum((row.allocation().charge for row in agent.vms.values()), ZERO).fits_in(agent.capacity)
        assert rows_of(made.database, "SELECT value FROM counters") == [(2,)]
        assert await first.end(signal.SIGTERM) == 0


async def test_a_leader_that_was_halted_changes_nothing_after_the_take_over_and_stands_by(
    tmp_path: Path, postgresql: Server
) -> None:
    async with pair(tmp_path, postgresql) as made, ManagerClient(made.urls, TOKEN) as client:
        first, second = made.managers
        await made.hosts_ready(client)
        agent = made.agents[0]
        # Two plans are at work: a start that the host holds back, and one that waits for the same host.
        agent.trouble.never_ends = True
        for name in ("one", "two"):
            await client.create(spec(name), request_id=name, deadline_s=120.0)
        async with asyncio.timeout(20):
            await agent.polled.wait()
        first.send(signal.SIGSTOP)
        try:
            agent.end_pending()
            assert await second.until("/readyz", 200) < TAKE_OVER_S
            async with ManagerClient(second.url, TOKEN) as other:
                for name in ("one", "two"):
                    ended = await other.wait(await other.operation(name), limit_s=60)
                    assert ended.state is OperationState.DONE, ended
            async with asyncio.timeout(20):
                while any(each.epoch < 2 or each.changes for each in made.agents):
                    for each in made.agents:
                        each.reported.clear()
                        await each.reported.wait()
            before, arrived = made.contents(), [list(each.arrived) for each in made.agents]
        finally:
            first.send(signal.SIGCONT)
        await first.until("/healthz", 200)
        await first.until("/readyz", 503)
        async with asyncio.timeout(20):
            while "standby" not in first.roles()[-1]:
                await first.ask("/healthz")
        status, problem = await first.ask("/v1/vms")
        assert (status, problem["detail"].split(";")[0]) == (503, "this manager is a standby")
        assert made.contents() == before
        assert [list(each.arrived) for each in made.agents] == arrived
        assert rows_of(made.database, "SELECT epoch, url FROM terms ORDER BY epoch") == [
            (1, first.url),
            (2, second.url),
        ]
        # It stands by as before: when the other one ends in good order, it leads at once.
        assert await second.end(signal.SIGTERM) == 0
        assert await first.until("/readyz", 200) < TAKE_OVER_S
        assert {row.name for row in await client.vms()} == {"one", "two"}


async def test_a_leader_whose_session_is_ended_by_the_server_steps_down_and_one_of_them_leads_again(
    tmp_path: Path, postgresql: Server
) -> None:
    async with pair(tmp_path, postgresql) as made, ManagerClient(made.urls, TOKEN) as client:
        await made.hosts_ready(client)
        rows_of(
            made.database,
            "SELECT pg_terminate_backend(pid) FROM pg_stat_activity"
            " WHERE application_name LIKE 'ebb-manager%' AND datname = current_database()",
        )
        async with asyncio.timeout(30):
            while not any("standby" in line for line in made.managers[0].roles()):
                await made.managers[0].ask("/healthz")
        operation = await client.create(spec("later"), request_id="later", deadline_s=60.0)
        assert (await client.wait(operation, limit_s=60)).state is OperationState.DONE
        assert rows_of(made.database, "SELECT value FROM counters") >= [(2,)]


async def test_a_lock_that_is_lost_while_a_command_is_under_way_starts_no_vm_twice(
    tmp_path: Path, postgresql: Server
) -> None:
    """The answer reaches a manager that leads no more; the one that leads by then finds the VM, whoever that is."""
    async with pair(tmp_path, postgresql) as made, ManagerClient(made.urls, TOKEN) as client:
        await made.hosts_ready(client)
        first, agent = made.managers[0], made.agents[0]
        agent.trouble.hangs_at = len(agent.arrived) + 1
        operation = await client.create(spec("one"), request_id="one", deadline_s=60.0)
        async with asyncio.timeout(20):
            await agent.hanging.wait()
        assert rows_of(
            made.database,
            "SELECT pg_terminate_backend(pid) FROM pg_stat_activity JOIN pg_locks USING (pid)"
            " WHERE locktype = 'advisory' AND datname = current_database()",
        ) == [(True,)]
        ended = await client.wait(operation, limit_s=60)
        assert (ended.state, ended.host) == (OperationState.DONE, agent.id), ended
        assert any("standby" in line for line in first.roles())
        assert [name for each in made.agents for kind, name in each.done if kind == "create"] == ["one"]
        assert rows_of(made.database, "SELECT count(*) FROM events WHERE kind = 'placed'") == [(1,)]
        assert rows_of(made.database, "SELECT count(*) >= 2 FROM terms") == [(True,)]
        # A command of the first term that comes only now changes nothing.
        late = CreateCommand(request_id="late", vm=spec("late"), epoch=1, order=99).model_dump(mode="json")
        headers = {"Authorization": f"Bearer {command_token(HOSTS_KEY, agent.id)}"}
        url = f"{agent.report().url}/v1/vms"
        async with aiohttp.ClientSession(headers=headers) as session, session.post(url, json=late) as response:
            assert response.status == 409
        assert list(agent.vms) == ["one"]
