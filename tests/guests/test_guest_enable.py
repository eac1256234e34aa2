"""`ebb guest enable`: the guest agent's channel comes into a guest that runs, and the host agent talks through it."""

from __future__ import annotations

import contextlib
import uuid
import xml.etree.ElementTree as ElementTree
from collections.abc import Iterator
from typing import Any

import libvirt
import pytest

from ebbtide.cli.guest_channel import Enabled, enable, has_channel
from ebbtide.deflation.cascade.instructions import GuestKind
from ebbtide.errors import EbbError
from ebbtide.lab.services import open_libvirt
from ebbtide.messages.common import Vector
from ebbtide.messages.operations import OperationState
from tests.guests.conftest import RunningLab
from tests.guests.solo import eventually
from tests.guests.test_lifecycle import done
from tests.guests.test_ordinary_guests import LEAST_MIB, NAME, SIZE_MIB, SMALL_MIB, actual_mib, ordinary, reached

pytestmark = [pytest.mark.guest, pytest.mark.timeout(900)]

BARE = """<domain type='{kind}'><name>{name}</name><memory unit='MiB'>64</memory><vcpu>1</vcpu>
<os><type arch='x86_64' machine='q35'>hvm</type></os><devices>{devices}<memballoon model='none'/></devices></domain>"""
CONTROLLER = "<controller type='virtio-serial' index='0'/>"


@contextlib.contextmanager
def bare(uri: str, devices: str, *, running: bool = True, persistent: bool = True) -> Iterator[Any]:
    """A domain whose vCPUs never run: its devices are all that counts."""
    connection = open_libvirt(uri)
    xml = BARE.format(kind="qemu", name=f"bare-{uuid.uuid4().hex[:8]}", devices=devices)
    paused = libvirt.VIR_DOMAIN_START_PAUSED
    domain = connection.defineXML(xml) if persistent else connection.createXML(xml, paused)
    try:
        if running and persistent:
            domain.createWithFlags(paused)
        yield domain
    finally:
        for end in (domain.destroy, domain.undefine):
            with contextlib.suppress(libvirt.libvirtError):
                end()
        connection.close()


def channels(domain: Any) -> tuple[bool, bool]:
    """Whether it has the channel now, and from its next start on."""
    return has_channel(domain.XMLDesc()), has_channel(domain.XMLDesc(libvirt.VIR_DOMAIN_XML_INACTIVE))


async def test_an_adopted_guest_has_the_channel_while_it_runs_and_its_agent_is_talked_to(lab: RunningLab) -> None:
    async with lab.client() as client, ordinary(lab) as (domain, _link):
        host = next(found.id for found in await client.hosts() if found.id.endswith("-a"))
        await done(client, await client.adopt(domain.name(), host, name=NAME, minimum=Vector(memory_mib=LEAST_MIB)))
        try:
            before = await client.vm(NAME)
            assert (before.guest_kind, before.guest_connected) == (GuestKind.BALLOON, False)
            found = enable(domain.name(), lab.state.uri)
            assert (found.live, found.at_next_start) == (True, True), found.sentence
            assert channels(domain) == (True, True)

            async def connected() -> bool:
                vm = await client.vm(NAME)
                return bool(vm.guest_connected and vm.guest_kind is GuestKind.AGENT)

            await eventually(connected, "the guest agent is connected", 60)
            assert domain.info()[0] == libvirt.VIR_DOMAIN_RUNNING
            shrunk = await reached(client, SMALL_MIB, cpu_cores=1.0)
            assert shrunk.state is OperationState.DONE, shrunk.sentence
            assert actual_mib(domain) == pytest.approx(SMALL_MIB, abs=2)
            grown = await reached(client, float(SIZE_MIB), cpu_cores=2.0)
            assert grown.state is OperationState.DONE, grown.sentence
            again = enable(domain.name(), lab.state.uri)
            assert "already" in again.sentence
        finally:
            await client.wait(await client.delete(NAME), limit_s=60)


def test_what_takes_a_restart_what_does_not_last_and_what_is_refused(lab: RunningLab) -> None:
    uri = lab.state.uri
    with bare(uri, CONTROLLER) as domain:
        assert enable(domain.name(), uri) == Enabled(
            domain.name(), True, True, f"{domain.name()} has the channel io.ebbtide.guest.0 now, without a restart"
        )
    with bare(uri, "") as domain:
        found = enable(domain.name(), uri)
        assert (found.live, found.at_next_start, channels(domain)) == (False, True, (False, True))
        assert "takes a restart" in found.sentence
    with bare(uri, "", running=False) as domain:
        found = enable(domain.name(), uri)
        assert (found.live, found.at_next_start) == (False, True)
        assert "from its next start on" in found.sentence
        root = ElementTree.fromstring(domain.XMLDesc())
        assert root.find("./devices/controller[@type='virtio-serial']") is not None
    with bare(uri, CONTROLLER, persistent=False) as domain:
        found = enable(domain.name(), uri)
        assert (found.live, found.at_next_start) == (True, False)
        assert "no persistent definition" in found.sentence
    with bare(uri, "", persistent=False) as domain:
        with pytest.raises(EbbError, match="cannot have the channel") as refused:
            enable(domain.name(), uri)
        assert "\n" not in str(refused.value)
        assert not has_channel(domain.XMLDesc())
    with pytest.raises(EbbError, match="there is no VM and no domain nobody"):
        enable("nobody", uri)
    with pytest.raises(EbbError, match="type lxc is no QEMU"):
        has_channel("<domain type='lxc'><name>c</name></domain>")
