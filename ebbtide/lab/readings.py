"""Readings of a VM that go through none of the agents: libvirt, cgroup files, smaps, and the lab channel.

The demo and the tests hold the agents' ledgers against these.
"""

from __future__ import annotations

import asyncio
import re
import xml.etree.ElementTree as ElementTree
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict

from ebbtide.lab.errors import LabError, ReadingError
from ebbtide.lab.guest_link import LabLink, channel_path
from ebbtide.lab.namespace import outside
from ebbtide.lab.services import open_libvirt

PROC = Path("/proc")
PID_FILES = Path("/run/libvirt/qemu")
KIB_PER = {"b": 1 / 1024, "bytes": 1 / 1024, "KiB": 1, "k": 1, "MiB": 1024, "M": 1024, "GiB": 1024**2, "G": 1024**2}
_VCPU_THREAD = re.compile(r"CPU (\d+)/")


class Reading(BaseModel):
    """One pass of independent readings over one VM."""

    model_config = ConfigDict(frozen=True)

    #: memcached's ``limit_maxbytes`` in MiB, by its own statistics.
    memcached_limit_mib: float
    #: Resident memory of the memcached process, by the guest's kernel.
    memcached_rss_mib: float
    #: CPUs on line, by the guest's kernel (/sys/devices/system/cpu/online).
    cpus_online: tuple[int, ...]
    #: virtio-mem ``<current>``, by libvirt.
    virtio_mem_current_mib: float
    #: Boot memory less what the balloon holds (``actual``), by libvirt.
    balloon_actual_mib: float
    #: Quota of each vCPU thread in cores, from its cgroup's file; None: unlimited.
    vcpu_quota_cores: tuple[float | None, ...]
    #: Resident part of the guest's memory, from the mappings in QEMU's smaps.
    resident_mib: float

    @property
    def memory_mib(self) -> float:
        """What the host lets the guest hold: the bound's memory."""
        return self.balloon_actual_mib + self.virtio_mem_current_mib

    @property
    def cpu_cores(self) -> float:
        """The bound's CPU: min(CPUs on line, sum of their quotas)."""
        quotas = [self.vcpu_quota_cores[cpu] for cpu in self.cpus_online if cpu < len(self.vcpu_quota_cores)]
        limits = [1.0 if quota is None else min(quota, 1.0) for quota in quotas]
        return round(min(float(len(self.cpus_online)), sum(limits)), 4)


@dataclass(frozen=True)
class DomainView:
    """What the live XML of a domain says."""

    boot_kib: int
    device_kib: int
    current_kib: int
    lab_socket: Path
    vcpus: int

    @classmethod
    def parse(cls, xml: str) -> DomainView:
        """Raises ReadingError for a domain that is not one of the lab."""
        root = ElementTree.fromstring(xml)
        cells = root.findall("./cpu/numa/cell")
        device = root.find("./devices/memory[@model='virtio-mem']")
        if not cells:
            raise ReadingError("the domain has no NUMA cell for its boot memory")
        try:
            socket = channel_path(xml)
        except LabError as error:
            raise ReadingError(str(error)) from error
        return cls(
            boot_kib=sum(_kib(cell.get("memory", "0"), cell.get("unit", "KiB")) for cell in cells),
            device_kib=_element_kib(device, "target/size"),
            current_kib=_element_kib(device, "target/current"),
            lab_socket=socket,
            vcpus=int(root.findtext("vcpu", "0")),
        )


def _element_kib(parent: ElementTree.Element | None, path: str) -> int:
    element = parent.find(path) if parent is not None else None
    return 0 if element is None else _kib(element.text or "0", element.get("unit", "KiB"))


def _kib(text: str, unit: str) -> int:
    if unit not in KIB_PER:
        raise ReadingError(f"the unit {unit!r} in a domain's XML is not known")
    return int(float(text) * KIB_PER[unit])


class Gauge:
    """Takes the readings of one domain. ``domain``: its name in libvirt."""

    def __init__(self, domain: str, uri: str = "qemu:///system") -> None:
        self.domain = domain
        self.uri = uri

    async def read(self) -> Reading:
        """One pass. Raises ReadingError if the domain does not run or its guest does not answer."""
        try:
            view, balloon_mib = await asyncio.to_thread(self._from_libvirt)
            async with asyncio.timeout(60):
                limit_mib, rss_mib, online = await self._from_guest(outside(self.uri, view.lab_socket))
        except ReadingError:
            raise
        except (LabError, TimeoutError) as error:
            raise ReadingError(f"{self.domain} could not be read: {error or 'no answer in time'}") from error
        pid = qemu_pid(self.domain, outside(self.uri, PID_FILES))
        return Reading(
            memcached_limit_mib=limit_mib,
            memcached_rss_mib=rss_mib,
            cpus_online=online,
            virtio_mem_current_mib=view.current_kib / 1024,
            balloon_actual_mib=balloon_mib,
            vcpu_quota_cores=vcpu_quotas(pid),
            resident_mib=round(resident_kib((PROC / str(pid) / "smaps").read_text(), view) / 1024, 1),
        )

    async def link(self) -> LabLink:
        """The lab channel of the guest; the caller closes it."""
        view, _ = await asyncio.to_thread(self._from_libvirt)
        return await LabLink.connect(outside(self.uri, view.lab_socket))

    async def _from_guest(self, socket: Path) -> tuple[float, float, tuple[int, ...]]:
        link = await LabLink.connect(socket)
        try:
            stats = await link.call("memcached.stats", args="")
            rss = await link.call("rss", name="memcached")
            online = await link.call("read", path="/sys/devices/system/cpu/online")
        finally:
            await link.close()
        return int(stats["limit_maxbytes"]) / 1024**2, round(float(rss["rss_mib"]), 1), cpu_list(online["text"])

    def _from_libvirt(self) -> tuple[DomainView, float]:
        import libvirt

        connection = open_libvirt(self.uri)
        try:
            domain: Any = connection.lookupByName(self.domain)
            return DomainView.parse(domain.XMLDesc()), domain.memoryStats()["actual"] / 1024
        except (libvirt.libvirtError, KeyError) as error:
            raise ReadingError(f"{self.domain} could not be read: {error}") from error
        finally:
            connection.close()


