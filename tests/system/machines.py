"""Two Debian 12 machines, emulated, with one cable between them, and libvirt of their own on this machine."""

from __future__ import annotations

import shutil
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from ebbtide.lab import kvm_device, own_libvirt, processes
from ebbtide.lab.cluster import free_ports
from ebbtide.lab.services import open_libvirt
from ebbtide.lab.state import LabHost, LabState
from ebbtide.messages.common import Vector
from tests.debian_guest import DebianGuest, running_debian
from tests.debian_image import build_debian

#: What somebody with hosts for VMs has installed, and what the package asks Debian for.
PACKAGES = (
    "libgcc-s1",
    "libstdc++6",
    "libvirt-clients",
    "libvirt-daemon-system",
    "python3",
    "python3.11",
    "qemu-system-x86",
    "qemu-utils",
)
NAMES = ("host-a", "host-b")
MEMORY_MIB = 3072


@dataclass(frozen=True)
class Machines:
    """The two of them, and where the packages lie in each."""

    a: DebianGuest
    b: DebianGuest


@contextmanager
def libvirt_of_our_own(home: Path) -> Iterator[str]:
    """The address of a libvirtd that shares nothing with the machine's."""
    host = LabHost(
        id="machines", capacity=Vector(), url="", token_file=Path(), disk_dir=Path(), libvirt=home / "libvirt"
    )
    state = LabState(hosts=[host])
    own_libvirt.make_folders(home / "libvirt")
    try:
        own_libvirt.ensure_own(state, home, lambda: None, print)
        yield host.uri
    finally:
        processes.stop(state.services[::-1])
        if state.kvm_before is not None:
            kvm_device.restore(state.kvm_before)


def disk_of(files: Sequence[Path], folder: Path) -> Path:
    """A raw disk with these files."""
    tree, disk = folder / "files", folder / "files.raw"
    tree.mkdir()
    for path in files:
        shutil.copy(path, tree)
    size_mib = sum(path.stat().st_size for path in files) // 2**20 * 5 // 4 + 16
    subprocess.run(["mke2fs", "-q", "-t", "ext4", "-d", tree, disk, f"{size_mib}M"], check=True)
    disk.chmod(0o644)
    return disk


@contextmanager
def machines(files: Sequence[Path]) -> Iterator[Machines]:
    """Both, booted, with these files in /root/packages and a network of their own, 10.0.0.0/24.

    The cable is one TCP connection over loopback between the two processes of QEMU.
    """
    image = build_debian(PACKAGES)
    (port,) = free_ports(1)
    with tempfile.TemporaryDirectory(prefix="ebbtide-test-", dir="/var/tmp") as directory, ExitStack() as stack:
        folder = Path(directory)
        folder.chmod(0o711)
        disk = disk_of(files, folder)
        connection = open_libvirt(stack.enter_context(libvirt_of_our_own(folder)))
        stack.callback(connection.close)
        guests = []
        for number, (name, kind) in enumerate(zip(NAMES, ("server", "client"), strict=True), 1):
            cable = (
                f"<interface type='{kind}'><mac address='52:54:00:00:00:0{number}'/>"
                f"<source address='127.0.0.1' port='{port}'/><model type='virtio'/></interface>"
            )
            guest = running_debian(
                connection, image, folder, name, memory_mib=MEMORY_MIB, disks=[disk], devices=cable, cache_mib=256
            )
            guests.append(stack.enter_context(guest))
        for number, (name, machine) in enumerate(zip(NAMES, guests, strict=True), 1):
            machine.run(
                f"""set -e
                echo {name} >/etc/hostname; hostname {name}
                printf '127.0.0.1 localhost\\n10.0.0.1 host-a\\n10.0.0.2 host-b\\n' >/etc/hosts
                cd /etc/systemd/network
                printf '[Match]\\nName=eth0\\n[Network]\\nAddress=10.0.0.{number}/24\\n' >cable.network
                systemctl enable --now systemd-networkd
                mkdir /root/packages && mount -o ro /dev/vdb /root/packages"""
            )
        guests[0].eventually("ping -c 1 host-b || cat </dev/tcp/host-b/1 2>&1", "refused|1 received")
        yield Machines(*guests)
