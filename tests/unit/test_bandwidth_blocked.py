"""Which domains' disks and interfaces can be limited, read from their XML."""

from __future__ import annotations

import pytest

from hostagent.limits.bandwidth import disk_blocked, network_blocked


def domain(*devices: str) -> str:
    return f"<domain><devices>{''.join(devices)}</devices></domain>"


DISK = "<disk type='file' device='disk'><source file='/a'/><target dev='vda'/></disk>"
LUN = "<disk type='block' device='lun'><source dev='/dev/sdz'/><target dev='sda'/></disk>"
VHOST = "<disk type='vhostuser' device='disk'><source type='unix' path='/s'/><target dev='vdb'/></disk>"
EMPTY_CDROM = "<disk type='file' device='cdrom'><target dev='sdb'/></disk>"
TAP = "<interface type='ethernet'><mac address='52:54:00:00:00:01'/><target dev='tap0'/></interface>"
USER = "<interface type='user'><mac address='52:54:00:00:00:02'/></interface>"
PASSED = "<interface type='hostdev'><mac address='52:54:00:00:00:03'/></interface>"


@pytest.mark.parametrize(
    ("devices", "why"),
    [
        ((), "the domain has no disk"),
        ((EMPTY_CDROM,), "the domain has no disk"),
        ((DISK, EMPTY_CDROM), ""),
        ((DISK, LUN), "disk sda is passed through as a whole (device lun), so its data goes past QEMU"),
        ((DISK, VHOST), "disk vdb is of type vhostuser, whose data goes past QEMU"),
    ],
)
def test_a_disk_that_goes_past_qemu_blocks_the_limit_on_all(devices: tuple[str, ...], why: str) -> None:
    assert disk_blocked(domain(*devices)) == why


@pytest.mark.parametrize(
    ("devices", "why"),
    [
        ((), "the domain has no network interface"),
        ((TAP,), ""),
        (
            (USER,),
            "interface 52:54:00:00:00:02 is of type user, which has no device on the host that could be limited",
        ),
        (
            (TAP, PASSED),
            "interface 52:54:00:00:00:03 is a device passed through, whose traffic the host does not see",
        ),
        (("<interface type='server'/>",), "interface number 1 is of type server, which we cannot limit"),
    ],
)
def test_an_interface_without_a_device_on_the_host_blocks_the_limit_on_all(devices: tuple[str, ...], why: str) -> None:
    assert network_blocked(domain(*devices)) == why
