"""Memory of the guest: what it has, what it needs, and how much it suffers (proc(5), Linux: PSI)."""

from __future__ import annotations

import os
from typing import Any

from guestagent.errors import GuestFailure
from guestagent.messages import MemoryStatus, Paging, Pressure

RESERVE_MIB = 48.0
RESERVE_SHARE = 0.05
# proc(5): nearly all others are killed first. mlockall(2).
OOM_SCORE_ADJ = -900
MCL_CURRENT, MCL_FUTURE, MCL_ONFAULT = 1, 2, 4


class Memory:
    """Memory as procfs shows it. `reserve_mib` None: 5 % of all memory, at least 48 MiB."""

    def __init__(self, procfs: str = "/proc", reserve_mib: float | None = None) -> None:
        self._procfs = procfs
        #: May be set at any time.
        self.reserve_mib = reserve_mib

    def status(self) -> MemoryStatus:
        """Sizes in MiB.

        Raises: GuestFailure where the kernel does not tell; unknown is never reported as zero.
        """
        total_mib, available_mib, free_mib = self._meminfo()
        reserve_mib = self.reserve_mib
        if reserve_mib is None:
            reserve_mib = max(RESERVE_MIB, RESERVE_SHARE * total_mib)
        return MemoryStatus(
            total_mib=total_mib,
            available_mib=available_mib,
            reserve_mib=round(reserve_mib, 3),
            floor_mib=round(total_mib - available_mib + reserve_mib, 3),
            unpluggable_mib=round(max(available_mib - reserve_mib, 0.0), 3),
            free_mib=free_mib,
        )

    def total_mib(self) -> float:
        """MemTotal. Raises: GuestFailure."""
        return self._meminfo()[0]

    def pressure(self) -> Pressure | None:
        """Pressure stall information, None where the kernel has none."""
        memory, cpu = self._psi("memory"), self._psi("cpu")
        if "some" not in memory or "full" not in memory or "some" not in cpu:
            return None
        (some, some_us), (full, full_us) = memory["some"], memory["full"]
        return Pressure(some, full, cpu["some"][0], some_us, full_us)

    def paging(self) -> Paging:
        """Page faults that had to wait for a disk, and pages swapped.

        Raises: GuestFailure.
        """
        found = self.counters("pgmajfault", "pswpin", "pswpout")
        if "pgmajfault" not in found:
            raise GuestFailure("vmstat of the guest has no pgmajfault")
        return Paging(found["pgmajfault"], found.get("pswpin"), found.get("pswpout"))

    def counters(self, *names: str) -> dict[str, int]:
        """Counters of /proc/vmstat since boot; what the kernel does not have is left out.

        Raises: GuestFailure.
        """
        pairs = (line.split() for line in self._lines("vmstat"))
        return {pair[0]: int(pair[1]) for pair in pairs if pair[0] in names}

    def _meminfo(self) -> tuple[float, float, float]:
        found: dict[str, float] = {}
        for line in self._lines("meminfo"):
            name, _, value = line.partition(":")
            if name in ("MemTotal", "MemAvailable", "MemFree"):
                found[name] = round(int(value.split()[0]) / 1024, 3)
        if len(found) < 3:
            raise GuestFailure("meminfo of the guest has no MemTotal, no MemAvailable or no MemFree")
        return found["MemTotal"], found["MemAvailable"], found["MemFree"]

    def _psi(self, resource: str) -> dict[str, tuple[float, int]]:
        """Average over 10 s in per cent and total in us, by kind."""
        try:
            lines = self._lines(os.path.join("pressure", resource))
        except GuestFailure:  # no such file, or EOPNOTSUPP where PSI is switched off
            return {}
        found = {}
        for line in lines:
            kind, *fields = line.split()
            values = dict(field.split("=", 1) for field in fields)
            found[kind] = (float(values["avg10"]), int(values["total"]))
        return found

    def _lines(self, name: str) -> list[str]:
        try:
            with open(os.path.join(self._procfs, name)) as file:
                return file.readlines()
        except OSError as error:
            raise GuestFailure(f"cannot read {name} of the guest: {error.strerror}") from None


def spare_this_process(procfs: str = "/proc", libc: Any = None) -> list[str]:
    """Have the kernel kill others first and keep this process's pages: without it no memory would come back.

    Returns: what could not be had, in words; it needs root.
    """
    problems = []
    try:
        with open(os.path.join(procfs, "self", "oom_score_adj"), "w") as file:
            file.write(str(OOM_SCORE_ADJ))
    except OSError as error:
        problems.append(f"oom_score_adj: {error.strerror}")
    try:
        if libc is None:
            import ctypes

            libc = ctypes.CDLL(None)
        # Pages are locked as they are touched: whole thread stacks would cost 8 MiB each.
        if libc.mlockall(MCL_CURRENT | MCL_FUTURE | MCL_ONFAULT):
            problems.append("mlockall: refused")
    except (ImportError, OSError, AttributeError) as error:
        problems.append(f"mlockall: {error}")
    return problems
