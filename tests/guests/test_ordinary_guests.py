"""A guest that runs nothing of ours, adopted while it runs: memory by its balloon, by what its driver says of it."""

from __future__ import annotations

import contextlib
import os
import re
import tempfile
import time
import uuid
import xml.etree.ElementTree as ElementTree
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import libvirt
import pytest

from ebbtide.client import ManagerClient
from ebbtide.deflation.cascade.instructions import GuestKind
from ebbtide.deflation.cascade.ordinary import RESERVE_MIB
from ebbtide.deflation.ledger import Layer
from ebbtide.lab import paths
from ebbtide.lab.guest_link import LabLink, channel_path
from ebbtide.lab.image import build_image
from ebbtide.lab.services import open_libvirt
from ebbtide.messages.common import Vector
from ebbtide.messages.operations import Operation, OperationState
from hostagent.domain_xml.templates import DomainParameters, DomainTemplate, render_domain
from hostagent.libvirt.disks import create_overlay
from tests.guests.conftest import RunningLab
from tests.guests.solo import eventually
from tests.guests.test_lifecycle import done

pytestmark = [pytest.mark.guest, pytest.mark.timeout(900)]

READY_S = 240.0
SIZE_MIB = 768
#: What it is shrunk to, and its least.
SMALL_MIB, LEAST_MIB = 420.0, 256.0
NAME = "ordinary"
AGENT = "io.ebbtide.guest.0"
QEMU_AGENT = "org.qemu.guest_agent.0"
#: Takes 320 MiB at 16 MiB a second and keeps them: more than is left, and too much at once for what is in reserve.
GROW = """
import time
held = []
for _ in range(320):
    held.append(bytearray(b"x") * (1 << 20))
    time.sleep(0.0625)
print(len(held))
"""


def ordinary_xml(xml: str, *channels: str) -> str:
    """A lab guest's definition as of somebody else: no virtio-mem, no statistics, only these channels and the lab's."""
    root = ElementTree.fromstring(xml)
    for name in ("maxMemory", "currentMemory", "metadata"):
        root.remove(root.find(name))  # type: ignore[arg-type]
    cell, memory = root.find("./cpu/numa/cell"), root.find("memory")
    assert cell is not None
    assert memory is not None
    cell.set("memory", str(SIZE_MIB))
    memory.text = str(SIZE_MIB)
    devices, balloon = root.find("devices"), root.find("./devices/memballoon")
    assert devices is not None
    assert balloon is not None
    balloon.clear()
    balloon.set("model", "virtio")
    for device in [*devices.findall("memory"), *devices.findall("channel")]:
        target = device.find("target")
        if device.tag == "memory" or (target is not None and target.get("name") in {AGENT, QEMU_AGENT} - {*channels}):
            devices.remove(device)
    return ElementTree.tostring(root, encoding="unicode")


@asynccontextmanager
async def ordinary(lab: RunningLab, *channels: str) -> AsyncIterator[tuple[Any, LabLink]]:
    """A running guest of 2 vCPUs that nobody of ours has made, and the lab channel into it."""
    image = build_image(paths.image_cache())
    with tempfile.TemporaryDirectory(prefix="ebbtide-test-", dir="/var/tmp") as directory:
        home = Path(directory)
        os.chmod(home, 0o755)  # QEMU's user is to enter
        connection = open_libvirt(lab.state.uri)
        parameters = DomainParameters(
            name=f"Foreign-{uuid.uuid4().hex[:8]}",
            uuid=str(uuid.uuid4()),
            cpu_cores=2,
            memory_mib=SIZE_MIB,
            accelerator="qemu",
            kernel=image.kernel,
            initrd=image.initrd,
            disk=create_overlay(image.base, home / "guest"),
            console=home / "console.log",
            metadata="<e:intent xmlns:e='urn:ebbtide:test'>none</e:intent>",
        )
        domain = connection.defineXML(ordinary_xml(render_domain(DomainTemplate.load("lab"), parameters), *channels))
        try:
            domain.create()
            async with await LabLink.connect(channel_path(domain.XMLDesc()), READY_S) as link:
                yield domain, link
        finally:
            for end in (domain.destroy, domain.undefine):
                with contextlib.suppress(libvirt.libvirtError):
                    end()
            connection.close()


async def run(link: LabLink, *argv: str, timeout_s: float = 60) -> str:
    ended = await link.call("exec", argv=list(argv), timeout_s=timeout_s, reply_timeout_s=timeout_s + 60)
    assert ended["returncode"] == 0, f"{argv[0]}: {ended['stderr']}"
    return str(ended["stdout"])


async def available_mib(link: LabLink) -> float:
    found = re.search(r"MemAvailable:\s+(\d+)", await run(link, "busybox", "cat", "/proc/meminfo"))
    assert found is not None
    return int(found[1]) / 1024


async def target(client: ManagerClient, memory_mib: float | None = None, cpu_cores: float | None = None) -> Operation:
    found = await client.vm(NAME)
    size = Vector(
        cpu_cores=found.current.cpu_cores if cpu_cores is None else cpu_cores,
        memory_mib=found.current.memory_mib if memory_mib is None else memory_mib,
    )
    return await client.wait(
        await client.set_target(NAME, size, generation=found.generation + 1, deadline_s=120), limit_s=240
    )


async def reached(client: ManagerClient, memory_mib: float | None = None, cpu_cores: float | None = None) -> Operation:
    """A target that is asked for again while this machine is too busy for an emulated guest to answer in time."""

    async def answers() -> bool:
        vm = await client.vm(NAME)
        return bool(vm.guest_connected or vm.guest_kind is not GuestKind.AGENT)

    for _ in range(4):
        # An agent that has let a call wait for 5 s is greeted anew.
        await eventually(answers, "its agent answers", 60)
        found = await target(client, memory_mib, cpu_cores)
        if found.state is OperationState.DONE:
            break
    return found


