"""Two hosts and real guests: an arrival goes where the other host is closed, its deflation falls short, and the guest
that gave too little is preempted, with a record that names the layer.
"""

from __future__ import annotations

import asyncio
import re
import time

import pytest

from benchmarks.host.bench_host import in_guest, lab_link
from ebbtide.client import ManagerClient
from ebbtide.deflation.allocations import Priority
from ebbtide.deflation.modes import HostMode
from ebbtide.lab.errors import ReadingError
from ebbtide.lab.guest_link import LabLink
from ebbtide.lab.readings import Gauge
from ebbtide.messages.common import Vector
from ebbtide.messages.operations import OperationState
from ebbtide.messages.vms import VMSpec
from tests.guests.conftest import RunningLab
from tests.guests.placed import START_S
from tests.guests.test_modes import ended, set_mode

pytestmark = [pytest.mark.guest, pytest.mark.timeout(600)]

LOW = VMSpec(
    name="hogged",
    priority=Priority.DEFLATABLE,
    nominal=Vector(cpu_cores=1.5, memory_mib=768.0),
    minimum=Vector(cpu_cores=0.5, memory_mib=448.0),
)
#: Fits beside the minimum of the low VM, but not beside what the hog lets it give.
HIGH = VMSpec(name="arrival", priority=Priority.FIXED, nominal=Vector(cpu_cores=1.0, memory_mib=500.0))
HOG_MIB = 510


async def available_mib(guest: LabLink) -> int:
    meminfo = await in_guest(guest, "busybox cat /proc/meminfo")
    return int(re.findall(r"^MemAvailable:\s+(\d+) kB$", meminfo, re.MULTILINE)[0]) // 1024


async def hog(lab: RunningLab, domain: str) -> None:
    """Fill the guest's memory with pages that no layer may take."""
    code = f"import time; x = bytearray(b'x' * 4096) * {HOG_MIB * 256}; print(len(x), flush=True); time.sleep(3600)"
    guest = await lab_link(lab.state.uri, domain)
    try:
        async with asyncio.timeout(150):
            # It starts with what it needs to boot; the rest is plugged after its agent's hello.
            while await available_mib(guest) < HOG_MIB + 24:
                await asyncio.sleep(0.5)
            await in_guest(guest, f'python3 -S -c "{code}" </dev/null >/run/hog 2>&1 &')
            while not re.fullmatch(r"\d+\s*", await in_guest(guest, "busybox cat /run/hog")):
                await asyncio.sleep(0.5)
    finally:
        await guest.close()


async def test_a_deflation_that_falls_short_preempts_its_guest_and_the_record_names_the_layer(lab: RunningLab) -> None:
    large, small = (host.id for host in lab.state.hosts)
    domain = f"ebb-{small}.{LOW.name}"
    async with lab.client() as client:
        begun_at = time.time()
        await set_mode(client, large, HostMode.PAUSED)
        try:
            created = await ended(client, await client.create(LOW, deadline_s=START_S))
            assert (created.state, created.host) == (OperationState.DONE, small), created.sentence
            await calm(client, domain, lab.state.uri)
            await hog(lab, domain)

            arrived = await ended(client, await client.create(HIGH, deadline_s=60))
            assert (arrived.state, arrived.host) == (OperationState.DONE, small), arrived.sentence
            events = [event for event in await client.events(1000) if event.at >= begun_at]
            (record,) = [event.sentence for event in events if event.kind == "preempting"]
            assert f"preempting {LOW.name} on {small} (reason shortfall)" in record
            assert re.search(r"in layer (application|guest|hypervisor)\b", record), record
        finally:
            for name in (HIGH.name, LOW.name):
                if any(vm.name == name for vm in await client.vms()):
                    await ended(client, await client.delete(name))
            await set_mode(client, large, HostMode.ACTIVE)


async def calm(client: ManagerClient, domain: str, uri: str) -> None:
    """Until the guest answers and is under no pressure, as one is that starts on a busy machine."""
    async with asyncio.timeout(300):
        while True:
            vm = await client.vm(LOW.name)
            host = await client.host(vm.host or "")
            spare = vm.current.memory_mib - vm.minimum.memory_mib
            if vm.guest_connected and host.deflatable.memory_mib >= spare - 1:
                try:
                    await Gauge(domain, uri).read()
                    return
                except ReadingError:
                    pass  # its services still start
            await asyncio.sleep(0.5)
