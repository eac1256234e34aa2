"""A small cluster with something on each of the page's views: two hosts, deflated and preempted VMs, tasks."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from pathlib import Path

from tests.manager import fake_engine
from tests.manager.cluster import vm
from tests.manager.two_agents import TwoHosts, two_hosts
from tests.waiting import until


@contextlib.asynccontextmanager
async def staged(path: Path) -> AsyncIterator[TwoHosts]:
    engine = fake_engine.FakeEngine(far=4, near=2)
    async with two_hosts(path, **fake_engine.settings(engine, directory=path / "engine")) as hosts:
        await place(hosts, vm("shop"))
        await place(hosts, vm("wiki", memory_mib=1200.0))
        await place(hosts, vm("mail", cpu_cores=2.0, preemption_notice_s=0.0))
        # The first takes what those of host-a can give, the second stops what is on host-b.
        await place(hosts, vm("database", priority="fixed", cpu_cores=5.0, memory_mib=1400.0), policy="first-fit")
        await place(hosts, vm("billing", priority="fixed", cpu_cores=5.8, memory_mib=1000.0), policy="first-fit")
        for name, cores in (("train", 2), ("render", 2), ("index", 3), ("vacuum", 4)):
            task = {"name": name, "command": ["/usr/bin/true"], "cores": cores, "duration_s": 900.0}
            body = {"request_id": f"submit-{name}", "task": task}
            status, said = await hosts.cluster.call("POST", "/v1/tasks", json=body)
            assert status == 202, said
        yield hosts


async def place(hosts: TwoHosts, body: dict[str, object], **more: str) -> None:
    """A VM whose guest is connected."""
    operation = await hosts.cluster.create(body, deadline_s=20.0, **more)
    assert operation.state == "done", operation.sentence
    name, host = str(body["name"]), operation.host
    assert host is not None
    agent = hosts.hosts[host].agent
    assert agent is not None
    await until(lambda: agent.host.vms[name].link.connected)
