"""Limits from outside the guest: cgroups, memory limit, disk and network bandwidth."""
