"""Which layout of control groups a host has. Apart from all that needs libvirt, so that a doctor can ask without it."""

from __future__ import annotations


def cgroup_layout(mounts: str) -> str:
    """v1, hybrid, v2 or none, from the text of /proc/mounts (systemd's words for the layouts)."""
    kinds = {fields[2] for line in mounts.splitlines() if len(fields := line.split()) > 2}
    if "cgroup" in kinds:
        return "hybrid" if "cgroup2" in kinds else "v1"
    return "v2" if "cgroup2" in kinds else "none"
