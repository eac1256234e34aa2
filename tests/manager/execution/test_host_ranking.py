"""Which hosts come first where plans wait in line."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import AsyncIterator
from typing import Any

import numpy as np
import pytest

from cluster_manager.execution.host_ranking import HostRanking
from cluster_manager.inventory.hosts import Hosts
from cluster_manager.plans.plans import ChooseHosts
from cluster_manager.store.database import Database
from cluster_manager.store.store import Store
from ebbtide.deflation.placement.policy_names import PlacementPolicy
from tests.manager.plan_events import placement, report_of, spec_of


@pytest.fixture
async def hosts(database: Database) -> AsyncIterator[Hosts]:
    store = Store(database, time.time)
    await store.open()
    found = Hosts(store, 10.0, lambda: 5.0, lambda: 100.0)
    for host in ("a", "b", "c", "d"):
        await found.take(report_of(host))
    yield found
    await store.close()


async def line_of(hosts: Hosts, host: str, number: int) -> list[asyncio.Task[bool]]:
    """So many plans that take a host or wait for it."""
    plans = [asyncio.create_task(hosts.locks.hold(uuid.uuid4().hex, host)) for _ in range(number)]
    await asyncio.sleep(0)
    return plans


def ranked(hosts: Hosts) -> tuple[str, ...]:
    unused: Any = None
    state = placement(spec_of("low", "deflatable")).having(policy=PlacementPolicy.FIRST_FIT)
    ranking = HostRanking(unused, hosts, np.random.default_rng(0))
    return ranking.choose(state, ChooseHosts(purpose="place"), 0.0).hosts


async def test_hosts_for_which_nobody_waits_come_first_and_else_the_shortest_line(hosts: Hosts) -> None:
    assert ranked(hosts) == ("a", "b", "c", "d")
    tasks = await line_of(hosts, "a", 1)
    assert ranked(hosts) == ("a", "b", "c", "d"), "most plans are done in a moment"
    tasks += await line_of(hosts, "b", 1)
    assert ranked(hosts) == ("a", "c", "d", "b"), "but who leaves the first goes where nobody is"
    tasks += await line_of(hosts, "a", 2)
    assert ranked(hosts) == ("b", "c", "d", "a")
    for host, number in (("b", 2), ("c", 2), ("d", 4)):
        tasks += await line_of(hosts, host, number)
    assert [hosts.locks.in_line(host) for host in ("a", "b", "c", "d")] == [3, 3, 2, 4]
    assert ranked(hosts)[0] == "c"
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    assert not hosts.locks.waited_for


async def test_many_arrivals_stand_in_lines_that_are_as_long_at_every_host(hosts: Hosts) -> None:
    # These fit best, and all have the room.
    for number in range(60):
        await hosts.take(report_of(f"large-{number:02}", cpu_cores=64.0, memory_mib=64000.0))
    unused: Any = None
    ranking = HostRanking(unused, hosts, np.random.default_rng(0))
    state = placement(spec_of("low", "deflatable", cpu_cores=1.0, memory_mib=300.0))
    tasks = []
    for number in range(256):
        first = ranking.choose(state, ChooseHosts(purpose="place"), 0.0).hosts[0]
        tasks.append(asyncio.create_task(hosts.locks.hold(f"plan-{number}", first)))
        await asyncio.sleep(0)
    lines = [hosts.locks.in_line(host) for host in hosts.ids()]
    assert (min(lines), max(lines)) == (4, 4)
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
