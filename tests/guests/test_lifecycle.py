"""A VM's lifecycle with a real guest: resize, stop, start, and a domain of somebody else adopted and given back."""

from __future__ import annotations

import asyncio
import contextlib
import re
import uuid
import xml.etree.ElementTree as ElementTree
from collections.abc import Iterator
from typing import Any

import libvirt
import pytest

from ebbtide.client import ClientError, ManagerClient
from ebbtide.deflation.allocations import Priority
from ebbtide.messages.common import PartialVector, Vector
from ebbtide.messages.operations import Operation, OperationState
from ebbtide.messages.vms import ClusterVM, VMSpec
from hostagent.state.intents import NAMESPACE
from tests.guests.conftest import RunningLab
from tests.guests.placed import placed
from tests.guests.test_demo import virsh

pytestmark = [pytest.mark.guest, pytest.mark.timeout(900)]

NAME = "kept"
NOMINAL = Vector(cpu_cores=2.0, memory_mib=640.0)
SMALLER = PartialVector(cpu_cores=1.0, memory_mib=512.0)
#: From here on it writes into another file.
SNAPSHOT = ("taken", "--disk-only", "--no-metadata")


async def done(client: ManagerClient, operation: Operation) -> Operation:
    ended = await client.wait(operation, limit_s=240)
    assert ended.state is OperationState.DONE, ended.sentence
    return ended


async def connected(client: ManagerClient, name: str) -> ClusterVM:
    async with asyncio.timeout(300):
        while not (found := await client.vm(name)).guest_connected:
            await asyncio.sleep(0.3)
    return found


async def resized(client: ManagerClient, **changes: Any) -> Operation:
    """Until it is done: an emulated guest beside others does not answer in time each time it is asked."""
    async with asyncio.timeout(300):
        while True:
            ended = await client.wait(await client.resize(NAME, **changes), limit_s=240)
            if ended.state is OperationState.DONE:
                return ended
            assert ended.state is OperationState.PARTIAL, ended.sentence
            assert "stays what it was" in ended.sentence


def sizes(domain: str) -> tuple[int, int]:
    """vCPUs and MiB that libvirt says a domain has now."""
    root = ElementTree.fromstring(virsh("dumpxml", domain) or "")
    vcpu, memory = root.find("vcpu"), root.find("currentMemory")
    assert vcpu is not None
    assert memory is not None
    return int(vcpu.get("current") or vcpu.text or 0), int(memory.text or 0) // 1024


def state_of(domain: str) -> str:
    return (virsh("domstate", domain) or "").strip()


async def test_a_vm_is_resized_stopped_and_started_again_on_its_disk(lab: RunningLab) -> None:
    async with lab.client() as client:
        spec = VMSpec(name=NAME, priority=Priority.DEFLATABLE, nominal=NOMINAL, minimum=Vector(memory_mib=320.0))
        async with placed(client, spec) as host:
            domain = f"ebb-{host}.{NAME}"
            await connected(client, NAME)
            await resized(client, nominal=SMALLER)
            found = await client.vm(NAME)
            assert (found.nominal.cpu_cores, found.current.memory_mib) == (1.0, 512.0)
            # What it did not boot with is plugged a moment after its hello.
            async with asyncio.timeout(120):
                while (await asyncio.to_thread(sizes, domain))[1] != 512:
                    await asyncio.sleep(0.5)
            grown = await resized(client, nominal=PartialVector(memory_mib=640.0))
            assert (await client.vm(NAME)).current.memory_mib == 640.0, grown.sentence
            await done(
                client, await client.resize(NAME, priority=Priority.FIXED, minimum=PartialVector(memory_mib=0.0))
            )
            async with asyncio.timeout(60):
                while "cpu_shares     : 200" not in (await asyncio.to_thread(virsh, "schedinfo", domain) or ""):
                    await asyncio.sleep(0.3)
            later = await resized(client, nominal=PartialVector(memory_mib=768.0))
            assert "takes effect at its next start" in later.sentence
            identity = await asyncio.to_thread(virsh, "domuuid", domain)
            assert await asyncio.to_thread(virsh, "snapshot-create-as", domain, *SNAPSHOT) is not None
            disk = await asyncio.to_thread(virsh, "domblklist", domain)
            assert f"disk.{SNAPSHOT[0]}" in (disk or "")
            assert await asyncio.to_thread(virsh, "checkpoint-create", domain) is not None

            stopped = await done(client, await client.stop(NAME, limit_s=60))
            assert "its guest powered off" in stopped.sentence
            assert await asyncio.to_thread(state_of, domain) == "shut off"
            assert (await client.vm(NAME)).state == "stopped"

            await done(client, await client.start(NAME))
            found = await connected(client, NAME)
            assert (found.state, found.host, found.current.memory_mib) == ("running", host, 768.0)
            assert await asyncio.to_thread(sizes, domain) == (1, 768)
            assert await asyncio.to_thread(virsh, "domuuid", domain) == identity, "the very same domain"
            assert await asyncio.to_thread(virsh, "domblklist", domain) == disk, "what it wrote since the snapshot"
        assert await asyncio.to_thread(virsh, "dominfo", domain) is None, "its checkpoint keeps it from being deleted"


