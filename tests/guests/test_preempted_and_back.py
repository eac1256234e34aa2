"""A real guest is preempted: a program in it records the notice, its disk stays, and it boots again from it."""

from __future__ import annotations

import asyncio

import pytest

from benchmarks.host.bench_host import in_guest, lab_link
from ebbtide.client import ManagerClient
from ebbtide.deflation.allocations import Priority
from ebbtide.deflation.modes import HostMode
from ebbtide.messages.common import Vector
from ebbtide.messages.operations import OperationState
from ebbtide.messages.vms import VMSpec
from tests.guests.conftest import RunningLab
from tests.guests.test_demo import virsh
from tests.guests.test_modes import ended, set_mode

pytestmark = [pytest.mark.guest, pytest.mark.timeout(900)]

#: It can be shrunk by nothing worth while, and both do not fit on the smaller host.
LOW = VMSpec(
    name="kept-low",
    priority=Priority.DEFLATABLE,
    nominal=Vector(cpu_cores=1.0, memory_mib=640.0),
    minimum=Vector(cpu_cores=1.0, memory_mib=640.0),
    preemption_notice_s=90.0,
)
PROGRAM = "#!/bin/busybox sh\\necho told $1 $2 $3 >> /var/notice\\nbusybox sync\\n"


async def shell(uri: str, domain: str, script: str) -> str:
    guest = await lab_link(uri, domain)
    try:
        return await in_guest(guest, script)
    finally:
        await guest.close()


async def answers(client: ManagerClient) -> None:
    async with asyncio.timeout(300):
        while not (await client.vm(LOW.name)).guest_connected:
            await asyncio.sleep(0.5)


async def test_a_preempted_guest_has_its_notice_keeps_its_disk_and_boots_again_from_it(lab: RunningLab) -> None:
    large, small = (host.id for host in lab.state.hosts)
    domain, uri = f"ebb-{small}.{LOW.name}", lab.state.uri
    token = lab.state.manager_token_file.read_text().strip()
    async with ManagerClient(lab.state.manager_url, token) as client:
        await set_mode(client, large, HostMode.PAUSED)
        high = VMSpec(name="arriving", priority=Priority.FIXED, nominal=Vector(cpu_cores=0.5, memory_mib=500.0))
        try:
            created = await ended(client, await client.create(LOW, deadline_s=60))
            assert (created.state, created.host) == (OperationState.DONE, small), created.sentence
            await answers(client)
            await shell(
                uri,
                domain,
                "busybox mkdir -p /etc/ebbtide/preempt.d && "
                f"printf '{PROGRAM}' > /etc/ebbtide/preempt.d/record && "
                "busybox chmod 755 /etc/ebbtide/preempt.d /etc/ebbtide/preempt.d/record && "
                "echo precious > /var/work && busybox sync",
            )

            arrived = await ended(client, await client.create(high, deadline_s=120))
            assert (arrived.state, arrived.host) == (OperationState.DONE, small), arrived.sentence
            found = await client.vm(LOW.name)
            assert (found.state, found.host) == ("preempted", small)
            assert found.preempted is not None
            assert found.preempted.position == 1
            assert found.preempted.waits_for.memory_mib > 0
            (event,) = await client.events(10, kind="preempted", vm=LOW.name)
            assert "its guest was told" in event.sentence
            assert "1 of 1 programs ended in time" in event.sentence
            assert "its guest powered off" in event.sentence
            assert (await asyncio.to_thread(virsh, "domstate", domain) or "").strip() == "shut off"

            await ended(client, await client.delete(high.name))
            async with asyncio.timeout(300):
                while (await client.vm(LOW.name)).state != "running":
                    await asyncio.sleep(0.5)
            await answers(client)
            kept = await shell(uri, domain, "busybox cat /var/work /var/notice")
            work, notice = kept.split("\n", 1)
            assert work == "precious"
            told, kind, seconds, _ = notice.split(maxsplit=3)
            assert (told, kind) == ("told", "stop")
            assert 5 < float(seconds) <= 60
        finally:
            for name in (high.name, LOW.name):
                if any(vm.name == name for vm in await client.vms()):
                    await ended(client, await client.delete(name))
            await set_mode(client, large, HostMode.ACTIVE)
