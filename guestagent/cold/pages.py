"""Cold pages of the guest made free: reads the control groups and PSI, and writes what `pace.ColdReclaim` decides.

Only the guest's own `system.slice` and `user.slice` are touched, and of these what no `memory.min` or `memory.low` in
them protects (Linux: cgroup-v2, memory.reclaim, since 5.19).
"""

from __future__ import annotations

import os
import threading
import time

from guestagent.cold.pace import MIB, ColdReclaim, End, Reclaim, Reclaimed, Rest, Rested, Stop
from guestagent.errors import GuestFailure
from guestagent.memory import Memory
from guestagent.messages import ColdFreedResult, ColdReclaimParams
from guestagent.telling import log

GROUPS = ("system.slice", "user.slice")
PAGE = os.sysconf("SC_PAGE_SIZE")
#: How long a step that is under way is waited for when it is called off.
CALL_OFF_S = 3.0


class ColdPages:
    """The guest's slices. Calls may come from several threads; one request is at work at a time."""

    def __init__(self, memory: Memory, sysfs: str = "/sys") -> None:
        self._memory = memory
        self._root = os.path.join(sysfs, "fs", "cgroup")
        self._lru = os.path.join(sysfs, "kernel", "mm", "lru_gen", "enabled")
        self._lru_seen = False
        self._busy = threading.Lock()
        #: How often something was called off: a request ends that came in before the last time.
        self.stops = 0
        self._counting = threading.Lock()
        self._stop = threading.Event()  # ends a rest

    def blocked(self) -> str:
        """Why nothing can be reclaimed; empty if something can."""
        if not os.path.exists(os.path.join(self._root, "cgroup.controllers")):
            return "the guest has no cgroup2 at /sys/fs/cgroup"
        groups = [name for name in GROUPS if os.path.exists(self._file(name, "memory.current"))]
        if not groups:
            return "the guest has no system.slice or user.slice with the memory controller"
        if not any(os.path.exists(self._file(name, "memory.reclaim")) for name in groups):
            return "the guest's kernel has no memory.reclaim (since Linux 5.19)"
        if self._memory.pressure() is None:
            return "the guest's kernel has no pressure stall information, by which it is paced"
        return ""

    def reclaim(self, params: ColdReclaimParams, stops: int | None = None) -> ColdFreedResult:
        """Make so much free, or as much as is cold, within the deadline.

        `stops`: as it was when the request came in, which may be some time before its thread runs; None: now.

        Raises: GuestFailure where it is not supported, or a request is at work.
        """
        came_at = self.stops if stops is None else stops
        if why := self.blocked():
            raise GuestFailure(f"unsupported: {why}")
        if not self._busy.acquire(blocking=False):
            raise GuestFailure("cold pages are becoming free already; ask again")
        try:
            self._stop.clear()
            end = self._run(params, came_at)
        finally:
            self._busy.release()
        return ColdFreedResult(round(end.freed / MIB, 3), end.done, end.reason)

    def stop(self) -> ColdFreedResult:
        """Call the request that is at work off; when this returns nothing more is reclaimed.

        Raises: GuestFailure where the kernel has not come back.
        """
        self.ask_to_stop()
        if not self._busy.acquire(timeout=CALL_OFF_S):
            raise GuestFailure("the kernel is still reclaiming; it does no more after this step")
        self._busy.release()
        return ColdFreedResult(0.0, True, "called off")

    def ask_to_stop(self) -> None:
        """As `stop`, without waiting."""
        with self._counting:
            self.stops += 1
        self._stop.set()

    def _run(self, params: ColdReclaimParams, stops: int) -> End:
        if self.stops == stops:
            self._switch_lru_on()
        began = time.monotonic()
        machine = ColdReclaim(int(params.memory_mib * MIB), self._takeable(), began + params.deadline_s)
        refaulted = self._refaulted()
        instruction = machine.start(began)
        while not isinstance(instruction, End):
            if self.stops != stops:
                instruction = machine.handle(Stop("called off"))
            elif isinstance(instruction, Reclaim):
                before = time.monotonic()
                freed = self._write(instruction)
                now = time.monotonic()
                instruction = machine.handle(Reclaimed(now, freed, now - before))
            else:
                pressure = self._rest(instruction)
                instruction = machine.handle(Rested(time.monotonic(), pressure, self._refaulted() - refaulted))
        return instruction

    def _takeable(self) -> dict[str, int]:
        """Bytes of each group that nothing in it protects."""
        found = {}
        for name in GROUPS:
            if os.path.exists(self._file(name, "memory.reclaim")):
                current, protected = self._usage(os.path.join(self._root, name))
                found[name] = max(current - protected, 0)
        return found

    def _usage(self, path: str) -> tuple[int, int]:
        """What a group has, and what of that is protected, by its own word or by those of the groups in it."""
        try:
            current = _number(path, "memory.current")
            own = max(_number(path, "memory.min"), _number(path, "memory.low"))
            with os.scandir(path) as entries:
                within = [entry.path for entry in entries if entry.is_dir(follow_symlinks=False)]
        except OSError:
            return 0, 0  # it has ended, or has no memory controller of its own
        below = sum(self._usage(one)[1] for one in within)
        return current, min(current, max(own, below))

    def _write(self, instruction: Reclaim) -> int:
        """Bytes that the kernel reclaimed.

        By how much the group became smaller is more: unplugging drops page cache of its own at the same time.
        """
        path = os.path.join(self._root, instruction.group)
        try:
            before = _stolen(path)
            fd = os.open(os.path.join(path, "memory.reclaim"), os.O_WRONLY)
            try:
                os.write(fd, str(instruction.size).encode())
            except BlockingIOError:
                pass  # EAGAIN: less than that could be had
            finally:
                os.close(fd)
            return _stolen(path) - before
        except OSError as error:
            raise GuestFailure(f"memory.reclaim of {instruction.group}: {error.strerror}") from None

    def _rest(self, instruction: Rest) -> float:
        """The part of the rest in which some task waited for memory."""
        before, began = self._stalled_us(), time.monotonic()
        self._stop.wait(instruction.seconds)
        return (self._stalled_us() - before) / 1e6 / max(time.monotonic() - began, 1e-3)

    def _stalled_us(self) -> int:
        pressure = self._memory.pressure()
        if pressure is None:
            raise GuestFailure("the guest's pressure stall information is gone")
        return pressure.memory_some_total_us

    def _refaulted(self) -> int:
        """Bytes that were read back after they had been reclaimed, since boot."""
        counters = self._memory.counters("workingset_refault_anon", "workingset_refault_file")
        return sum(counters.values()) * PAGE

    def _switch_lru_on(self) -> None:
        """The multi-generational LRU finds cold pages better (Linux 6.1). Once: who switches it off later is heard."""
        if self._lru_seen:
            return
        self._lru_seen = True
        try:
            with open(self._lru) as file:
                if int(file.read(), 0):
                    return
            with open(self._lru, "w") as file:
                file.write("y")
        except FileNotFoundError:
            return
        except (OSError, ValueError) as error:
            log(f"the multi-generational LRU could not be switched on: {error}")
            return
        log("the multi-generational LRU was switched on, to find cold pages")

    def _file(self, group: str, name: str) -> str:
        return os.path.join(self._root, group, name)


def _number(path: str, name: str) -> int:
    """Bytes in a file of a group; `max` is more than any memory. Raises: OSError."""
    with open(os.path.join(path, name)) as file:
        text = file.read().strip()
    return 2**63 if text == "max" else int(text)


def _stolen(path: str) -> int:
    """Bytes that were ever reclaimed of a group: `pgsteal` of its `memory.stat`. Raises: OSError."""
    with open(os.path.join(path, "memory.stat")) as file:
        counters = dict(line.split() for line in file)
    return int(counters["pgsteal"]) * PAGE
