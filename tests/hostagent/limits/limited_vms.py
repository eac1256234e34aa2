"""Kernel and libvirt made up, for memory limits: several VMs on one swap, failures."""

from __future__ import annotations

import asyncio
import errno
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import libvirt

from ebbtide.deflation.cascade.backing import Footprint, Swap
from hostagent.errors import HypervisorError, HypervisorTimeout
from hostagent.limits.cgroups import MIB, NO_RECLAIM, CgroupError
from hostagent.limits.footprints import UNLIMITED_KIB, LimitedVM
from hostagent.limits.memory_limit import MemoryLimits

ALLOWANCE_MIB = 100.0


class LibvirtRefuses(libvirt.libvirtError):  # type: ignore[misc]
    """An error as libvirtd sends it."""

    def __init__(self, code: int, number: int = 0) -> None:
        Exception.__init__(self, "refused")
        self._code, self._number = code, number

    def get_error_code(self) -> int:
        return self._code

    def get_int1(self) -> int:
        return self._number


@dataclass
class VM:
    """A domain, its group and its kernel. ``least_mib``: what cannot be reclaimed. MiB."""

    version: int = 1
    usage_mib: float = 700.0
    least_mib: float = 0.0
    touchable_mib: float = 768.0
    hard_mib: float | None = None
    swapped_mib: float = 0.0
    held: bool = False
    #: Its process waits at the limit until that is raised; whether it does so again at once.
    waits: bool = False
    for_ever: bool = False
    raised: list[float] = field(default_factory=list)
    limits: list[float | None] = field(default_factory=list)
    reclaims: list[float] = field(default_factory=list)
    #: Whether the kernel tells of pressure, and cannot reclaim.
    psi: bool = True
    kernel_is_old: bool = False
    #: Pages fetched back, and how many more at each look.
    refaulted: int = 0
    refaults_a_look: int = 0
    #: What libvirt answers instead of doing anything.
    broken: Exception | None = None
    #: Called before each write of a limit.
    meanwhile: Callable[[], None] = lambda: None

    # The group.

    pid = 1

    def swap(self) -> int:
        return round(self.swapped_mib * MIB)

    def swap_room(self) -> int | None:
        return None

    def swappiness(self) -> int:
        return 60

    def unswappable(self) -> int:
        return 0

    def usage(self) -> int:
        return round(self.usage_mib * MIB)

    def limit(self) -> int | None:
        return None if self.hard_mib is None else round(self.hard_mib * MIB)

    def check_ours(self) -> None:
        pass

    def stalled_us(self) -> int:
        if not self.psi:
            raise CgroupError("memory pressure cannot be read: [Errno 2] No such file or directory")
        return 0

    def refaults(self) -> int:
        self.refaulted += self.refaults_a_look
        return self.refaulted

    def why_no_reclaim(self) -> str:
        return NO_RECLAIM if self.kernel_is_old else ""

    def hold_at_limit(self, hold: bool) -> bool:
        self.held = hold and self.version == 1
        return self.held

    def holds_at_limit(self) -> bool:
        return self.held

    def stands_still(self) -> bool:
        return self.held and self.waits

    def _take(self, wanted_mib: float) -> None:
        taken = min(wanted_mib, max(self.usage_mib - self.least_mib, 0.0))
        self.usage_mib -= taken
        self.swapped_mib += taken

    def reclaim(self, amount: int) -> int:
        assert self.version == 2
        self.reclaims.append(amount / MIB)
        before = self.usage()
        self._take(amount / MIB)
        return before - self.usage()

    def set_limit(self, limit: int | None) -> bool:
        assert limit is None or self.waits or self.raised, "the files are written to lift, and to have it try again"
        if limit is not None and limit > (self.limit() or 0):
            self.waits = self.for_ever
            self.raised.append(limit / MIB)
        self.hard_mib = None if limit is None else limit / MIB
        return True

    # The domain.

    def setMemoryParameters(self, parameters: dict[str, int], flags: int) -> None:
        assert flags == libvirt.VIR_DOMAIN_AFFECT_LIVE
        if self.broken is not None:
            raise self.broken
        hard = None if parameters["hard_limit"] >= UNLIMITED_KIB else parameters["hard_limit"] / 1024
        assert hard is None or self.version == 2 or self.held, "what cannot be kept would kill"
        self.meanwhile()
        if hard is not None and self.usage_mib > hard:
            assert self.version == 1, "on v2 that kills when it cannot be reclaimed"
            self._take(self.usage_mib - hard)
            if self.usage_mib > hard:
                raise LibvirtRefuses(libvirt.VIR_ERR_SYSTEM_ERROR, errno.EBUSY)
        self.hard_mib = hard
        self.limits.append(hard)

    @property
    def limit_mib(self) -> float | None:
        return None if self.hard_mib is None else self.hard_mib - ALLOWANCE_MIB

    def looked_at(self) -> LimitedVM:
        footprint = Footprint(self.touchable_mib, swapped_mib=self.swapped_mib)
        return LimitedVM(self, ALLOWANCE_MIB, self.touchable_mib, footprint, self.hard_mib)  # type: ignore[arg-type]


class Machine:
    """All VMs, libvirt's connection to them, and the host's swap."""

    def __init__(self, **vms: VM) -> None:
        self.vms = {f"ebb-a.{name}": vm for name, vm in vms.items()}
        self.swap = Swap(4096, 4096)
        #: Domains of which libvirt says nothing now, and how often it was asked.
        self.unreadable: set[str] = set()
        self.looks = 0
        #: Set for domains that no call changes any more.
        self.answered = {domain: asyncio.Event() for domain in self.vms}

    async def call(self, function: Callable[[Any], Any], *, modifies: str | None = None, limit_s: float = 15.0) -> Any:
        try:
            return function(self)
        except libvirt.libvirtError as error:
            raise HypervisorError(str(error)) from error

    async def ended(self, domain: str) -> None:
        await self.answered[domain].wait()

    def lookupByName(self, domain: str) -> VM:
        return self.vms[domain]

    def look(self, _connection: Any, domain: str, _pid_files: Path, _measure: bool) -> LimitedVM:
        self.looks += 1
        if domain in self.unreadable:
            raise HypervisorTimeout("libvirt did not answer within 15 s")
        return self.vms[domain].looked_at()


#: Makes a machine of these VMs, and what limits them.
Limits = Callable[..., tuple[Machine, MemoryLimits]]
