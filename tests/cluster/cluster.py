"""A whole cluster inside one event loop in faked time: the real manager and real host agents, over real HTTP.

Hypervisors, guests, network and time are make-believe. Any of the programs can be killed at any moment; nothing that it
does from there on reaches anybody.
"""

from __future__ import annotations

import asyncio
import os
import sqlite3
import time
from collections import defaultdict
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Iterator
from contextlib import contextmanager
from contextvars import Context, copy_context
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from random import Random
from typing import Any, TypeVar
from weakref import WeakSet

import aiohttp
import aiosqlite
import pytest
from aiohttp import web

from cluster_manager import manager as manager_module
from cluster_manager.api import app as manager_api
from cluster_manager.inventory.hosts import Hosts
from cluster_manager.leadership.leadership import Leadership
from cluster_manager.manager import Manager
from cluster_manager.plans.plans import Effect, Plan
from cluster_manager.settings import Settings
from cluster_manager.store.store import Store
from cluster_manager.tasks.core_changes import CoreChanges
from ebbtide.deflation.resources import ResourceVector
from ebbtide.rest.credentials import command_token, report_token
from hostagent.api import app as agent_api
from hostagent.control.reporter import Reporter
from hostagent.libvirt.definitions import usable_boot_mib
from hostagent.operations.agent import Agent
from hostagent.state.intents import Intent
from hostagent.vm.host import Host, Slice
from tests.cluster.wire import PROGRAM, Connector, Wire
from tests.hostagent.faked_loop import FakedLoop
from tests.hostagent.local_fence import Faults, Fence, FencedJournal
from tests.hostagent.local_guest import Application
from tests.hostagent.local_hypervisor import LocalHypervisor
from tests.hostagent.local_world import LocalWorld
from tests.manager.cluster import TOKEN
from tests.manager.fake_agent import HOSTS_KEY

OVERHEAD_MIB = 100.0
MANAGER, MANAGER_PORT = "manager", 7100
URL = f"http://127.0.0.1:{MANAGER_PORT}"
#: Faked time begins here, so that nothing lies before 0.
EPOCH_S = 1_000_000.0

T = TypeVar("T")
#: Told of every record of a plan before it is stored.
Watcher = Callable[[Plan, Iterable[Effect]], None]


class ClusterLoop(FakedLoop):
    """Knows which program each task belongs to."""

    def __init__(self) -> None:
        super().__init__()
        self._files.now = EPOCH_S
        self._tasks: dict[str, WeakSet[asyncio.Task[Any]]] = defaultdict(WeakSet)

    def create_task(  # type: ignore[override]
        self, coro: Any, *, name: str | None = None, context: Context | None = None
    ) -> asyncio.Task[Any]:
        task = super().create_task(coro, name=name, context=context)
        self._tasks[context.get(PROGRAM, "test") if context is not None else PROGRAM.get()].add(task)
        return task

    def tasks_of(self, program: str) -> list[asyncio.Task[Any]]:
        return [task for task in self._tasks[program] if not task.done()]


class _Anything(set[str]):
    """Every domain may be removed: what is lost by that, the test finds out by itself."""

    def __contains__(self, name: object) -> bool:
        return True


class CutFence(Fence):
    """Whoever dies here is heard of no more."""

    def __init__(self, cut: Callable[[], None]) -> None:
        super().__init__()
        self._cut = cut

    def _check(self) -> None:
        if self.dead:
            self._cut()
        super()._check()


class PlainHypervisor(LocalHypervisor):
    """Makes guests from which all above what they need can be taken, but for those that are called stubborn."""

    async def create(self, domain: str, intent: Intent, xml: str | None = None) -> None:
        await super().create(domain, intent, xml)
        guest = self._world.domains[domain].guest
        if not intent.spec.name.endswith("stubborn"):
            guest.cache_mib, guest.application = 0.0, Application.NONE


@dataclass
class FakedHost:
    """A host and the agents over it, one after another."""

    id: str
    port: int
    capacity: ResourceVector
    directory: Path
    world: LocalWorld
    agent: Agent | None = None
    fence: Fence = field(default_factory=Fence)
    #: Since when its agent has been there.
    up_since: float = 0.0


