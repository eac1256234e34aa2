"""Wakes the agent when tasks of the guest wait for memory (Linux: Documentation/accounting/psi.rst)."""

from __future__ import annotations

import os
import select

# Some task stalled for 150 ms within 1 s. The kernel wakes us once per window at most.
TRIGGER = b"some 150000 1000000\0"


class PressureTrigger:
    """A trigger of the kernel; wait for `EVENTS` on `fileno()`.

    Raises: OSError where the kernel has no pressure stall information or lets us set no trigger.
    """

    EVENTS = select.POLLPRI | select.POLLERR

    def __init__(self, procfs: str = "/proc") -> None:
        self._fd = os.open(os.path.join(procfs, "pressure", "memory"), os.O_RDWR | os.O_NONBLOCK)
        try:
            os.write(self._fd, TRIGGER)
        except OSError:
            os.close(self._fd)
            raise

    def fileno(self) -> int:
        """File descriptor, for poll()."""
        return self._fd

    def close(self) -> None:
        """Remove the trigger."""
        os.close(self._fd)