def qemu_pid(domain: str, pid_files: Path = PID_FILES) -> int:
    """The process that runs a domain. Raises ReadingError if there is none."""
    try:
        pid = int((pid_files / f"{domain}.pid").read_text())
        command = (PROC / str(pid) / "cmdline").read_bytes()
    except (OSError, ValueError) as error:
        raise ReadingError(f"{domain} does not run: {error}") from error
    if f"guest={domain},".encode() not in command:
        raise ReadingError(f"pid {pid} is not the QEMU of {domain}")
    return pid


def cpu_list(text: str) -> tuple[int, ...]:
    """Read the kernel's list format: ``0-1,3`` is (0, 1, 3)."""
    cpus: list[int] = []
    for part in text.strip().split(","):
        first, _, last = part.partition("-")
        cpus.extend(range(int(first), int(last or first) + 1))
    return tuple(cpus)


def resident_kib(smaps: str, view: DomainView) -> int:
    """Resident KiB of the guest's memory: the anonymous mappings as large as its boot memory and its device.

    Raises ReadingError unless just these are found: a guess would be worse than none.
    """
    wanted = [kib for kib in (view.boot_kib, view.device_kib) if kib]
    resident, anonymous, mapped = 0, False, 0
    for line in smaps.splitlines():
        name, _, rest = line.partition(":")
        if name in ("Size", "Rss"):
            kib = int(rest.split()[0])
            if name == "Size":
                mapped = kib if anonymous else 0
            elif mapped in wanted:
                wanted.remove(mapped)
                resident += kib
        elif "-" in name and " " in name:
            # A mapping's first line: address, permissions, offset, device, inode and, if any, the file.
            anonymous = len(line.split()) == 5
    if wanted:
        raise ReadingError(f"QEMU's smaps have no anonymous mapping of {wanted[0]} KiB")
    return resident


def vcpu_quotas(pid: int, proc: Path = PROC) -> tuple[float | None, ...]:
    """The quota of each vCPU thread in cores, from the files of its cgroup, of version 1 or 2; by vCPU number."""
    mounts = _cpu_mounts((proc / "self" / "mountinfo").read_text())
    quotas: dict[int, float | None] = {}
    for task in (proc / str(pid) / "task").iterdir():
        match = _VCPU_THREAD.match((task / "comm").read_text())
        if match:
            quotas[int(match[1])] = _quota((task / "cgroup").read_text(), mounts)
    return tuple(quotas[number] for number in sorted(quotas))


def _quota(memberships: str, mounts: Mapping[str, tuple[str, Path]]) -> float | None:
    """The quota that the cgroup of one thread has itself; limits of groups above it are not looked at."""
    groups = {}
    for line in memberships.splitlines():
        _, controllers, path = line.split(":", 2)
        for controller in controllers.split(","):
            groups[controller] = path
    for controller, group in (("cpu", groups.get("cpu")), ("", groups.get(""))):
        if group is None or controller not in mounts:
            continue
        root, mount = mounts[controller]
        below = group.removeprefix(root) if root != "/" else group
        directory = mount / below.lstrip("/")
        if controller == "cpu" and (directory / "cpu.cfs_quota_us").exists():
            quota_us = int((directory / "cpu.cfs_quota_us").read_text())
            period_us = int((directory / "cpu.cfs_period_us").read_text())
            return None if quota_us < 0 else quota_us / period_us
        if (directory / "cpu.max").exists():
            quota, period = (directory / "cpu.max").read_text().split()
            return None if quota == "max" else int(quota) / int(period)
    raise ReadingError("the vCPU threads are in no cgroup with a CPU controller")


def _cpu_mounts(mountinfo: str) -> dict[str, tuple[str, Path]]:
    """Where the CPU controller of cgroup v1 ("cpu") and the tree of v2 ("") are mounted: (root, mount point)."""
    found: dict[str, tuple[str, Path]] = {}
    for line in mountinfo.splitlines():
        fields, _, tail = line.partition(" - ")
        root, point = fields.split()[3:5]
        kind, _, options = tail.split(" ", 2)
        if kind == "cgroup2":
            found.setdefault("", (root, Path(point)))
        elif kind == "cgroup" and "cpu" in options.split(","):
            found.setdefault("cpu", (root, Path(point)))
    return found
