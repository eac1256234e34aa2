"""Jobs of a domain: what libvirt does with it as a whole, one at a time, for whoever asked for it.

A backup, a dump or a snapshot is its owner's. It keeps our saves and moves waiting, and is not ours to call off:
tried on libvirt 9.0, ``abortJob`` ends whatever job there is, whoever calls it.
Source: https://libvirt.org/html/libvirt-libvirt-domain.html#virDomainJobOperation
"""

from __future__ import annotations

from typing import Any, Final

import libvirt

#: Jobs that are never ours, in words.
_OTHERS: Final = {
    libvirt.VIR_DOMAIN_JOB_OPERATION_BACKUP: "a backup",
    libvirt.VIR_DOMAIN_JOB_OPERATION_DUMP: "a dump",
    libvirt.VIR_DOMAIN_JOB_OPERATION_SNAPSHOT: "a snapshot",
    libvirt.VIR_DOMAIN_JOB_OPERATION_SNAPSHOT_REVERT: "the revert to a snapshot",
    # Named since libvirt 9.0; the bindings are built with the machine's own.
    getattr(libvirt, "VIR_DOMAIN_JOB_OPERATION_SNAPSHOT_DELETE", 10): "the removal of a snapshot",
}


def job_of(stats: dict[str, Any]) -> int | None:
    """The operation of the job under way, out of ``jobStats``; None: there is none."""
    if stats.get("type", libvirt.VIR_DOMAIN_JOB_NONE) == libvirt.VIR_DOMAIN_JOB_NONE:
        return None
    return int(stats.get("operation", libvirt.VIR_DOMAIN_JOB_OPERATION_UNKNOWN))


def held_by(stats: dict[str, Any]) -> str:
    """Which job of its owner's keeps a domain from being saved or moved, in words; empty: none."""
    job = job_of(stats)
    return f"{_OTHERS[job]} of it by another program is under way" if job in _OTHERS else ""


def call_off(domain: Any, operation: int) -> None:
    """Call off the job under way where it is of this kind. Blocks."""
    if job_of(domain.jobStats()) == operation:
        domain.abortJob()