class FakedCluster:
    """Hosts, a manager, and whoever asks. Use `patched` around all of its life."""

    def __init__(self, directory: Path, capacities: dict[str, ResourceVector], seed: int) -> None:
        self.loop = ClusterLoop()
        asyncio.set_event_loop(self.loop)
        self.wire = Wire()
        self.directory = directory
        self.manager: Manager | None = None
        self.manager_since = 0.0
        #: Records of plans until the manager dies at one, and whether that is stored; None: it does not.
        self.records_left: int | None = None
        self.stores_last = False
        self.manager_died = False
        self.watchers: list[Watcher] = []
        self._connections: list[Any] = []
        self._never = asyncio.Event()
        self.hosts: dict[str, FakedHost] = {}
        for number, (name, capacity) in enumerate(capacities.items()):
            world = LocalWorld(self.loop, Random(seed + number), slowest_s=0.02, terminating=_Anything())
            place = directory / name
            place.mkdir()
            self.hosts[name] = FakedHost(name, 7200 + number, capacity, place, world)

    def run(self, work: Coroutine[Any, Any, T] | Awaitable[T], program: str = "test") -> T:
        """Work of one of the programs, to its end."""
        context = copy_context()
        context.run(PROGRAM.set, program)

        async def awaited() -> T:
            return await work

        result: T = self.loop.run_until_complete(self.loop.create_task(awaited(), context=context))
        return result

    def pass_time(self, seconds: float) -> None:
        """Let time pass; whoever came to die meanwhile is dead, and stays so."""
        self.run(asyncio.sleep(seconds))
        self.bury()

    def bury(self) -> None:
        if self.manager_died:
            self.kill_manager()
        for host in self.hosts.values():
            if host.agent is not None and host.fence.dead:
                self.kill_agent(host)

    # --- the manager -------------------------------------------------------------------------------------------------

    def start_manager(self) -> None:
        settings = Settings(
            database=self.directory / "manager.sqlite", token=TOKEN, hosts_key=HOSTS_KEY, url=URL, insecure=True
        )

        async def start() -> None:
            self.manager = Manager(settings, time.time)
            self._watch(self.manager.store)
            runner = web.AppRunner(manager_api.make_app(self.manager), access_log=None)
            await runner.setup()
            assert runner.server is not None
            self.wire.listen(MANAGER_PORT, runner.server)

        self.wire.begin(MANAGER)
        self.records_left, self.manager_died = None, False
        self.run(start(), MANAGER)
        self.manager_since = self.loop.time()

    def _watch(self, store: Store) -> None:
        """Count the records of plans, and have the manager die at one of them."""
        add, save = store.add_plan, store.save_step

        async def stored(state: Plan, effects: Iterable[Effect], save_it: Callable[[], Awaitable[T]]) -> T:
            for watcher in self.watchers:
                watcher(state, effects)
            if self.records_left is None:
                return await save_it()
            self.records_left -= 1
            dies = self.records_left <= 0
            result = await save_it() if self.stores_last or not dies else None
            if dies:
                self.manager_died = True
                self._cut_manager()
                await self._never.wait()
            assert result is not None
            return result

        store.add_plan = lambda state, fingerprint: stored(state, (), lambda: add(state, fingerprint))  # type: ignore[method-assign]
        store.save_step = lambda state, effects: stored(state, effects, lambda: save(state, effects))  # type: ignore[method-assign]

    def _cut_manager(self) -> None:
        assert self.manager is not None
        self.manager.store._closed = True
        self.wire.cut(MANAGER)

    def kill_manager(self) -> None:
        """As SIGKILL does."""
        manager, self.manager, self.manager_died = self.manager, None, False
        if manager is None:
            return
        manager.store._closed = True
        self._end(MANAGER)

        async def what_the_kernel_does() -> None:
            if manager._session is not None:
                await manager._session.close()
            await manager.store._engine.dispose()
            for connection in self._connections:
                if connection._connection is not None:
                    # What it had written and not committed is gone.
                    connection._connection.close()
                    connection._connection = None
            self._connections.clear()
            await manager.leadership._lock.release()

        self.run(what_the_kernel_does())

    # --- agents ------------------------------------------------------------------------------------------------------

    def start_agent(self, host: FakedHost) -> None:
        host.fence = CutFence(partial(self.wire.cut, host.id))
        part = Slice(host.id, f"http://127.0.0.1:{host.port}", host.capacity, "qemu", OVERHEAD_MIB)
        hypervisor = PlainHypervisor(host.world, host.id, host.fence, Faults())
        journal = FencedJournal(host.directory, host.fence, Faults())
        agent = host.agent = Agent(Host(part, hypervisor, journal, lambda: 1e6), usable_boot_mib)

        async def start() -> None:
            await agent.start()
            runner = web.AppRunner(agent_api.make_app(agent, command_token(HOSTS_KEY, host.id)), access_log=None)
            await runner.setup()
            assert runner.server is not None
            self.wire.listen(host.port, runner.server)
            reporter = Reporter(agent.host, URL, report_token(HOSTS_KEY, host.id))
            self.loop.create_task(reporter.run(), name=f"reporter of {host.id}")

        self.wire.begin(host.id)
        self.run(start(), host.id)
        host.up_since = self.loop.time()

    def kill_agent(self, host: FakedHost) -> None:
        """As SIGKILL does; its VMs run on."""
        host.fence.dead, host.agent = True, None
        host.world.listeners.clear()
        self._end(host.id)

    def _end(self, program: str) -> None:
        self.wire.cut(program)
        for _ in range(50):
            if not (tasks := self.loop.tasks_of(program)):
                return
            for task in tasks:
                task.cancel()
            self.run(asyncio.wait(tasks, timeout=0.001))
        raise AssertionError(f"tasks that cannot be cancelled: {tasks}")

    # --- everything --------------------------------------------------------------------------------------------------

    def start(self) -> None:
        self.start_manager()
        for host in self.hosts.values():
            self.start_agent(host)

    def close(self) -> None:
        self.kill_manager()
        for host in self.hosts.values():
            self.kill_agent(host)
            for task in host.world.tasks:
                task.cancel()
        self._end("test")
        self.loop.close()
        asyncio.set_event_loop(None)

    @contextmanager
    def patched(self) -> Iterator[None]:
        """Time, threads, network and guests are this cluster's."""

        async def guest(path: str, limit: int = 2**16) -> Any:
            name = Path(path).name
            for host in self.hosts.values():
                if name in host.world.domains:
                    return await host.world.connect(path, limit)
            raise FileNotFoundError(path)

        now = self.loop.time
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(time, "time", now)
            patch.setattr(time, "monotonic", now)
            patch.setattr(os, "fsync", lambda file: None)
            patch.setattr(asyncio, "open_unix_connection", guest)
            patch.setattr(aiohttp, "TCPConnector", lambda **_: Connector(self.wire))
            patch.setattr(manager_module, "Hosts", partial(Hosts, monotonic=now))
            patch.setattr(manager_module, "CoreChanges", partial(CoreChanges, monotonic=now))
            patch.setattr(manager_module, "Leadership", partial(Leadership, clock=now))
            _without_threads(patch, self._connections)
            yield


class _AtOnce:
    """In the place of the thread of an SQLite connection and of the queue before it: whatever is asked for is done."""

    daemon = True

    def start(self) -> None:
        pass

    def put_nowait(self, asked: tuple[asyncio.Future[Any] | None, Callable[[], Any]]) -> None:
        future, function = asked
        try:
            result = function()
        except Exception as error:
            if future is not None:
                future.set_exception(error)
            return
        if future is not None:
            future.set_result(result)


def _without_threads(patch: pytest.MonkeyPatch, connections: list[Any]) -> None:
    """SQLite is called where it is asked for: no thread of it would ever be waited for in faked time.

    :param connections: gets every connection that is made.
    """
    make = aiosqlite.Connection.__init__

    def made(self: Any, *args: Any, **options: Any) -> None:
        make(self, *args, **options)
        self._tx = self._thread = _AtOnce()
        connections.append(self)

    patch.setattr(sqlite3, "connect", partial(sqlite3.connect, check_same_thread=False))
    patch.setattr(aiosqlite.Connection, "__init__", made)
