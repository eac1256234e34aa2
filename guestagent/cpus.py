"""CPUs of the guest: which can go, and taking them off and on line one at a time (Linux: cpu-hotplug)."""

from __future__ import annotations

import os
import threading
from typing import Callable, Iterable

from guestagent.errors import BadParams, GuestFailure
from guestagent.messages import CpuFailure, CpusSetResult, CpuStatus

KTHREADD = 2
IN_A_CPUSET = "a cpuset of cgroup v1 would lose it for good"


def parse_cpu_list(text: str) -> list[int]:
    """CPU numbers of a kernel list such as `0-3,5`.

    Raises: ValueError.
    """
    cpus: list[int] = []
    for part in text.strip().split(","):
        if part:
            first, _, last = part.partition("-")
            cpus.extend(range(int(first), int(last or first) + 1))
    return cpus


class Cpus:
    """CPUs as sysfs and procfs show them. Calls may come from several threads.

    :param affinity: the CPUs that a task may use, by its id; raises OSError (sched_getaffinity(2)).
    """

    def __init__(
        self,
        sysfs: str = "/sys",
        procfs: str = "/proc",
        affinity: Callable[[int], Iterable[int]] = os.sched_getaffinity,
    ) -> None:
        self._affinity = affinity
        self._root = os.path.join(sysfs, "devices", "system", "cpu")
        self._procfs = procfs
        self._lock = threading.Lock()
        self._times: dict[int, tuple[int, int]] = {}

    def present(self) -> list[int]:
        """CPUs that are plugged."""
        return self._list("present")

    def possible(self) -> list[int]:
        """CPUs that can be plugged: those of the VM at full size."""
        return self._list("possible")

    def _list(self, name: str) -> list[int]:
        try:
            with open(os.path.join(self._root, name)) as file:
                return parse_cpu_list(file.read())
        except (OSError, ValueError) as error:
            raise GuestFailure(f"cannot read the CPUs of the guest: {error}") from None

    def online(self) -> list[int]:
        """CPUs that the kernel uses now."""
        return [cpu for cpu in self.present() if self._is_online(cpu)]

    def status(self, brief: bool = False) -> CpuStatus:
        """Present, on line, and those that can be taken, in the order in which they should be.

        A brief one does not look at every task for what can be taken, and says nothing of it; nor does it wait until
        CPUs that are going on or off line have all done so.
        """
        if brief:
            return CpuStatus(self.present(), self.online(), [])
        with self._lock:
            present = self.present()
            online = [cpu for cpu in present if self._is_online(cpu)]
            return CpuStatus(present, online, self._unpluggable(online))

    def set_online(self, wanted: Iterable[int]) -> CpusSetResult:
        """Make exactly these CPUs on line, first adding, then taking away, and read back what the kernel did.

        A CPU that a task is pinned to is not taken: the kernel would silently undo the pinning for good. Nor is one in
        a cpuset of cgroup v1.

        Raises: BadParams where CPU 0 is left out or a CPU is not present.
        """
        target = list(wanted)
        with self._lock:
            present = self.present()
            if 0 not in target:
                raise BadParams("online", "CPU 0 cannot be left out")
            missing = sorted(set(target) - set(present))
            if missing:
                raise BadParams("online", f"CPU {missing[0]} is not present")
            failed: list[CpuFailure] = []
            online = {cpu for cpu in present if self._is_online(cpu)}
            for cpu in sorted(set(target) - online):
                self._switch(cpu, True, failed)
            surplus = sorted(online - set(target), reverse=True)
            pinned = self._affinities(online | set(target)) if surplus else {}
            kept = self._in_cpusets() if surplus else set()
            remaining = {cpu for cpu in present if self._is_online(cpu)}
            for cpu in surplus:
                task = _pinned_task(cpu, remaining, pinned)
                if cpu in kept:
                    failed.append(CpuFailure(cpu, IN_A_CPUSET))
                elif task:
                    failed.append(CpuFailure(cpu, f"{task} is pinned to it"))
                elif self._switch(cpu, False, failed):
                    remaining.discard(cpu)
            return CpusSetResult([cpu for cpu in present if self._is_online(cpu)], failed)

    def _switch(self, cpu: int, online: bool, failed: list[CpuFailure]) -> bool:
        # os.write, because a buffered file hides EBUSY until a close whose result is not looked at.
        try:
            fd = os.open(self._online_file(cpu), os.O_WRONLY)
            try:
                os.write(fd, b"1" if online else b"0")
            finally:
                os.close(fd)
        except OSError as error:
            failed.append(CpuFailure(cpu, error.strerror or str(error)))
            return False
        if self._is_online(cpu) != online:
            failed.append(
                CpuFailure(cpu, "the kernel took the order, and the CPU is still {} line".format(["on", "off"][online]))
            )
            return False
        return True

    def _online_file(self, cpu: int) -> str:
        return os.path.join(self._root, f"cpu{cpu}", "online")

    def _is_online(self, cpu: int) -> bool:
        try:
            with open(self._online_file(cpu)) as file:
                return file.read().strip() == "1"
        except OSError:
            pass
        # Without a switch it cannot go, which is not off line: the boot CPU of x86, all of a kernel without hotplug.
        try:
            return cpu in self._list("online")
        except GuestFailure:
            return cpu == 0

    def _unpluggable(self, online: list[int]) -> list[int]:
        idle = self._idle_shares()
        # In tenths: what is about equally idle goes by number, so that the order does not flicker.
        order = sorted(online, key=lambda cpu: (-round(idle.get(cpu, 0.0), 1), -cpu))
        affinities = self._affinities(set(online))
        kept = {0, *self._in_cpusets()}
        remaining = set(online)
        taken: list[int] = []
        for cpu in order:
            if (
                cpu not in kept
                and os.path.exists(self._online_file(cpu))
                and not _pinned_task(cpu, remaining, affinities)
            ):
                taken.append(cpu)
                remaining.discard(cpu)
        return taken

    def _in_cpusets(self) -> set[int]:
        """CPUs that a cpuset of cgroup v1 names: the kernel takes one that goes off line out of it, and does not put it
        back when that comes on line (Linux: hotplug_update_tasks_legacy). cgroup v2, and v1 in its mode, remember it.
        """
        found: set[int] = set()
        for mount, file_name in self._cpuset_mounts():
            try:
                groups = [entry.path for entry in os.scandir(mount) if entry.is_dir(follow_symlinks=False)]
            except OSError:
                continue
            # What is deeper names none that these do not.
            for group in groups:
                try:
                    with open(os.path.join(group, file_name)) as file:
                        found.update(parse_cpu_list(file.read()))
                except (OSError, ValueError):  # it has just gone
                    continue
        return found

    def _cpuset_mounts(self) -> list[tuple[str, str]]:
        """Where cgroup v1 has its cpusets, and the name of their files with CPUs."""
        try:
            with open(os.path.join(self._procfs, "mounts"), errors="replace") as file:
                mounts = [line.split() for line in file]
        except OSError:
            return []
        found = []
        for _, mount, kind, options, *_ in (fields for fields in mounts if len(fields) > 3):
            words = options.split(",")
            if kind == "cgroup" and "cpuset" in words and "cpuset_v2_mode" not in words:
                found.append((mount, "cpus" if "noprefix" in words else "cpuset.cpus"))
        return found

    def _idle_shares(self) -> dict[int, float]:
        """Idle share of each CPU since the last reading, since boot at the first (proc(5): /proc/stat)."""
        shares: dict[int, float] = {}
        try:
            with open(os.path.join(self._procfs, "stat")) as file:
                lines = [line.split() for line in file if line.startswith("cpu") and line[3].isdigit()]
        except OSError:
            return shares
        for fields in lines:
            cpu = int(fields[0][3:])
            ticks = [int(field) for field in fields[1:9]]  # guest time is contained in user time
            idle, total = ticks[3] + ticks[4], sum(ticks)
            last_idle, last_total = self._times.get(cpu, (0, 0))
            if total < last_total or idle < last_idle:  # the counters restart when a CPU comes back
                last_idle, last_total = 0, 0
            if total > last_total:
                shares[cpu] = (idle - last_idle) / (total - last_total)
                self._times[cpu] = (idle, total)
        return shares

    def _affinities(self, online: set[int]) -> dict[frozenset[int], str]:
        """Sets of CPUs that some user task is bound to, with the name of one such task; tasks that may use all are out.

        Kernel threads do not count: the kernel parks its per-CPU threads by itself.
        """
        found: dict[frozenset[int], str] = {}
        try:
            pids = [entry for entry in os.listdir(self._procfs) if entry.isdigit()]
        except OSError as error:
            raise GuestFailure(f"cannot list the tasks of the guest: {error}") from None
        for pid in pids:
            for tid in self._threads(pid):
                allowed = self._allowed(pid, tid)
                if not allowed or allowed >= online or allowed in found:
                    continue  # so that of thousands of threads that are bound alike one has its status read
                if (name := self._user_task(pid, tid)) is not None:
                    found[allowed] = f"task {tid} ({name})"
        return found

    def _threads(self, pid: str) -> list[str]:
        try:
            return os.listdir(os.path.join(self._procfs, pid, "task"))
        except OSError:
            return []  # the process has ended

    def _allowed(self, pid: str, tid: str) -> frozenset[int]:
        """The CPUs that a task may use; none: it has ended.

        One call of the kernel. What procfs says of a task is sixty lines to make and to take apart, and of most tasks
        none are needed.
        """
        try:
            return frozenset(self._affinity(int(tid)))
        except ProcessLookupError:
            return frozenset()
        except OSError:  # a policy of the guest's forbids the question
            status = self._task_status(pid, tid) or {}
        try:
            return frozenset(parse_cpu_list(status.get("Cpus_allowed_list", "")))
        except ValueError:
            return frozenset()

    def _user_task(self, pid: str, tid: str) -> str | None:
        """The name of a task; None: it has ended, or it is one of the kernel's."""
        status = self._task_status(pid, tid)
        if status is None or int(pid) == KTHREADD or status.get("PPid") == str(KTHREADD):
            return None
        return status.get("Name", "?")

    def _task_status(self, pid: str, tid: str) -> dict[str, str] | None:
        """proc(5): /proc/PID/task/TID/status; None: it has ended."""
        try:
            with open(os.path.join(self._procfs, pid, "task", tid, "status"), errors="replace") as file:
                pairs = [line.partition(":") for line in file]
        except OSError:
            return None
        status = {key: value.strip() for key, _, value in pairs}
        return None if status.get("State", "").startswith(("Z", "X")) else status


def _pinned_task(cpu: int, online: set[int], affinities: dict[frozenset[int], str]) -> str | None:
    """A task that could run nowhere else if this CPU went."""
    for allowed, task in affinities.items():
        if cpu in allowed and not allowed & (online - {cpu}):
            return task
    return None
