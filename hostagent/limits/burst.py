"""Bursts of vCPUs under a quota: what one left over of its periods it may use at once, up to half of its quota.

A guest that waits for most of the time is then not stopped in the middle of an answer; over any longer time the quota
holds as before, so that a VM's bound stays what it was. libvirt has no call for it, and neither reads nor writes the
file: https://docs.kernel.org/scheduler/sched-bwc.html (Linux 5.14; `cpu.cfs_burst_us` on v1, `cpu.max.burst` on v2).

The kernel refuses a quota that is smaller than the burst beside it, also to libvirt. So a burst goes before a quota is
changed and comes afterwards, and it is small enough that another program can still halve a quota.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Final

import structlog

from hostagent.limits import cgroups
from hostagent.limits.footprints import PID_FILES, qemu_pid

#: Of the quota.
SHARE: Final = 0.5

log = structlog.get_logger()


def kernel_lacks_it(mountinfo: Path = Path("/proc/self/mountinfo")) -> str:
    """Why vCPUs have no bursts on this host; empty where they can. Reads a few directories."""
    for mount in cgroups.mounts(mountinfo.read_text(encoding="utf-8", errors="replace")):
        # The root group of v2 has no such file, but those below it, of which a VM's is one.
        found = "*/cpu.max.burst" if mount.version == 2 else "cpu.cfs_burst_us"
        if any(Path(mount.point).glob(found)):
            return ""
    return "no control group of this kernel has them (Linux 5.14)"


def drop(domain: str, pid_files: Path = PID_FILES) -> None:
    """Take the bursts of a running domain away, so that its quotas can be changed."""
    _set(domain, 0.0, pid_files)


def give(domain: str, pid_files: Path = PID_FILES) -> None:
    """Let the vCPUs of a running domain burst by `SHARE` of the quotas that they have now; none without a quota."""
    _set(domain, SHARE, pid_files)


def _set(domain: str, share: float, pid_files: Path) -> None:
    """Never raises: a burst is no limit, and a domain that is gone needs none."""
    try:
        pid = qemu_pid(domain, pid_files)
        for group in _groups(pid):
            group.set_burst(share)
    except (cgroups.CgroupError, OSError, ValueError) as error:
        log.debug("the bursts of its vCPUs are left as they are", domain=domain, why=str(error))


def _groups(pid: int) -> list[cgroups.CpuGroup]:
    """Those of the vCPUs, and the one that the domain's cap is on: only where libvirt has made them for it."""
    vcpus = cgroups.vcpu_groups(pid)
    made = [group for number, group in vcpus.items() if os.path.basename(group.path) == f"vcpu{number}"]
    parents = {os.path.dirname(group.path): group.version for group in made}
    return [*made, *(cgroups.CpuGroup(version, path) for path, version in parents.items())]