def memory_rows(operation: Operation) -> dict[Layer, float]:
    (vm,) = operation.vms
    return {row.layer: row.verified for row in vm.ledger if row.resource == "memory_mib"}


async def cpus(link: LabLink) -> str:
    return (await run(link, "busybox", "cat", "/sys/devices/system/cpu/online")).strip()


def actual_mib(domain: Any) -> float:
    return float(domain.memoryStats()["actual"]) / 1024


async def test_a_guest_without_any_agent_gives_memory_has_it_back_and_keeps_it_once_it_falls_silent(
    lab: RunningLab,
) -> None:
    async with lab.client() as client, ordinary(lab) as (domain, link):
        host = next(found.id for found in await client.hosts() if found.id.endswith("-a"))
        found, spare_mib = await client.adoptable(domain.name(), host), await available_mib(link)
        assert (found.why_not, found.size.memory_mib) == ("", SIZE_MIB)
        assert found.minimum.memory_mib == pytest.approx(SIZE_MIB - spare_mib + RESERVE_MIB, abs=24)
        assert found.minimum.cpu_cores is not None
        assert 0.1 <= found.minimum.cpu_cores <= 2.0
        assert ElementTree.fromstring(domain.XMLDesc()).find("./devices/memballoon/stats") is None
        await done(client, await client.adopt(domain.name(), host, name=NAME, minimum=Vector(memory_mib=LEAST_MIB)))
        released = False
        try:
            unused_mib = await available_mib(link)
            shrunk = await target(client, SMALL_MIB)
            assert shrunk.state is OperationState.DONE, shrunk.sentence
            assert memory_rows(shrunk)[Layer.HYPERVISOR] == pytest.approx(SIZE_MIB - SMALL_MIB, abs=2)
            assert memory_rows(shrunk)[Layer.HYPERVISOR] >= 0.4 * unused_mib
            assert actual_mib(domain) == pytest.approx(SMALL_MIB, abs=2)
            assert "kind is balloon" in shrunk.vms[0].ledger[-1].reason

            # It had to be asked for 320 MiB at once, which is more than it has left: no process of it is killed.
            assert await run(link, "python3", "-S", "-c", GROW, timeout_s=150) == "320\n"
            assert actual_mib(domain) > SMALL_MIB + 50
            assert "Out of memory" not in await run(link, "busybox", "dmesg")

            # Its driver is gone, and with it the statistics; what it says last does not count.
            unbind = "for d in /sys/bus/virtio/drivers/virtio_balloon/virtio*; do echo ${d##*/} >${d%/*}/unbind; done"
            await run(link, "busybox", "sh", "-c", unbind)
            said_at = domain.memoryStats()["last_update"]

            async def silent() -> bool:
                return bool(said_at < time.time() - 4)

            await eventually(silent, "its statistics stop")
            held_mib = actual_mib(domain)
            refused = await target(client, LEAST_MIB + 64)
            assert refused.state is OperationState.PARTIAL, refused.sentence
            assert "no fresh reading of the guest, so no memory is taken" in refused.sentence
            assert actual_mib(domain) == held_mib

            await done(client, await client.release(NAME))
            released = True
            assert ElementTree.fromstring(domain.XMLDesc()).find("./devices/memballoon/stats") is None
        finally:
            if not released:
                await client.wait(await client.delete(NAME), limit_s=60)


async def test_a_guest_with_qemu_guest_agent_only_has_its_cpus_off_line_and_a_stopped_agent_holds_nothing_up(
    lab: RunningLab,
) -> None:
    async with lab.client() as client, ordinary(lab, QEMU_AGENT) as (domain, link):
        host = next(found.id for found in await client.hosts() if found.id.endswith("-a"))
        await done(client, await client.adopt(domain.name(), host, name=NAME, minimum=Vector(memory_mib=LEAST_MIB)))
        try:
            # As long as it still boots it reads from its disk, and gives no memory.
            await reached(client, SIZE_MIB - 8)
            shrunk = await target(client, SMALL_MIB, cpu_cores=1.0)
            assert shrunk.state is OperationState.DONE, shrunk.sentence
            rows = {(row.layer, row.resource): row.verified for row in shrunk.vms[0].ledger}
            assert rows[Layer.GUEST, "cpu_cores"] == 1.0
            assert rows[Layer.HYPERVISOR, "memory_mib"] == pytest.approx(SIZE_MIB - 8 - SMALL_MIB, abs=2)
            assert await cpus(link) == "0"
            grown = await target(client, cpu_cores=2.0)
            assert grown.state is OperationState.DONE, grown.sentence
            assert await cpus(link) == "0-1"

            assert (await target(client, cpu_cores=1.0)).state is OperationState.DONE
            assert await cpus(link) == "0"
            pid = (await run(link, "busybox", "pidof", "qemu-ga")).strip()
            await run(link, "busybox", "kill", "-STOP", pid)
            # It is given its cores by quota; its second CPU comes when the agent answers again.
            grown = await target(client, cpu_cores=2.0)
            assert grown.state is OperationState.DONE, grown.sentence
            assert await cpus(link) == "0"
            grown = await target(client, SIZE_MIB)
            assert grown.vms[0].seconds < 5, "memory does not wait for the agent"
            await run(link, "busybox", "kill", "-CONT", pid)

            async def whole() -> bool:
                return await cpus(link) == "0-1"

            await eventually(whole, "its second CPU is on line again", 150)
        finally:
            await client.wait(await client.delete(NAME), limit_s=60)
