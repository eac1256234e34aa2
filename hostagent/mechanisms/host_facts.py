"""Facts of this host that decide which mechanisms its domains have: swap, cgroups, versions, ACPI verdict."""

from __future__ import annotations

import functools
import platform
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import libvirt
import psutil

from ebbtide.deflation.cascade.mechanisms import Finding
from hostagent.limits import burst
from hostagent.limits.cgroups import cgroup_layout, kernel_lacks_limits, kernel_lacks_quotas, own_mountinfo
from hostagent.mechanisms import acpi_probe
from hostagent.mechanisms.layers import HostFacts, examine
from hostagent.state.files import ACPI_VERDICT


@dataclass(frozen=True, slots=True)
class Versions:
    """What does not change while a connection lives, as libvirt counts: 7.2.11 is 7002011."""

    qemu: int
    libvirt: int

    @classmethod
    def of(cls, connection: Any) -> Versions:
        """Ask once per connection: libvirt may probe QEMU again for it, which takes seconds on some machines."""
        return cls(connection.getVersion(), connection.getLibVersion())

    def key(self, accelerator: str) -> dict[str, str]:
        """What a verdict on ACPI unplug depends on."""
        return {
            "kernel": platform.release(),
            "qemu": str(self.qemu),
            "libvirt": str(self.libvirt),
            "accelerator": accelerator,
        }


def host_facts(versions: Versions, verdict: Path = ACPI_VERDICT, *, cold_first: bool = False) -> HostFacts:
    """Read this host; some small files of /proc and the verdict, no more.

    :param cold_first: as the host agent is told.
    """
    swap, mountinfo = psutil.swap_memory(), own_mountinfo()
    return HostFacts(
        swap_total_mib=swap.total / 2**20,
        swap_free_mib=swap.free / 2**20,
        cgroups=_cgroups(),
        # Emulated domains have a verdict of their own, which is always no.
        acpi_unplug=acpi_probe.why_not(verdict, versions.key("kvm")),
        qemu_version=versions.qemu,
        no_burst=burst.kernel_lacks_it(),
        no_quota=kernel_lacks_quotas(mountinfo),
        no_limit=kernel_lacks_limits(mountinfo),
        huge_pools=huge_pools(),
        cold_first=cold_first,
    )


def huge_pools(pools: Path = Path("/sys/kernel/mm/hugepages"), meminfo: Path = Path("/proc/meminfo")) -> frozenset[int]:
    """The sizes of huge pages that are set aside, KiB; surplus ones (``nr_overcommit_hugepages``) become free memory
    again. 0 is among them where those of the default size are.
    """
    found = {
        int(pool.name.removeprefix("hugepages-").removesuffix("kB"))
        for pool in pools.glob("hugepages-*kB")
        if int((pool / "nr_hugepages").read_text()) > int((pool / "surplus_hugepages").read_text())
    }
    default = re.search(r"^Hugepagesize:\s*(\d+) kB$", meminfo.read_text(), re.MULTILINE)
    return frozenset(found | {0} if default is not None and int(default[1]) in found else found)


def findings_of(domain: Any, facts: HostFacts) -> tuple[Finding, ...]:
    """The findings of a domain of libvirt, running or not. Blocks; asks libvirt for XML only.

    :raises libvirt.libvirtError: the domain is gone, or libvirt does not answer.
    """
    config = domain.XMLDesc(libvirt.VIR_DOMAIN_XML_INACTIVE)
    return examine(domain.XMLDesc() if domain.isActive() else config, facts, config)


@functools.cache
def _cgroups() -> str:
    return cgroup_layout(Path("/proc/mounts").read_text(encoding="utf-8", errors="replace"))
