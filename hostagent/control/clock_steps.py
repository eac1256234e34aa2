"""Steps of the host's clock: since when VMs run, which is kept as a date, goes with them.

A host may boot hours ahead or in 1970, and start VMs before its clock is put right.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterable
from typing import Final

from hostagent.errors import HypervisorError
from hostagent.vm.host import Host
from hostagent.vm.managed_vm import ManagedVM

#: A clock that differs by less from what it was is not put right for, seconds.
LEAST_STEP_S: Final = 60.0
#: What is dated by less than this before the boot may be dated by it, seconds: the kernel tells it in whole ones
#: (`HostBoot.at`).
WHOLE_S: Final = 2.0


def clocks() -> tuple[float, float]:
    """When the host booted by what its clock says now, seconds since the epoch, and how many seconds ago that was."""
    up_s = time.clock_gettime(time.CLOCK_BOOTTIME)
    return time.time() - up_s, up_s


def put_right(at: float | None, before: float, after: float, up_s: float) -> float | None:
    """A date, by the clock as it is now if it was by the clock before.

    What is dated before the boot, or later than that clock can have said, was not by it.

    :param before: when the host booted by the clock as it was, and ``after`` as it is.
    """
    if at is None or not -WHOLE_S < at - before <= up_s:
        return at
    return at + after - before


class ClockSteps:
    """Watches the clock.

    :param read: see `clocks`.
    """

    def __init__(self, read: Callable[[], tuple[float, float]] = clocks) -> None:
        self._read = read
        self._booted_at, _ = read()

    def look(self, vms: Iterable[ManagedVM]) -> list[tuple[ManagedVM, float, float]]:
        """The VMs whose start was dated by the clock as it was at the last look: that date, and the right one."""
        before, (after, up_s) = self._booted_at, self._read()
        if abs(after - before) < LEAST_STEP_S:
            return []
        self._booted_at = after
        found = []
        for vm in vms:
            was = vm.intent.started_at
            right = put_right(was, before, after, up_s)
            if was is not None and right is not None and right != was:
                found.append((vm, was, right))
        return found


async def date_start(host: Host, vm: ManagedVM, was: float, right: float) -> None:
    """Date a VM's start anew, unless it was started again meanwhile, or is another one by now."""
    async with vm.lock:
        if not host.holds(vm) or vm.intent.started_at != was:
            return
        vm.record.intent = vm.intent.changed(started_at=right)
        # What cannot be written now, the reconciler writes later.
        with contextlib.suppress(HypervisorError):
            await vm.record.persist()
