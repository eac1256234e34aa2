"""kill -9 of a host agent in the middle of a deflation of a real guest: started again, it ends at the plan."""

from __future__ import annotations

import asyncio
import os
import signal
import time
import uuid

import pytest

from ebbtide.client import ManagerClient
from ebbtide.deflation.allocations import Priority
from ebbtide.demo.cache import Cache
from ebbtide.lab import processes
from ebbtide.lab.readings import Gauge
from ebbtide.messages.common import Vector
from ebbtide.messages.vms import VMSpec
from hostagent.state.intents import NAMESPACE, Intent, Phase, from_element
from tests.guests.conftest import RunningLab
from tests.guests.placed import placed
from tests.guests.test_demo import virsh
from tests.waiting import until

pytestmark = [pytest.mark.guest, pytest.mark.timeout(600)]

NAME = "victim"
NOMINAL = Vector(cpu_cores=3, memory_mib=1024)
TARGET = Vector(cpu_cores=1.5, memory_mib=480)


def intent_of(domain: str) -> Intent:
    """What stands in the domain's metadata, read past the agent."""
    intent = from_element(virsh("metadata", domain, "--uri", NAMESPACE) or "")
    assert intent is not None
    return intent


async def connected(client: ManagerClient) -> None:
    async with asyncio.timeout(240):
        while not (await client.vm(NAME)).guest_connected:
            await asyncio.sleep(0.5)


async def test_a_killed_agent_brings_a_real_guest_to_the_planned_size(lab: RunningLab) -> None:
    async with lab.client() as client:
        spec = VMSpec(name=NAME, priority=Priority.DEFLATABLE, nominal=NOMINAL, minimum=Vector(memory_mib=320))
        async with placed(client, spec) as host:
            await connected(client)
            domain = f"ebb-{host}.{NAME}"
            gauge = Gauge(domain)
            await Cache(NAME, gauge, 9600).fill(lambda done: None)
            before = await gauge.read()
            assert (before.memory_mib, before.cpus_online) == (1024, (0, 1, 2))

            await _kill_in_the_middle(lab, client, host, domain)
            lab.lab.start_daemon(host)
            await asyncio.to_thread(lab.lab.wait_ready)
            await until(lambda: intent_of(domain).phase is Phase.SETTLED, limit_s=220)

            after = await gauge.read()
            assert after.memory_mib == pytest.approx(TARGET.memory_mib, abs=1)
            assert _kib_of("requested", domain) == _kib_of("current", domain), "something is still asked of the guest"
            assert after.cpu_cores == pytest.approx(TARGET.cpu_cores, abs=0.01)
            assert intent_of(domain).committed.memory_mib == pytest.approx(TARGET.memory_mib, abs=1)
            assert after.memcached_rss_mib < before.memcached_rss_mib
            await connected(client)
            await until_reported(client, TARGET)


async def _kill_in_the_middle(lab: RunningLab, client: ManagerClient, host: str, domain: str) -> None:
    generation = (await client.vm(NAME)).generation + 1
    # Time enough for a busy machine: what is not there at the deadline is not taken.
    request_id = uuid.uuid4().hex
    await client.set_target(NAME, TARGET, generation=generation, request_id=request_id, deadline_s=200.0)
    await until(lambda: intent_of(domain).phase is Phase.DEFLATING, limit_s=30)
    # Into the guest layer: memory is on its way out, nothing is committed yet.
    nominal = await asyncio.to_thread(_kib_of, "current", domain)
    began = time.monotonic()
    while await asyncio.to_thread(_kib_of, "current", domain) == nominal:
        assert time.monotonic() - began < 60, "the guest gives no memory"
        await asyncio.sleep(0.1)
    process = lab.lab.state().daemon(host).process
    assert process is not None
    os.kill(process.pid, signal.SIGKILL)
    # It may take a while to go.
    await until(lambda: processes.running(process) is None, limit_s=30)
    assert intent_of(domain).phase is Phase.DEFLATING, "the deflation had ended before the kill"


def _kib_of(what: str, domain: str) -> str:
    """Of its virtio-mem device."""
    xml = virsh("dumpxml", domain) or ""
    return xml.partition(f"<{what} unit='KiB'>")[2].partition("<")[0]


async def until_reported(client: ManagerClient, size: Vector) -> None:
    """Until the manager has the size that the agent committed."""
    async with asyncio.timeout(60):
        while (await client.vm(NAME)).current != size:
            await asyncio.sleep(0.5)
