"""Paths of the lab's state and of the cached guest image."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

STATE_VARIABLE = "EBB_STATE_DIR"
CACHE_VARIABLE = "EBB_CACHE_DIR"


def state_dir(environment: Mapping[str, str] = os.environ) -> Path:
    """Directory of the lab: EBB_STATE_DIR, else /var/lib/ebbtide/lab for root, else one of the user's."""
    if environment.get(STATE_VARIABLE):
        return Path(environment[STATE_VARIABLE]).absolute()
    if os.geteuid() == 0:
        return Path("/var/lib/ebbtide/lab")
    home = environment.get("XDG_STATE_HOME") or Path.home() / ".local" / "state"
    return Path(home) / "ebbtide" / "lab"


def cache_dir(environment: Mapping[str, str] = os.environ) -> Path:
    """Directory of the image cache and of the probed accelerator: EBB_CACHE_DIR, else /var/cache/ebbtide.

    Not below a home directory: the user under which libvirt runs QEMU must be able to read the image.
    """
    if environment.get(CACHE_VARIABLE):
        return Path(environment[CACHE_VARIABLE]).absolute()
    return Path("/var/cache/ebbtide")


def image_cache(environment: Mapping[str, str] = os.environ) -> Path:
    """Where `build_image` keeps root file systems and images."""
    return cache_dir(environment) / "image"


def accelerator_cache(environment: Mapping[str, str] = os.environ) -> Path:
    """The file in which the outcome of the accelerator probe is remembered."""
    return cache_dir(environment) / "accelerator.json"


def acpi_verdict(environment: Mapping[str, str] = os.environ) -> Path:
    """The file in which the outcome of the ACPI vCPU unplug probe is remembered; agents read it."""
    return cache_dir(environment) / "acpi-unplug.json"
