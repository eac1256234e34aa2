"""A stock Debian with systemd and no file of ours: adopted while it runs, shrunk, and given back what it asks for."""

from __future__ import annotations

import asyncio
import contextlib
import re
import shutil
import sys
import tempfile
import time
import uuid
import xml.etree.ElementTree as ElementTree
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from ebbtide.client import ManagerClient
from ebbtide.deflation.cascade.instructions import GuestKind
from ebbtide.deflation.ledger import Layer
from ebbtide.lab.rootfs import run as run_program
from ebbtide.lab.services import open_libvirt
from ebbtide.messages.common import Vector
from ebbtide.messages.operations import OperationState
from tests.debian_guest import DebianGuest, running_debian
from tests.debian_image import build_debian
from tests.guests.conftest import RunningLab
from tests.guests.solo import eventually
from tests.guests.test_lifecycle import done
from tests.guests.test_ordinary_guests import AGENT, NAME, QEMU_AGENT, actual_mib, memory_rows, reached, target

pytestmark = [pytest.mark.guest, pytest.mark.timeout(2400)]

ROOT = Path(__file__).resolve().parents[2]
SIZE_MIB = 1024
LEAST_MIB = 256.0
BOOT_S = 900.0
#: Of what it does not use, this much is taken.
TAKEN = 0.5
#: 16 MiB at a time into memory that stays, until there is so much of it.
GROW = """set -e
mkdir -p /run/grown; mount -t tmpfs -o size=2G none /run/grown
for i in $(seq {chunks}); do head -c 16M /dev/zero >/run/grown/$i; sleep 0.5; done
ls /run/grown | wc -l"""
OLD_PYTHON = "/usr/bin/env LD_LIBRARY_PATH=/run/tools/python/lib /run/tools/python/bin/python3"
UNBIND = "for d in /sys/bus/virtio/drivers/virtio_balloon/virtio*; do echo ${d##*/} >${d%/*}/unbind; done"


@contextlib.contextmanager
def open_folder() -> Iterator[Path]:
    """One that QEMU's user may enter."""
    with tempfile.TemporaryDirectory(prefix="ebbtide-test-", dir="/var/tmp") as directory:
        Path(directory).chmod(0o755)
        yield Path(directory)


@contextlib.contextmanager
def debian(lab: RunningLab, packages: list[str], **options: Any) -> Iterator[DebianGuest]:
    """A running guest of somebody else's, named as people do."""
    connection = open_libvirt(lab.state.uri)
    try:
        with open_folder() as folder:
            name = f"Debian-{uuid.uuid4().hex[:8]}"
            with running_debian(
                connection, build_debian(packages), folder, name, memory_mib=SIZE_MIB, **options
            ) as guest:
                guest.shell.await_answer(BOOT_S)
                yield guest
    finally:
        connection.close()


def available_mib(guest: DebianGuest) -> float:
    found = re.search(r"MemAvailable:\s+(\d+)", guest.run("cat /proc/meminfo"))
    assert found is not None
    return int(found[1]) / 1024


async def adopted(client: ManagerClient, guest: DebianGuest) -> None:
    host = next(found.id for found in await client.hosts() if found.id.endswith("-a"))
    await done(client, await client.adopt(guest.domain.name(), host, name=NAME, minimum=Vector(memory_mib=LEAST_MIB)))


@pytest.mark.parametrize("kind", [GuestKind.QEMU_GUEST_AGENT, GuestKind.BALLOON])
async def test_a_stock_guest_gives_half_of_what_it_does_not_use_and_has_it_back_in_time(
    lab: RunningLab, kind: GuestKind
) -> None:
    with_agent = kind is GuestKind.QEMU_GUEST_AGENT
    channels = [QEMU_AGENT] if with_agent else []
    async with lab.client() as client:
        with debian(lab, ["qemu-guest-agent"], channels=channels) as guest:
            guest.eventually("systemctl is-system-running", "running|degraded", BOOT_S)
            if with_agent:
                guest.eventually("systemctl is-active qemu-guest-agent", "^active", BOOT_S)
            await adopted(client, guest)
            try:
                await stock(client, guest, kind)
            finally:
                await client.wait(await client.delete(NAME), limit_s=60)


async def stock(client: ManagerClient, guest: DebianGuest, kind: GuestKind) -> None:
    async def known() -> bool:
        return bool((await client.vm(NAME)).guest_kind is kind)

    await eventually(known, f"it is known as {kind.value}", 60)
    unused_mib = available_mib(guest)
    small_mib = float(int(SIZE_MIB - TAKEN * unused_mib))
    shrunk = await reached(client, small_mib, 1.0)
    assert shrunk.state is OperationState.DONE, shrunk.sentence
    assert SIZE_MIB - actual_mib(guest.domain) >= 0.4 * unused_mib
    assert memory_rows(shrunk).get(Layer.GUEST, 0.0) == 0.0
    online = guest.run("cat /sys/devices/system/cpu/online").strip()
    assert online == ("0" if kind is GuestKind.QEMU_GUEST_AGENT else "0-1")
    scheduler = guest.domain.schedulerParameters()
    assert scheduler["global_quota"] / scheduler["global_period"] == pytest.approx(1.0, abs=0.1)

    # More than is left to it, at once: it gets it back, and its kernel kills nothing.
    chunks = int(0.75 * unused_mib / 16)
    growing = asyncio.to_thread(guest.run, GROW.format(chunks=chunks), 0, 600)
    assert await growing == f"{chunks}\n"
    assert actual_mib(guest.domain) > small_mib + 50
    assert "Out of memory" not in guest.run("dmesg")
    guest.run("umount /run/grown")

    async def calm() -> bool:
        told = (await client.explain(NAME)).explanation
        return told is not None and told.vm.pressure is None

    await eventually(calm, "its pressure ends", 240)

    # Its driver is gone, and with it the statistics; what it said last does not count.
    guest.run(UNBIND)
    said_at = guest.domain.memoryStats()["last_update"]

    async def silent() -> bool:
        return bool(said_at < time.time() - 4)

    await eventually(silent, "its statistics stop")
    held_mib = actual_mib(guest.domain)
    refused = await target(client, LEAST_MIB + 64)
    assert refused.state is OperationState.PARTIAL, refused.sentence
    assert "no fresh reading of the guest, so no memory is taken" in refused.sentence
    assert actual_mib(guest.domain) == held_mib


