"""The guest image and the domain template, with a real guest."""

from __future__ import annotations

import tempfile
import time
import uuid
import xml.etree.ElementTree as ElementTree
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import libvirt
import pytest

from ebbtide.lab import paths
from ebbtide.lab.guest_link import LabLink, channel_path
from ebbtide.lab.image import Image, build_image
from ebbtide.lab.services import ensure_services, open_libvirt, stop_services
from ebbtide.lab.state import LabState
from hostagent.domain_xml.templates import DomainParameters, DomainTemplate, render_domain
from hostagent.libvirt.disks import create_overlay
from hostagent.mechanisms.accelerator import QEMUS, boots
from tests.waiting import until

pytestmark = [pytest.mark.guest, pytest.mark.timeout(600)]
READY_S = 240.0
LISTENS_TO_BUTTON = "ls -l /proc/[0-9]*/fd 2>/dev/null | grep -c input/event0"


@pytest.fixture(scope="module")
def image() -> Image:
    return build_image(paths.image_cache())


@pytest.fixture(scope="module")
def home() -> Iterator[Path]:
    """A directory that QEMU's user may enter, which pytest's own are not."""
    with tempfile.TemporaryDirectory(prefix="ebbtide-test-", dir="/var/tmp") as directory:
        Path(directory).chmod(0o755)
        yield Path(directory)


@pytest.fixture(scope="module")
def libvirt_connection(home: Path) -> Iterator[Any]:
    state = LabState()
    ensure_services(state, home, lambda: None, lambda sentence: None)
    connection = open_libvirt(state.uri)
    try:
        yield connection
    finally:
        connection.close()
        stop_services(state, lambda sentence: None)


@pytest.fixture(scope="module")
def domain(image: Image, home: Path, libvirt_connection: Any) -> Iterator[Any]:
    """One guest of 2 vCPUs and 768 MiB, which the tests share; started by the first that connects."""
    name = f"ebbtide-test-{uuid.uuid4().hex[:8]}"
    disk = create_overlay(image.base, home / "guest")
    parameters = DomainParameters(
        name=name,
        uuid=str(uuid.uuid4()),
        cpu_cores=2,
        memory_mib=768,
        accelerator="qemu",
        kernel=image.kernel,
        initrd=image.initrd,
        disk=disk,
        console=home / "console.log",
        metadata="<e:intent xmlns:e='urn:ebbtide:test'>kept</e:intent>",
    )
    found = libvirt_connection.defineXML(render_domain(DomainTemplate.load("lab"), parameters))
    try:
        yield found
    finally:
        if found.isActive():
            found.destroy()
        found.undefine()


@asynccontextmanager
async def running(domain: Any) -> AsyncIterator[LabLink]:
    if not domain.isActive():
        domain.create()
    async with await LabLink.connect(channel_path(domain.XMLDesc()), READY_S) as link:
        yield link


async def shell(link: LabLink, command: str) -> str:
    done = await link.call("exec", argv=["sh", "-c", command], timeout_s=60)
    return str(done["stdout"] + done["stderr"]).strip()


async def shell_until(link: LabLink, command: str, expected: str) -> None:
    deadline_s = time.monotonic() + READY_S
    while (said := await shell(link, command)) != expected:
        assert time.monotonic() < deadline_s, f"{command}: {said}"


def agent_answers(domain: Any) -> bool:
    channels = ElementTree.fromstring(domain.XMLDesc()).iterfind("./devices/channel/target")
    return any(c.get("name") == "org.qemu.guest_agent.0" and c.get("state") == "connected" for c in channels)


def virtio_mem_is(domain: Any, current_kib: int) -> bool:
    return ElementTree.fromstring(domain.XMLDesc()).findtext("./devices/memory/target/current") == str(current_kib)


def test_a_second_build_costs_nothing(image: Image) -> None:
    again = build_image(paths.image_cache())
    assert again.built_s == 0.0
    assert again.key == image.key


def test_all_files_of_the_image_can_be_read_by_qemus_user(image: Image) -> None:
    for path in (image.base, image.kernel, image.initrd):
        assert path.stat().st_mode & 0o444 == 0o444
        assert path.parent.stat().st_mode & 0o555 == 0o555
    assert not list(paths.image_cache().glob(".building-*"))


