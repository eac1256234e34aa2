"""Readings that decide about a domain's memory limit: footprint, the emulator's need, control group, swap.

All of it blocks: it is for threads.
"""

from __future__ import annotations

import re
import xml.etree.ElementTree as ElementTree
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

import libvirt

from ebbtide.deflation.cascade.backing import Footprint, Swap
from hostagent.limits.cgroups import MIB, CgroupError, MemoryGroup

#: What a limit leaves the emulator itself, by domain type. Fixed, so that a limit can be read back from libvirt alone.
EMULATOR_MIB: Final = {"qemu": 192, "kvm": 96}
#: libvirt's VIR_DOMAIN_MEMORY_PARAM_UNLIMITED, which its Python module does not have.
UNLIMITED_KIB: Final = (2**63 - 1) >> 10
PID_FILES: Final = Path("/run/libvirt/qemu")
PROC: Final = Path("/proc")


def emulator_mib(domain: ElementTree.Element) -> float:
    """What a limit on the whole of QEMU has for the emulator, by the domain's live XML."""
    return float(EMULATOR_MIB.get(domain.get("type", ""), EMULATOR_MIB["qemu"]))


def read_limit_mib(domain: Any, root: ElementTree.Element) -> float | None:
    """The limit on the guest's memory as libvirt reads it from the cgroup; None where there is none.

    :param root: the domain's live XML: the cgroup is read only where libvirt has set a limit.
    """
    if root.find("./memtune/hard_limit") is None:
        return None
    try:
        hard_kib = domain.memoryParameters(libvirt.VIR_DOMAIN_AFFECT_LIVE).get("hard_limit")
    except libvirt.libvirtError as error:
        if error.get_error_code() == libvirt.VIR_ERR_NO_DOMAIN:
            raise
        return None  # no memory controller: no limit
    if hard_kib is None or hard_kib >= UNLIMITED_KIB:
        return None
    return float(max(hard_kib / 1024 - emulator_mib(root), 0.0))


@dataclass(frozen=True, slots=True)
class LimitedVM:
    """One domain, freshly looked at."""

    group: MemoryGroup
    allowance_mib: float
    #: Balloon and plugged memory: a limit at or above this limits nothing. Unmeasured, all of it.
    held_mib: float
    footprint: Footprint
    hard_mib: float | None

    @property
    def limit_mib(self) -> float | None:
        return None if self.hard_mib is None else self.hard_mib - self.allowance_mib


def look(connection: Any, domain: str, pid_files: Path = PID_FILES, measure: bool = True) -> LimitedVM:
    """Read all that decides about a domain's memory limit.

    :param measure: also what the emulator itself needs, which takes a walk through QEMU's mappings, and what the
        balloon holds, which takes its monitor: one that hangs does not answer.
    :raises CgroupError: the domain does not run, or is in no memory group.
    """
    found = connection.lookupByName(domain)
    root = ElementTree.fromstring(found.XMLDesc())
    boot_mib, regions_mib, plugged_mib = memory_of(root)
    pid = qemu_pid(domain, pid_files)
    group = MemoryGroup(pid)
    allowance_mib = emulator_mib(root)
    own_mib = emulator_resident_mib(_smaps(pid), regions_mib) if measure else 0.0
    footprint = Footprint(touchable_mib=boot_mib + plugged_mib, beyond_allowance_mib=own_mib - allowance_mib)
    # Without a balloon all of the boot memory is held.
    balloon_kib = found.memoryStats().get("actual") if measure else None
    held_mib = (boot_mib if balloon_kib is None else balloon_kib / 1024) + plugged_mib
    return look_again(LimitedVM(group, allowance_mib, held_mib, footprint, None))


def look_again(seen: LimitedVM) -> LimitedVM:
    """The same domain with what its group's files say now; libvirt is not asked.

    :raises CgroupError: it does not run any more.
    """
    group = seen.group
    room, hard = group.swap_room(), group.limit()
    footprint = replace(
        seen.footprint,
        swapped_mib=group.swap() / MIB,
        swap_room_mib=None if room is None else room / MIB,
        swappiness=group.swappiness(),
        unswappable_mib=group.unswappable() / MIB,
    )
    return replace(seen, footprint=footprint, hard_mib=None if hard is None else hard / MIB)