@pytest.fixture
def foreign(lab: RunningLab) -> Iterator[str]:
    """A domain that nobody of ours has made: a guest without a disk that stays in its boot loader."""
    name = f"Foreign-{uuid.uuid4().hex[:8]}"
    xml = f"""<domain type='qemu'><name>{name}</name><memory unit='MiB'>256</memory><vcpu>2</vcpu>
    <cputune><period>10000</period><quota>5000</quota></cputune>
    <os><type arch='x86_64' machine='q35'>hvm</type></os><features><acpi/></features>
    <devices><controller type='usb' model='none'/><memballoon model='virtio'/></devices></domain>"""
    connection = libvirt.open("qemu:///system")
    domain = connection.defineXML(xml)
    try:
        domain.create()
        yield name
    finally:
        with contextlib.suppress(libvirt.libvirtError):
            domain.destroy()
        with contextlib.suppress(libvirt.libvirtError):
            domain.undefine()
        connection.close()


def quota_us(domain: str) -> int:
    found = re.search(r"vcpu_quota\s*:\s*(-?\d+)", virsh("schedinfo", domain) or "")
    assert found is not None
    # libvirt prints what means no limit as an unsigned number.
    return -1 if int(found[1]) > 10**15 else int(found[1])


async def test_a_foreign_domain_is_adopted_throttled_and_given_back_untouched(lab: RunningLab, foreign: str) -> None:
    async with lab.client() as client:
        host = next(found.id for found in await client.hosts() if found.id.endswith("-a"))
        before = (await asyncio.to_thread(virsh, "schedinfo", foreign), await asyncio.to_thread(state_of, foreign))
        assert re.search(r"vcpu_period *: 10000\n", before[0] or "")
        await done(client, await client.adopt(foreign, host, name="foreign", minimum=Vector(cpu_cores=0.25)))
        released = False
        try:
            found = await client.vm("foreign")
            assert (found.state, found.nominal) == ("running", Vector(cpu_cores=1.0, memory_mib=256.0))
            assert NAMESPACE in (await asyncio.to_thread(virsh, "dumpxml", foreign) or "")
            target = Vector(cpu_cores=0.5, memory_mib=256.0)
            await done(client, await client.set_target("foreign", target, generation=found.generation + 1))
            assert await asyncio.to_thread(quota_us, foreign) == 25_000
            await done(client, await client.release("foreign"))
            released = True
            after = (await asyncio.to_thread(virsh, "schedinfo", foreign), await asyncio.to_thread(state_of, foreign))
            assert after == before
            for flag in ((), ("--inactive",)):
                assert NAMESPACE not in (await asyncio.to_thread(virsh, "dumpxml", foreign, *flag) or "")
            assert all(row.name != "foreign" for row in await client.vms())
        finally:
            if not released:
                await client.wait(await client.delete("foreign"), limit_s=60)


async def started(client: ManagerClient, name: str) -> bool:
    """Whether a VM that is off could be started."""
    with contextlib.suppress(ClientError):
        return (await client.wait(await client.start(name), limit_s=60)).state is OperationState.DONE
    return False


async def test_a_foreign_domain_is_looked_after_through_a_rename_and_without_its_definition(
    lab: RunningLab, foreign: str
) -> None:
    renamed = f"{foreign}-old"
    async with lab.client() as client:
        host = next(found.id for found in await client.hosts() if found.id.endswith("-a"))
        before = await asyncio.to_thread(virsh, "schedinfo", foreign)
        await done(client, await client.adopt(foreign, host, name="foreign", minimum=Vector(cpu_cores=0.25)))
        try:
            await done(client, await client.stop("foreign", limit_s=0))
            assert await asyncio.to_thread(virsh, "domrename", foreign, renamed) is not None
            async with asyncio.timeout(120):
                # Its host does not have it for a moment.
                while not await started(client, "foreign"):
                    await asyncio.sleep(1)
            assert await asyncio.to_thread(state_of, renamed) == "running"
            assert await asyncio.to_thread(virsh, "undefine", renamed) is not None
            found = await client.vm("foreign")
            target = Vector(cpu_cores=0.5, memory_mib=256.0)
            await done(client, await client.set_target("foreign", target, generation=found.generation + 1))
            assert await asyncio.to_thread(quota_us, renamed) == 25_000
        finally:
            await done(client, await client.release("foreign"))
        assert await asyncio.to_thread(virsh, "schedinfo", renamed) == before
        assert NAMESPACE not in (await asyncio.to_thread(virsh, "dumpxml", renamed) or "")