def seed(folder: Path) -> Path:
    """cloud-init's disk: the template of the repository, and the Debian package that it installs."""
    dist, tree = folder / "dist", folder / "seed"
    run_program([ROOT / "scripts/packages.sh", sys.executable, dist, "--bare"])
    tree.mkdir()
    shutil.copyfile(ROOT / "packaging/guest/cloud-init.yaml", tree / "user-data")
    (tree / "meta-data").write_text(f"instance-id: {uuid.uuid4()}\n")
    (package,) = dist.glob("ebbtide-guest_*_all.deb")
    shutil.copyfile(package, tree / "ebbtide-guest.deb")
    iso = folder / "seed.iso"
    run_program(["genisoimage", "-quiet", "-output", iso, "-volid", "cidata", "-joliet", "-rock", tree])
    iso.chmod(0o644)
    return iso


def oldest_python() -> Path:
    """The folder of the oldest Python on this machine that the guest agent is for; else the guest has its own."""
    found = {
        tuple(int(part) for part in path.parent.parent.name.split(".")): path.parent.parent
        for path in Path("/root/.pyenv/versions").glob("3.*/bin/python3")
    }
    fit = sorted(version for version in found if version >= (3, 8))
    return found[fit[0]] if fit else Path("/usr")


def zipapp_disk(folder: Path, python: Path) -> Path:
    """A disk with the agent as one file, and that Python's own files where it is not the guest's."""
    tree = folder / "tools"
    tree.mkdir()
    shutil.copyfile(folder / "dist/ebb-guestagent.pyz", tree / "ebb-guestagent.pyz")
    if python != Path("/usr"):
        for name in ("bin", "lib"):
            (tree / "python" / name).mkdir(parents=True)
        shutil.copy2((python / "bin/python3").resolve(), tree / "python/bin/python3")
        (library,) = (python / "lib").glob("python3.*")
        unused = shutil.ignore_patterns("test", "tests", "site-packages", "__pycache__", "config-*", "idlelib")
        for shared in (python / "lib").glob("libpython3.*.so.*"):
            shutil.copy2(shared, tree / "python/lib" / shared.name)
        shutil.copytree(library, tree / "python/lib" / library.name, ignore=unused)
    disk = folder / "tools.img"
    run_program(["mke2fs", "-q", "-t", "ext4", "-L", "tools", "-d", tree, disk, "256M"])
    disk.chmod(0o644)
    return disk


async def test_cloud_init_brings_the_agent_and_the_one_file_runs_under_the_oldest_python(lab: RunningLab) -> None:
    with open_folder() as folder:
        disks, python = [seed(folder)], oldest_python()
        disks.append(zipapp_disk(folder, python))
        async with lab.client() as client:
            with debian(lab, ["cloud-init", "python3"], channels=[AGENT], disks=disks) as guest:
                # Nobody does anything in the guest.
                await eventually(lambda: opened(guest), "cloud-init has installed the agent", BOOT_S)
                await adopted(client, guest)
                try:
                    await eventually(lambda: connected(client), "the host agent talks to it", 60)
                    assert guest.run("systemctl is-active ebb-guestagent").strip() == "active"
                    assert "ebbtide-guest" in guest.run("dpkg-query --list ebbtide-guest")
                    shrunk = await reached(client, SIZE_MIB - 200.0, 1.0)
                    assert shrunk.state is OperationState.DONE, shrunk.sentence
                    assert guest.run("cat /sys/devices/system/cpu/online").strip() == "0"
                    grown = await reached(client, float(SIZE_MIB), 2.0)
                    assert grown.state is OperationState.DONE, grown.sentence

                    guest.run("systemctl disable --now ebb-guestagent; dpkg --purge ebbtide-guest")
                    await eventually(lambda: disconnected(client), "its agent is gone", 60)
                    program = "/usr/bin/python3" if python == Path("/usr") else OLD_PYTHON
                    guest.run("mkdir /run/tools && mount -o ro LABEL=tools /run/tools")
                    version = guest.run(f"{program} --version").split()[1]
                    guest.run(f"systemd-run --unit=one-file {program} /run/tools/ebb-guestagent.pyz")
                    await eventually(lambda: connected(client), f"the one file under Python {version}", 120)
                    shrunk = await reached(client, SIZE_MIB - 200.0, 1.0)
                    assert shrunk.state is OperationState.DONE, shrunk.sentence
                    assert guest.run("cat /sys/devices/system/cpu/online").strip() == "0"
                finally:
                    await client.wait(await client.delete(NAME), limit_s=60)


async def opened(guest: DebianGuest) -> bool:
    """Whether somebody in the guest has opened the channel. A VM of low priority would boot last on a busy machine."""
    target = ElementTree.fromstring(guest.domain.XMLDesc()).find(f"./devices/channel/target[@name='{AGENT}']")
    return target is not None and target.get("state") == "connected"


async def connected(client: ManagerClient) -> bool:
    return bool((await client.vm(NAME)).guest_connected)


async def disconnected(client: ManagerClient) -> bool:
    return not await connected(client)
