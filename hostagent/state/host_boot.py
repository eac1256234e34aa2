"""The boot of the host that the agent runs on: by it one is told from an earlier one."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Final

import psutil

BOOT_ID: Final = Path("/proc/sys/kernel/random/boot_id")


@dataclass(frozen=True, slots=True)
class HostBoot:
    """One boot. Empty: it is not known which, and nothing is taken for another one."""

    #: The kernel's, another one after each boot.
    id: str = ""
    #: When it was, seconds since the epoch.
    at: float = 0.0

    @classmethod
    def read(cls) -> HostBoot:
        """The one that this process runs in."""
        try:
            return cls(BOOT_ID.read_text().strip(), psutil.boot_time())
        except OSError:
            return cls()