def host_swap(meminfo: Path = PROC / "meminfo") -> Swap:
    """The host's swap, by the kernel.

    A page that is in memory again may still have its place in swap; it counts as free, since that page goes back there
    or leaves it to another.
    """
    kib = dict(re.findall(r"^(Swap\w+):\s+(\d+) kB", meminfo.read_text(), re.MULTILINE))
    free_kib = int(kib.get("SwapFree", 0)) + int(kib.get("SwapCached", 0))
    return Swap(int(kib.get("SwapTotal", 0)) / 1024, free_kib / 1024)


def qemu_pid(domain: str, pid_files: Path = PID_FILES) -> int:
    """The process that runs a domain.

    :raises CgroupError: there is none.
    """
    try:
        pid = int((pid_files / f"{domain}.pid").read_text())
        command = (PROC / str(pid) / "cmdline").read_bytes()
    except (OSError, ValueError) as error:
        raise CgroupError(f"{domain} does not run: {error}") from error
    if f"guest={domain},".encode() not in command:
        raise CgroupError(f"pid {pid} is not the QEMU of {domain}")
    return pid


def memory_of(domain: ElementTree.Element) -> tuple[float, list[float], float]:
    """Boot memory, the sizes of all regions that it and the devices consist of, and what of the devices is plugged.

    In MiB; live XML has all in KiB.
    """
    sizes, plugged = [], 0.0
    for device in domain.findall("./devices/memory"):
        size = float(device.findtext("target/size", "0"))
        sizes.append(size / 1024)
        asked, current = device.findtext("target/requested"), device.findtext("target/current")
        # Of virtio-mem the guest may plug what is requested at any moment; a DIMM is there in full.
        plugged += size if asked is None else max(float(asked), float(current or 0))
    boot = float(domain.findtext("memory", "0")) / 1024 - sum(sizes)
    cells = [float(cell.get("memory", 0)) / 1024 for cell in domain.findall("./cpu/numa/cell")]
    return boot, [*(cells or [boot]), *sizes], plugged / 1024


def emulator_resident_mib(smaps: str, guest_mib: Iterable[float]) -> float:
    """Anonymous memory of QEMU, in memory or in swap, that is not the guest's: not in a mapping of one of its sizes."""
    guest_kib = {round(mib * 1024) for mib in guest_mib}
    own_kib, size = 0, 0
    for name, kib in re.findall(r"^(Size|Anonymous|Swap):\s+(\d+) kB", smaps, re.MULTILINE):
        if name == "Size":
            size = int(kib)
        elif size not in guest_kib:
            own_kib += int(kib)
    return own_kib / 1024


def guest_resident_mib(domain: str, root: ElementTree.Element, pid_files: Path = PID_FILES) -> float:
    """The guest's memory that is in memory or in swap: QEMU's mappings of the sizes of its regions.

    :param root: the domain's live XML.
    :raises CgroupError: the domain does not run, or its mappings cannot be read.
    """
    guest_kib = {round(mib * 1024) for mib in memory_of(root)[1]}
    resident_kib, size = 0, 0
    rows = re.findall(r"^(Size|Rss|Swap):\s+(\d+) kB", _smaps(qemu_pid(domain, pid_files)), re.MULTILINE)
    for name, kib in rows:
        if name == "Size":
            size = int(kib)
        elif size in guest_kib:
            resident_kib += int(kib)
    return resident_kib / 1024


def resident_mib(domain: str, pid_files: Path = PID_FILES) -> float:
    """What a domain's QEMU holds of the host's memory, MiB: huge pages as well, but no files that it has mapped, which
    the kernel counts as available.

    :raises CgroupError: the domain does not run, or its process cannot be read.
    """
    pid = qemu_pid(domain, pid_files)
    try:
        status = (PROC / str(pid) / "status").read_text()
    except OSError as error:
        raise CgroupError(f"the memory of process {pid} cannot be read: {error}") from error
    return sum(map(int, re.findall(r"^(?:RssAnon|RssShmem|HugetlbPages):\s+(\d+) kB", status, re.MULTILINE))) / 1024


def _smaps(pid: int) -> str:
    try:
        return (PROC / str(pid) / "smaps").read_text()
    except OSError as error:
        raise CgroupError(f"the mappings of process {pid} cannot be read: {error}") from error