def test_the_probe_kernel_really_boots_in_emulation(image: Image) -> None:
    booted, output = boots(QEMUS[0], image.kernel, None, "tcg", READY_S)
    assert booted, output


async def test_every_service_of_the_guest_comes_up(domain: Any) -> None:
    async with running(domain) as link:
        await shell_until(link, "busybox netstat -ltn | grep -c '127.0.0.1:11211 '", "1")
        await shell_until(link, "busybox netstat -lxn | grep -c /run/ebbtide/hooks/memcached.sock", "1")
        await shell_until(link, "cat /proc/[0-9]*/cmdline | tr '\\0' ' ' | grep -c 'm [g]uestagent'", "1")
        stats = await link.call("memcached.stats", args="settings")
        assert stats["maxbytes"] == str(768 * 55 // 100 << 20)
        assert (await link.call("rss", name="memcached"))["rss_mib"] > 0
        assert "MALLOC_MMAP_THRESHOLD_=131072" in await shell(link, "tr '\\0' '\\n' </proc/$(pidof memcached)/environ")
    await until(lambda: agent_answers(domain), "the guest agent of QEMU has not opened its port")


async def test_nothing_listens_beyond_loopback_and_nobody_can_log_in(domain: Any) -> None:
    async with running(domain) as link:
        assert await shell(link, "busybox netstat -ltnu | grep -v -e 127.0.0.1 -e Proto -e Active") == ""
        passwords = await shell(link, "cut -d : -f 2 /etc/shadow | sort -u")
        assert set(passwords.split()) <= {"*", "!", "!*"}
        assert await shell(link, "busybox pidof getty login sshd") == ""


async def test_a_dead_service_is_started_again(domain: Any) -> None:
    async with running(domain) as link:
        before = (await link.call("rss", name="memcached"))["pid"]
        await shell(link, f"kill -KILL {before}")
        await shell_until(link, "busybox netstat -ltn | grep -c '127.0.0.1:11211 '", "1")
        assert (await link.call("rss", name="memcached"))["pid"] != before


async def test_no_orphan_stays_a_zombie(domain: Any) -> None:
    async with running(domain) as link:
        await shell(link, "(busybox sleep 0.2 &) ; (busybox true &)")
        await shell_until(link, "cat /proc/[0-9]*/stat | cut -d ' ' -f 3 | grep -c Z", "0")


async def test_memory_of_the_device_can_be_unplugged_and_plugged(domain: Any) -> None:
    async with running(domain) as link:
        await until(partial(virtio_mem_is, domain, 384 * 1024), "the device was not plugged at start")
        total_kib = "awk '/^MemTotal/ {print $2}' /proc/meminfo"
        full_kib = int(await shell(link, total_kib))
        for requested_kib in (0, 384 * 1024):
            device = ElementTree.fromstring(domain.XMLDesc()).find("./devices/memory")
            assert device is not None
            requested = device.find("./target/requested")
            assert requested is not None
            requested.text = str(requested_kib)
            domain.updateDeviceFlags(ElementTree.tostring(device, encoding="unicode"), libvirt.VIR_DOMAIN_AFFECT_LIVE)
            await until(partial(virtio_mem_is, domain, requested_kib), "the device did not follow")
            expected_kib = full_kib - (384 * 1024 - requested_kib)
            assert abs(int(await shell(link, total_kib)) - expected_kib) < 4096


async def test_the_guest_agent_and_the_power_button_switch_off_cleanly(domain: Any) -> None:
    async with running(domain) as link:
        await shell_until(link, LISTENS_TO_BUTTON, "1")
        await shell(link, "echo kept >/var/kept")
    domain.shutdownFlags(libvirt.VIR_DOMAIN_SHUTDOWN_GUEST_AGENT)
    await until(lambda: not domain.isActive(), "the guest agent did not switch the guest off")
    async with running(domain) as link:
        assert await shell(link, "cat /var/kept") == "kept"
        await shell_until(link, LISTENS_TO_BUTTON, "1")
    domain.shutdownFlags(libvirt.VIR_DOMAIN_SHUTDOWN_ACPI_POWER_BTN)
    await until(lambda: not domain.isActive(), "the power button did not switch the guest off")
